"""Laws of several vLLM engines on one GPU (skipped without one)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from penstock.services.rollout.engines.engine import Engine, GeneratedSample
from penstock.services.rollout.engines.vllm.arguments import gather
from penstock.services.rollout.engines.vllm.several.engine_set import EngineSet
from penstock.services.rollout.engines.vllm.several.gpu import NvmlGpu
from penstock.services.rollout.engines.vllm.several.start import open_engines
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.offer import Offer
from tests.conftest import need_module
from tests.rollout.engines.vllm.test_engine import PROMPT, model, request, save
from tests.support import weights

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own imports warn
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BFLOAT16 = 2e-2
"""Logprobs in bfloat16: a unit in the last place of logits near 4 is 0.016."""
SHARE = 0.5


def arguments(folder: Path) -> dict[str, Any]:
    need_module("vllm", "vllm")
    policy = str(save(folder, model(0, stop=None).bfloat16()))
    return gather(policy, dtype="bfloat16", seed=1, max_num_seqs=16, max_model_len=256, gpu_memory_utilization=SHARE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineSet]:
    before = NvmlGpu().memory
    shared = arguments(tmp_path_factory.mktemp("policy"))
    opened, _ = await open_engines(2, shared, peer_host="127.0.0.1", deadline_s=30.0)
    opened.share_secret(weights.SECRET)
    assert isinstance(opened, EngineSet)
    taken = before.free_bytes - NvmlGpu().memory.free_bytes
    assert taken <= SHARE * before.total_bytes
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
def source() -> Any:
    with weights.serving() as opened:
        yield opened


async def put(engine: Engine, source: WeightSource, version: int) -> None:
    tensors = dict(model(version, stop=None).bfloat16().named_parameters())
    record = weights.offered(source, weights.fill(tensors, version))
    puller = Puller(engine.place, engine.ranks, 30.0, weights.secret)
    offer = await puller.ask(record.source, record)
    await engine.stage(offer)
    await engine.swap(PolicyVersion(version))
    await puller.finish(offer, None)
    await puller.close()


async def greedy(engine: Engine) -> GeneratedSample:
    (sample,) = (await engine.generate(request(samples=1, new_tokens=64, temperature=0.0))).samples
    return sample


async def test_the_second_engine_copies_the_firsts_shadow_within_the_gpu(
    engines: EngineSet, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, transports = engines.engines[1], []
    stage = second.stage

    async def noted(offer: Offer) -> None:
        transports.append(offer.transport)
        await stage(offer)

    monkeypatch.setattr(second, "stage", noted)
    for version in (0, 1):
        await put(engines, source, version)
        assert (engines.version, [engine.version for engine in engines.engines]) == (version, [version, version])
    assert transports == ["ipc", "ipc"]


async def test_after_an_update_each_of_two_engines_gives_the_tokens_and_logprobs_of_a_single_one(
    engines: EngineSet, source: WeightSource, tmp_path: Path
) -> None:
    await put(engines, source, 2)
    several = [await greedy(engine) for engine in engines.engines]
    probes = [await engine.logprobs(PROMPT) for engine in engines.engines]
    single, _ = await open_engines(1, {**arguments(tmp_path), "gpu_memory_utilization": 0.2})
    try:
        await put(single, source, 2)
        expected, probe = await greedy(single), await single.logprobs(PROMPT)
    finally:
        await single.close()
    for sample, logprobs in zip(several, probes, strict=True):
        assert sample.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(sample.behavior_logprobs, expected.behavior_logprobs, atol=BFLOAT16)
        np.testing.assert_allclose(logprobs, probe, atol=BFLOAT16)
        assert sample.version_spans.tolist() == [[0, 2]]


async def test_a_swap_falls_into_the_groups_of_every_engine(engines: EngineSet, source: WeightSource) -> None:
    running = [asyncio.ensure_future(engines.generate(request(PROMPT + n, 4, 200))) for n in range(4)]
    await put(engines, source, 3)
    for group in await asyncio.gather(*running):
        for sample in group.samples:
            assert {version for _, version in sample.version_spans.tolist()} <= {2, 3}


async def test_a_set_on_a_shared_gpu_frees_its_memory_and_continues_with_the_weights_that_each_engine_pulls(
    source: WeightSource, tmp_path: Path
) -> None:
    asleep = {**arguments(tmp_path), "enable_sleep_mode": True}
    opened, _ = await open_engines(2, asleep, shadow="bucketed", deadline_s=30.0)
    assert isinstance(opened, EngineSet)
    opened.share_secret(weights.SECRET)
    try:
        await put(opened, source, 4)
        expected = [await greedy(engine) for engine in opened.engines]
        for rung in (1, 2):
            running = [asyncio.ensure_future(opened.generate(request(PROMPT + n, 4, 200))) for n in range(4)]
            before = NvmlGpu().memory.free_bytes
            await opened.suspend(rung)
            freed = NvmlGpu().memory.free_bytes - before
            assert freed > 0.9 * opened.memory["kv_cache"]
            assert opened.version == (None if rung == 2 else 4)
            await opened.resume()
            if rung == 2:
                await put(opened, source, 4)
            for group in await asyncio.gather(*running):
                assert {version for sample in group.samples for version in sample.version_spans[:, 1]} == {4}
            for engine, sample in zip(opened.engines, expected, strict=True):
                again = await greedy(engine)
                assert again.token_ids.tolist() == sample.token_ids.tolist()
                np.testing.assert_allclose(again.behavior_logprobs, sample.behavior_logprobs, atol=BFLOAT16)
    finally:
        await opened.close()


async def test_auto_measures_how_busy_one_engine_keeps_the_gpu(tmp_path: Path) -> None:
    opened, choice = await open_engines("auto", arguments(tmp_path))
    opened.share_secret(weights.SECRET)
    try:
        assert choice.engines == (len(opened.engines) if isinstance(opened, EngineSet) else 1)
        assert "kept the GPU busy for" in choice.reason
    finally:
        await opened.close()
