"""Router replay: recorded routes give the recorded pass, and others what hand-written routers give."""

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from penstock.services.trainer.algorithm.estimates import AdapterOff
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model import adapter, experts
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.routing import replay
from penstock.shared.errors import SettingsError
from penstock.shared.model import routes
from penstock.shared.model.routes import mixtures_of
from penstock.shared.settings import PolicySettings, Settings
from tests.support import tiny
from tests.support.expert_ranks import family
from tests.support.packed import rows
from tests.support.tolerance import FORWARD

SHAPE = ((5, (4, 1, 6)), (9, (2, 2)), (1, (3,)))
EXACT = 1e-6
"""Of float32: an ulp of a logprob is 5e-7."""
RECURRENT = {"qwen3_next", "qwen3_5_moe_text"}
"""Families whose state sums over the sequence, in chunks that differ with packing: ten times as much."""
NORMALISED = {"mixtral", "qwen3_5_moe_text"}
"""Families whose weights always add up to one."""


def policy_of(name: str, **options: Any) -> Policy:
    policy = Policy(family(name), **options)
    policy.trunk.replay = replay.install(policy.model)
    return policy.train()


def replay_of(policy: Policy) -> replay.RouterReplay:
    assert policy.trunk.replay is not None
    return policy.trunk.replay


def routed(of: Policy, seed: int = 0) -> tuple[list[PackedRow], dict[bytes, np.ndarray]]:
    """Rows with claims of random routes, and these; samples of a group agree about their prompt."""
    generator, claims, known = np.random.default_rng(seed), [], {}
    plan = replay_of(of)

    def drawn(tokens: int) -> np.ndarray:
        order = generator.random((tokens, plan.decoder_layers, plan.experts)).argsort(-1)
        return order[..., : plan.top_k].astype(routes.id_type(plan.experts))

    for number, row in enumerate(rows(seed, SHAPE)):
        prompt, samples = drawn(len(row.prompt_token_ids)), []
        for place, sample in enumerate(row.samples):
            claim = f"{number} {place}".encode()
            known[claim] = np.concatenate([prompt, drawn(len(sample.token_ids) - 1)])
            samples.append(dataclasses.replace(sample, routes=claim))
        claims.append(dataclasses.replace(row, samples=tuple(samples)))
    for claim, own in known.items():
        plan.take(claim, own.tobytes(), len(own), len(own))
    return claims, known


def by_hand(name: str, router: Any, ids_TK: torch.Tensor, hidden_TD: torch.Tensor) -> tuple[None, Any, Any]:
    """What a router of the family gives with these experts, written from its paper's formula."""
    scores_TE = hidden_TD.reshape(-1, hidden_TD.shape[-1]) @ router.weight.T
    if name == "gpt_oss":
        return None, (scores_TE + router.bias).gather(1, ids_TK).softmax(-1), ids_TK
    is_gated = name in ("deepseek_v3", "glm4_moe")
    all_TE = scores_TE.sigmoid() if is_gated else scores_TE.softmax(-1)
    weights_TK = torch.stack([row[ids] for row, ids in zip(all_TE, ids_TK, strict=True)])
    if name in NORMALISED or getattr(router, "norm_topk_prob", False):
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return None, weights_TK * getattr(router, "routed_scaling_factor", 1.0), ids_TK


