"""Filters of the user's own for tests, separate so that their process imports little."""

import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

SEEN = "PENSTOCK_TEST_SEEN"
"""Environment variable with the path to which ``keeping`` writes what it was given last."""


def keeping(**group: Any) -> bool:
    """Keep groups whose first sample is right; write what was given."""
    Path(os.environ[SEEN]).write_bytes(pickle.dumps(group))
    print("{}")
    if group["rewards"][0] > 1:
        raise ValueError("a reward over 1")
    return bool(group["rewards"][0] == 1.0)


def deadly(**group: Any) -> bool:
    """End the process for wrong rewards."""
    if group["rewards"][0] > 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if group["rewards"][1] > 1:
        os._exit(7)
    if group["rewards"][1] > 0:
        sys.exit("enough")
    return True


def endless(**group: Any) -> bool:
    """Never answer for a wrong first sample."""
    while group["rewards"][0] == 0.0:
        time.sleep(1.0)
    return True


def keeping_nothing(**_: Any) -> bool:
    return False


def undecided(**_: Any) -> Any:
    return 1


def crashing(**_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def raising(**_: Any) -> Any:
    raise KeyError("temperature")
