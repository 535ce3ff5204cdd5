"""Laws of the records: no line twice, none torn, despite kills."""

import asyncio
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.evaluation.results import Evaluation
from penstock.services.coordinator.records.jsonl import BoundedLines, Lines, Overtaken, exclusive, read
from penstock.services.coordinator.records.recorder import UNREAD, Recorder
from penstock.services.coordinator.records.report import records
from penstock.services.coordinator.records.summary import digest, one_line_a_step, summarize, training_seconds
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.claims import Claim, is_claim
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, RolloutGroup
from penstock.shared.bus.stores.policy.evaluations import EVALUATIONS
from penstock.shared.bus.stores.policy.ledger import Ledger, Rewound, RunState, RunStatus
from penstock.shared.bus.stores.run.records import page, with_payloads
from penstock.shared.errors import ShelfLost
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings
from tests.conftest import PATIENCE_S, until
from tests.support import builders
from tests.support.coordinator_players import Trainer, report, settings
from tests.support.raw_redis import raw


def lines(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


async def put_steps(bus: Bus, *steps: int) -> None:
    for step in steps:
        await bus.publish(streams.STEPS, report(step, step))


async def commit_group(bus: Bus, group_id: int, payload: bytes | None = None) -> None:
    """Bring a group, or ``payload`` in its place, to the journal, as step 1, 2, …"""
    entry = await bus.append(streams.ROLLOUTS, {"id": str(group_id), "data": b""})
    (delivery,) = await bus.read(streams.ROLLOUTS, RolloutGroup, "reward", 1, 0.1)
    assert delivery.entry_id == entry
    await bus.hand_over(delivery, streams.EXPERIENCE, payload or builders.experience(group_id, version=7))
    trainer = Trainer(bus, groups=1)
    await trainer.start()
    await trainer.step()


async def test_each_step_is_one_line_with_its_metrics_by_name(bus: Bus, tmp_path: Path) -> None:
    await put_steps(bus, 1, 2)
    await Recorder(bus, tmp_path, 100).catch_up()
    first, second = lines(tmp_path, "metrics.jsonl")
    assert {name: first[name] for name in ("step", "version", "finished_at_s", "samples", "lag_counts")} == {
        "step": 1, "version": 1, "finished_at_s": 101.0, "samples": 4, "lag_counts": {"0": 3, "1": 1},
    }  # fmt: skip
    assert (first["reward_mean"], second["reward_mean"], first["kl_max"]) == (0.1, 0.2, None)


async def test_a_restart_writes_no_line_twice(bus: Bus, tmp_path: Path) -> None:
    await put_steps(bus, 1, 2)
    await tell(bus, "test", "first", "")
    await Recorder(bus, tmp_path, 100).catch_up()
    await put_steps(bus, 3)
    await tell(bus, "test", "second", "", version=3)
    await Recorder(bus, tmp_path, 100).catch_up()
    await Recorder(bus, tmp_path, 100).catch_up()
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]
    assert [line["name"] for line in lines(tmp_path, "events.jsonl")] == ["first", "second"]
    assert lines(tmp_path, "events.jsonl")[1]["fields"] == {"version": 3}


async def test_a_leader_that_wakes_late_writes_nothing_twice_and_loses_nothing(bus: Bus, tmp_path: Path) -> None:
    """As a frozen one, the first recorder has read where the file ends, and then another writes."""
    frozen, next_one = Recorder(bus, tmp_path, 1), Recorder(bus, tmp_path, 1)
    await commit_group(bus, 0)
    await frozen.catch_up()
    for group_id in (1, 2):
        await commit_group(bus, group_id)
        await next_one.catch_up()
    await tell(bus, "test", "first", "")
    await frozen.catch_up()
    await next_one.catch_up()
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]
    assert [line["step"] for line in lines(tmp_path, "rollouts.jsonl")] == [1, 2, 3]
    assert [line["name"] for line in lines(tmp_path, "events.jsonl")] == ["first"]


