"""The trainer process with ranks that share a mixture's experts and compute long rows together: publish, kill, resume with
other divisions and stages."""

import asyncio
import copy
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.services.rollout.engines.transformers.engine import TransformersEngine
from penstock.services.trainer.export.huggingface import export_version
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.settings import load
from penstock.shared.weights.receiver.puller import file_offer
from tests.conftest import PATIENCE_S, Server
from tests.support import tiny, weights
from tests.support.tolerance import ADAM_MOVEMENT, moved_apart
from tests.trainer.test_service import GROUPS, MODEL, Run, bus_of, feed


def made(folder: Path) -> Path:
    """Save a mixture that knows the groups' tokens."""
    config = copy.deepcopy(tiny.mixture().config)
    config.vocab_size = 64
    torch.manual_seed(0)
    return tiny.save(folder, of=AutoModelForCausalLM.from_config(config))


def run_of(model: Path, server: Server, name: str, **trainer: Any) -> Run:
    run = Run(model.parent, server, name, **{"checkpoint_every_steps": 1, **trainer})
    run.config.write_text(run.config.read_text().replace(str(MODEL), str(model)))
    return run


async def used(ledger: Ledger, model: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a replica that has taken the newest version."""
    status = await ledger.status()
    assert status.newest_version is not None
    record = await ledger.policy(status.newest_version)
    assert record is not None
    served = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = TransformersEngine(
        tiny.opened(served), max_rows=8, host="127.0.0.1", secret=weights.secret, deadline_s=PATIENCE_S
    )
    try:
        await engine.stage(file_offer(record, PATIENCE_S))
        await engine.swap(PolicyVersion(record.version))
    finally:
        await engine.close()
    return {name: weight.detach() for name, weight in served.named_parameters()}


@pytest.mark.slow
@pytest.mark.timeout(480)
async def test_a_run_with_shared_experts_is_that_without_through_a_kill_and_a_replica_uses_it(
    tmp_path: Path, server: Server
) -> None:
    model = made(tmp_path / "model")
    whole = run_of(model, server, "whole-experts")
    async with bus_of(whole) as (bus, ledger), whole.trainer() as process:
        await feed(bus, 0, 3 * GROUPS)
        await whole.reaches(ledger, 3, process)
        expected = await whole.weights(ledger)

    in_parts = {"sequence_parallel": 2, "micro_batch_tokens": 8}  # less than some samples
    shared = run_of(model, server, "shared-experts", ranks=2, expert_parallel=2, **in_parts)
    async with bus_of(shared) as (bus, ledger):
        await feed(bus, 0, GROUPS)
        async with shared.trainer() as process:
            await shared.reaches(ledger, 1, process)
            psutil.Process(process.pid).children()[-1].kill()
            assert await asyncio.to_thread(process.wait, PATIENCE_S) != 0  # its supervisor restarts it
        divided = shared.config.read_text()
        shared.config.write_text(divided.replace("expert_parallel = 2", "expert_parallel = 1"))
        await feed(bus, GROUPS, GROUPS)
        async with shared.trainer() as process:
            await shared.reaches(ledger, 2, process)
            await shared.stops(process)
        shared.config.write_text(divided.replace("zero_stage = 1", "zero_stage = 3"))
        await feed(bus, 2 * GROUPS, GROUPS)
        async with shared.trainer() as process:
            await shared.reaches(ledger, 3, process)
            actual, replica = await shared.weights(ledger), await used(ledger, model)
            await shared.stops(process)
        assert await bus.counts() == {"trained": 3 * GROUPS}
        newest = (await ledger.status()).newest_version
    initial = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters()
    start = {name: weight.detach() for name, weight in initial}
    assert moved_apart(actual, expected, start) < ADAM_MOVEMENT
    assert all(torch.equal(replica[name], tensor) for name, tensor in actual.items())
    shutil.rmtree(load(shared.config).snapshot_folder)  # the version is in a checkpoint only
    assert newest is not None
    assert "step-000003" in export_version(load(shared.config), newest, tmp_path / "exported").source
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert all(torch.equal(actual[name], weight) for name, weight in exported.named_parameters())
