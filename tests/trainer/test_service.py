"""The trainer process: commit, kill, resume, fence, with real DeepSpeed, Valkey and SIGKILL."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.services.trainer.checkpoint import local_store
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import RUN
from penstock.shared.bus.messages import Experience, FinishReason, GroupId, PolicyRecord, Probe, RolloutGroup, Sample
from penstock.shared.bus.stores.experience.signals import read_signals
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.stores.replicas.device_leases import grant_devices, look_at_devices
from penstock.shared.bus.stores.replicas.heartbeats import heartbeat_of
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.bus.streams import EXPERIENCE, PUBLISHED, Stream
from penstock.shared.process.service import INVALID_SETTINGS
from penstock.shared.settings import Settings
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.snapshot import read_snapshot
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.transport.place import DeviceLocation, boot_id
from tests.conftest import PATIENCE_S, Server, until
from tests.support import builders, forge, weights
from tests.support.raw_redis import empty, raw
from tests.support.tolerance import ADAM_MOVEMENT, FORWARD, moved_apart

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "arithmetic" / "policy"
STEPS, GROUPS = 5, 2
ACTOR_CRITIC = """
preset = "ppo"
minibatches = 2
[algorithm.kl]
coefficient = 0.05
estimator = "k1"
[algorithm.critic]
learning_rate = 1e-3
"""
LORA = "[policy.lora]\nrank = 4"
LOG_LINEAR = 'preset = "a3po"'  # its proximal depends on each token's lag


class Run:
    def __init__(
        self,
        folder: Path,
        server: Server,
        run_id: str,
        algorithm: str = "",
        transport: str = "file",
        internal: str = "",
        **trainer: int | str,
    ) -> None:
        self.folder, self.server, self.run_id = folder, server, run_id
        self.config, self.log = folder / f"{run_id}.toml", folder / f"{run_id}.log"
        options = {"ranks": 1, "zero_stage": 1, "checkpoint_every_steps": 2, **trainer}
        self.config.write_text(
            f'[run]\nid = "{run_id}"\nfolder = "{folder}/runs"\nsteps = {STEPS}\nthreads = 1\n'
            f'[bus]\nurl = "{server.url}"\n'
            f'[policy]\nmodel = "{MODEL}"\ndtype = "float32"\n'
            "[sampling]\nmax_new_tokens = 8\n[data]\ncurriculum = true\n"
            f"[algorithm]\ngroups_per_step = {GROUPS}\nmax_lag = {STEPS}\n{algorithm}\n"
            f'[weights]\ntransport = "{transport}"\ndeadline_s = {PATIENCE_S}\nfolder = "{folder}/weights-{run_id}"\n'
            "[trainer]\nlearning_rate = 1e-3\nadam_betas = [0.9, 0.99]\n"
            + "".join(f"{name} = {value}\n" for name, value in options.items())
            + f"[internal]\n{internal}\n"
        )

    @contextlib.asynccontextmanager
    async def trainer(self, name: str = "trainer-0") -> AsyncIterator[forge.Started]:
        with self.log.open("a") as log:
            process = forge.start("penstock.services.trainer", ["--config", self.config, "--replica", name], log)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)

    async def reaches(self, ledger: Ledger, step: int, process: forge.Started) -> None:
        async def reached() -> bool:
            if process.poll() is not None:
                pytest.fail(f"trainer ended with {process.returncode}: {self.log.read_text()[-3000:]}")
            status = await ledger.status()
            return status.newest_version is not None and status.step >= step

        await until(reached)

    async def stops(self, process: forge.Started) -> None:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, PATIENCE_S)

    async def weights(self, ledger: Ledger) -> dict[str, torch.Tensor]:
        status = await ledger.status()
        assert status.newest_version is not None
        record = await ledger.policy(status.newest_version)
        assert record is not None
        return read_snapshot(Path(record.location), record.manifest_digest)


def initial_weights() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(MODEL / "model.safetensors")
    return tensors


def experience(group_id: int, version: int = 0) -> Experience:
    """A group that the small policy could have written."""
    generator = np.random.default_rng(group_id)

    def sample(length: int) -> Sample:
        return Sample(
            token_ids=generator.integers(2, 60, length).astype(np.int32),
            behavior_logprobs=np.full(length, -4.0, dtype=np.float32),
            version_spans=np.array([[0, version]], dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text="46",
        )

    made = builders.experience(group_id, (1.0, 0.0, 0.0), version)
    group = RolloutGroup(
        prompt=made.group.prompt,
        prompt_token_ids=generator.integers(2, 60, 6).astype(np.int32),
        samples=tuple(sample(length) for length in (3, 4, 2)),
        replica="rollout-0",
        started_at_s=1.0,
        finished_at_s=2.0,
    )
    return Experience(group, made.rewards, made.scores, 4.0, 0.1)


def _last_rank(pid: int, ranks: int) -> int:
    return pid if ranks == 1 else psutil.Process(pid).children()[-1].pid


async def feed(bus: Bus, start: int, count: int, stream: Stream = EXPERIENCE, *, like: int | None = None) -> None:
    """Append groups from ``start``; ``like``: with contents from group ``like``."""
    for offset in range(count):
        made = experience(start + offset if like is None else like + offset)
        prompt = dataclasses.replace(made.group.prompt, group_id=GroupId(start + offset))
        group = dataclasses.replace(made, group=dataclasses.replace(made.group, prompt=prompt))
        await bus.append(stream, {"id": str(start + offset), "data": wire.encode(group)})


@contextlib.asynccontextmanager
async def bus_of(run: Run) -> AsyncIterator[tuple[Bus, Ledger]]:
    bus = await Bus.connect(run.server.url, run.run_id, wait_s=PATIENCE_S)
    ledger = Ledger(bus)
    await ledger.create()
    yield bus, ledger
    await bus.close()


async def _after(
    run: Run, steps: int, then: Callable[[forge.Started], Awaitable[None]] | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights after ``steps`` steps; ``then`` gets the process."""
    async with bus_of(run) as (bus, ledger), run.trainer() as process:
        await feed(bus, 0, steps * GROUPS)
        await run.reaches(ledger, steps, process)
        weights = await run.weights(ledger)
        if then is not None:
            await then(process)
        return weights


