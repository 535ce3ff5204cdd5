"""Render chat templates, which are a model's programs, in a process that is killed when one does not end.

::

    standard input   a JSON object per line: template, turns, views, arguments, at_s (or null), cpu_s
    standard output  {"texts": [[n, "…"], …]} or {"error": "…"} per line: each text after the first begins with n characters
                     of the first

The process may use ``_CPU_S`` seconds of CPU time for a text and ``_MEMORY_BYTES`` more than it has after its
imports. Each process that renders has one; it ends with its standard input.
"""

import atexit
import bisect
import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.shared.process.parent import FOR_PYTHON

_CPU_S = 2.0
_STARVED_S = 60.0
"""Wall time after which a process that is not given its CPU time is killed, imports included."""
_MEMORY_BYTES = 512 * 1024**2
_LONGEST_TEXT = 16 * 1024**2
_LONGEST_ERROR = 1_000
_PIPE_BYTES = 1 << 20
"""A long conversation is written and read at once, not in turns of both processes."""
_LIBRARY = "transformers.tokenization_utils_base"


class TemplateFailed(ValueError):
    """The template cannot render these messages."""


class TemplateEndless(TemplateFailed):
    """The rendering was killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """The first ``turns`` of a conversation, and ``last`` after them; ``answers``: up to where the policy answers."""

    turns: int
    last: Mapping[str, Any] | None = None
    answers: bool = False


def render(
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    at_s: float | None = None,
) -> str:
    """Return the text of a conversation by a tokenizer's template, or by ``template``. Raises as :func:`render_views` does."""
    views = [View(len(turns), answers=add_generation_prompt)]
    return render_views(tokenizer, turns, views, template=template, arguments=arguments, at_s=at_s)[0]


def render_views(
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    views: Sequence[View],
    *,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    at_s: float | None = None,
) -> list[str]:
    """Return the texts of parts of a conversation by a tokenizer's template, or by ``template``.

    Args:
        at_s: what ``strftime_now`` tells, seconds since the epoch; default: its own time.

    Raises:
        TemplateFailed: it cannot be rendered, or not in time.
    """
    if type(tokenizer).apply_chat_template.__module__ != _LIBRARY:  # no Jinja, or code of a trusted model
        from jinja2 import TemplateError

        clock = {} if at_s is None else {"strftime_now": datetime.fromtimestamp(at_s, UTC).strftime}
        own = {} if template is None else {"chat_template": template}
        try:
            return [
                str(
                    tokenizer.apply_chat_template(
                        _seen(turns, view.turns, view.last),
                        add_generation_prompt=view.answers,
                        tokenize=False,
                        return_dict=False,
                        **{**own, **clock, **(arguments or {})},
                    )
                )
                for view in views
            ]
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise TemplateFailed(str(error)) from error
    question = {
        "template": tokenizer.get_chat_template(template),
        "turns": list(turns),
        "views": [dataclasses.astuple(view) for view in views],
        "arguments": {**tokenizer.special_tokens_map, **(arguments or {})},
        "at_s": at_s,
        "cpu_s": _CPU_S * len(views),
    }
    return _renderer(os.getpid()).render(json.dumps(question, default=str).encode() + b"\n")


def common(left: str, right: str) -> int:
    """Return the length of the longest common prefix."""
    lengths = range(1, min(len(left), len(right)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda length: left[:length] != right[:length])


def _seen(turns: Sequence[Any], count: int, last: Any) -> list[Any]:
    return [*turns[:count], *([] if last is None else [last])]


@functools.lru_cache(1)
def _renderer(pid: int) -> "_Renderer":
    """Return the renderer of this process, not of one that it was forked from."""
    renderer = _Renderer()
    atexit.register(renderer.close)
    return renderer


class _Renderer:
    """The parent's side; threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, question: bytes) -> list[str]:
        with self._turn:
            try:
                answer = self._ask(question)
            except BaseException:
                self.close()
                raise
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        first = answer["texts"][0][1]
        return [first[:count] + rest for count, rest in answer["texts"]]

    def _ask(self, question: bytes) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _started()
        reading, writing = self._process.stdout, self._process.stdin
        assert reading is not None
        assert writing is not None
        try:
            writing.write(question)
            writing.flush()
            if not select.select([reading], [], [], _STARVED_S)[0]:
                raise TemplateEndless(f"it did not end within {_STARVED_S:g} s")
            answer: dict[str, Any] = json.loads(reading.readline())
        except (ValueError, ConnectionError) as error:
            if isinstance(error, TemplateEndless):
                raise
            how = "did not end within" if self._process.wait() == -signal.SIGPROF else "ended its process before"
            raise TemplateEndless(f"it {how} {_CPU_S:g} s of CPU time") from error
        return answer

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:
                pass


def _started() -> "subprocess.Popen[bytes]":
    environment = {name: os.environ[name] for name in FOR_PYTHON if name in os.environ}
    process = subprocess.Popen(
        (sys.executable, "-m", "penstock.shared.model.rendering.chat_template"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**environment, "USE_TORCH": "0", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
        cwd=Path(__file__).parents[4],
    )
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError, AttributeError):  # another system than Linux, or its limit
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # type: ignore[arg-type]
    return process


@functools.cache
def template_library() -> Any:
    """Return ``transformers.utils.chat_template_utils``, imported without all that models need, half a second of its import.

    What else a process imports of transformers, before or after this, is as usual.
    """
    names = ("transformers", "transformers.utils")
    if names[0] in sys.modules or threading.active_count() > 1:  # another thread would see hollow modules
        return importlib.import_module("transformers.utils.chat_template_utils")
    try:
        for name in names:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
        return importlib.import_module("transformers.utils.chat_template_utils")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == names[0]]:
            del sys.modules[name]
        logging.getLogger(names[0]).handlers.clear()  # its next import adds one


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    clock = {}
    if question["at_s"] is not None:
        clock["strftime_now"] = datetime.fromtimestamp(question["at_s"], UTC).strftime
    try:
        texts = [
            template_library().render_jinja_template(
                conversations=[_seen(question["turns"], turns, last)],
                chat_template=question["template"],
                add_generation_prompt=answers,
                **{**clock, **question["arguments"]},
            )[0][0]
            for turns, last, answers in question["views"]
        ]
    except Exception as error:  # noqa: BLE001 (the edge of the process: a template raises what it likes)
        return {"error": (str(error) or type(error).__name__)[:_LONGEST_ERROR]}
    if (longest := max(map(len, texts))) > _LONGEST_TEXT:
        return {"error": f"expected at most {_LONGEST_TEXT} characters, found {longest}"}
    shared = [0, *(common(texts[0], text) for text in texts[1:])]
    return {"texts": [(count, text[count:]) for count, text in zip(shared, texts, strict=True)]}


def _serve() -> None:
    template_library()  # before its time is counted
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        most = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])
        answer = _answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