def expected(
    name: str, of: list[PackedRow], known: dict[bytes, np.ndarray], model: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logprobs and gradients of each sequence by itself, with routers by hand."""
    model = model or family(name)
    routers = {path: module for path, module in model.named_modules() if type(module).__name__.endswith("Router")}
    collected = []
    for row in of:
        for sample in row.samples:
            ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, sample.token_ids]).astype(np.int64))
            own = torch.from_numpy(known[sample.routes].astype(np.int64))
            for path, router in routers.items():
                layer = int(path.split("layers.")[1].split(".")[0])
                router.forward = functools.partial(by_hand, name, router, own[:, layer])
            logits = model(input_ids=ids[None, :-1]).logits[0]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
            collected.append(logprobs[len(row.prompt_token_ids) - 1 :])
    logprobs = torch.cat(collected)
    logprobs.mean().backward()
    return logprobs.detach(), {path: weight.grad for path, weight in model.named_parameters()}


def computed(of: Policy, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    of.zero_grad()
    logprobs = of(batch).policy_logprobs_N
    logprobs.mean().backward()
    return logprobs.detach(), gradients(of)


def gradients(of: Policy) -> dict[str, Any]:
    return {path: None if weight.grad is None else weight.grad.clone() for path, weight in of.model.named_parameters()}


def gap(ours: tuple[torch.Tensor, dict[str, Any]], theirs: tuple[torch.Tensor, dict[str, Any]]) -> float:
    """The largest difference of logprobs, or of a gradient to the norm of all of them."""
    norm = torch.stack([each.norm() for each in theirs[1].values() if each is not None]).norm()
    gaps = [float((ours[0] - theirs[0]).abs().max())]
    for path, gradient in theirs[1].items():
        own = ours[1][path]
        gaps.append(
            float(((0 if own is None else own) - (0 if gradient is None else gradient) + torch.zeros(1)).norm() / norm)
        )
    return max(gaps)


@pytest.mark.parametrize("packing", ["rows", "sequences"])
@pytest.mark.parametrize("name", sorted(experts.PROVEN))
def test_any_routes_give_what_routers_by_hand_give(name: str, packing: Any) -> None:
    policy = policy_of(name, packing=packing)
    of, known = routed(policy)
    ours, theirs = computed(policy, micro_batch(of)), expected(name, of, known)
    assert gap(ours, theirs) < (10 if name in RECURRENT else 1) * EXACT
    replay_of(policy).forget()
    assert gap(computed(policy, micro_batch(of)), theirs) > 1e-2, "live routes are others"


def change(of: adapter.Update) -> torch.Tensor:
    """What an adapter adds to its weight."""
    a, b = of.factors
    if of.experts > 1:
        a, b = a.reshape(of.experts, -1, a.shape[-1]), b.reshape(len(b), -1, of.experts).permute(2, 0, 1)
    product = of.scale * (b @ a)
    return product.mT if of.transposed else product


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "qwen3_moe"])
@pytest.mark.filterwarnings("ignore:The (following|PEFT config)")  # peft's, of ranks of experts and of its base
def test_adapters_of_routers_and_experts_are_trained_as_the_weights_that_they_are_merged_into(name: str) -> None:
    lora = PolicySettings.model_validate({"model": "tiny", "lora": {"rank": 2}})
    policy = Policy(adapter.add(family(name), lora))
    policy.trunk.replay = replay.install(policy.model)
    updates = adapter.updates(policy.train().model)
    torch.manual_seed(1)
    for update in updates.values():
        torch.nn.init.normal_(update.factor_b, std=0.1)
    of, known = routed(policy)
    model, ours = family(name), computed(policy, micro_batch(of))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for path, update in updates.items():
            weights[adapter.plain_name(path)] += change(update)
    logprobs, gradients_by_hand = expected(name, of, known, model)
    sums = [(gradients_by_hand[adapter.plain_name(path)] * change(update)).sum() for path, update in updates.items()]
    factors = {path: weight for path, weight in policy.model.named_parameters() if adapter.is_factor(path)}
    theirs = dict(zip(factors, torch.autograd.grad(sum(sums), list(factors.values())), strict=True))
    assert gap(ours, (logprobs, theirs)) < FORWARD  # W + BA and Wx + BAx round differently
    engine: Any = SimpleNamespace(policy=policy, evaluate=policy)
    with torch.no_grad():
        reference, live = AdapterOff(engine)(micro_batch(of)), Policy(family(name))(micro_batch(of))
    assert torch.allclose(reference.policy_logprobs_N, live.policy_logprobs_N, atol=EXACT, rtol=0), "it routes live"
    assert gap(computed(policy, micro_batch(of)), ours) == 0


@pytest.mark.parametrize("name", sorted(experts.PROVEN))
def test_recorded_routes_give_the_recorded_pass(name: str) -> None:
    policy, batch = policy_of(name), micro_batch(rows(0, SHAPE))
    seen: list[torch.Tensor] = []
    mixtures = mixtures_of(policy.model).values()
    hooks = [each.register_forward_pre_hook(lambda _, given: seen.append(given[1])) for each in mixtures]
    live = computed(policy, batch)
    for hook in hooks:
        hook.remove()
    with mock.patch.object(replay_of(policy), "routes_of", return_value=torch.stack(seen, 1).int()) as given:
        assert gap(computed(policy, batch), live) < EXACT
    given.assert_called_once()


def test_tokens_without_routes_are_routed_live() -> None:
    policy = policy_of("deepseek_v3")
    of, _ = routed(policy)
    unknown = [
        dataclasses.replace(row, samples=tuple(dataclasses.replace(each, routes=b"lost") for each in row.samples))
        for row in of
    ]
    live = computed(policy, micro_batch(unknown))
    assert gap(computed(policy, micro_batch(rows(0, SHAPE))), live) == 0
    replayed, first = computed(policy, micro_batch(of)), sum(len(sample.token_ids) for sample in of[0].samples)
    partly = computed(policy, micro_batch(of[:1] + unknown[1:]))[0]
    assert torch.allclose(partly[:first], replayed[0][:first], atol=EXACT, rtol=0)
    assert torch.allclose(partly[first:], live[0][first:], atol=EXACT, rtol=0)


@pytest.mark.parametrize("packing", ["rows", "sequences"])
def test_routes_of_completions_alone_leave_prompts_to_the_live_routers(packing: Any) -> None:
    policy = policy_of("qwen3_moe", packing=packing)
    of, known = routed(policy)
    plan, batch = replay_of(policy), micro_batch(of)
    routes_TLK = plan.routes_of(batch, torch.device("cpu"))
    assert routes_TLK is not None
    whole, samples = computed(policy, batch), [sample for row in of for sample in row.samples]
    for sample, routed_sample in zip(samples, batch.routed, strict=True):
        drawn = len(sample.token_ids)
        plan.take(sample.routes, known[sample.routes][-drawn:].tobytes(), len(known[sample.routes]), drawn)
        assert plan.columns_of(routed_sample).tolist() == routed_sample.columns_P[-drawn:].tolist()
    read = np.concatenate([plan.columns_of(each) for each in batch.routed])
    is_prompt_T = ~np.isin(np.arange(len(routes_TLK)), read)
    assert is_prompt_T.sum() == sum(len(row.prompt_token_ids) - 1 for row in of), (
        "their last tokens draw the first ones"
    )
    ours = computed(policy, batch)
    plan.forget()
    routes_TLK[is_prompt_T] = -1
    with mock.patch.object(plan, "routes_of", return_value=routes_TLK):
        assert gap(computed(policy, batch), ours) == 0
    assert gap(ours, whole) > 1e-4, "the prompts' routes matter"


def test_layers_that_are_computed_again_route_as_they_did_first() -> None:
    kept, again = policy_of("qwen3_moe"), policy_of("qwen3_moe")
    again.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    passes = []
    for policy in (kept, again):
        (first, _), (second, _) = routed(policy, 0), routed(policy, 1)
        renamed = [  # beside the first ones
            dataclasses.replace(
                row, samples=tuple(dataclasses.replace(each, routes=b"2" + each.routes) for each in row.samples)
            )
            for row in second
        ]
        plan, others = replay_of(policy), routed(policy, 1)[1]
        routed(policy, 0)
        for claim, own in others.items():
            plan.take(b"2" + claim, own.tobytes(), len(own), len(own))
        sums = [policy(micro_batch(each)).policy_logprobs_N.mean() for each in (first, renamed)]
        (sums[0] - 2 * sums[1]).backward()
        passes.append((torch.stack(sums).detach(), gradients(policy)))
    assert gap(passes[1], passes[0]) == 0


def test_routes_that_cannot_be_the_models_are_refused() -> None:
    plan = replay_of(policy_of("mixtral"))  # 3 layers, 2 of 4 experts a token
    right = np.tile(np.array([[0, 1], [1, 2], [3, 0]], np.uint8), (8, 1, 1))
    plan.take(b"right", right.tobytes(), 8, 8)
    for wrong in (right[:-1], right[:0]):
        with pytest.raises(ValueError, match=f"expected 48 bytes of routes, found {wrong.nbytes}"):
            plan.take(b"wrong", wrong.tobytes(), 8, 8)
    for beyond in (np.where(right == 3, 4, right), right * 0):
        with pytest.raises(ValueError, match="expected different experts of 4 in each layer, found others"):
            plan.take(b"wrong", beyond.astype(np.uint8).tobytes(), 8, 8)


@pytest.mark.parametrize("of", [tiny.model, lambda: family("granitemoeshared")])
def test_models_whose_routers_are_not_known_are_refused(of: Any) -> None:
    with pytest.raises(SettingsError, match=r"trainer.router_replay is tested with deepseek_v2, .* set it to false"):
        replay.install(of())


@pytest.mark.parametrize(
    ("tables", "other"),
    [
        (
            {"policy": {"lora": {"rank": 4}}, "rollout": {"engine": "vllm"}},
            "adapters that vLLM merges (weights.lora)",
        ),
        ({"algorithm": {"preset": "dpo"}}, "algorithm.loss = 'dpo'"),
        ({"rollout": {"engine": "scripted"}}, "rollout.engine = 'scripted'"),
        (
            {"rollout": {"engine": "vllm", "vllm": {"quantization": "fp8"}}},
            "rollout.vllm.quantization = 'fp8'",
        ),
    ],
)
def test_what_was_not_tested_with_replay_is_refused(tables: dict[str, Any], other: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expected trainer.router_replay = false with {other}, found true")):
        Settings.model_validate({**tables, "trainer": {"router_replay": True}})