async def versions(ledger: Ledger) -> list[tuple[int, int | None, int]]:
    return [(record.version, record.parent, record.step) for record in await ledger.policies()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "zero_stage", "algorithm"),
    [(2, 2, ""), (2, 3, LORA), (2, 1, ACTOR_CRITIC), (1, 0, LOG_LINEAR)],
    ids=["grpo-2", "lora-zero-3", "actor-critic-2", "log-linear-1"],
)
async def test_a_trainer_killed_after_a_commit_comes_back_at_its_step_with_the_same_weights(
    tmp_path: Path, server: Server, ranks: int, zero_stage: int, algorithm: str
) -> None:
    whole = Run(tmp_path, server, f"whole-{ranks}-{zero_stage}", algorithm, ranks=ranks, zero_stage=zero_stage)
    undisturbed = asyncio.create_task(_after(whole, STEPS))  # in parallel: mostly process start

    killed = Run(tmp_path, server, f"killed-{ranks}-{zero_stage}", algorithm, ranks=ranks, zero_stage=zero_stage)
    async with bus_of(killed) as (bus, ledger):
        await feed(bus, 0, 3 * GROUPS)
        async with killed.trainer() as process:
            await killed.reaches(ledger, 3, process)  # checkpoint of step 2, journal of step 3
            os.kill(_last_rank(process.pid, ranks), signal.SIGKILL)
            await asyncio.to_thread(process.wait, PATIENCE_S)
        published = await bus.length(PUBLISHED)
        await feed(bus, 3 * GROUPS, 2 * GROUPS)
        async with killed.trainer() as process:
            await killed.reaches(ledger, STEPS, process)
            await killed.stops(process)
            assert ranks > 1 or process.returncode == 0
        assert await versions(ledger) == [(0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 3, 4), (5, 4, 5)]
        assert await bus.length(PUBLISHED) == published + 2, "a replayed step is not published again"
        assert await bus.counts() == {"trained": STEPS * GROUPS}
        once = f"{2 / 9:.6f}"
        signals = await read_signals(bus)
        assert {f"{float(value):.6f}" for value in signals.values()} == {once}, "a replayed group is not counted again"
        assert len(signals) == STEPS * GROUPS
        tested = (await ledger.status()).self_tests
        assert set(tested) == ({"policy", "critic"} if algorithm == ACTOR_CRITIC else {"policy"})
        assert all(" differ by " in outcome and 'packing = "rows"' in outcome for outcome in tested.values())
        weights = await killed.weights(ledger)
    expected = await undisturbed
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert (tmp_path / "runs" / f"killed-{ranks}-{zero_stage}" / "policy" / "config.json").exists()


