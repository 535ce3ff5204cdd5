"""On a full disk, writers report it, keep old files, and continue later."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from penstock.services.cli.__main__ import main
from penstock.services.coordinator.api.server import ApiServer
from penstock.services.coordinator.records.jsonl import Lines
from penstock.services.coordinator.records.recorder import Recorder
from penstock.services.trainer.checkpoint.commits import note_version, noted_version
from penstock.services.up import plan, supervisor
from penstock.services.up.disk_space import Room
from penstock.services.up.display.watch import RunSnapshot, Watch
from penstock.services.up.process import Restarts
from penstock.services.up.supervisor import INTERRUPTED, Ending, Supervisor
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.files import durable
from penstock.shared.files.durable import LEAST_BYTES, UpdatedFile, write_whole
from penstock.shared.process.telemetry import tell
from tests.conftest import until
from tests.support.disks import Disk, small_disk
from tests.support.model_folders import write_model


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", 64) as folder:
        yield folder


def test_a_file_that_cannot_be_written_whole_stays_as_it_was_and_nothing_is_left_beside_it(disk: Disk) -> None:
    write_whole(disk.folder / "up.json", "before")
    with disk.full(), pytest.raises(OSError, match=r"No space left|too large"):
        write_whole(disk.folder / "up.json", "after" * 1000)
    assert [(path.name, path.read_text()) for path in disk.folder.iterdir()] == [("up.json", "before")]


async def test_the_table_of_processes_is_written_as_soon_as_there_is_room_and_both_are_said(disk: Disk) -> None:
    said: list[str] = []
    table = UpdatedFile(disk.folder / "up.json", said.append)
    with disk.full():
        table.write("first" * 1000)
        table.write("second" * 1000)
        assert len(said) == 1
    assert said[0].startswith(f"cannot write up.json in {disk.folder} (")
    assert said[0].endswith("free space there, or move run.folder; the run retries each second and then continues")
    trying = asyncio.create_task(table.run())
    await until(lambda: (disk.folder / "up.json").exists())
    trying.cancel()
    assert (disk.folder / "up.json").read_text() == "second" * 1000
    assert said[1:] == ["up.json is written again"]


def test_lines_of_which_a_part_found_room_are_not_in_the_file(disk: Disk) -> None:
    path = disk.folder / "metrics.jsonl"
    lines = Lines(path)
    lines.append([{"step": 1}])
    with disk.full(left_bytes=100), pytest.raises(OSError, match=r"No space left|too large"):
        lines.append([{"step": 2, "text": "x" * 8192}])
    assert path.read_text() == '{"step": 1}\n'
    lines.append([{"step": 2}])
    assert [line["step"] for line in lines.read()] == [1, 2]


async def test_records_wait_for_room_and_none_is_lost_or_written_twice(bus: Bus, disk: Disk) -> None:
    recorder = Recorder(bus, disk.folder, 100)
    await tell(bus, "test", "first", "")
    await recorder.catch_up()
    await tell(bus, "test", "second", "x" * 8192)
    with disk.full(left_bytes=200):
        writing = asyncio.create_task(recorder.catch_up())
        await until(lambda: recorder.trouble != "")
        assert recorder.trouble.startswith("cannot write ")
        assert not writing.done()
    await writing
    assert recorder.trouble == ""
    assert [line["name"] for line in Lines(disk.folder / "events.jsonl").read()] == ["first", "second"]


def test_the_coordinator_answers_though_its_address_finds_no_room(disk: Disk) -> None:
    server = ApiServer("127.0.0.1", 0)
    path = disk.folder / "coordinator.json"
    try:
        with disk.full():
            server.announce(path, "test")
            assert not path.exists()
        server.announce(path, "test")
        assert server.url in path.read_text()
    finally:
        server.close()


async def test_a_version_is_not_published_before_its_number_is_noted(disk: Disk) -> None:
    note_version(disk.folder, PolicyVersion(3))
    with disk.full():
        noting = asyncio.create_task(asyncio.to_thread(note_version, disk.folder, PolicyVersion(4)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.shield(noting)
        assert noted_version(disk.folder) == 3
    await noting
    assert noted_version(disk.folder) == 4


def test_a_start_that_finds_no_room_is_a_sentence_with_the_setting(
    disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = tmp_path / "run.toml"
    config.write_text(f'policy.model = "{tmp_path / "model"}"\ndata.path = "{tmp_path / "train.jsonl"}"\n')
    flags = ["--run.folder", str(disk.folder), "--weights.folder", str(tmp_path / "weights")]
    with disk.full():
        code = main(["up", str(config), *flags])
    said = capsys.readouterr().err
    assert code == 2
    assert said.startswith(f"penstock up: could not write a run in {disk.folder}")
    assert said.endswith("free disk space there, or change run.folder\n")


def test_the_free_space_that_is_said_is_what_a_file_may_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for free, usable in ((0, 0), (LEAST_BYTES - 1, 0), (LEAST_BYTES + 7, 7)):
        monkeypatch.setattr(durable, "free_bytes", lambda _, free=free: free)
        assert durable.usable_bytes(tmp_path) == usable


async def test_a_server_that_cannot_write_its_data_is_waited_for_and_not_taken_for_a_bug(bus: Bus) -> None:
    answers: list[Exception | int] = [
        ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
        7,
    ]

    async def command() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await bus.call(command) == 7
    answers[:] = [ResponseError("WRONGTYPE Operation against a key")]
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await bus.call(command)


def test_room_that_runs_out_is_said_once_and_once_when_it_is_back(tmp_path: Path) -> None:
    said: list[str] = []
    free = [LEAST_BYTES, LEAST_BYTES - 1, 0, LEAST_BYTES, 2 * LEAST_BYTES, 2 * LEAST_BYTES]
    room = Room(tmp_path, said.append, lambda folder: free.pop(0))
    for _ in range(6):
        room.look()
    assert [text.split(":")[0] for text in said] == ["no disk space", "disk space again"]
    assert "free disk space there, and it continues automatically" in said[0]


async def test_on_a_full_disk_neither_a_silent_bus_nor_coordinator_is_called_frozen(tmp_path: Path) -> None:

    async def unasked(*_: object) -> Any:
        raise AssertionError

    said: list[str] = []
    with small_disk(tmp_path / "disk", 8192) as disk:
        if not disk.mounted:
            pytest.skip("this process may not mount a small disk")
        watching = Watch(disk.folder, said.append)
        watching.seen = RunSnapshot(cast("Any", object()), at_s=0.0)
        silent = plan.valkey(tmp_path / "no.sock", disk.folder, {})
        supervised = Supervisor(disk.folder, [silent], "", Restarts(), said.append, unasked, unasked)
        supervised.children[0].mark_ready()
        with disk.full():
            watching.look_for_silence()
            asking = asyncio.create_task(supervised._ask_forever(supervised.children[0]))
            await until(lambda: len(said) == 2)
            asking.cancel()
    assert len(said) == 2
    for sentence in said:
        assert f" s: no space left on the disk of {disk.folder}" in sentence
        assert "frozen" not in sentence


async def test_on_a_full_disk_a_stop_waits_for_no_work_that_the_bus_cannot_take_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each service waits for the bus until its time to stop is over."""

    async def unasked(*_: object) -> Any:
        raise AssertionError

    bus = plan.valkey(tmp_path / "no.sock", tmp_path, {})
    rollout = plan.ProcessPlan("rollout-0", "rollout", (), {}, stop_s=30.0)
    for full, order, stop_s in (("", plan.STOP_ORDER, 30.0), ("no space left", plan.STOP_ORDER_AT_ONCE, 5.0)):
        said: list[str] = []
        monkeypatch.setattr(supervisor, "no_space", lambda _, full=full: full)
        supervised = Supervisor(tmp_path, [bus, rollout], "", Restarts(), said.append, unasked, unasked)
        for child in supervised.children:
            child.mark_ready()
        supervised.end(Ending(INTERRUPTED))
        assert supervised._stop_order() == order
        assert [child.stop_s for child in supervised.children] == [bus.stop_s, stop_s]
        assert [text.partition(",")[0] for text in said] == ([full] if full else [])
