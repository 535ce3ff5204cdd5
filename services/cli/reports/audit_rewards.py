"""`penstock audit-rewards`: audit a run's recorded rewards.

::

    RUN is a folder           groups from its coordinator if it runs, else from rollouts.jsonl
    RUN is a settings file    groups from --url, or of its run
"""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.services.cli.export import find_alive
from penstock.services.coordinator.admission import dataset
from penstock.services.coordinator.records import jsonl
from penstock.services.reward.audit import audit
from penstock.services.reward.audit.audit import AuditedGroup, AuditReport, Disagreement, RecordedCompletion
from penstock.services.up.display import console
from penstock.shared.bus.messages import FinishReason, Json
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import Job
from penstock.shared.settings import Settings

_MOST_GROUPS, _PAGE = 5_000, 50
_START_WITHIN_S = 60.0
_SHOWN_TEXT, _SHOWN_DETAIL = 60, 100


def read_groups(settings: Settings, url: str, token_file: Path | None) -> list[AuditedGroup]:
    asked = find_alive(settings.run_folder, url, token_file)
    if asked is None:
        rows: Sequence[Mapping[str, Any]] = list(jsonl.read(settings.run_folder / "rollouts.jsonl"))
    else:
        rows = asked.items("/v1/run/rollouts", _MOST_GROUPS, a_page=_PAGE)
    if not rows:
        raise SettingsError(
            f"no groups of the run are recorded in {settings.run_folder}: coordinator.sample_every_steps sets how "
            f"often one is "
            "recorded"
        )
    columns = _columns(settings)
    try:
        return [_group(row, columns) for row in rows]
    except KeyError as error:
        raise SettingsError(
            f"the groups recorded in {settings.run_folder} are of another version: no {error}"
        ) from error


def _columns(settings: Settings) -> dict[str, dict[str, dict[str, Json]]]:
    """Return the other columns of each row, by its id and place."""
    if not audit.needs_executor(settings):
        return {}
    names = [scorer.name for scorer in settings.reward.scorers]
    problems = dataset.load_training(settings.data, names).problems
    columns: dict[str, dict[str, dict[str, Json]]] = {}
    for problem in problems:
        columns.setdefault(problem.row_id, {})[problem.source] = problem.extra
    return columns


def _extra(row: Mapping[str, Any], columns: Mapping[str, dict[str, dict[str, Json]]]) -> dict[str, Json]:
    equal = columns.get(row["row_id"], {})
    return equal.get(row["problem"]) or next(iter(equal.values()), {})


def _group(row: Mapping[str, Any], columns: Mapping[str, dict[str, dict[str, Json]]]) -> AuditedGroup:
    asked = row["prompt"]
    question = asked if isinstance(asked, str) else "\n".join(str(turn["content"]) for turn in asked or [])
    return AuditedGroup(
        step=int(row["step"]),
        group=int(row["group"]),
        problem=str(row["problem"]),
        question=question,
        answer=row["answer"],
        extra=_extra(row, columns),
        completions=tuple(_completion(each) for each in row["completions"]),
    )


def _completion(row: Mapping[str, Any]) -> RecordedCompletion:
    values = {name: float(score["value"]) for name, score in row["scores"].items() if score["value"] is not None}
    reward = float(row["reward"]) if row["reward"] is not None else 0.0
    return RecordedCompletion(row["text"], reward, values, int(row["tokens"]), FinishReason(row["finish_reason"]))


@contextlib.contextmanager
def fresh_executor(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with the address of a new executor, if a scorer needs one."""
    if not audit.needs_executor(settings):
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="penstock-audit-") as folder:
        address = f"unix:{folder}/executor.sock"
        chosen = settings.reward.executor
        command = [sys.executable, "-m", "penstock.services.reward.executor", "--telemetry.log_level=ERROR"]
        command += [f"--reward.executor.address={address}", f"--reward.executor.isolation={chosen.isolation}"]
        command += [f"--reward.executor.interpreter={chosen.interpreter}"] if chosen.interpreter else []
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK__")}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        try:
            asyncio.run(_answers(address, process))
            executor = chosen.model_copy(update={"address": address})
            yield settings.model_copy(update={"reward": settings.reward.model_copy(update={"executor": executor})})
        finally:
            process.terminate()
            process.wait()


async def _answers(address: str, process: "subprocess.Popen[bytes]") -> None:
    client, until_s = ExecutorClient(address), time.monotonic() + _START_WITHIN_S
    try:
        while process.poll() is None and time.monotonic() < until_s:
            with contextlib.suppress(TemporaryError):
                await client.run(Job("print(1)"))
                return
            await asyncio.sleep(0.1)
    finally:
        await client.close()
    raise SettingsError("the executor for the run's code scorers did not start: see above")


def make(
    settings: Settings, url: str, token_file: Path | None, *, above: float | None, count: int, seed: int
) -> AuditReport:
    if not settings.run.id and not url:
        raise SettingsError(
            "the settings file has no run.id, and no coordinator's address is given: give the run's folder, or --url"
        )
    groups = read_groups(settings, url, token_file)
    with fresh_executor(settings) as ready:
        executor = ready.reward.executor.address
        return asyncio.run(audit.audit(groups, settings, above=above, count=count, seed=seed, executor=executor))


# ---------------------------------------------------------------- for people


def say_json(report: AuditReport, settings: Settings) -> None:
    console.say_json({"not_rescored": audit.not_rescored(settings), **dataclasses.asdict(report)})


def show(report: AuditReport, settings: Settings) -> None:
    if report.disagreements:
        console.show(_table(report.disagreements))
    doubted = len({(each.step, each.group, each.sample) for each in report.disagreements})
    parts = [
        f"{report.completions} completions of {report.groups} groups with a reward of at least {report.above:g}: "
        f"{doubted} with {len(report.disagreements)} disagreements"
    ]
    parts += [f"not judged by {check!r}: {count}" for check, count in report.unavailable.items()]
    if names := audit.not_rescored(settings):
        parts.append(f"scorers that were not asked again: {', '.join(names)}")
    console.show(Text("\n".join(parts)))


def _table(doubts: tuple[Disagreement, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("check", "step", "group", "sample", "reward", "problem", "why", "completion ends"):
        table.add_column(name, overflow="fold")
    for each in doubts:
        numbers = (str(each.step), str(each.group), str(each.sample), f"{each.reward:g}")
        shown = (each.problem, each.detail[:_SHOWN_DETAIL], each.text[-_SHOWN_TEXT:])
        table.add_row(*(Text(text) for text in (each.check, *numbers, *shown)))
    return table
