"""Changed code of the user's own functions: noted once, by name and version, whatever was restarted or lost."""

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import pytest

from penstock.services.coordinator.records import summary
from penstock.services.coordinator.run.monitor import Monitor
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.manifests import CheckpointState, decode_state
from penstock.services.trainer.rank0.branch import Branch
from penstock.services.trainer.rank0.opening import Opening
from penstock.services.trainer.rank0.retention import Retention
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Event, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.cordon import Cordon
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.place import Place
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.bus.stores.run.functions import (
    FUNCTIONS,
    Change,
    changes,
    inherit_functions,
    note_functions,
    read_functions,
    reward_functions,
    trainer_functions,
)
from penstock.shared.bus.streams import EVENTS
from penstock.shared.files.source import digest
from penstock.shared.process.service import Context
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.chaos.run import running, steps_of
from tests.conftest import PATIENCE_S
from tests.support import forge
from tests.support.raw_redis import raw
from tests.trainer.checkpoint.test_store import written

NAME = "algorithm.loss = mine:loss"
FIRST, SECOND = "a" * 64, "b" * 64
V = PolicyVersion


async def at_version(bus: Bus, version: int) -> None:
    await raw(bus).hset(bus.keys.named("run"), "newest_version", str(version))


async def test_a_function_is_noted_once_and_each_change_has_the_version_after_which_it_came(bus: Bus) -> None:
    assert await note_functions(bus, {NAME: FIRST}) == []
    for version, digest_then, expected in (
        (3, FIRST, []),
        (4, SECOND, [Change(NAME, V(4))]),
        (5, SECOND, []),
        (9, FIRST, [Change(NAME, V(9))]),
    ):
        await at_version(bus, version)
        assert await note_functions(bus, {NAME: digest_then, "reward.scorers.x = built:in": ""}) == expected
    history = await read_functions(bus)
    assert [(source.sha256, source.version) for source in history[NAME]] == [(FIRST, None), (SECOND, 4), (FIRST, 9)]
    assert changes(history) == [Change(NAME, V(4)), Change(NAME, V(9))]
    assert list(history) == [NAME], "a function without a source file is not noted"


async def test_code_that_changed_before_the_first_version_made_no_figure(bus: Bus) -> None:
    assert await note_functions(bus, {NAME: FIRST}) == []
    assert await note_functions(bus, {NAME: SECOND}) == []
    assert changes(await read_functions(bus)) == []


async def test_processes_that_start_together_note_one_change(bus: Bus) -> None:
    await note_functions(bus, {NAME: FIRST})
    await at_version(bus, 2)
    told = await asyncio.gather(*(note_functions(bus, {NAME: SECOND}) for _ in range(8)))
    assert [change for each in told for change in each] == [Change(NAME, V(2))]
    assert await raw(bus).hlen(bus.keys.of(FUNCTIONS)) == 2


@pytest.mark.parametrize("noted_first", [False, True])
async def test_a_checkpoint_tells_a_bus_that_does_not_know_it_what_its_weights_were_made_with(
    bus: Bus, noted_first: bool
) -> None:
    """The reward service may start before or after the trainer has read the checkpoint."""
    since = Change(NAME, V(7), since_checkpoint=True)
    told = await note_functions(bus, {NAME: SECOND}) if noted_first else []
    told += await inherit_functions(bus, {NAME: FIRST}, V(7))
    told += [] if noted_first else await note_functions(bus, {NAME: SECOND})
    told += await inherit_functions(bus, {NAME: FIRST}, V(7))
    assert told == [since]
    assert changes(await read_functions(bus)) == [since]
    assert "since the checkpoint of version 7, from which the run continues" in since.sentence


async def test_an_unchanged_function_of_a_checkpoint_is_no_change(bus: Bus) -> None:
    assert await inherit_functions(bus, {NAME: FIRST}, V(7)) == []
    assert await note_functions(bus, {NAME: FIRST}) == []
    assert await note_functions(bus, {NAME: FIRST}) == await inherit_functions(bus, {NAME: FIRST}, V(9)) == []
    assert changes(await read_functions(bus)) == []


