"""User functions for tests of their scorer, separate so that its processes import little."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from penstock import Prompt, Result, Sample, ScoreStatus

NUMBER = 1


def score(sample: Sample, prompt: Prompt) -> float | Result:
    """Do what the completion says."""
    print("what a function prints is no answer")
    match sample.text.split():
        case ["raise"]:
            raise ZeroDivisionError("no")
        case ["exit"]:
            sys.exit(0)
        case ["die"]:
            os._exit(3)
        case ["hang", folder]:
            child = subprocess.Popen(["sleep", "600"])
            (Path(folder) / "child").write_text(str(child.pid))
            time.sleep(600)
        case ["text"]:
            return "0.5"  # type: ignore[return-value]
        case ["list"]:
            return [1.0, 0.0]  # type: ignore[return-value]
        case ["none"]:
            return None  # type: ignore[return-value]
        case ["mark", file]:
            Path(file).touch()
        case ["nan"]:
            return float("nan")
        case ["unknown"]:
            return Result(None, "the index is being built")
        case ["form"]:
            return Result(0.25, "no table", ScoreStatus.WRONG_FORMAT)
        case ["read"]:
            return float(len(sys.stdin.read()))
        case ["see", name]:
            return float(name in os.environ)
    return float(sample.text == prompt.answer and prompt.extra["level"] == 1 and sample.token_ids.tolist() == [0, 1, 2])


_LOOPS: list[asyncio.AbstractEventLoop] = []


async def score_async(sample: Sample, prompt: Prompt) -> float:
    await asyncio.sleep(0)
    _LOOPS.append(asyncio.get_running_loop())
    return float(len(set(_LOOPS)))
