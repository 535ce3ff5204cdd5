"""Copy run records from the bus to the run's folder.

::

    bus                       file                 one line is
    steps                     metrics.jsonl        one optimizer step: step, version, samples, lag_counts, metrics
    evaluations               evaluations.jsonl    one evaluation
    events                    events.jsonl         one event
    memory                    memory.jsonl         one process's memory by phase and component (``records.memory``)
    journal                   rollouts.jsonl       one trained group, each ``sample_every_steps`` steps: that whose tokens
                                                   the trainer has recorded (``shared.files.token_records``), else the newest

Lines carry their entry's id, where the recorder resumes. While the disk is full it retries. Whatever else has written
the files, each entry becomes one line: a file that has changed is read again before a line is added.
"""

import asyncio
import contextlib
import dataclasses
import errno
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import Counter

from penstock.services.coordinator.evaluation.results import evaluations_of
from penstock.services.coordinator.records.jsonl import BoundedLines, Lines, Overtaken, every_second, exclusive
from penstock.services.coordinator.records.memory import MEMORY_FILE, memory_line, memory_lines
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, Experience, Json, MemoryReport, Prompt, Score, ScoreStatus, StepReport
from penstock.shared.bus.stores.policy.evaluations import evaluated
from penstock.shared.bus.stores.run.records import following, newer, wait_for_any, with_payloads
from penstock.shared.bus.streams import Row, Stream
from penstock.shared.bus.transcripts import turns_of
from penstock.shared.errors import MessageError
from penstock.shared.files.durable import no_room

log = logging.getLogger(__name__)

UNREAD = Counter(
    "penstock_coordinator_unread_groups_total",
    "Trained groups that rollouts.jsonl skips: no copy of the payload is left, or it cannot be decoded.",
)
_BATCH = 500
_WAIT_S = 0.5
_AGAIN_S = 1.0
_LOOKED_BACK = 64
"""Groups of the journal among which that of the last due step is looked for."""
_ROLLOUT_BYTES = 1 << 30
"""Above which every second group of rollouts.jsonl leaves."""


class _Files:
    """A run's record files as they are now, and what they have: to be made in :func:`exclusive`."""

    def __init__(self, folder: Path) -> None:
        self.metrics = Lines(folder / "metrics.jsonl")
        self.events = Lines(folder / "events.jsonl")
        self.evaluations = Lines(folder / "evaluations.jsonl")
        self.rollouts = BoundedLines(folder / "rollouts.jsonl", _ROLLOUT_BYTES, every_second)
        self.memory = memory_lines(folder / MEMORY_FILE)
        self.after = {
            streams.STEPS: _entry(self.metrics),
            streams.EVENTS: _entry(self.events),
            streams.MEMORY: _entry(self.memory),
        }
        self.evaluated = {line.get("version") for line in self.evaluations.read()}
        self.step = _number(self.metrics.last, "step")
        self.sampled_step = min(_number(self.rollouts.last, "step"), self.step)
        self.unread: set[str] = set()
        """Entries of the journal that were tried once, and are skipped."""


