"""Scenes of ranks that share experts, for ``tests/trainer/model/test_experts.py``, started once by the launcher because
imports take seconds. Rank 0 writes the results.
"""

import copy
import dataclasses
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.batch import assignment, shards
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model import adapter, experts
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.engine import TrainingEngine, place, saved_tensors
from penstock.services.trainer.model.layers import ulysses
from penstock.services.trainer.model.memory import layerwise
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.routing import replay
from penstock.services.trainer.phases import Phases
from penstock.services.trainer.rank_group import start_ranks
from penstock.services.trainer.self_test import self_test, unmodified_model
from penstock.shared.errors import SettingsError
from penstock.shared.model import routes
from penstock.shared.model.routes import mixtures_of
from penstock.shared.settings import Settings, TrainerSettings
from tests.support import tiny, tolerance
from tests.support.model_configurations import configurations
from tests.support.packed import placed, rows
from tests.trainer.algorithm import test_update

CLIPPED, RATE, SETS = 0.1, 1e-3, 4
SHAPE = ((5, (4, 1, 6)), (9, (2, 2)), (1, (3,)))
ALONE = ((12, (5,)),)
"""So that groups of ranks have different numbers of long samples."""
ACTOR_CRITIC = {"preset": "ppo", "minibatches": 1, "critic": {"learning_rate": 1e-3}}
TOGETHER = {"sequence_parallel": 2, "micro_batch_tokens": 9}
"""Some samples are longer, others are not."""
RECURRENT = {"qwen3_5_moe_text", "qwen3_next"}
FAMILIES = [*((name, 1) for name in sorted(experts.PROVEN)), *((name, 3) for name in sorted(RECURRENT))]
"""With the ZeRO stages of their steps; those of others at stage 3 are of rows in parts, too (``expert_row_ranks``)."""
REPLAYED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "divided": (2, 1, {}),
    "zero-3": (1, 3, {}),
    "sequences": (1, 3, {"packing": "sequences"}),
    "together": (1, 3, TOGETHER),
    "divided zero-3": (2, 3, {}),
    "divided offload": (2, 3, {"offload": "all"}),
    "divided recomputed": (2, 3, {"gradient_checkpointing": True}),
}
"""Ranks that share experts, ZeRO stage and other settings of steps with routes."""


def settings(parallel: int, zero_stage: int = 1, **tables: Any) -> Settings:
    return Settings.model_validate(
        {
            "run": {"id": "experts", "device": "cpu"},
            "policy": {"dtype": tables.get("dtype", "float32"), "model": "tiny", "lora": {"rank": tables.get("rank", 0)}},
            "sampling": {"max_new_tokens": 8},
            "rollout": {"engine": "transformers"},
            "internal": {"probe_every_versions": 0},
            "algorithm": {"groups_per_step": 4, **tables.get("algorithm", {})},
            "trainer": {
                "ranks": dist.get_world_size(), "zero_stage": zero_stage, "expert_parallel": parallel,
                "max_grad_norm": CLIPPED, "learning_rate": RATE, "micro_batch_tokens": 24, **tables.get("trainer", {}),
            },
        }
    )  # fmt: skip


def family(name: str) -> Any:
    """Return a tiny model whose routers choose clearly."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configurations()[name]()).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(5)
    return model


def engine(of: Settings, model: Any) -> TrainingEngine:
    return TrainingEngine(Policy(model, packing=of.trainer.packing).train(), of, "cpu")


def opened(of: Settings, seed: int) -> TrainingEngine:
    """Return an engine whose weights, or adapters if it has some, depend on ``seed``."""
    model = family("qwen2_moe") if of.policy.lora.rank else tiny.mixture(seed).requires_grad_(True)
    torch.manual_seed(seed)
    return engine(of, adapter.add(model, of.policy, of.trainer.zero_stage))


def weights(of: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in of.tensors()}


def every_row() -> list[PackedRow]:
    return placed([*rows(SETS, ALONE), *(row for number in range(SETS) for row in rows(number, SHAPE))])


def passes_of(trainer: TrainerSettings) -> list[MicroBatch]:
    """This rank's forward passes of all rows."""
    cap, together = trainer.micro_batch_tokens, trainer.sequence_parallel
    return assignment.plan(every_row(), cap, trainer.ranks, sequence_parallel=together)[dist.get_rank()]