async def test_one_that_no_longer_leads_writes_no_record_and_reports_no_trouble(bus: Bus, tmp_path: Path) -> None:
    leading = [False]
    recorder = Recorder(bus, tmp_path, 1, lambda: leading[0])
    await put_steps(bus, 1)
    with pytest.raises(Overtaken), recorder.writing():
        raise AssertionError
    writing = asyncio.create_task(recorder.catch_up())
    await asyncio.sleep(0.1)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert recorder.trouble == ""
    leading[0] = True
    await writing
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [1]


def test_records_that_another_process_holds_are_refused_in_words(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(OSError, match="another coordinator holds it"), exclusive(tmp_path):
        raise AssertionError


def test_readers_see_each_entry_and_evaluation_of_a_repeated_file_once(tmp_path: Path) -> None:
    """A leader of an older version that woke late has written 1 to 3 again."""
    metrics, evaluated = tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"
    steps = [1, 2, 3, 4, 1, 2, 3, 5]
    metrics.write_text("".join(f'{{"entry": "{step}-0", "step": {step}}}\n' for step in steps))
    evaluated.write_text(
        "".join(f'{{"version": {v}, "set": "{s}"}}\n' for v, s in ((4, "a"), (4, "b"), (2, "a"), (4, "a")))
    )
    assert [line["step"] for line in one_line_a_step(read(metrics))] == [1, 2, 3, 4, 5]
    assert [(line["version"], line["set"]) for line in read(evaluated)] == [(4, "a"), (4, "b"), (2, "a")]
    with metrics.open("a") as file:  # a real rollback: new entries of lower steps
        file.write('{"entry": "6-0", "step": 3}\n{"entry": "7-0", "step": 4}\n{"entry": "4-0", "step": 4}\n')
    assert [line["entry"] for line in one_line_a_step(read(metrics))] == ["1-0", "2-0", "6-0", "7-0"]
    last = Lines(metrics).last
    assert last is not None
    assert last["entry"] == "7-0", "where the recorder continues"


@pytest.mark.parametrize("torn", [b'{"entry": "99-0", "st', b"\x00\x00\x00\n", b"{}garbage\n"])
async def test_a_torn_last_line_is_cut_off_and_written_anew(bus: Bus, tmp_path: Path, torn: bytes) -> None:
    await put_steps(bus, 1, 2)
    await Recorder(bus, tmp_path, 100).catch_up()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 1] + torn)
    await Recorder(bus, tmp_path, 100).catch_up()
    assert path.read_bytes() == whole


async def test_an_unreadable_report_is_passed_over_once(bus: Bus, tmp_path: Path) -> None:
    await bus.append(streams.STEPS, {"id": "1", "data": b""})
    await put_steps(bus, 2)
    await bus.append(streams.STEPS, {"id": "3", "data": b"?"})
    recorder = Recorder(bus, tmp_path, 100)
    await recorder.catch_up()
    await recorder.catch_up()
    assert [line["step"] for line in lines(tmp_path, "metrics.jsonl")] == [2]


@pytest.mark.parametrize("step", ["", "-1", "\N{ARABIC-INDIC DIGIT THREE}", "9" * 5000])
async def test_entries_of_the_journal_that_no_trainer_wrote_are_passed_over(
    bus: Bus, tmp_path: Path, step: str
) -> None:
    recorder = Recorder(bus, tmp_path, 1)
    await commit_group(bus, 0)
    for fields in ({"step": step, "data": "?"}, {"data": "?"}, {"step": step}):
        await bus.append(streams.JOURNAL, fields)
    await recorder.catch_up()
    assert [line["step"] for line in lines(tmp_path, "rollouts.jsonl")] == [1]
    assert [entry.step for entry in await Ledger(bus).journal("")] == [1]