def test_the_functions_of_a_run_are_those_with_an_import_path() -> None:
    scorers = [
        {"kind": "python", "name": "own", "function": "mine:brevity"},
        {"kind": "python", "name": "entry", "function": "an_entry_point"},
        {"kind": "trl", "name": "trl", "functions": ["mine:first", "theirs.rewards:get(n=3)"]},
        {"kind": "answer", "name": "answer"},
    ]
    of = Settings.model_validate({"algorithm": {"loss": "mine:loss"}, "reward": {"scorers": scorers}})
    assert trainer_functions(of) == {NAME: "mine:loss"}
    assert reward_functions(of) == {
        "reward.scorers.own = mine:brevity": "mine:brevity",
        "reward.scorers.entry = an_entry_point": "an_entry_point",
        "reward.scorers.trl = mine:first": "mine:first",
        "reward.scorers.trl = theirs.rewards:get(n=3)": "theirs.rewards:get(n=3)",
    }
    assert not trainer_functions(Settings()) | reward_functions(Settings())


def test_a_digest_is_of_the_modules_file_and_runs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "raising_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "losses.py").write_text("1 +")
    first = digest("raising_package.losses:mine")
    assert len(first) == 64
    (package / "losses.py").write_text("2 +")
    assert digest("raising_package.losses:mine") not in ("", first)
    assert digest("raising_package:mine") == digest("raising_package:other") != first
    assert [digest(name) for name in ("no_such_package.losses:mine", "sys:exit", "raising_package.no:mine")] == [""] * 3


def opening(bus: Bus, folder: Path, reward: str = "") -> Opening:
    scorers = {"scorers": [{"kind": "python", "name": "own", "function": reward}]} if reward else {}
    run = {"id": bus.run_id, "folder": folder}
    of = Settings.model_validate({"run": run, "algorithm": {"loss": "code_under_test:loss"}, "reward": scorers})
    cordon, secret = Cordon(bus, "trainer-0", lambda: None), RunSecret(bus)
    context = Context(of, "trainer", "trainer-0", bus, Status(), asyncio.Event(), Live(bus, of), cordon, secret)
    return Opening(context, Place(bus, "trainer-0", 1.0), Branch(bus), Retention(of, bus))


async def events(bus: Bus) -> list[str]:
    told = [wire.decode(fields[b"data"], Event) for _, fields in await raw(bus).xrange(bus.keys.of(EVENTS))]
    return [event.detail for event in told if event.name == "code changed"]


async def test_a_trainer_that_starts_with_other_code_says_so_in_an_event_and_a_notice(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "code_under_test.py").write_text("# first")
    await Ledger(bus).create()
    await opening(bus, tmp_path).find()
    await at_version(bus, 5)
    (tmp_path / "code_under_test.py").write_text("# second")
    for _ in range(2):
        again = opening(bus, tmp_path)
        await again.find()
        await again.find()  # after a rollback
    (sentence,) = await events(bus)
    assert sentence.startswith(
        "the source file of algorithm.loss = code_under_test:loss changed after version 5: later"
    )
    settings = Settings.model_validate({"run": {"id": bus.run_id, "folder": tmp_path}})
    view = await Monitor(bus, Live(bus, settings), Status()).view()
    assert [(each.level, each.text) for each in view.notices] == [("warning", sentence)]
    status, history = await Ledger(bus).status(), await read_functions(bus)
    recorded = summary.summarize(settings, status, {}, [], [], "", history).functions
    assert [each["after_version"] for each in recorded["algorithm.loss = code_under_test:loss"]] == [None, 5]