def updated(of: TrainingEngine) -> dict[str, Any]:
    """Logprobs of this rank's samples, gradient norm and weights after a step on all rows, other ones on each rank."""
    own, logprobs = passes_of(of._trainer), dict[int, torch.Tensor]()
    count = sum(len(sample.token_ids) for row in every_row() for sample in row.samples)
    for number, batch in enumerate(own):
        logprobs_N = of.forward(batch).policy_logprobs_N
        of.backward(logprobs_N.sum() / count * of.ranks, last=number + 1 == len(own))
        logprobs |= zip(batch.places_S.tolist(), logprobs_N.detach().split(batch.lengths_S.tolist()), strict=True)
    return {"logprobs": logprobs, "norm": of.step(RATE), "weights": weights(of)}


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """What rank 0 has computed by ``of_transformers`` for all ranks, which call this together."""
    of_ranks = [of_transformers(name) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(of_ranks)
    return of_ranks[0]


def of_transformers(name: str) -> dict[str, Any]:
    """What ``updated`` returns, by transformers' model, one sequence at a time, and torch's AdamW; logprobs of all samples."""
    model, every = family(name), every_row()
    with unmodified_model.unmodified(model):
        logprobs_N = unmodified_model.logprobs(model, every, torch.device("cpu"))
    logprobs_N.mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
    torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, eps=1e-4).step()
    lengths = [len(sample.token_ids) for row in every for sample in row.samples]
    logprobs = logprobs_N.detach().split(lengths)
    return {"logprobs": logprobs, "norm": float(norm), "weights": dict(model.named_parameters())}


def compared(name: str, zero_stage: int = 1, parallel: int = 2, **trainer: Any) -> dict[str, float]:
    """Gaps of a step of a family with divided experts to that of transformers."""
    start = dict(family(name).named_parameters())
    ours = updated(engine(settings(parallel, zero_stage, trainer=trainer), family(name)))
    theirs = expected(name)
    own = {key: tensor for key, tensor in ours["weights"].items() if key in start}
    moved = [
        tolerance.moved_apart(*[{key: of[key]} for of in (own, theirs["weights"], start)])
        for key in _moved(start, theirs)
    ]
    return {
        "logprobs": max(
            (float((own_N - theirs["logprobs"][place]).abs().max()) for place, own_N in ours["logprobs"].items()),
            default=0.0,
        ),
        "norm": abs(ours["norm"] / theirs["norm"] - 1),
        "all weights": tolerance.moved_apart(own, theirs["weights"], start),
        "weights": max(moved),
        "missing": float(len(start.keys() - ours["weights"].keys())),
    }


