"""Scenes of ranks that share experts, for ``tests/trainer/model/test_experts.py``, started once by the launcher because
imports take seconds. Rank 0 writes the results.
"""

import copy
import dataclasses
import functools
import json
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
from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.model import experts
from penstock.services.trainer.model.engine import TrainingEngine, place, saved_tensors
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.routing import replay
from penstock.services.trainer.phases import Phases
from penstock.services.trainer.rank_group import start_ranks
from penstock.services.trainer.self_test import self_test
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings
from tests.support import tiny, tolerance
from tests.support.model_configurations import configurations
from tests.support.packed import rows
from tests.trainer.algorithm import test_update

CLIPPED, RATE = 0.1, 1e-3
SHAPE = ((5, (4, 1, 6)), (9, (2, 2)), (1, (3,)))


def settings(parallel: int, zero_stage: int = 1, **tables: Any) -> Settings:
    return Settings.model_validate(
        {
            "run": {"id": "experts", "device": "cpu"},
            "policy": {"dtype": tables.get("dtype", "float32"), "model": "tiny"},
            "sampling": {"max_new_tokens": 8},
            "rollout": {"engine": "transformers"},
            "internal": {"probe_every_versions": 0},
            "algorithm": {"groups_per_step": 4},
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


def weights(of: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in of.tensors()}


def updated(of: TrainingEngine) -> dict[str, Any]:
    """Logprobs of this rank, gradient norm and weights after a step on other sequences on each rank."""
    ranks = [micro_batch(rows(rank, SHAPE)) for rank in range(of.ranks)]
    logprobs_N = of.forward(ranks[dist.get_rank()]).policy_logprobs_N
    count = sum(len(each.targets_N) for each in ranks)
    of.backward(logprobs_N.sum() / count * of.ranks, last=True)
    return {"logprobs": logprobs_N.detach(), "norm": of.step(RATE), "weights": weights(of)}


def expected(model: Any, ranks: int) -> dict[str, Any]:
    """The same, by transformers' experts and torch's AdamW, of all ranks' sequences."""
    policy, own = Policy(model).train(), dist.get_rank()
    parts = [policy(micro_batch(rows(rank, SHAPE))).policy_logprobs_N for rank in range(ranks)]
    (torch.cat(parts).sum() / len(torch.cat(parts))).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIPPED)
    torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0, eps=1e-4).step()
    return {"logprobs": parts[own].detach(), "norm": float(norm), "weights": dict(model.named_parameters())}


def compared(name: str) -> dict[str, float]:
    """Gaps between divided and whole experts of a family."""
    start = dict(family(name).named_parameters())
    ours = updated(engine(settings(2), family(name)))
    theirs = expected(family(name), dist.get_world_size())
    own = {key: tensor for key, tensor in ours["weights"].items() if key in start}
    moved = [
        tolerance.moved_apart(*[{key: of[key]} for of in (own, theirs["weights"], start)])
        for key in _moved(start, theirs)
    ]
    return {
        "logprobs": float((ours["logprobs"] - theirs["logprobs"]).abs().max()),
        "norm": abs(ours["norm"] / theirs["norm"] - 1),
        "weights": max(moved),
        "missing": float(len(start.keys() - ours["weights"].keys())),
    }