async def test_a_checkpoint_holds_the_digests_and_a_run_that_starts_from_it_compares_them(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "code_under_test.py").write_text("# first")
    reward = "code_under_test:reward"
    first = digest("code_under_test:loss")
    digests = {f"{name} = code_under_test:{name.split('.')[1]}": first for name in ("algorithm.loss",)}
    await note_functions(
        bus, {**digests, f"reward.scorers.own = {reward}": first, "algorithm.loss = other:loss": first}
    )
    of = Settings.model_validate({"run": {"id": bus.run_id, "folder": tmp_path}})
    described = await Retention(of, bus).describe(2, V(2), Live(bus, of))
    assert set(described.functions.values()) == {first}
    await raw(bus).delete(bus.keys.of(FUNCTIONS))
    local_store.beside(tmp_path / "other", 2).mkdir(parents=True)
    made = local_store.make_whole(tmp_path / "other", described)
    (of.run_folder).mkdir(parents=True, exist_ok=True)
    made.folder.rename(of.run_folder / local_store.START)
    (tmp_path / "code_under_test.py").write_text("# second")
    await Ledger(bus).create()
    await note_functions(bus, {f"reward.scorers.own = {reward}": digest(reward)})
    await opening(bus, tmp_path, reward).find()
    loss, own = sorted(await events(bus))
    assert loss.startswith(
        "the source file of algorithm.loss = code_under_test:loss has changed since the checkpoint of v"
    )
    assert own.startswith("the source file of reward.scorers.own = code_under_test:reward has changed since the checkp")
    assert "algorithm.loss = other:loss" not in await read_functions(bus), "of the other run alone"


def test_a_checkpoint_of_an_older_penstock_has_no_digests(tmp_path: Path) -> None:
    state = dataclasses.asdict(written(tmp_path, 2).state)
    del state["functions"]
    assert decode_state(state) == CheckpointState(**state)
    assert decode_state(state).functions == {}


LOSS = """
def loss(*, policy_logprobs, anchor_logprobs, advantages, **others):
    return -advantages * (policy_logprobs - anchor_logprobs).clamp(max=1.0).exp()


def reward(sample, prompt):
    return float(sample.text.strip() == prompt.answer)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "code_under_test.py").write_text(LOSS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(Path.cwd()))))
    return folder / "code_under_test.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_run_that_is_resumed_with_other_code_warns_on_the_console_and_in_its_records(
    tmp_path: Path, own: Path
) -> None:
    flags = {
        "algorithm.loss": "code_under_test:loss",
        "reward.scorers": '[{ kind = "python", name = "own", function = "code_under_test:reward" }]',
        "reward.expression": "own",
    }
    async with running(tmp_path, flags=flags) as run:
        bus = await run.connect()
        await run.more_steps(bus, 2)
        await bus.close()
        run.process.terminate()
        await asyncio.to_thread(run.process.wait, PATIENCE_S)
        own.write_text(LOSS + "\n# another\n")
        steps = await steps_of(run) + 4
        output = tmp_path / "resumed.txt"
        with output.open("w") as stream:
            resumed = forge.start(
                "penstock.services.cli", ["up", "--resume", run.folder, f"--run.steps={steps}"], stream
            )
        assert await asyncio.to_thread(resumed.wait, 2 * PATIENCE_S) == 0, output.read_text()
        lines = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    told = {line["fields"]["function"]: line for line in lines if line["name"] == "code changed"}
    names = {"algorithm.loss = code_under_test:loss", "reward.scorers.own = code_under_test:reward"}
    assert told.keys() == names
    version = told["algorithm.loss = code_under_test:loss"]["fields"]["version"]
    assert version >= 2
    shown = " ".join(output.read_text().split())
    assert (
        f"code changed: the source file of algorithm.loss = code_under_test:loss changed after version {version}"
        in shown
    )
    functions = json.loads((run.folder / "summary.json").read_text())["functions"]
    assert {
        name: len({source["sha256"] for source in sources}) for name, sources in functions.items()
    } == dict.fromkeys(names, 2)
    assert functions["algorithm.loss = code_under_test:loss"][1]["after_version"] == version
    assert functions["algorithm.loss = code_under_test:loss"][1]["sha256"] in (run.folder / "report.html").read_text()