def _moved(start: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [key for key, tensor in start.items() if not torch.equal(tensor, theirs["weights"][key])]


def critic(of: Settings, seed: int = 1) -> TrainingEngine | None:
    """Return the critic that the algorithm needs, if it does: a mixture, too."""
    if not of.algorithm.needs_critic:
        return None
    trunk = tiny.mixture(seed).requires_grad_(True).get_decoder()
    made = Critic(trunk, trunk.config.hidden_size).train()
    torch.manual_seed(seed)
    torch.nn.init.normal_(made.value_head.weight)
    return TrainingEngine(made, of, "cpu")


def continued_critic(folder: Path) -> list[bool]:
    """Whether critics have the values of the one that saved a checkpoint: with divided experts and the same, or other, ranks."""
    first, *others = [
        critic(settings(parallel, 1, algorithm=ACTOR_CRITIC), seed) for parallel, seed in ((2, 1), (2, 2), (1, 3))
    ]
    assert first is not None
    batch = micro_batch(rows(0, SHAPE))
    first.backward(first.forward(batch).mean(), last=True)
    first.step(RATE)
    first.save(folder)()
    dist.barrier()
    expected, equal = first.evaluate(batch), []
    for number, other in enumerate(others):
        assert other is not None
        before = other.evaluate(batch)
        other.load(folder, of_others=number == 1)
        equal.append(bool((other.evaluate(batch) - expected).abs().max() < 1e-5 < (before - expected).abs().max()))
    return equal


def of_8_bits(zero_stage: int, folder: Path) -> dict[str, Any]:
    """Steps with moments of 8 bits and divided experts, and with AdamW; a step after a checkpoint, which holds all experts."""
    of = settings(2, zero_stage, trainer={"optimizer": "adamw_8bit"})
    first, second, plain = opened(of, 0), opened(of, 1), opened(settings(2, zero_stage), 0)
    for each in (first, first, plain, plain):
        updated(each)
    kept, exact = weights(first), weights(plain)
    first.save(folder)()
    dist.barrier()
    saved = saved_tensors(folder, zero_stage, 2)
    second.load(folder)
    after, again = updated(first)["weights"], updated(second)["weights"]
    return {
        "apart": tolerance.moved_apart(kept, exact, dict(tiny.mixture(0).named_parameters())),
        "resumed": all(torch.equal(tensor, again[name]) for name, tensor in after.items()),
        "saved": all(torch.equal(tensor, saved[name]) for name, tensor in kept.items()),
    }


def steps(of: Settings, model: Any) -> dict[str, Any]:
    """Figures of two steps of the algorithm, and the weights after them."""
    policy, values = engine(of, model), critic(of)
    learner, data = Learner(policy, of, Phases(), values), test_update.batch(longer=3)
    measured = [learner.learn(data, test_update.lags(data), step) for step in (1, 2)]
    return {"measured": measured, "weights": weights(policy), "values": weights(values) if values else {}}


def published(of: Settings) -> dict[str, Any]:
    """Published tensors that differ from the model's, by name, type, shape or content."""
    model = tiny.mixture(0).requires_grad_(True).to(getattr(torch, of.policy.dtype))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    policy = engine(of, model)
    shapes = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in start.items()]
    given = weights(policy)
    other = [name for name, tensor in start.items() if not torch.equal(given[name], tensor)]
    return {"names": list(given) == list(start), "shapes": list(policy.shapes()) == shapes, "other": other}


def resumed(of: Settings, folder: Path) -> dict[str, Any]:
    """A second step, by an engine and by one that loads its checkpoint, and by others; the checkpoint's tensors."""
    before, after = (opened(of, seed) for seed in (0, 1))
    updated(before)
    error = before.save(folder)().error
    dist.barrier()
    kept, saved = weights(before), saved_tensors(folder, of.trainer.zero_stage, of.trainer.expert_parallel)
    published = {name: tensor.clone() for name, tensor in before.factors()} or kept
    saved = {adapter.file_name(name) if adapter.is_factor(name) else name: tensor for name, tensor in saved.items()}
    after.load(folder)
    next_step, resumed_step = updated(before), updated(after)
    if not dist.get_rank():
        torch.save({"kept": kept, "next": next_step["weights"]}, folder / "expected.pt")
    dist.barrier()
    return {
        "error": error,
        "norms": next_step["norm"] == resumed_step["norm"],
        "other": [
            name
            for name, tensor in next_step["weights"].items()
            if not torch.equal(tensor, resumed_step["weights"][name])
        ],
        "unsaved": [name for name, tensor in published.items() if not torch.equal(tensor, saved[name])],
    }


def by_others(of: Settings, folder: Path) -> dict[str, Any]:
    """A second step by ranks, or with a stage or division of experts, other than those that wrote ``folder``."""
    other, expected = opened(of, 1), torch.load(folder / "expected.pt")
    other.load(folder, of_others=True)
    kept = weights(other)
    unlike = [name for name, tensor in expected["kept"].items() if not torch.equal(tensor, kept[name])]
    after = updated(other)["weights"]
    return {"unlike": unlike, "apart": tolerance.moved_apart(after, expected["next"], expected["kept"])}


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except SettingsError as error:
        return str(error)
    return ""


