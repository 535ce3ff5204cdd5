"""Laws of rollout tables and the report in trackers: each once, whatever dies, and texts are shown as they are."""

import asyncio
import json
import math
import os
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.services.tracking import tables
from penstock.services.tracking.offset import Offset
from penstock.services.tracking.points import Segments
from penstock.services.tracking.tables import LONGEST_TEXT, MOST_ROWS, RolloutLines, table_of
from penstock.shared.bus.bus import Bus
from tests.conftest import PATIENCE_S
from tests.support.trackers import REPORTS, TABLES, mlflow_run, text_tensors
from tests.tracking.conftest import Tracking, line, points, unanswered

HOSTILE = (
    "<script>alert(1)</script><img src=http://x/y>\x00\x1b[2J\u202e",
    "```\n# title\n</pre>\n\n    <!-- [a](http://x) <![CDATA[ <?php **b** `c` ~~~\n~~~\n| a | b |\n|---|---|\n| c | d |",
    "\ud800 lone, \U0001f600 whole, \ufeff\u2028 \x85 \r\n &amp; &#60; &lt;",
    '{"_type": "table-file", "path": "/etc/passwd"}',
    "=cmd|' /C calc'!A0\n[r]: http://x\n===\n\\u0000 $$x^2$$ \x02wzxhzdk:0\x03",
    "",
)


def steps_of(tracking: Tracking, segment: str = "run") -> list[int]:
    return [step for step, _, _ in TABLES[tracking.name](tracking.folder, segment)]


async def test_a_table_that_was_written_but_not_acknowledged_is_in_the_tracker_once(tracking: Tracking) -> None:
    tracking.record(line(1))
    await tracking.put(1)
    assert await tracking.follower.deliver()
    tracking.record(line(2, texts=HOSTILE), line(3))
    await tracking.put(2, 3)
    follower = await tracking.killed_after_the_write()
    assert await follower.deliver()
    tracking.record(line(4))
    await tracking.put(4)
    assert await follower.deliver()
    assert not await (await tracking.restart()).deliver(), "nothing is repeated"
    await tracking.close()
    tables = TABLES[tracking.name](tracking.folder, "run")
    assert [(step, len(rows)) for step, _, rows in tables] == [(1, 2), (2, len(HOSTILE)), (3, 2), (4, 2)]
    assert tracking.shown() == points(1, 2, 3, 4)


async def test_a_table_has_a_row_for_each_completion_with_its_text_whatever_it_is(tracking: Tracking) -> None:
    texts = (*HOSTILE, "x" * 1_000_000)
    tracking.record(line(2, texts=texts))
    await tracking.put(2)
    assert await tracking.follower.deliver()
    await tracking.close()
    ((step, columns, rows),) = TABLES[tracking.name](tracking.folder, "run")
    assert step == 2
    assert columns == [
        "step", "version", "problem", "prompt", "answer", "completion", "reward", "rewards/answer", "rewards/slow",
        "tokens", "finish_reason", "sampled_by",
    ]  # fmt: skip
    shown = [str(row[5]) for row in rows]
    assert shown[0] == "<script>alert(1)</script><img src=http://x/y>\\u0000\\u001b[2J\\u202e"
    assert shown[1] == HOSTILE[1]
    assert shown[2] == "? lone, \U0001f600 whole, \\ufeff\\u2028 \\u0085 \\u000d\n &amp; &#60; &lt;"
    assert shown[3:-1] == [HOSTILE[3], HOSTILE[4].replace("\x02", "\\u0002").replace("\x03", "\\u0003"), ""]
    assert shown[-1] == "x" * LONGEST_TEXT + "… (990000 characters more)"
    others = [str("" if cell is None else cell) for place, cell in enumerate(rows[0]) if place != 5]
    assert others == ["2", "2", "train.jsonl:5", "12+34=", "46", "0.5", "1.0", "", "3", "stop", "6, 7"]


