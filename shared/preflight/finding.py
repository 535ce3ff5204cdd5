"""The result of one check."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    check: str
    ok: bool
    sentence: str

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def passed(check: str, sentence: str) -> Finding:
    return Finding(check, True, sentence)


def failed(check: str, expected: str, actual: str, fix: str) -> Finding:
    """Return a check that failed, in one sentence.

    >>> failed("shm", "1 GiB", "64 MiB", "set trainer.shm").sentence
    'expected 1 GiB, found 64 MiB: set trainer.shm'
    """
    return Finding(check, False, f"expected {expected}, found {actual}: {fix}")