def self_tested(of: Settings, *, broken: bool) -> str:
    """Why the self-test refuses divided experts, or ""; at stage 3 with a layer on the device at a time."""
    policy = place(Policy(tiny.mixture(0).requires_grad_(True)).train(), of, "cpu")
    exchange = experts._Divided._exchanged

    def wrong(*given: Any) -> torch.Tensor:
        return exchange(*given) * 1.05

    with (
        mock.patch.object(experts._Divided, "_exchanged", wrong if broken else exchange),
        mock.patch.object(layerwise, "SMALL", 100),
        layerwise.looked_at(policy, of, torch.device("cpu")),
    ):
        assert any(map(layerwise.is_away, policy.parameters())) is (of.trainer.zero_stage == 3)
        together = of.trainer.sequence_parallel
        return _refusal(
            lambda: self_test.run(policy, "rows", 0, is_sharded=True, sequence_parallel=together)  # type: ignore[arg-type]
        )


def adapted(zero_stage: int) -> list[dict[str, Any]]:
    """A step with adapters, with whole and divided experts."""
    return [updated(opened(settings(parallel, zero_stage, rank=4), 1)) for parallel in (1, 2)]


def held(of: Settings) -> list[float]:
    """Parts of each weight of experts that this rank holds."""
    policy = engine(of, tiny.mixture(0).requires_grad_(True)).policy
    weights: list[Any] = [weight for weight in policy.parameters() if experts.group_of(weight) is not None]
    return [part.ds_tensor.numel() / math.prod(experts.whole_shape(part)) for part in weights]