@pytest.mark.slow
async def test_a_run_is_continued_by_other_ranks_at_other_zero_stages_and_what_they_replay_is_published_again(
    tmp_path: Path, server: Server
) -> None:
    undisturbed = asyncio.create_task(_after(Run(tmp_path, server, "as-one", ranks=2), STEPS))

    def relaid(ranks: int, zero_stage: int) -> Run:
        return Run(tmp_path, server, "relaid", ranks=ranks, zero_stage=zero_stage)

    run = relaid(2, 1)
    async with bus_of(run) as (bus, ledger):
        await feed(bus, 0, 2 * GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 2, process)
            await run.stops(process)
        run = relaid(1, 3)
        await feed(bus, 2 * GROUPS, GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 3, process)  # no checkpoint is due
            process.kill()
            await asyncio.to_thread(process.wait, PATIENCE_S)
        assert await versions(ledger) == [(0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3)]
        run = relaid(2, 2)
        await feed(bus, 3 * GROUPS, 2 * GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, STEPS, process)
            await run.stops(process)
        assert (await versions(ledger))[4:] == [(4, 3, 3), (5, 4, 4), (6, 5, 5)]
        assert await bus.counts() == {"trained": STEPS * GROUPS}
        weights = await run.weights(ledger)
    assert moved_apart(weights, await undisturbed, initial_weights()) < ADAM_MOVEMENT