async def test_a_trained_group_is_written_to_be_read_each_so_many_steps(bus: Bus, tmp_path: Path) -> None:
    recorder = Recorder(bus, tmp_path, 2)
    for group_id in range(5):
        await commit_group(bus, group_id)
        await recorder.catch_up()
    await Recorder(bus, tmp_path, 2).catch_up()
    first, second = lines(tmp_path, "rollouts.jsonl")
    assert (first["step"], first["group"], second["step"], second["group"]) == (2, 1, 4, 3)
    assert (first["version"], second["version"]) == (2, 4), "of the step, whatever version generated the samples"
    assert (first["prompt"], first["answer"], first["problem"]) == ("12+34=", "46", "train.jsonl:2")
    assert first["completions"] == [
        {
            "text": text,
            "reward": reward,
            "scores": {"answer": {"status": "ok", "value": reward, "detail": ""}},
            "tokens": 3,
            "finish_reason": "stop",
            "versions": [7],
        }
        for text, reward in (("46", 1.0), ("47", 0.0))
    ]


async def test_a_journal_just_trimmed_by_a_checkpoint_is_sampled_at_the_next_step(bus: Bus, tmp_path: Path) -> None:
    recorder = Recorder(bus, tmp_path, 1)
    await commit_group(bus, 0)
    await raw(bus).xtrim(bus.keys.of(streams.JOURNAL), maxlen=0, approximate=False)
    await recorder.catch_up()
    await commit_group(bus, 1)
    await recorder.catch_up()
    assert [line["step"] for line in lines(tmp_path, "rollouts.jsonl")] == [2]


async def test_a_trained_group_whose_payload_is_lost_is_tried_once_and_passed_over(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bytes] = []

    async def whole(data: bytes) -> bytes:
        tried.append(data)
        if is_claim(data):
            raise ShelfLost("no copy is left")
        return data

    monkeypatch.setattr(bus, "whole", whole)
    before = UNREAD._value.get()
    recorder = Recorder(bus, tmp_path, 1)
    claim = wire.encode(Claim(0, "0" * 64, 10, ()))
    await commit_group(bus, 0, claim)
    for _ in range(3):
        await recorder.catch_up()
    assert (tried, UNREAD._value.get() - before) == ([claim], 1)
    await commit_group(bus, 1)
    await recorder.catch_up()
    assert [line["group"] for line in lines(tmp_path, "rollouts.jsonl")] == [1]
    assert tried.count(claim) == 1


def test_lines_hold_no_number_that_json_cannot(tmp_path: Path) -> None:
    file = Lines(tmp_path / "a.jsonl")
    file.append([{"a": float("inf"), "b": [float("nan"), 1.5], "c": {"d": "é"}}])
    assert (tmp_path / "a.jsonl").read_text(encoding="utf-8") == '{"a": null, "b": [null, 1.5], "c": {"d": "é"}}\n'


def test_of_a_step_written_twice_the_later_line_holds_and_what_followed_the_first_goes() -> None:
    written = [(1, "a"), (2, "a"), (3, "a"), (2, "b")]
    steps = one_line_a_step([{"step": step, "by": by} for step, by in written])
    assert [(step["step"], step["by"]) for step in steps] == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], (None, None)),
        ([0.5], (0.5, 0.5)),
        ([0.0, 1.0, 2.0], (0.0, 2.0)),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], (1.0, 4.0)),
        ([1.0] * 5 + [9.0] * 90 + [3.0] * 5, (1.0, 3.0)),
    ],
)
def test_the_first_and_the_last_reward_share_no_step_and_are_the_report_s(
    tmp_path: Path, rewards: list[float], expected: tuple[float | None, float | None]
) -> None:
    steps: list[dict[str, Any]] = [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rewound = Rewound(2, 16, 100.0, "the bus came back with older data")
    status = dataclasses.replace(STATUS, step=len(rewards), rewound=rewound)
    lost: dict[str, Any] = {"step": len(rewards) + 1, "reward_mean": 100.0, "samples": 64}
    summary = summarize(Settings(), status, {}, [], [*steps, lost], "")
    assert (summary.rewound_steps, summary.rewound_groups, summary.samples) == (2, 16, 0)
    assert (summary.reward_first, summary.reward_last) == expected
    assert records(tmp_path)["ends"]["reward_mean"] == list(expected)  # type: ignore[index, call-overload]


STATUS = RunStatus(
    state=RunState.RUNNING, reason="", created_at_s=90.0, changed_at_s=100.0, step=3, cursor=9,
    head=PolicyVersion(3), newest_version=PolicyVersion(3), trainer_epoch=1, shift=0, tip=None,
    first_admission_s=100.0, last_commit_s=130.0, paused_s=5.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 35.0),
        ({"state": RunState.PAUSED, "changed_at_s": 120.0}, 15.0),
        ({"state": RunState.STOPPED}, 25.0),
        ({"step": 10}, 25.0),
        ({"first_admission_s": None}, 0.0),
        ({"paused_s": 99.0}, 0.0),
    ],
)
def test_training_time_runs_from_first_admission_to_last_commit_without_pauses(
    changed: dict[str, object], expected: float
) -> None:
    import dataclasses

    status = dataclasses.replace(STATUS, **changed)  # type: ignore[arg-type]
    assert training_seconds(status, steps=10, now_s=140.0) == expected