async def test_a_table_is_in_the_segment_of_its_step(tracking: Tracking) -> None:
    """Version 3 is rolled back to 1; tables of both branches come after all steps."""
    for step, version in ((1, 1), (2, 2), (3, 3), (2, 4), (3, 5)):
        await tracking.put_version(step, version)
    tracking.record(line(2, 2))
    assert await tracking.follower.deliver()
    tracking.record(line(3, 3), line(2, 4), line(3, 5))
    follower = await tracking.killed_after_the_write()
    assert await follower.deliver()
    await tracking.close()
    assert steps_of(tracking) == [2, 3]
    assert steps_of(tracking, "run-segment-1") == [2, 3]
    assert tracking.shown() == points(1, 2, 3)
    assert tracking.shown("run-segment-1") == points(2, 3)


async def test_each_new_report_is_in_the_tracker_once(tracking: Tracking) -> None:
    path = tracking.folder / "report.html"
    path.write_text("<p>first</p>")
    await tracking.put(1)
    follower = await tracking.killed_after_the_write()
    assert await follower.deliver()
    path.write_text("<p>first</p>")  # by `penstock report`, with the same contents
    assert not await follower.deliver()
    path.write_text("<p>second</p>")
    assert await follower.deliver()
    assert not await (await tracking.restart()).deliver()
    await tracking.close()
    both = {"tensorboard": [], "mlflow": [b"<p>second</p>"]}.get(tracking.name, [b"<p>first</p>", b"<p>second</p>"])
    assert sorted(REPORTS[tracking.name](tracking.folder, "run")) == both
    assert tracking.shown() == points(1)


async def test_a_report_that_was_removed_delays_nothing(tracking: Tracking) -> None:
    (tracking.folder / "report.html").write_text("<p>first</p>")
    await tracking.put(1)
    follower = await tracking.killed_after_the_write()
    (tracking.folder / "report.html").unlink()
    assert await follower.deliver()
    await tracking.put(2)
    assert await follower.deliver()
    await tracking.close()
    assert tracking.shown() == points(1, 2)


async def test_the_end_does_not_wait_for_a_sink_that_hangs_and_a_later_start_sends_the_rest(
    tensorboard: Tracking,
) -> None:
    await tensorboard.put(1)
    assert await tensorboard.follower.deliver()
    await tensorboard.put(2)
    tensorboard.record(line(2))
    (tensorboard.folder / "report.html").write_text("<p>first</p>")
    tensorboard.hang()
    tensorboard.client._timeout_s = 0.2
    assert not await tensorboard.follower.deliver(), "it has noted what is to be sent"
    tensorboard.client._timeout_s = PATIENCE_S
    await tensorboard.client._start()
    tensorboard.hang()
    await tensorboard.follower.finish(0.2)
    assert steps_of(tensorboard) == []
    assert [point["step"] for point in Offset.read(tensorboard.path).pending] == [2, 2, 2], "they are still to be sent"
    assert await (await tensorboard.restart()).deliver()
    assert (steps_of(tensorboard), tensorboard.shown()) == ([2], points(1, 2))


async def test_a_table_waits_for_the_report_of_its_step(tensorboard: Tracking) -> None:
    tensorboard.record(line(1), line(2))
    assert not await tensorboard.follower.deliver()
    await tensorboard.put(1)
    assert await tensorboard.follower.deliver()
    assert steps_of(tensorboard) == [1]
    await tensorboard.put(2)
    assert await tensorboard.follower.deliver()
    assert steps_of(tensorboard) == [1, 2]


async def test_what_cannot_be_read_is_passed_over(tensorboard: Tracking, caplog: pytest.LogCaptureFixture) -> None:
    old = line(1)
    del old["version"]
    tensorboard.record(old, {**line(2), "completions": [7]})
    with (tensorboard.folder / "rollouts.jsonl").open("ab") as file:
        file.write(b'\xff\x00\n{"entry": 7}\n[1]\n' + b"[" * 100_000 + b"\n" + json.dumps(line(3)).encode())
    await tensorboard.put(1, 2, 3)
    assert await tensorboard.follower.deliver()
    assert not await tensorboard.follower.deliver(), "the last line is not complete"
    with (tensorboard.folder / "rollouts.jsonl").open("ab") as file:
        file.write(b"\n")
    assert await tensorboard.follower.deliver()
    assert steps_of(tensorboard) == [3]
    assert [record.message for record in caplog.records] == ["unreadable rollouts passed over"] * 2