@contextlib.contextmanager
def endless(file: Path) -> Iterator[None]:
    """Have a file whose writer does not come to its end: a pipe that nobody empties."""
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    descriptor = os.open(file, os.O_RDWR)
    try:
        yield
    finally:
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 0), (2, 3)])
async def test_a_trainer_killed_while_it_writes_a_checkpoint_comes_back_from_the_one_before_and_the_journal(
    tmp_path: Path, server: Server, ranks: int, zero_stage: int
) -> None:
    every: dict[str, Any] = {"ranks": ranks, "zero_stage": zero_stage, "checkpoint_every_steps": 1}
    whole = Run(tmp_path, server, f"written-{ranks}", **every)
    undisturbed = asyncio.create_task(_after(whole, STEPS))
    killed = Run(tmp_path, server, f"writing-{ranks}", **every)
    root = tmp_path / "runs" / killed.run_id / "checkpoints"
    name = "mp_rank_00_model_states.pt" if ranks == 1 else "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    async with bus_of(killed) as (bus, ledger):

        async def counts(*steps: int) -> bool:
            return [version for version in steps if version not in await ledger.checkpoints()] == []

        async with killed.trainer() as process:
            await feed(bus, 0, GROUPS)
            await until(lambda: counts(1))
            with endless(local_store.beside(root, 2) / "engine" / "engine" / name):
                await feed(bus, GROUPS, 2 * GROUPS)
                await killed.reaches(ledger, 3, process)  # beside the write of step 2
                assert sorted(await ledger.checkpoints()) == [1]
                assert {entry.step for entry in await ledger.journal("")} == {2, 3}
                os.kill(_last_rank(process.pid, ranks), signal.SIGKILL)
                await asyncio.to_thread(process.wait, PATIENCE_S)
        assert [checkpoint.state.step for checkpoint in local_store.find(root)] == [1]
        async with killed.trainer() as process:
            await feed(bus, 3 * GROUPS, 2 * GROUPS)
            await killed.reaches(ledger, STEPS, process)
            await until(lambda: counts(4, 5))
            await killed.stops(process)
        assert await versions(ledger) == [(0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 3, 4), (5, 4, 5)]
        assert await bus.counts() == {"trained": STEPS * GROUPS}
        weights = await killed.weights(ledger)
    expected = await undisturbed
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
async def test_a_replay_repeats_the_learning_rate_of_each_step(tmp_path: Path, server: Server) -> None:
    run = Run(tmp_path, server, "live-rate", checkpoint_every_steps=100)
    async with bus_of(run) as (bus, ledger):
        live = Live(bus, Settings())
        await feed(bus, 0, GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 1, process)
            expected = await run.weights(ledger)
            await live.change(0, {"trainer.learning_rate": 0.0}, "stand still")
            await feed(bus, GROUPS, GROUPS)
            await run.reaches(ledger, 2, process)
            process.kill()
            await asyncio.to_thread(process.wait, PATIENCE_S)
        await live.change(1, {"trainer.learning_rate": 1.0}, "only a replay that reads this would move")
        await live.change(2, {"trainer.learning_rate": 0.0}, "stand still")
        async with run.trainer() as process:  # without a checkpoint, steps 1 and 2 are replayed
            await feed(bus, 2 * GROUPS, GROUPS)
            await run.reaches(ledger, 3, process)
        weights = await run.weights(ledger)
        revisions = [(record.step, record.settings_revision) for record in await ledger.policies()]
    assert revisions == [(0, 0), (1, 0), (2, 1), (3, 3)]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


async def pulled(ledger: Ledger) -> tuple[PolicyRecord, dict[str, torch.Tensor]]:
    status = await ledger.status()
    assert status.newest_version is not None
    record = await ledger.policy(status.newest_version)
    assert record is not None
    secret = RunSecret(ledger._bus)
    await secret.refresh()
    puller, receiver = Puller(DeviceLocation("cpu", (), boot_id()), 1, PATIENCE_S, secret), Receiver(1, 1, weights.CPU)
    try:
        offer = await puller.ask(record.source, record)
        shadow = FlatSnapshot(offer.layout, weights.CPU)
        await asyncio.to_thread(receiver.receive, offer, shadow)
        await puller.finish(offer, None)
        return record, shadow.tensors()
    finally:
        await puller.close()
        receiver.close()


