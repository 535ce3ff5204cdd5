"""Laws of a process's start: its heartbeat and its log say what it does until it is ready."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.services.client.views import ReplicaView, RunView
from penstock.services.up.display import view
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.model.tokenizer import open_tokenizer
from penstock.shared.process.start_up import StartUp
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.settings import Settings
from tests.conftest import until
from tests.support.forge import ROOT


def test_seconds_are_those_between_activities_and_the_end_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    start = StartUp()
    began_s = start.since_s
    start.begin("loading the model", began_s + 2.0)
    start.begin("self-test", began_s + 5.0)
    start.begin("loading the model", began_s + 5.5)
    assert (start.activity, start.since_s) == ("loading the model", began_s + 5.5)
    with caplog.at_level(logging.INFO):
        start.end()
        start.end()
    (record,) = [record for record in caplog.records if record.message == "ready"]
    seconds = vars(record)["start_s"]
    assert list(seconds) == ["importing", "loading the model", "self-test"]
    assert (seconds["importing"], seconds["self-test"]) == (2.0, 0.5)
    start.begin("too late")
    assert start.activity == ""


def test_processor_time_is_that_of_the_activity_that_spent_it() -> None:
    start = StartUp()
    start.begin("computing")
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    start.begin("waiting")
    cpu_s = start.cpu_seconds()
    assert list(cpu_s) == list(start.seconds()) == ["importing", "computing", "waiting"]
    assert cpu_s["computing"] >= 0.2 > cpu_s["waiting"]


ALONE = """
import json, sys
from penstock.shared.model import tokenizer
from penstock.shared.settings import Settings
policy = Settings.model_validate({"policy": json.loads(sys.argv[1])}).policy
token_ids = tokenizer.open_tokenizer(policy, alone=True)(sys.argv[2])["input_ids"]
has_torch = "torch" in sys.modules
import datasets
row = datasets.load_dataset(sys.argv[3], split="train", cache_dir=sys.argv[4])[0]
print(json.dumps([token_ids, has_torch, row]))
"""


@pytest.mark.parametrize("own_code", [False, True])
def test_a_tokenizer_alone_imports_torch_for_a_folders_own_code_alone_and_others_may(
    tmp_path: Path, own_code: bool
) -> None:
    pytest.importorskip("datasets")  # which imports torch where it is loaded, to tell its objects from others
    row = {"prompt": "12+34=\n 5"}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(json.dumps(row))
    policy = {"model": str(ROOT / "examples/code/policy"), "trust_remote_code": own_code}
    folders = [str(tmp_path / "rows"), str(tmp_path / "cache")]
    words = [sys.executable, "-c", ALONE, json.dumps(policy), row["prompt"], *folders]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    here = open_tokenizer(Settings.model_validate({"policy": policy}).policy)
    assert json.loads(done.stdout) == [here(row["prompt"])["input_ids"], own_code, row]
    assert "PyTorch was not found" not in done.stderr


def test_activities_are_bounded() -> None:
    start = StartUp()
    for number in range(1000):
        start.begin(f"activity {number}")
    assert len(start.seconds()) == 100


@pytest.mark.asyncio
async def test_a_heartbeat_says_what_the_process_does_until_it_is_ready(bus: Bus) -> None:
    status, stop = Status(), asyncio.Event()
    status.start.begin("building the engine", 1000.0)
    beating = asyncio.create_task(Presence(bus, "trainer", "trainer-0", 0.5, status).run(stop))

    async def activity() -> list[tuple[str, float]]:
        return [(beat.activity, beat.activity_since_s) for beat in await heartbeats(bus)]

    async def shows(expected: str) -> bool:
        return [text for text, _ in await activity()] == [expected]

    await until(lambda: shows("building the engine"))
    assert await activity() == [("building the engine", 1000.0)]
    status.start.end()
    await until(lambda: shows(""))
    stop.set()
    await beating


def test_the_screen_and_the_lines_show_activities_until_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1095.0)
    said = {"replica": "trainer-0", "state": "starting", "activity": "building the engine", "activity_since_s": 1000.0}
    row = view.row_of(ReplicaView.model_validate(said))
    assert row.note == "building the engine 1m35s"
    created = RunView(state="created", activity="waiting for version 0")
    assert view.line(created, [row]) == "created  waiting for version 0  trainer-0: building the engine 1m35s"
    ready = view.row_of(ReplicaView.model_validate(json.loads('{"replica": "trainer-0", "state": "waiting"}')))
    assert view.line(created, [ready]) == "created  waiting for version 0"
