"""Laws of rollout tables and the report in trackers: each once, whatever dies, and texts are shown as they are."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from services.tracking.offset import Offset
from services.tracking.points import Segments
from services.tracking.tables import LONGEST_TEXT, MOST_ROWS, RolloutLines, table_of
from tests.conftest import PATIENCE_S
from tests.support.trackers import REPORTS, TABLES, mlflow_run, text_tensors
from tests.tracking.conftest import Tracking, line, points

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
    await tracking.client.close(PATIENCE_S)
    tables = TABLES[tracking.name](tracking.folder, "run")
    assert [(step, len(rows)) for step, _, rows in tables] == [(1, 2), (2, len(HOSTILE)), (3, 2), (4, 2)]
    assert tracking.shown() == points(1, 2, 3, 4)


async def test_a_table_has_a_row_for_each_completion_with_its_text_whatever_it_is(tracking: Tracking) -> None:
    texts = (*HOSTILE, "x" * 1_000_000)
    tracking.record(line(2, texts=texts))
    await tracking.put(2)
    assert await tracking.follower.deliver()
    await tracking.client.close(PATIENCE_S)
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
    await tracking.client.close(PATIENCE_S)
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
    await tracking.client.close(PATIENCE_S)
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
    await tracking.client.close(PATIENCE_S)
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
    from services.tracking.sinks.mlflow_sink import open_sink
    from services.tracking.sinks.sink import TrackedRun

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