class Recorder:
    """``leading``: whether the coordinator may write."""

    def __init__(
        self, bus: Bus, folder: Path, sample_every_steps: int, leading: Callable[[], bool] = lambda: True
    ) -> None:
        self._bus = bus
        self._every = sample_every_steps
        self._folder = folder
        self._leading = leading
        self._busy = asyncio.Lock()
        self.trouble = ""
        """Why records cannot be written."""
        self._files: _Files | None = None

    async def run(self) -> None:
        while True:
            await self.catch_up()
            if self._files is not None:
                await wait_for_any(self._bus, self._files.after, _WAIT_S)

    async def catch_up(self) -> None:
        async with self._busy:
            await self.with_room(self._catch_up)

    async def with_room(self, write: Callable[[], Awaitable[None]]) -> None:
        """Retry ``write`` while the disk is full, reporting ``trouble``."""
        while True:
            try:
                await write()
            except Overtaken:
                self._files = None
                await asyncio.sleep(0.0 if self._leading() else _AGAIN_S)  # until the lease finds out
            except OSError as error:
                file = Path(error.filename) if isinstance(error.filename, str) else self._folder / "records"
                if not self.trouble:
                    log.warning("records cannot be written", extra={"error": str(error)})
                self.trouble = no_room(file, error)
                await asyncio.sleep(_AGAIN_S)
            else:
                self.trouble = ""
                return

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder's records while leading. Raises OSError: another holds them; Overtaken: another leads."""
        with exclusive(self._folder):
            if not self._leading():
                raise Overtaken(errno.ESTALE, "another coordinator leads", str(self._folder))
            yield

    def _open(self) -> _Files:
        with self.writing():
            return _Files(self._folder)

    async def _catch_up(self) -> None:
        if self._files is None:
            self._files = await asyncio.to_thread(self._open)  # files may be long
        files = self._files
        while await self._record_steps(files) + await self._record_events(files) + await self._record_memory(files):
            pass
        await self._record_evaluations(files)
        await self._sample(files)

    async def _record_steps(self, files: _Files) -> int:
        entries = await following(self._bus, streams.STEPS, files.after[streams.STEPS], _BATCH)
        reports = list(_decoded(entries, StepReport))
        self._append(files.metrics, [step_line(entry, report) for entry, report in reports])
        _pass(files, streams.STEPS, entries)
        if reports:
            files.step = reports[-1][1].step
            files.sampled_step = min(files.sampled_step, files.step)
        return len(entries)

    async def _record_events(self, files: _Files) -> int:
        entries = await following(self._bus, streams.EVENTS, files.after[streams.EVENTS], _BATCH)
        events = _decoded(entries, Event)
        self._append(files.events, [{"entry": entry, **dataclasses.asdict(event)} for entry, event in events])
        _pass(files, streams.EVENTS, entries)
        return len(entries)

    async def _record_memory(self, files: _Files) -> int:
        entries = await following(self._bus, streams.MEMORY, files.after[streams.MEMORY], _BATCH)
        self._append(files.memory, [memory_line(entry, report) for entry, report in _decoded(entries, MemoryReport)])
        _pass(files, streams.MEMORY, entries)
        return len(entries)

    def _append(self, file: Lines, lines: list[dict[str, Json]]) -> None:
        if lines:
            with self.writing():
                file.append(lines)

    async def _record_evaluations(self, files: _Files) -> None:
        if not (new := sorted(await evaluated(self._bus) - files.evaluated)):
            return
        results = await evaluations_of(self._bus, new)
        lines = [dataclasses.asdict(evaluation) for version in new for evaluation in results[version]]
        self._append(files.evaluations, lines)
        files.evaluated.update(new)

    async def _sample(self, files: _Files) -> None:
        if files.step // self._every <= files.sampled_step // self._every:
            return
        rows = await newer(self._bus, streams.JOURNAL, "", _LOOKED_BACK)
        due = files.step // self._every * self._every
        rows = [row for row in rows if streams.count_in(row[1], b"step") >= 0]
        of_step = [row for row in rows if streams.count_in(row[1], b"step") == due]  # it may be behind the trainer
        files.unread.intersection_update(entry for entry, _ in rows)
        unseen = [row for row in of_step or rows if row[0] not in files.unread]
        if not (chosen := await with_payloads(self._bus, unseen[:1])):
            return  # just after a checkpoint: at the next step
        for entry, experience in _decoded(chosen, Experience):
            line = journal_line(entry, chosen[0][1], experience)
            new = [] if entry == _entry(files.rollouts) else [line]
            await asyncio.to_thread(self._append, files.rollouts, new)  # a long group's text; thinning reads the file
            files.sampled_step = max(streams.count_in(chosen[0][1], b"step"), files.step)
            return
        files.unread.add(chosen[0][0])
        UNREAD.inc()


def _pass(files: _Files, stream: Stream, entries: list[Row]) -> None:
    if entries:
        files.after[stream] = entries[-1][0]


def step_line(entry: str, report: StepReport) -> dict[str, Json]:
    figures = dataclasses.asdict(report)
    metrics = figures.pop("metrics")
    return {"entry": entry, **figures, **metrics}


def _shown(score: Score) -> dict[str, Json]:
    """Return a score under its scorer's name, and the values of the scorer's functions under theirs."""
    shown: dict[str, Json] = {
        score.scorer: {"status": score.status.value, "value": score.value, "detail": score.detail}
    }
    for name, value in score.parts.items():
        shown[f"{score.scorer}.{name}"] = {"status": ScoreStatus.OK.value, "value": value, "detail": ""}
    return shown


def journal_line(entry: str, fields: Mapping[bytes, bytes], experience: Experience) -> dict[str, Json]:
    """Return the line of a journal's entry."""
    step, version = (streams.count_in(fields, name) for name in (b"step", b"version"))
    return rollout_line(entry, step, experience, None if version < 0 else version)


def rollout_line(entry: str, step: int, experience: Experience, version: int | None = None) -> dict[str, Json]:
    """Return a group's line. ``version``: what its step made; None in the journal of an older Penstock."""
    prompt = experience.group.prompt
    completions: list[Json] = [
        {
            "text": sample.text,
            "reward": float(reward),
            "scores": {name: value for score in scores.scores for name, value in _shown(score).items()},
            "tokens": sample.sampled_tokens,
            **({"ended": sample.ended.value} if sample.ended else {}),
            "finish_reason": sample.finish_reason.value,
            "versions": [int(version) for version in sorted(sample.versions)],
            **({"turns": turns} if (turns := turns_of(sample)) else {}),
        }
        for sample, reward, scores in zip(experience.group.samples, experience.rewards, experience.scores, strict=True)
    ]
    return {
        "entry": entry,
        "step": step,
        "version": version,
        "group": int(prompt.group_id),
        "problem": prompt.problem,
        "row_id": prompt.stable_id,
        "prompt": _asked(prompt),
        "answer": prompt.answer,
        "replica": experience.group.replica,
        "completions": completions,
    }


def _asked(prompt: Prompt) -> Json:
    if prompt.messages is None:
        return prompt.text
    return [{"role": turn.role, "content": turn.content} for turn in prompt.messages]


def _decoded(entries: list[Row], kind: type[wire.T]) -> Iterator[tuple[str, wire.T]]:
    for entry, fields in entries:
        try:
            yield entry, wire.decode(fields.get(b"data", b""), kind)
        except MessageError as error:
            log.warning("unreadable record skipped", extra={"entry": entry, "reason": str(error)})


def _entry(lines: Lines) -> str:
    return "0-0" if lines.last is None else str(lines.last.get("entry", "0-0"))


def _number(line: dict[str, Json] | None, name: str) -> int:
    value = None if line is None else line.get(name)
    return value if isinstance(value, int) else 0
