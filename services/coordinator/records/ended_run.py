"""The folder of a run that has ended, read as the routes read the bus.

::

    metrics.jsonl       steps, and a version for each: those that a rollback made are in no record
    events.jsonl        events, of which some pin or release a version
    memory.jsonl        memory
    evaluations.jsonl   evaluations, of the run and of versions
    summary.json        the run's view; rollouts.jsonl and metrics.jsonl are read by the routes themselves
"""

import asyncio
import dataclasses
import functools
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException

from penstock.services.coordinator.evaluation.results import Evaluation, evaluation_of
from penstock.services.coordinator.policies.lineage import compare
from penstock.services.coordinator.records import jsonl
from penstock.services.coordinator.records.memory import MEMORY_FILE
from penstock.services.coordinator.records.summary import one_line_a_step
from penstock.services.coordinator.schemas.resources import Comparison, Page, PolicyView
from penstock.services.coordinator.schemas.run import EvaluationView, History, NoticeView, RunView
from penstock.shared.bus import streams
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, Json, MemoryReport, MemorySample, PolicyVersion, StepReport
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.bus.streams import Row, Stream
from penstock.shared.errors import MessageError, SettingsError
from penstock.shared.files.checkpoint_folder import checkpoint_folder
from penstock.shared.settings import SETTINGS_FILE

_FILES = {streams.STEPS: "metrics.jsonl", streams.EVENTS: "events.jsonl", streams.MEMORY: MEMORY_FILE}
_ABOUT = frozenset({"entry", "step", "version", "finished_at_s", "samples", "lag_counts"})
_MARKS = {"policy pinned": ("pinned", True), "policy unpinned": ("pinned", False)}
_MARKS |= {"policy released": ("released", True), "policy withdrawn": ("released", False)}
_UNMARKED: dict[str, Any] = {"state": PolicyState.RETIRED, "checkpoint": None, "pinned": False, "released": False}
_UNMARKED |= {"location": "", "source": "", "manifest_digest": "", "settings_revision": 0}
_ENDED: dict[str, Any] = {"closed": True, "recorded": True, "bus_full": "", "guards": [], "bound": "", "self_tests": {}}
_ENDED |= {
    "groups_in_flight": 0,
    "slots": 0,
    "dead": 0,
    "eta_s": None,
    "settings_revision": 0,
    "drawn_tokens_per_s": 0.0,
}
_UNKNOWN: dict[str, Any] = {
    "reason": "",
    "head": None,
    "counts": {},
    "training_s": 0.0,
    "gpu_hours": 0.0,
    "missing": {},
}
_UNKNOWN |= {"groups_admitted": 0, "started_at_s": 0.0, "bus": ""}
"""What the summary of another Penstock may lack."""
_OF_VERSIONS = ("reward_mean", "kl_mean", "entropy")
"""What a version's record on the bus has of its step's metrics."""
_STREAMS = [stream.name for stream in (*streams.TRAINING_STREAMS, streams.JOURNAL)]
_IDLE = {"entries": 0, "pending": 0, "oldest_age_s": 0.0}
_HISTORY_STEPS, _EVALUATIONS = 60, 200
_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, MessageError)