DAMAGED: tuple[dict[str, Any], ...] = (
    {"step": math.inf}, {"step": math.nan}, {"step": 10**400}, {"step": -1}, {"step": 2**63}, {"step": {}}, {"step": "two"},
    {"version": math.inf}, {"version": 1e300}, {"version": None}, {"version": []},
    {"completions": math.inf}, {"completions": {"a": 1}}, {"completions": "text"}, {"completions": [[]]},
    {"prompt": [1]}, {"prompt": [{"role": "user"}]},
    {"entry": "9" * 4000 + "-0"}, {"entry": "99999999999999999-0"}, {"entry": "\u0661-0"}, {"entry": [1]}, {"entry": "\ud800"},
)  # fmt: skip
"""Lines that are passed over."""
ODD: tuple[dict[str, Any], ...] = (
    {"reward": math.inf}, {"reward": -(10**400)}, {"reward": "nan"}, {"reward": "0.5"}, {"finish_reason": {"a": "\ud800"}},
    {"scores": {"a": {"value": math.nan}, "\ud800": {"value": 1e308}}}, {"scores": {"\u0000": {}, "\\u0000": {}}},
    {"scores": {str(number): {"value": 1.0} for number in range(1000)}}, {"scores": {"s" * 100_000: {"value": 10**400}}},
    {"tokens": "7"}, {"tokens": 2**63 - 1}, {"versions": list(range(10_000))}, {"text": None}, {"text": {"a": [math.nan]}},
)  # fmt: skip
"""Completions whose table can still be shown."""


def changed(number: int, **fields: object) -> dict[str, Any]:
    return {**line(number), **fields}


def odd(number: int, fields: Mapping[str, object]) -> dict[str, Any]:
    made = line(number)
    return {**made, "completions": [{**completion, **fields} for completion in made["completions"]]}


async def test_a_damaged_line_ends_and_delays_nothing_and_every_tracker_takes_the_others(tracking: Tracking) -> None:
    damaged = [changed(1, **fields) for fields in DAMAGED]
    damaged += [odd(1, {"tokens": math.inf}), odd(1, {"versions": [math.nan]}), odd(1, {"scores": {"a": 7}})]
    shown = [odd(number, fields) for number, fields in enumerate(ODD, start=2)]
    with (tracking.folder / "rollouts.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in (*damaged, *shown, line(90)))
    await tracking.put(*range(1, 91))
    while await tracking.follower.deliver():
        pass
    assert tracking.follower.trouble == ""
    await tracking.close()
    assert steps_of(tracking) == [*range(2, 2 + len(ODD)), 90]
    assert tracking.shown() == points(*range(1, 91))


async def test_a_line_that_is_too_long_is_not_read_into_memory(
    tensorboard: Tracking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tables, "LONGEST_LINE", 4096)
    path = tensorboard.folder / "rollouts.jsonl"
    tensorboard.record(line(1))
    with path.open("ab") as file:
        file.write(b"x" * 10_000)
    await tensorboard.put(1, 2, 3)
    assert await tensorboard.follower.deliver()
    assert not await tensorboard.follower.deliver()
    with path.open("ab") as file:
        file.write(b"x" * 10_000 + b"\n" + b"y" * 4096 + b"\n" + json.dumps(line(2)).encode() + b"\n")
    assert await tensorboard.follower.deliver()
    assert steps_of(tensorboard) == [1, 2]
    assert [record.message for record in caplog.records] == ["rollouts line too long"] * 2


async def test_a_damaged_version_delays_no_later_table(tensorboard: Tracking) -> None:
    tensorboard.record({**line(1), "version": 10**9}, line(2), line(3))
    await tensorboard.put(1, 2)
    assert await tensorboard.follower.deliver()
    assert steps_of(tensorboard) == [1, 2]
    assert not await tensorboard.follower.deliver(), "the table of step 3 waits for its report"


async def test_a_file_that_was_cut_is_read_on(tensorboard: Tracking) -> None:
    tensorboard.record(line(1), line(2))
    with (tensorboard.folder / "rollouts.jsonl").open("ab") as file:
        file.write(b"damage" * 1000 + b"\n")
    await tensorboard.put(1, 2, 3)
    assert await tensorboard.follower.deliver()
    tensorboard.record(line(3))  # the coordinator starts again, and cuts off what it cannot read
    assert await tensorboard.follower.deliver()
    assert steps_of(tensorboard) == [1, 2, 3]


@pytest.mark.parametrize("name", ["rollouts.jsonl", "report.html"])
@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)], ids=["folder", "pipe", "loop"]
)
async def test_a_name_in_the_folder_that_is_no_file_delays_no_step(
    tensorboard: Tracking, name: str, make: Callable[[Path], None]
) -> None:
    make(tensorboard.folder / name)
    await tensorboard.put(1)
    async with asyncio.timeout(PATIENCE_S):
        assert await tensorboard.follower.deliver()
    assert tensorboard.shown() == points(1)