def test_runs_that_differ_only_in_name_and_place_have_the_same_digest(tmp_path: Path) -> None:
    run = settings(tmp_path)
    renamed = settings(tmp_path, run={"id": "other"}, bus={"url": "redis://:secret@host"})
    assert digest(run) == digest(renamed)
    assert digest(run) != digest(settings(tmp_path, steps=5))


async def test_a_pause_is_counted_when_it_ends(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    await raw(bus).hset(bus.keys.named("run"), "first_admission_s", 1.0)
    await ledger.transition(RunState.PAUSED, "", [RunState.RUNNING])
    await raw(bus).hincrbyfloat(bus.keys.named("run"), "changed_at_s", -7)  # seven seconds pass
    assert (await ledger.status()).paused_s == 0.0
    await ledger.transition(RunState.RUNNING, "", [RunState.PAUSED])
    assert (await ledger.status()).paused_s == pytest.approx(7.0, abs=0.9)


async def test_experience_of_the_journal_stays_where_it_is(bus: Bus, tmp_path: Path) -> None:
    await commit_group(bus, 0)
    await Recorder(bus, tmp_path, 1).catch_up()
    ((_, fields),) = await with_payloads(bus, await page(bus, streams.JOURNAL, None, 10))
    assert wire.decode(fields[b"data"], Experience).group.prompt.group_id == 0


def evaluation(version: int) -> Evaluation:
    return Evaluation(
        PolicyVersion(version), version, "heldout", 10, 1, 10, 5, 0.5, 0.4, 0.6, {}, initial=False, final=False,
        started_at_s=0.0, seconds=1.0, note="",
    )  # fmt: skip


async def test_evaluations_after_the_bus_was_lost_are_recorded_however_many_there_were(
    bus: Bus, tmp_path: Path
) -> None:
    recorder = Recorder(bus, tmp_path, 100)
    for versions in ((1, 2, 3), (7,)):
        await raw(bus).delete(bus.keys.of(EVALUATIONS))
        for version in versions:
            results = [dataclasses.asdict(evaluation(version))]
            await raw(bus).hset(bus.keys.of(EVALUATIONS), str(version), json.dumps(results))
        await recorder.catch_up()
    assert [line["version"] for line in lines(tmp_path, "evaluations.jsonl")] == [1, 2, 3, 7]


async def test_a_long_group_is_written_beside_the_event_loop(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit_group(bus, 7)
    went_on, append = threading.Event(), BoundedLines.append

    def waiting(of: BoundedLines, new: list[Any]) -> None:
        assert went_on.wait(PATIENCE_S), "the event loop stood still"
        append(of, new)

    monkeypatch.setattr(BoundedLines, "append", waiting)
    recording = asyncio.create_task(Recorder(bus, tmp_path, 1).catch_up())
    await until(lambda: (tmp_path / "metrics.jsonl").exists())
    await asyncio.sleep(0)
    went_on.set()
    await recording
    assert [line["group"] for line in lines(tmp_path, "rollouts.jsonl")] == [7]