GATHERED_AHEAD = (
    "{ zero_optimization = { stage3_param_persistence_threshold = 0, stage3_max_reuse_distance = 0, "
    "stage3_prefetch_bucket_size = 1 } }"
)
"""One weight, like a large model's."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 1), (2, 3)])
async def test_a_trainer_that_comes_back_serves_its_step_as_a_new_version_with_a_probe(
    tmp_path: Path, server: Server, ranks: int, zero_stage: int
) -> None:
    run = Run(
        tmp_path,
        server,
        f"pull-{ranks}",
        transport="pull",
        ranks=ranks,
        zero_stage=zero_stage,
        internal="stopped_exit_status = 143",
        **({"deepspeed": GATHERED_AHEAD} if zero_stage == 3 else {}),
    )
    async with bus_of(run) as (bus, ledger):
        await feed(bus, 0, 3 * GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 3, process)
            before, expected = await pulled(ledger)
            os.kill(_last_rank(process.pid, ranks), signal.SIGKILL)
            await asyncio.to_thread(process.wait, PATIENCE_S)
        async with run.trainer() as process:
            await until(lambda: _newest_is(ledger, 4))
            after, actual = await pulled(ledger)
            await run.stops(process)
            assert process.returncode == 143  # 0 would mark a Job's run as finished
        assert await versions(ledger) == [(0, None, 0), (1, 0, 1), (2, 1, 2), (3, 2, 3), (4, 3, 3)]
        assert (before.location, after.location) == ("", "")
        assert after.source != before.source
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        assert [record.probe is not None for record in await ledger.policies()] == [False, True, False, False, True]
        assert after.probe is not None
        _assert_scored_by(after.probe, actual)


async def _newest_is(ledger: Ledger, version: int) -> bool:
    return (await ledger.status()).newest_version == version


def _assert_scored_by(probe: Probe, tensors: dict[str, torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert unexpected == []
    for token_ids, logprobs in probe.sequences():
        ids = torch.tensor(token_ids, dtype=torch.long)
        with torch.inference_mode():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        expected = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=FORWARD)


@pytest.mark.slow
async def test_two_ranks_learn_what_one_rank_learns_and_do_not_outlive_their_launcher(
    tmp_path: Path, server: Server
) -> None:
    """With a critic; ``tests/trainer/test_ranks.py`` covers algorithms and ZeRO stages."""

    def run(ranks: int, zero_stage: int, cap: int, **more: int) -> Run:
        name = f"ranks-{ranks}-{zero_stage}"
        options: dict[str, Any] = {"ranks": ranks, "zero_stage": zero_stage, **more}
        return Run(tmp_path, server, name, ACTOR_CRITIC, micro_batch_tokens=cap, **options)

    # the cap makes several micro-batches per rank; 8 is less than some samples, which ranks compute together
    first, two, together = await asyncio.gather(
        _after(run(1, 0, 16_384), 2),
        _after(run(2, 3, 24), 2, _outlived_by_no_rank),
        _after(run(2, 1, 8, sequence_parallel=2), 2),
    )
    assert moved_apart(two, first, initial_weights()) < ADAM_MOVEMENT
    assert moved_apart(together, first, initial_weights()) < ADAM_MOVEMENT


async def _outlived_by_no_rank(launcher: forge.Started) -> None:
    ranks = psutil.Process(launcher.pid).children()
    assert len(ranks) == 2
    os.kill(launcher.pid, signal.SIGKILL)
    await until(lambda: not any(_runs(rank) for rank in ranks))


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
async def test_what_cannot_be_trained_on_leaves_with_its_reason_and_the_rest_is_trained(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "leaving", micro_batch_tokens=40)
    async with bus_of(run) as (bus, ledger), run.trainer() as process:
        await run.reaches(ledger, 0, process)
        await bus.append(EXPERIENCE, {"id": "0", "data": b"noise"})
        await bus.append(EXPERIENCE, {"id": "1", "data": wire.encode(experience(1, version=77))})
        short = Experience(experience(2).group, np.array([1.0], np.float32), (), 1.0, 0.1)
        await bus.append(EXPERIENCE, {"id": "2", "data": wire.encode(short)})
        long = builders.experience(3, (1.0, 0.0))
        long = Experience(
            RolloutGroup(long.group.prompt, np.arange(60, dtype=np.int32), long.group.samples, "r", 1.0, 2.0),
            long.rewards, long.scores, 1.0, 0.1,
        )  # fmt: skip
        await bus.append(EXPERIENCE, {"id": "3", "data": wire.encode(long)})
        await feed(bus, 10, GROUPS)
        await feed(bus, 10, 1)  # the same group twice
        await run.reaches(ledger, 1, process)
        await feed(bus, 20, 1)
        await until(lambda: _ended(bus, 5 + GROUPS))
        assert await bus.counts() == {
            "dead:experience": 3, "dropped:too_long": 1, "dropped:duplicate": 1, "trained": GROUPS,
        }  # fmt: skip


@pytest.mark.slow
async def test_a_gradient_that_is_not_finite_leaves_with_its_batch_and_a_commit_under_an_older_epoch_is_refused(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "nonfinite", algorithm='advantage = "dr_grpo"')
    async with bus_of(run) as (bus, ledger), run.trainer() as process:
        for group_id in range(GROUPS):
            await bus.append(EXPERIENCE, {"id": str(group_id), "data": wire.encode(_overflowing(group_id))})
        await feed(bus, GROUPS, GROUPS)
        await run.reaches(ledger, 1, process)
        assert await bus.counts() == {"dropped:nonfinite": GROUPS, "trained": GROUPS}
        assert await versions(ledger) == [(0, None, 0), (1, 0, 1)]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in (await run.weights(ledger)).values())
        (report,) = await raw(bus).xrange(bus.keys.of(streams.STEPS))
        assert b"dropped_nonfinite" in b"".join(report[1].values())
        await ledger.take_epoch()  # another trainer starts
        await feed(bus, 2 * GROUPS, GROUPS)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        assert "another trainer has taken over" in run.log.read_text()
        assert (await ledger.status()).step == 1
        assert await bus.length(EXPERIENCE) == GROUPS, "nothing moved"


@pytest.mark.slow
async def test_the_newer_of_two_trainers_takes_the_place_once_and_the_older_one_has_it_back_when_that_ends(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "two-trainers")
    async with bus_of(run) as (bus, ledger), contextlib.AsyncExitStack() as stack:
        old = await stack.enter_async_context(run.trainer("trainer-old"))
        await run.reaches(ledger, 0, old)
        new = await stack.enter_async_context(run.trainer("trainer-new"))
        assert await asyncio.to_thread(old.wait, PATIENCE_S) == 0
        old = await stack.enter_async_context(run.trainer("trainer-old"))

        async def waits() -> bool:
            beat = await heartbeat_of(bus, "trainer-old")
            other = f"waiting for the end of the other trainer, trainer-new (process {new.pid} on "
            return beat is not None and beat.activity.startswith(other) and beat.values["stored"] == 1.0

        await until(waits)
        await feed(bus, 0, GROUPS)
        await run.reaches(ledger, 1, new)
        assert await ledger.epochs() == (2, 0)
        await run.stops(new)
        await feed(bus, GROUPS, GROUPS)
        await run.reaches(ledger, 2, old)
        assert await ledger.epochs() == (3, 0)
        beat = await heartbeat_of(bus, "trainer-old")
        assert beat is not None
        assert "stored" not in beat.values


@pytest.mark.slow
async def test_of_three_trainers_one_has_the_place_even_if_two_share_a_name(tmp_path: Path, server: Server) -> None:
    run = Run(tmp_path, server, "three-trainers")
    async with bus_of(run) as (bus, ledger), contextlib.AsyncExitStack() as stack:

        async def starts(name: str) -> forge.Started:
            return await stack.enter_async_context(run.trainer(name))

        first = await starts("trainer-a")
        await run.reaches(ledger, 0, first)
        second = await starts("trainer-b")
        assert await asyncio.to_thread(first.wait, PATIENCE_S) == 0
        third = await starts("trainer-b")
        assert await asyncio.to_thread(second.wait, PATIENCE_S) == 0
        waiting = [await starts("trainer-a"), await starts("trainer-b")]
        sentence = (
            f"trainer-b (process {third.pid} on {socket.gethostname()}) has taken this one's place and is alive: "
        )
        for name in ("trainer-a", "trainer-b"):
            await until(lambda name=name: _says(run, f"{sentence}{name} waits until it ends"))
        await feed(bus, 0, GROUPS)
        await run.reaches(ledger, 1, third)
        assert await ledger.epochs() == (3, 0)
        await run.stops(third)
        await feed(bus, GROUPS, GROUPS)
        await run.reaches(ledger, 2, waiting[0])
        assert [process.poll() for process in waiting] == [None, None]
        assert await ledger.epochs() == (4, 0)


async def _says(run: Run, sentence: str) -> bool:
    return sentence in run.log.read_text()


def _overflowing(group_id: int) -> Experience:
    """A valid group whose gradient overflows float32."""
    made = experience(group_id)
    rewards = np.where(np.arange(len(made.rewards)) % 2 == 0, 3e38, -3e38).astype(np.float32)
    return dataclasses.replace(made, rewards=rewards)


async def _ended(bus: Bus, count: int) -> bool:
    return sum((await bus.counts()).values()) >= count


@pytest.mark.slow
async def test_an_empty_bus_is_restored_from_the_checkpoint_and_no_version_is_reused(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "emptied")
    async with bus_of(run) as (bus, ledger):
        await feed(bus, 0, 2 * GROUPS)
        await raw(bus).hset(bus.keys.named("run"), "cursor", 9)
        async with run.trainer() as process:
            await run.reaches(ledger, 2, process)
            signals = await read_signals(bus)
            await feed(bus, 2 * GROUPS, GROUPS)
            await run.reaches(ledger, 3, process)
            await until(lambda: _is_saved(ledger, 2))
            os.kill(process.pid, signal.SIGKILL)
        await empty(bus)
        await bus.make_groups()
        async with run.trainer() as process:
            await run.reaches(ledger, 2, process)
            await until(lambda: _are_known(ledger, 2))
            status = await ledger.status()
            assert (status.step, status.cursor) == (2, 9)
            assert await versions(ledger) == [(2, None, 2), (4, 2, 2)], (
                "version 3 was published before the bus was lost"
            )
            assert len(signals) == 2 * GROUPS
            assert await read_signals(bus) == signals
        state = json.loads((tmp_path / "runs/emptied/checkpoints/step-000002/state.json").read_text())
        assert (state["step"], state["version"]) == (2, 2)


async def _is_saved(ledger: Ledger, version: int) -> bool:
    return version in await ledger.checkpoints()


async def _are_known(ledger: Ledger, count: int) -> bool:
    return len(await ledger.policies()) == count


@pytest.mark.parametrize(
    ("change", "sentence", "code"),
    [
        ("--policy.model=/nowhere", "change policy.model", 2),
        ("--trainer.zero_stage=7", "trainer.zero_stage: expected 0, 1, 2 or 3, found 7", INVALID_SETTINGS),
        (
            "--sampling.group_size=1",
            "sampling.group_size: expected greater than or equal to 2, found 1",
            INVALID_SETTINGS,
        ),
        ("--trainer.learnin_rate=1", "did you mean 'learning_rate'?", INVALID_SETTINGS),
    ],
)
async def test_a_wrong_setting_is_one_sentence(
    tmp_path: Path, server: Server, change: str, sentence: str, code: int
) -> None:
    run = Run(tmp_path, server, "wrong")
    with run.log.open("w") as log:
        process = forge.start("penstock.services.trainer", ["--config", run.config, change], log)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == code
    said = run.log.read_text()
    assert sentence in said
    assert "Traceback" not in said


async def test_a_trainer_that_stops_alone_keeps_its_device_until_its_memory_is_free(
    tmp_path: Path, server: Server
) -> None:
    run = Run(tmp_path, server, "stops-alone", '[placement]\nmode = "shared"\nrung = 4')
    async with bus_of(run) as (bus, ledger):
        await raw(bus).hset(bus.keys.of(RUN), "leader_term", 1)

        async def granted() -> bool:
            requests = (await look_at_devices(bus, 1)).requests
            return bool(requests) and await grant_devices(bus, 1, requests[0], PATIENCE_S) > 0

        async with run.trainer() as process:
            await until(granted)
            await run.reaches(ledger, 0, process)
            await until(lambda: _has_released(bus))
            await feed(bus, 0, GROUPS)
            await until(granted)
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, PATIENCE_S)
        assert not await _has_released(bus), "its restart or the lapse ends the grant"


async def _has_released(bus: Bus) -> bool:
    return (await look_at_devices(bus, 1)).grants == (None,)