OFFSETS = (
    b"", b"\xff", b"7", b"{}x", b"[" * 100_000, b'{"after": 7}', b'{"evaluated": null}', b'{"segments": 7}',
    b'{"after": "end"}', b'{"rollouts": "1"}',
    b'{"segments": {"points": "many"}}', b'{"segments": {"earlier": [[]]}}', b'{"pending": {"a": 1}}', b'{"rollouts": Infinity}',
)  # fmt: skip


@pytest.mark.parametrize("contents", OFFSETS, ids=range(len(OFFSETS)))
async def test_a_damaged_offset_is_reported_and_ends_nothing(tensorboard: Tracking, contents: bytes) -> None:
    tensorboard.path.parent.mkdir()
    tensorboard.path.write_bytes(contents)
    await tensorboard.put(1)
    follower = tensorboard.follow()
    assert not await follower.deliver()
    assert follower.trouble == (
        f"expected the tracker's offset in {tensorboard.path}, found another file: remove it to copy the run again"
    )
    tensorboard.path.unlink()
    assert await follower.deliver()
    assert [name for name, _ in tensorboard.events] == ["tracker failed", "tracker works again"]


async def test_many_tables_are_delivered_in_their_order(tensorboard: Tracking) -> None:
    tensorboard.record(*map(line, range(1, 31)))
    (tensorboard.folder / "report.html").write_text("<p>last</p>")
    await tensorboard.put(*range(1, 31))
    while await tensorboard.follower.deliver():
        pass
    assert steps_of(tensorboard) == list(range(1, 31))
    assert tensorboard.shown() == points(*range(1, 31))


def test_lines_are_read_on_from_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f"{json.dumps(line(step))}\n" for step in (1, 2, 3, 4)))
    rollouts = RolloutLines(path)
    assert [of["step"] for of in rollouts.following("0-0", 3, 2)] == [1, 2]
    assert [of["step"] for of in rollouts.following("2000-1", 3, 2)] == [3]
    assert [of["step"] for of in rollouts.following("2000-1", 4, 2)] == [3, 4], "it was not delivered"
    assert rollouts.following("4000-1", 9, 2) == []
    assert [of["step"] for of in rollouts.following("1000-1", 9, 9)] == [2, 3, 4]
    assert RolloutLines(tmp_path / "none.jsonl").following("0-0", 9, 9) == []


def test_a_conversation_is_a_text_and_a_large_group_is_cut() -> None:
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1+1"}]}]
    table = table_of({**line(1, texts=("2",) * 100), "prompt": turns, "answer": None})
    assert len(table["rows"]) == MOST_ROWS
    assert table["rows"][0][3:5] == ['system: Add.\nuser: [{"type": "text", "text": "1+1"}]', ""]