def _moved(start: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [key for key, tensor in start.items() if not torch.equal(tensor, theirs["weights"][key])]


def steps(of: Settings, model: Any) -> dict[str, Any]:
    """Figures of two steps of the algorithm, and the weights after them."""
    policy = engine(of, model)
    learner, data = Learner(policy, of, Phases()), test_update.batch(longer=3)
    return {
        "measured": [learner.learn(data, test_update.lags(data), step) for step in (1, 2)],
        "weights": weights(policy),
    }


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
    """A second step, by an engine and by one that loads its checkpoint; the checkpoint's tensors; refusals."""
    before, after = (engine(of, tiny.mixture(seed).requires_grad_(True)) for seed in (0, 1))
    updated(before)
    error = before.save(folder)().error
    dist.barrier()
    kept, saved = weights(before), saved_tensors(folder, of.trainer.zero_stage)
    after.load(folder)
    next_step, resumed_step = updated(before), updated(after)
    whole = engine(settings(1, of.trainer.zero_stage), tiny.mixture(0).requires_grad_(True))
    whole.save(folder / "whole")()
    dist.barrier()
    return {
        "error": error,
        "norms": next_step["norm"] == resumed_step["norm"],
        "other": [
            name
            for name, tensor in next_step["weights"].items()
            if not torch.equal(tensor, resumed_step["weights"][name])
        ],
        "unsaved": [name for name, tensor in kept.items() if not torch.equal(tensor, saved[name])],
        "refused": [
            _refusal(lambda: whole.load(folder)),
            _refusal(lambda: after.load(folder / "whole")),
            _refusal(lambda: after.load(folder, of_others=True)),
        ],
    }


def _refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except SettingsError as error:
        return str(error)
    return ""


def self_tested(*, broken: bool) -> str:
    """Why the self-test refuses divided experts, or ""."""
    policy = Policy(tiny.mixture(0).requires_grad_(True)).train()
    place(policy, settings(2), "cpu")
    exchange = experts._Divided._exchanged

    def wrong(*given: Any) -> torch.Tensor:
        return exchange(*given) * 1.05

    with mock.patch.object(experts._Divided, "_exchanged", wrong if broken else exchange):
        return _refusal(lambda: self_test.run(policy, "rows", 0, is_sharded=True))


def imbalance() -> tuple[float, float]:
    """The figure of a pass, and the same by transformers' routers."""
    ours, model, chosen = (
        engine(settings(2), tiny.mixture(0).requires_grad_(True)),
        tiny.mixture(0),
        list[torch.Tensor](),
    )

    def note(_: Any, given: Any) -> None:
        chosen.append(torch.bincount(given[1].flatten(), minlength=4))

    for module in model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module.register_forward_pre_hook(note)
    for rank in range(ours.ranks):
        Policy(model).eval()(micro_batch(rows(rank, SHAPE)))
    ours.evaluate(micro_batch(rows(dist.get_rank(), SHAPE)))
    layers = [sum(chosen[place::2]).double() for place in range(2)]  # type: ignore[union-attr]
    means = [float(of.max() / of.mean()) for of in layers]
    return experts.take_imbalance(ours.policy)["expert_imbalance"], sum(means) / len(means)


def replayed(parallel: int) -> dict[str, Any]:
    """Figures and weights of a step with random routes, of which one sample's are lost and one's are another model's."""
    policy = Policy(tiny.mixture(0).requires_grad_(True)).train()
    policy.trunk.replay = plan = replay.install(policy.model)
    of = settings(parallel, trainer={"router_replay": True})
    trained = TrainingEngine(policy, of, "cpu")
    learner, generator, known = Learner(trained, of, Phases()), np.random.default_rng(0), dict[bytes, bytes]()
    data = []
    for experience in test_update.batch(longer=3):
        samples: list[Any] = []
        for sample in experience.group.samples:
            positions = len(experience.group.prompt_token_ids) + len(sample.token_ids) - 1
            order = generator.random((positions, plan.decoder_layers, plan.experts)).argsort(-1)
            claim = f"{experience.group_id} {len(samples)}".encode()
            known[claim] = order[..., : plan.top_k].astype(np.uint8).tobytes()
            samples.append(dataclasses.replace(sample, routes=claim))
        group = dataclasses.replace(experience.group, samples=tuple(samples))
        data.append(dataclasses.replace(experience, group=group))
    lost, wrong, *_ = known
    del known[lost]
    known[wrong] = known[wrong][1:]
    learner.offer(known if dist.get_rank() == 0 else {})
    measured = learner.learn(data, test_update.lags(data), 1)
    layout, after = learner.plan.layout if learner.plan else "", weights(trained)
    learner.offer({})
    live = learner.learn(data, test_update.lags(data), 2)
    return {"measured": measured, "live": live, "weights": after, "layout": layout}


def refusals() -> list[str]:
    uneven = copy.deepcopy(tiny.mixture(0).config)
    uneven.num_experts = 3
    unknown = AutoModelForCausalLM.from_config(configurations()["granitemoeshared"]())
    models = [tiny.model(0), AutoModelForCausalLM.from_config(uneven), unknown]
    return [_refusal(functools.partial(experts.divide, model, 2)) for model in models]


def pair(folder: Path) -> dict[str, Any]:
    """Scenes of two ranks, which share one copy of the experts."""
    scenes: dict[str, Any] = {name: compared(name) for name in sorted(experts.PROVEN)}
    for stage in (1, 2):
        scenes[f"published-{stage}"] = published(settings(2, stage))
        scenes[f"resumed-{stage}"] = resumed(settings(2, stage), folder / f"resumed-{stage}")
    sums = {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}}
    scenes["published-bfloat16"] = published(settings(2, 2, dtype="bfloat16", trainer=sums))
    for packing in ("rows", "sequences"):
        of = [settings(parallel, trainer={"packing": packing}) for parallel in (1, 2)]
        scenes[packing] = [steps(each, tiny.mixture(0).requires_grad_(True)) for each in of]
    again = {"packing": "rows", "gradient_checkpointing": True}
    scenes["again"] = steps(settings(2, trainer=again), tiny.mixture(0).requires_grad_(True))
    scenes["replayed"] = [replayed(parallel) for parallel in (1, 2)]
    scenes["self-test"] = [self_tested(broken=broken) for broken in (False, True)]
    scenes["imbalance"] = imbalance()
    scenes["refusals"] = refusals()
    return scenes


def four(folder: Path) -> dict[str, Any]:
    """Scenes of four ranks, two of which have the same experts."""
    return {
        "qwen3_moe": compared("qwen3_moe"),
        "published": published(settings(2, 2)),
        "resumed": resumed(settings(2, 2), folder / "resumed"),
    }


def worst(values: Any) -> Any:
    """Return the largest of all ranks' numbers."""
    if isinstance(values, dict) and values and all(isinstance(value, float) for value in values.values()):
        numbers = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return dict(zip(values, numbers.tolist(), strict=True))
    return values


def main(folder: Path) -> None:
    start_ranks("cpu")
    torch.set_num_threads(1)
    scenes = four if dist.get_world_size() == 4 else pair
    with tolerance.smooth_adam():
        actual = {name: worst(scene) for name, scene in scenes(folder).items()}
    if dist.get_rank() == 0:
        torch.save(actual, folder / "found.pt")
        print(json.dumps(sorted(actual)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
