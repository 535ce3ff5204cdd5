"""Tell ranks at once that a source abandoned a pull; NCCL would wait for the deadline.

Ranks query the session's store in a thread, because queries to a stopped process may block forever.
"""

import contextlib
import threading
from collections.abc import Iterator

from torch._C._distributed_c10d import Store

from penstock.shared.errors import WeightsError
from penstock.shared.weights.waits import Interrupt, bounded

_EVERY_S = 0.05
_SOUND_S = 1.0


def sound(store: Store, pull: int) -> None:
    with contextlib.suppress(WeightsError):
        bounded(lambda _: store.set(_key(pull), "failed"), _SOUND_S, "the store of this process")


@contextlib.contextmanager
def listening(store: Store, pull: int) -> Iterator[Interrupt]:
    """Yield an interrupt that raises WeightsError once the source abandons the pull."""
    ended, failed = threading.Event(), threading.Event()

    def listen() -> None:
        with contextlib.suppress(RuntimeError):
            while not ended.wait(_EVERY_S):
                if store.check([_key(pull)]):
                    failed.set()
                    return

    def interrupt() -> None:
        if failed.is_set():
            raise WeightsError("the source ended the pull")

    threading.Thread(target=listen, name="alarm of a pull", daemon=True).start()
    try:
        yield interrupt
    finally:
        ended.set()


def _key(pull: int) -> str:
    return f"pull/{pull}/failed"