def test_a_table_of_an_earlier_segment_has_an_index_of_its_own() -> None:
    segments = Segments(segment=1, last_step=3, points=5, last_version=9, first_version=7, earlier=[[0, 6]])
    made = [segments.of_rollout(line(3, version)) for version in (6, 7, 5)]
    assert [(point["segment"], point["index"]) for point in made] == [(0, 6), (1, 5), (0, 7)]


async def _mlflow(bus: Bus, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Tracking(bus, folder, "mlflow")


async def test_steps_do_not_wait_for_an_artifact_store_that_fails_and_tables_are_sent_once_it_is_back(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = await _mlflow(bus, tmp_path, monkeypatch)
    (tmp_path / "mlflow").write_text("a file where the artifact store should be")
    tracking.record(*map(line, range(1, 21)))
    (tmp_path / "report.html").write_text("<p>first</p>")
    for step in (1, 2, 3):
        await tracking.put(step)
        assert await tracking.follower.deliver(), "the step is sent"
    assert tracking.shown() == points(1, 2, 3)
    assert "Error" in tracking.follower.trouble
    assert [(name, detail.split(":")[0]) for name, detail in tracking.events] == [
        ("tracker failed", "mlflow-artifacts")
    ]
    await tracking.put(*range(4, 21))
    assert await (await tracking.restart()).deliver()
    assert tracking.shown() == points(*range(1, 21)), "also after a restart, with tables that wait"
    (tmp_path / "mlflow").unlink()
    tracking.files.write = unanswered(tracking.files.write)  # type: ignore[assignment, method-assign]
    await tracking.follower.deliver()
    await tracking.restart()
    while await tracking.follower.deliver():
        pass
    await tracking.close()
    assert tracking.follower.trouble == ""
    assert steps_of(tracking) == list(range(1, 21))
    assert REPORTS["mlflow"](tmp_path, "run") == [b"<p>first</p>"]
    assert tracking.shown() == points(*range(1, 21))


class _Texts(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "td":
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated")
@pytest.mark.parametrize("markdown", [True, False])
async def test_tensorboard_shows_the_texts_and_none_of_their_markup(tensorboard: Tracking, markdown: bool) -> None:
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    tensorboard.record(line(1, texts=HOSTILE))
    await tensorboard.put(1)
    assert await tensorboard.follower.deliver()
    ((_, columns, rows),) = TABLES["tensorboard"](tensorboard.folder, "run")
    ((_, array),) = text_tensors(tensorboard.folder, "run")
    page = _Texts()
    page.feed(text_array_to_html(array, markdown))
    assert page.tags <= {"table", "tbody", "tr", "td", "pre"}
    cells = [cell for row in (columns, *rows) for cell in row]
    assert [text.split() for text in page.texts] == [cell.split() for cell in cells]


async def test_mlflow_names_the_newest_tables_in_a_tag_that_its_server_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    from penstock.services.tracking.sinks.mlflow_sink import open_sink
    from penstock.services.tracking.sinks.sink import TrackedRun

    sink, segments = open_sink(TrackedRun("run", "penstock", tmp_path, {})), Segments()
    sink.write([segments.of_rollout(line(1))], {})
    client, run = mlflow_run(tmp_path, "run")
    others = [{"path": "mine.json", "type": "table"}]
    old = [{"path": f"rollouts/{step:08}.json", "type": "table"} for step in range(1, 100)]
    client.set_tag(run.info.run_id, "mlflow.loggedArtifacts", json.dumps(old + others))
    sink.write([segments.of_rollout(line(step)) for step in (2, 100, 101)], {})
    shown = json.loads(mlflow_run(tmp_path, "run")[1].data.tags["mlflow.loggedArtifacts"])
    names = [*(f"rollouts/{step:08}.json" for step in range(4, 100)), "mine.json"]
    assert [table["path"] for table in shown] == [*names, *(f"rollouts/{step:08}.json" for step in (2, 100, 101))]