class EndedRun:
    """Raises SettingsError: its summary cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            self.run_id = str(self._summary.get("run_id") or folder.resolve().name)
            planned = tomllib.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))["run"]["steps"]
            self._planned = max(int(planned), self._summary["steps"])
        except (OSError, *_UNREADABLE) as error:
            why = f"could not read settings and summary of an ended run in {folder} ({error})"
            raise SettingsError(f"{why}: `penstock up --resume {folder}` continues the run") from error

    async def rows(self, stream: Stream, before: str | None, count: int) -> list[Row]:
        """Return the newest entries of ``stream`` before one, newest first; of streams without a record none."""
        if stream not in _FILES:
            return []
        return await asyncio.to_thread(self._rows, stream, before, count)

    def _rows(self, stream: Stream, before: str | None, count: int) -> list[Row]:
        bound = jsonl.place({"entry": before}) if before else None
        rows: list[Row] = []
        for line in jsonl.newest_first(self.folder / _FILES[stream], bound):
            if len(rows) == count:
                break
            if bound is not None and jsonl.place(line) >= bound:
                continue  # twice
            try:
                rows.append((str(line["entry"]), {b"data": wire.encode(_message(stream, line))}))
            except _UNREADABLE:
                continue
            bound = jsonl.place(line)
        return rows

    # ---------------------------------------------------------------- versions

    async def policies(self, after: int, limit: int, state: PolicyState | None) -> Page[PolicyView]:
        """Return ``limit`` versions in ``state`` (None: any) after one, oldest first."""
        known = await asyncio.to_thread(lambda: self._versions)
        views = [view for view in known.values() if view.version > after and state in (None, view.state)]
        return Page(items=views[:limit], next=str(views[limit - 1].version) if len(views) > limit else None)

    async def policy(self, version: int) -> PolicyView:
        known = await asyncio.to_thread(lambda: self._versions)
        if version not in known:
            raise HTTPException(404, f"this run has no policy version {version}; it has versions up to {max(known)}")
        return known[version]

    async def compared(self, version: int, other: int) -> Comparison:
        left, right = await self.policy(version), await self.policy(other)
        before = {view.version for view in self._ancestry(left)}
        ancestor = next((view for view in self._ancestry(right) if view.version in before), None)
        return compare(left, right, ancestor, {view.version: view.evaluations for view in (left, right)})

    def _ancestry(self, view: PolicyView) -> Iterator[PolicyView]:
        while True:
            yield view
            if view.parent is None:
                return
            view = self._versions[view.parent]

    @functools.cached_property
    def _versions(self) -> dict[int, PolicyView]:
        views = {0: _policy({"version": 0, "step": 0, "finished_at_s": self._summary.get("started_at_s", 0.0)}, None)}
        branch = [views[0]]
        for line in jsonl.read(self.folder / "metrics.jsonl"):
            try:
                while len(branch) > 1 and branch[-1].step >= line["step"]:  # type: ignore[operator]
                    branch.pop().state = PolicyState.REVOKED
                view = _policy(line, branch[-1].version)
            except _UNREADABLE:
                continue
            branch.append(view)
            views[view.version] = view
        branch[-1].state = PolicyState.LIVE
        for view in branch:
            checkpoint = checkpoint_folder(self.folder, view.step)
            view.checkpoint = str(checkpoint) if checkpoint.is_dir() else None
        for evaluation in self._evaluations():
            if evaluation.version in views:
                views[evaluation.version].evaluations.append(_view(evaluation))
        for event in jsonl.read(self.folder / "events.jsonl"):
            mark, fields = _MARKS.get(str(event.get("name"))), event.get("fields")
            if mark and isinstance(fields, dict) and (marked := views.get(fields.get("version"))):  # type: ignore[arg-type]
                setattr(marked, *mark)
        return dict(sorted(views.items()))

    def _evaluations(self) -> Iterator[Evaluation]:
        for line in jsonl.read(self.folder / "evaluations.jsonl"):
            try:
                yield evaluation_of(line)
            except _UNREADABLE:
                continue

    # ---------------------------------------------------------------- the run

    async def text(self) -> bytes:
        """Return the run's view as JSON. Raises SettingsError: of a summary with other types."""
        try:
            return await asyncio.to_thread(lambda: self._text)
        except ValidationError as error:
            raise SettingsError(f"could not read {self.folder / 'summary.json'}: {error}") from error

    @functools.cached_property
    def _text(self) -> bytes:
        summary = {**_UNKNOWN, **self._summary, "step": self._summary["steps"]}
        steps = one_line_a_step(jsonl.read(self.folder / "metrics.jsonl"))
        last = steps[-1] if steps else {}
        evaluations = [_view(each) for each in self._evaluations() if not self._is_revoked(each.version)]
        figures = _metrics(last)
        known = {
            name: summary[name] for name in ("state", "reason", "step", "head", "counts", "training_s", "gpu_hours")
        }
        known |= {"cursor": summary["groups_admitted"], "started_at_s": summary["started_at_s"], "bus": summary["bus"]}
        known |= {"notices": list(_notices(summary)), "steps": self._planned, "streams": dict.fromkeys(_STREAMS, _IDLE)}
        known |= {"last": figures, "lag_counts": last.get("lag_counts", {}), "history": _history(steps)}
        known |= {"tokens_per_s": figures.get("tokens_per_s") or 0.0, "newest_version": max(self._versions)}
        known |= {"evaluations": evaluations[:1] + evaluations[1:][-_EVALUATIONS:], "activity": summary["state"]}
        return RunView.model_validate({**_ENDED, **known, "run_id": self.run_id}).model_dump_json().encode()

    def _is_revoked(self, version: int) -> bool:
        known = self._versions.get(version)
        return known is not None and known.state is PolicyState.REVOKED


def _message(stream: Stream, line: Mapping[str, Any]) -> Any:
    if stream is streams.STEPS:
        figures = {name: math.nan if value is None else value for name, value in _metrics(line).items()}
        about = {name: line[name] for name in ("step", "version", "finished_at_s", "samples", "lag_counts")}
        return StepReport(**about, metrics=figures)
    if stream is streams.EVENTS:
        return Event(**{field.name: line[field.name] for field in dataclasses.fields(Event) if field.name in line})
    samples = tuple(MemorySample(**sample) for sample in line["samples"])
    return MemoryReport(replica=line["replica"], samples=samples)


def _metrics(line: Mapping[str, Json]) -> dict[str, float | None]:
    return {
        name: value
        for name, value in line.items()
        if name not in _ABOUT and (value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)))
    }


def _policy(line: Mapping[str, Any], parent: PolicyVersion | int | None) -> PolicyView:
    made = {"version": line["version"], "parent": parent, "step": line["step"], "created_at_s": line["finished_at_s"]}
    metrics = {name: value for name, value in _metrics(line).items() if name in _OF_VERSIONS}
    return PolicyView.model_validate({**_UNMARKED, **made, "metrics": metrics, "evaluations": []})


def _view(evaluation: Evaluation) -> EvaluationView:
    return EvaluationView.model_validate(evaluation, from_attributes=True)


def _notices(summary: Mapping[str, Any]) -> Iterator[NoticeView]:
    for artifact, why in summary.get("missing", {}).items():
        yield NoticeView(about=artifact, level="error", text=f"without its {artifact}: {why}")
    for name, count in summary.get("counts", {}).items():
        if name.startswith("dead:") and count:
            text = f"{count} dead letters of {name.removeprefix('dead:')}: the bus had their contents"
            yield NoticeView(about=name, level="warning", text=text)


def _history(steps: list[dict[str, Json]]) -> History:
    names, metrics = ("reward_mean", "tokens_per_s"), [_metrics(line) for line in steps[-_HISTORY_STEPS:]]
    of_names = {name: [figures.get(name) for figures in metrics] for name in names}
    return History.model_validate({"step": [line["step"] for line in steps[-_HISTORY_STEPS:]], **of_names})
