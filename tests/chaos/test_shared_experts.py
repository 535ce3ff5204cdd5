"""A mixture on four ranks that share its experts: every part is killed, and the run rolled back, stopped, divided anew,
long rows among ranks too, and exported."""

import asyncio
import functools
import json
import signal
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
import torch
from transformers import AutoModelForCausalLM

from penstock.services.trainer.export.huggingface import export_version
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Event
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.policy.policies import PolicyState
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.bus.streams import EVENTS
from penstock.shared.settings import SETTINGS_FILE, load
from penstock.shared.weights.format.snapshot import read_snapshot
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import FLAGS, Run, left_behind, running
from tests.conftest import PATIENCE_S
from tests.support import forge
from tests.trainer.test_expert_parallel import made

GROUPS, EVERY = int(str(FLAGS["algorithm.groups_per_step"])), 3
BEGUN: Mapping[str, object] = {
    "rollout.engine": "transformers", "rollout.replicas": 2, "evaluation.every_steps": 4, "trainer.ranks": 4,
    "trainer.expert_parallel": 2, "trainer.zero_stage": 1, "trainer.router_replay": True, "weights.snapshots": "sharded",
    "trainer.checkpoint_every_steps": EVERY, "sampling.group_size": 4,
}  # fmt: skip
DIVIDED_ANEW: Mapping[str, object] = {
    "trainer.expert_parallel": 4, "trainer.zero_stage": 3, "weights.snapshots": "whole", "weights.transport": "file",
    "trainer.sequence_parallel": 2, "trainer.micro_batch_tokens": 8,
}  # fmt: skip
"""Two ranks compute samples of nine tokens together."""


def config_of(folder: Path) -> Path:
    """Write the example with the mixture and random rewards, with which it is trained."""
    settings = tomllib.loads((forge.ROOT / "config" / "arithmetic.toml").read_text())
    settings["policy"]["model"] = str(made(folder / "model"))
    settings["reward"] = {"expression": "random", "scorers": [{"kind": "random"}]}
    (config := folder / "mixture.toml").write_text(tomli_w.dumps(settings))
    return config


async def kill_rank(run: Run, bus: Bus) -> None:
    """Kill the last rank while there is something to replay."""
    while (await Ledger(bus).status()).step % EVERY == 0:
        await run.more_steps(bus, 1)
    trainer = run.pid("trainer-0")
    assert trainer is not None
    psutil.Process(trainer).children()[-1].kill()


async def pause(run: Run, bus: Bus) -> int:
    """Pause the run while there is something to replay; return the trainer's process, which waits."""
    while True:
        await run.more_steps(bus, 1)
        await run.command("/v1/run/pause", {"reason": "the test"})
        await run.until(lambda: idle(bus))
        if (await Ledger(bus).status()).step % EVERY:
            return await idle(bus)
        await run.command("/v1/run/resume")


async def idle(bus: Bus, but: int = 0) -> int:
    """Return the process of a trainer that waits, and not the process ``but``, in a paused run with too few groups for a
    step; else 0."""
    waiting = [each.pid for each in await heartbeats(bus) if each.replica == "trainer-0" and each.state == "waiting"]
    is_idle = waiting not in ([], [but]) and await Ledger(bus).in_flight() < GROUPS
    return waiting[0] if is_idle else 0


async def rolled_back(run: Run, bus: Bus) -> bool:
    tip, states = (await Ledger(bus).status()).tip, await Ledger(bus).policy_states()
    kept = [v for v in await Ledger(bus).checkpoints() if states.get(v) is not PolicyState.REVOKED and v != tip]
    answer = await run.ask("POST", f"/v1/policies/{max(kept, default=0)}/rollback", {"reason": "the test"})
    return answer is not None and answer.status_code == 202


def lines_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_mixture_outlives_every_kill_and_another_division_to_the_bit(tmp_path: Path) -> None:
    async with running(tmp_path, flags=BEGUN, config=str(config_of(tmp_path))) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        for victim in ("a rank", "rollout-0", "reward-0", "coordinator-0", "the last steps"):
            if victim == "a rank":
                await kill_rank(run, bus)
            elif victim == "the last steps":
                await run.until(lambda: rolled_back(run, bus))
            else:
                await run.until(functools.partial(run.send, victim, signal.SIGKILL))
            await run.more_steps(bus, 2)
        await bus.close()
        run.process.terminate()
        assert await asyncio.to_thread(run.process.wait, PATIENCE_S) == 128 + signal.SIGTERM, run.report()
    recorded = lines_of(run)
    assert all(of["replayed_fraction"] > 0.999999 for of in recorded if of["routed_live"] == 0)
    assert sum(of["routed_live"] == 0 for of in recorded) > len(recorded) / 2, "a kill loses few experts"

    flags = {**dict.fromkeys([*FLAGS, "run.folder"]), **DIVIDED_ANEW}
    async with running(tmp_path, flags=flags, config=f"--resume={run.folder}") as run:
        bus = await run.connect()
        await run.more_steps(bus, 2)
        trainer = await pause(run, bus)
        newest = (await Ledger(bus).status()).newest_version
        assert newest is not None
        record = await Ledger(bus).policy(newest)
        assert record is not None
        published = read_snapshot(Path(record.location), record.manifest_digest)
        await kill_rank(run, bus)
        await run.until(lambda: idle(bus, trainer))
        assert (await Ledger(bus).status()).newest_version == newest, "a replay that differs is a new version"
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        status, counts = await Ledger(bus).status(), await audit_groups(bus)
        await audit_versions(bus)
        events = [event.name for _, event in await bus.newest(EVENTS, Event, 10_000)]
    assert counts["trained"] == GROUPS * status.step
    assert "replay differs" not in events
    assert "journal replayed" in events
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["counts"]) == ("stopped", status.step, counts)
    assert f"stopped: {status.step} steps" in (tmp_path / "up.txt").read_text()
    source = export_version(load(run.folder / SETTINGS_FILE), newest, tmp_path / "exported").source
    assert source.endswith(f"step-{status.step:06d}"), "a checkpoint that was written after the replay"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert all(torch.equal(published.pop(name), weight) for name, weight in exported.named_parameters())
    assert not published