def imbalance(together: int = 1) -> tuple[float, float]:
    """The figure of a pass of each group of ranks that compute a row ``together``, and the same by transformers' routers."""
    ours, model, chosen = (
        engine(settings(2, trainer={"sequence_parallel": together}), tiny.mixture(0).requires_grad_(True)),
        tiny.mixture(0),
        list[torch.Tensor](),
    )

    def note(_: Any, given: Any) -> None:
        chosen.append(torch.bincount(given[1].flatten(), minlength=4))

    for module in mixtures_of(model).values():
        module.register_forward_pre_hook(note)
    batches = [micro_batch(rows(group, SHAPE[:2])) for group in range(ours.ranks // together)]
    for batch in batches:
        Policy(model).eval()(batch)
    own = batches[dist.get_rank() // together]
    ours.evaluate(own if together == 1 else shards.split(own, together)[ulysses.index(together)])
    layers = [sum(chosen[place::2]).double() for place in range(2)]  # type: ignore[union-attr]
    means = [float(of.max() / of.mean()) for of in layers]
    return experts.take_imbalance(ours.policy)["expert_imbalance"], sum(means) / len(means)


def travels() -> dict[str, int]:
    """Hidden states that this rank sends to the ranks in a pass, its pairs of a token and a rank, and of a token and an expert."""
    ours, sent, chosen = engine(settings(2), tiny.mixture(0).requires_grad_(True)), list[int](), list[torch.Tensor]()

    def noted(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        sent.append(len(rows))
        return ulysses.exchange(rows, *others)

    for module in experts.layers_of(ours.policy):
        module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    with mock.patch.object(experts, "exchange", noted):
        ours.evaluate(micro_batch(rows(dist.get_rank(), SHAPE[:2])))
    pairs = [len({int(expert) // 2 for expert in token}) for index_TK in chosen for token in index_TK]
    # of each layer: choices and hidden states, the same tokens, and results of what other ranks sent
    return {"sent": sum(sent[1::3]), "choices": sum(sent[::3]), "ranks": sum(pairs), "experts": 2 * len(pairs)}


TREE = ((0, -1, 1), (1, 0, 0), (3, 1, 1), (4, 0, 1))
"""A turn, an observation, a turn, and another one after the first."""


def routed(plan: replay.RouterReplay, *, episodes: bool) -> tuple[list[Any], dict[bytes, bytes]]:
    """Groups with claims of random routes, which agree about a group's prompt, and these; ``episodes``: samples are trees."""
    generator, known, data = np.random.default_rng(0), dict[bytes, bytes](), []

    def drawn(tokens: int) -> Any:
        order = generator.random((tokens, plan.decoder_layers, plan.experts)).argsort(-1)
        return order[..., : plan.top_k].astype(np.uint8)

    for experience in test_update.batch(longer=3):
        prompt, samples = drawn(len(experience.group.prompt_token_ids)), list[Any]()
        for sample in experience.group.samples:
            claim = f"{experience.group_id} {len(samples)}".encode()
            payload = np.concatenate([prompt, drawn(len(sample.token_ids) - 1)]).tobytes()
            if episodes:
                tree = TREE if len(sample.token_ids) > TREE[-1][0] else TREE[:1]
                sample = dataclasses.replace(sample, segments=np.array(tree, np.int32))
                rows = np.concatenate([prompt[-1:], drawn(sample.sampled_tokens - 1)])
                turns = np.split(rows, (1, 2)) if tree is TREE else [rows]
                payload = routes.join([(len(own), own.tobytes()) for own in turns])
            known[claim] = payload
            samples.append(dataclasses.replace(sample, routes=claim))
        group = dataclasses.replace(experience.group, samples=tuple(samples))
        data.append(dataclasses.replace(experience, group=group))
    return data, known


def replayed(
    parallel: int, zero_stage: int = 1, *, is_lossy: bool = False, episodes: bool = False, **tables: Any
) -> dict[str, Any]:
    """Figures and weights of a step with random routes; ``is_lossy``: of which one sample's are lost and one's are another
    model's, and the figures of a step without any.
    """
    of = settings(parallel, zero_stage, **{**tables, "trainer": {"router_replay": True, **tables.get("trainer", {})}})
    model = adapter.add(tiny.mixture(0).requires_grad_(True), of.policy, zero_stage)
    policy = Policy(model, packing=of.trainer.packing).train()
    policy.trunk.replay = plan = replay.install(policy.model)
    trained, (data, known) = TrainingEngine(policy, of, "cpu"), routed(plan, episodes=episodes)
    learner = Learner(trained, of, Phases(), critic(of))
    if is_lossy:
        lost, wrong, *_ = known
        del known[lost]
        known[wrong] = known[wrong][1:]
    learner.offer(known if dist.get_rank() == 0 else {})
    measured = learner.learn(data, test_update.lags(data), 1)
    after, layout = weights(trained), learner.plan.layout if learner.plan else ""
    learner.offer({})
    live = learner.learn(data, test_update.lags(data), 2) if is_lossy else {}
    return {"measured": measured, "live": live, "weights": after, "layout": layout}


def refusals() -> list[str]:
    uneven = copy.deepcopy(tiny.mixture(0).config)
    uneven.num_experts = 3
    unknown = AutoModelForCausalLM.from_config(configurations()["granitemoeshared"]())
    wrapped = adapter.add(tiny.mixture(0), settings(2, rank=4).policy)
    models = [tiny.model(0), AutoModelForCausalLM.from_config(uneven), unknown, wrapped]
    return [_refusal(functools.partial(experts.install, model, 2, 1)) for model in models]


def pair(folder: Path) -> dict[str, Any]:
    """Scenes of two ranks, which share one copy of the experts."""
    scenes: dict[str, Any] = {}
    for name, stage in FAMILIES:
        scenes[f"{name}-{stage}"] = compared(name, stage)
    for stage in (1, 2, 3):
        scenes[f"published-{stage}"] = published(settings(2, stage))
        scenes[f"resumed-{stage}"] = resumed(settings(2, stage), folder / f"resumed-{stage}")
        scenes[f"adapted-{stage}"] = adapted(stage)
    for stage in (1, 3):
        scenes[f"self-test-{stage}"] = [self_tested(settings(2, stage), broken=broken) for broken in (False, True)]
    for stage, other, parallel in ((1, 3, 2), (3, 1, 2), (2, 2, 1), (3, 3, 1)):
        name = f"{stage} by {other} with {parallel}"
        scenes[name] = by_others(settings(parallel, other), folder / f"resumed-{stage}")
    scenes["resumed-offload"] = resumed(settings(2, 3, trainer={"offload": "all"}), folder / "resumed-offload")
    scenes["offload by 2 with 2"] = by_others(settings(2, 2), folder / "resumed-offload")
    for stage in (1, 3):
        path = folder / f"adapted-{stage}"
        scenes[f"resumed-adapters-{stage}"] = resumed(settings(2, stage, rank=4), path)
        scenes[f"adapters-{stage} by 2 with 1"] = by_others(settings(1, 2, rank=4), path)
        resumed(settings(1, stage), folder / f"whole-{stage}")
        scenes[f"whole {stage}"] = by_others(settings(2, stage), folder / f"whole-{stage}")
        scenes[f"four {stage}"] = by_others(settings(2, stage), folder.parent / "four" / f"resumed-{stage}")
    for stage, offload in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")):
        scenes[f"{offload}-{stage}"] = compared("qwen3_moe", stage, offload=offload)
    sums = {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}}
    scenes["published-bfloat16"] = published(settings(2, 2, dtype="bfloat16", trainer=sums))
    for packing in ("rows", "sequences"):
        of = [settings(*each, trainer={"packing": packing}) for each in ((1, 1), (2, 1), (2, 3))]
        scenes[packing] = [steps(each, tiny.mixture(0).requires_grad_(True)) for each in of]
    again = {"packing": "rows", "gradient_checkpointing": True}
    for stage in (1, 3):
        scenes[f"again-{stage}"] = steps(settings(2, stage, trainer=again), tiny.mixture(0).requires_grad_(True))
    for stage in (0, 1, 3):
        parallel, actor_critic = (2 if stage else 1), {"algorithm": ACTOR_CRITIC}
        scenes[f"critic-{stage}"] = steps(
            settings(parallel, stage or 1, **actor_critic), tiny.mixture(0).requires_grad_(True)
        )
        scenes[f"adamw_8bit-{stage}"] = of_8_bits(stage, folder / f"8-bit-{stage}") if stage else {}
    scenes["continued-critic"] = continued_critic(folder / "critic")
    scenes["replayed with a critic"] = [replayed(parallel, algorithm=ACTOR_CRITIC) for parallel in (1, 2)]
    scenes["replayed with adapters"] = [replayed(1, stage, rank=4) for stage in (1, 3)]
    scenes["replayed"], scenes["replayed in part"] = replayed(1), replayed(1, is_lossy=True)
    scenes["replayed episodes"] = replayed(1, episodes=True)
    for name, (parallel, stage, options) in REPLAYED.items():
        scenes[f"replayed {name}"] = replayed(parallel, stage, trainer=options)
        scenes[f"replayed episodes {name}"] = replayed(parallel, stage, trainer=options, episodes=True)
    scenes["imbalance"] = imbalance()
    scenes["travels"] = travels()
    scenes["refusals"] = refusals()
    return scenes


def four(folder: Path) -> dict[str, Any]:
    """Scenes of four ranks, two of which have the same experts."""
    return {
        **{f"qwen3_moe-{stage}": compared("qwen3_moe", stage) for stage in (1, 3)},
        **{f"published-{stage}": published(settings(2, stage)) for stage in (2, 3)},
        **{f"resumed-{stage}": resumed(settings(2, stage), folder / f"resumed-{stage}") for stage in (1, 3)},
        "held": held(settings(2, 3)),
    }


def worst(values: Any) -> Any:
    """Return the largest of all ranks' numbers."""
    if isinstance(values, dict) and values and all(isinstance(value, float) for value in values.values()):
        numbers = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return dict(zip(values, numbers.tolist(), strict=True))
    return values


def main(scenes_of: Callable[[Path], dict[str, Any]]) -> None:
    """Compute scenes on all ranks; rank 0 writes what they found into the folder of the command line."""
    folder = Path(sys.argv[1])
    start_ranks("cpu")
    torch.set_num_threads(1)
    with tolerance.smooth_adam():
        actual = {name: worst(scene) for name, scene in scenes_of(folder).items()}
    if dist.get_rank() == 0:
        torch.save(actual, folder / "found.pt")
        print(json.dumps(sorted(actual)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(lambda folder: (four if dist.get_world_size() == 4 else pair)(folder))
