"""A filter of groups of the user's own, by import path (docs/algorithms.md, "Your own loss, advantage or filter").

::

    def mine(*, rewards, lengths, **others) -> bool:     # whether the group is trained

It is called in a process of its own, ``python -m penstock.services.trainer.algorithm.group_filter PARENT``, so that one that ends
its process costs the group that it was asked for, and not the trainer::

    standard input   8 bytes of length, then the pickled name and arguments, for each group
    standard output  {"kept": true} or {"error": "KeyError: 'a'"} for each
"""

import contextlib
import functools
import json
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from penstock.shared.bus.messages import Experience, FinishReason, Float32Array, Sample
from penstock.shared.errors import MessageError
from penstock.shared.process.parent import confine, take_standard_streams

_TRIAL_LENGTHS = (3, 1, 2)
_LENGTH_BYTES = 8
_LONGEST_ERROR = 500
_ENDING_S = 10.0
"""A process that closed its output must end within this."""
_START_S, _ANSWER_S = 300.0, 60.0
"""Limits of a first answer, with the start of the process, and of any other."""


@functools.cache
def load(name: str) -> Callable[..., Any]:
    """Return the function ``package.module:function``; raises its import's error."""
    target = pkgutil.resolve_name(name)
    if not callable(target):
        raise TypeError(f"it is no function but {type(target).__name__}")
    function: Callable[..., Any] = target
    return function


class FilterError(Exception):
    """The function raised an error, returned something else than a bool, or ended its process."""


class Filter:
    """The function ``name`` in a process of its own, which starts with the first group and again after its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._one = threading.Lock()

    def __enter__(self) -> "Filter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def keeps(self, experience: Experience) -> bool:
        """Return whether the function keeps ``experience``. Raises MessageError: it failed."""
        try:
            return self.ask(experience.rewards, experience.group.samples)
        except FilterError as error:
            raise MessageError(
                f"algorithm.filter: {self.name} failed for {experience.group.prompt.problem} ({error}): correct the "
                "function, or change algorithm.filter"
            ) from error

    def ask(self, rewards_S: Float32Array, samples: Sequence[Sample]) -> bool:
        """Return what the function returns for a group. Raises FilterError."""
        question = pickle.dumps((self.name, _arguments(rewards_S, samples)))
        with self._one:
            answer = self._asked(question)
        if "error" in answer:
            raise FilterError(answer["error"])
        return bool(answer["kept"])

    def close(self) -> None:
        """End the process, also while it is asked."""
        if (process := self._process) is not None:
            process.kill()
        with self._one:
            self._end()

    def _asked(self, question: bytes) -> dict[str, Any]:
        limit_s = _START_S if self._process is None else _ANSWER_S
        process = self._process = self._process or _started()
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        limit = threading.Timer(limit_s, stop)
        limit.daemon = True
        limit.start()
        try:
            return self._answer_of(process, question)
        except FilterError as error:
            if late.is_set():
                raise FilterError(f"it did not answer within {limit_s:g} s") from error
            raise
        finally:
            limit.cancel()

    def _answer_of(self, process: subprocess.Popen[bytes], question: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(question).to_bytes(_LENGTH_BYTES, "little") + question)
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:  # a line that is empty or torn
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)
            self._end()
            code = process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise FilterError(f"it ended its process by {how}") from error
        return answer

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def try_filter(name: str) -> None:
    """Call the function ``name`` once; raises FilterError."""
    samples = [
        Sample(
            token_ids=np.arange(length, dtype=np.int32),
            behavior_logprobs=np.full(length, -1.0, dtype=np.float32),
            version_spans=np.zeros((1, 2), dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text="a trial",
        )
        for length in _TRIAL_LENGTHS
    ]
    with Filter(name) as tried:
        tried.ask(np.linspace(0.0, 1.0, len(samples), dtype=np.float32), samples)


def _arguments(rewards_S: Float32Array, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "rewards": rewards_S.copy(),
        "lengths": np.array([len(sample.token_ids) for sample in samples], dtype=np.int32),
        "truncated": np.array([sample.finish_reason is FinishReason.LENGTH for sample in samples]),
        "token_ids": np.concatenate([sample.token_ids for sample in samples]),
        "behavior_logprobs": np.concatenate([sample.behavior_logprobs for sample in samples]),
        "texts": [sample.text for sample in samples],
    }


def _serve() -> None:
    """Answer until standard input ends."""
    questions, output = take_standard_streams()
    while length := questions.read(_LENGTH_BYTES):
        name, arguments = pickle.loads(questions.read(int.from_bytes(length, "little")))  # noqa: S301 (of the trainer)
        try:
            answer: dict[str, Any] = {"kept": _called(name, arguments)}
        except Exception as error:  # noqa: BLE001 (the edge: whatever the function raises)
            answer = {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}
        print(json.dumps(answer), file=output, flush=True)


def _called(name: str, arguments: dict[str, Any]) -> bool:
    kept = load(name)(**arguments)
    if not isinstance(kept, bool | np.bool_):
        raise TypeError(f"expected True or False, found {type(kept).__name__}")
    return bool(kept)


if __name__ == "__main__":
    confine(int(sys.argv[1]), None)
    _serve()
