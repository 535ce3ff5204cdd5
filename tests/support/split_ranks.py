"""Scenes of four ranks that compute rows together, for ``tests/trainer/model/test_ulysses.py``; started once by the launcher.

    python -m tests.support.split_ranks FOLDER

Rank 0 writes what all measured to FOLDER/found.pt.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.batch import shards
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.layers import ulysses
from penstock.services.trainer.model.layers.attention import PackedLayout, decoder_of
from penstock.services.trainer.model.layers.attention_layout import CAUSAL, Pattern
from penstock.services.trainer.model.layers.attention_math import Extras
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.rank_group import start_ranks
from penstock.services.trainer.self_test import self_test
from penstock.shared.errors import SettingsError
from penstock.shared.model.rope import settle_rope
from penstock.shared.settings import Settings
from tests.support import model_configurations, model_page, model_zoo, tolerance, trainer_ranks, trees
from tests.support.trainer_ranks import Rank
from tests.trainer.algorithm import test_tree_steps, test_update

RANKS = 4
HEADS = 8
RUNS: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_stage": 0},
    "zero-1": {},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3, "trainer": trainer_ranks.CHUNKED},
    "one group in parts": {"zero_stage": 3, "trainer": {"micro_batch_tokens": 9, **trainer_ranks.CHUNKED}},
    "offload": {"zero_stage": 2, "trainer": {"offload": "optimizer"}},
    "four ranks a row": {"trainer": {"sequence_parallel": 4}},
    "recomputed layers": {"trainer": {"gradient_checkpointing": True}},
    "actor-critic": {"algorithm": trainer_ranks.ALGORITHMS["actor-critic"]},
    "dpo": {"algorithm": trainer_ranks.ALGORITHMS["dpo"], "trainer": {"micro_batch_tokens": 10}},
    "top-k": {"algorithm": trainer_ranks.ALGORITHMS["top-k"]},
    "gspo with an entropy bonus": {"algorithm": {"preset": "gspo", "entropy_bonus": 0.01}},
    "adapters": {"lora": trainer_ranks.LORA, "algorithm": {"kl": trainer_ranks.KL}},
    "short of memory": {"trainer": {"micro_batch_tokens": 9}},
    "episodes": {"batch": test_tree_steps.episodes, "trainer": {"micro_batch_tokens": 30}},
}
CAP = 7
"""Tokens of a forward pass: some samples are longer, others are not."""


def families() -> list[str]:
    return sorted(model_page.verdicts().rows)


def built(name: str) -> Policy:
    """Return a policy of the zoo with random weights, the same on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = model_configurations.configurations()[name]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model_zoo.randomise(model)
    settle_rope(model, 200)
    return Policy(model, packing="rows").train()


def gradients(module: Any, logprobs_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logprobs, and all gradients of a weighted sum of them in one row."""
    weights_N = torch.randn(len(logprobs_N), generator=torch.Generator().manual_seed(1))
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    results = torch.autograd.grad(logprobs_N @ weights_N, parameters, allow_unused=True)
    filled = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, results, strict=True)]
    return logprobs_N.detach(), torch.cat([gradient.flatten() for gradient in filled])


def apart(policy: Policy, rows: list[PackedRow], ranks: int) -> tuple[float, float]:
    """Return how far logprobs and gradients of a row in parts are from those of one rank: nats, and a share of the largest gradient."""
    batch = micro_batch(rows)
    whole_N, whole = gradients(policy, policy(batch).policy_logprobs_N)
    own = shards.split(batch, ranks)[ulysses.index(ranks)]
    part_N, parts = gradients(policy, policy(own).policy_logprobs_N)
    dist.all_reduce(parts, group=ulysses.group_of(ranks))
    nats = float((part_N - whole_N).abs().max()) if len(part_N) else 0.0
    return nats, float((parts - whole).abs().max() / whole.abs().max())


def of_family(name: str, ranks: int) -> str | tuple[float, float]:
    """Return the sentence that refuses it, or how far it is: shared prompts and trees, in one micro-batch."""
    try:
        policy = built(name)
        policy.trunk.check_shards(ranks)
    except SettingsError as error:
        return str(error)
    vocabulary = model_configurations.VOCABULARY
    rows = [
        *model_zoo.groups(model_zoo.LONG),
        trees.group(0, vocabulary, 40, samples=2),
        trees.group(1, vocabulary, 2, samples=1),
    ]
    return apart(policy, rows, ranks)


def attention(ranks: int) -> dict[str, float]:
    """Return how far outputs and gradients of attention are, relative to the largest, by heads, pattern and extras."""
    rows = [trees.group(0, 40, 12), *model_zoo.groups(model_zoo.SHORT)]
    part = shards.split(micro_batch(rows), ranks)[ulysses.index(ranks)].shard
    assert part is not None
    segments = part.part.segments
    tokens = int(segments.lengths_K.sum())
    patterns = (CAUSAL, Pattern("window", 12), Pattern("chunk", 16))
    results = {}
    for key_heads, pattern, extra in itertools.product((1, 2, 4, 8), patterns, ("", "sinks", "cap", "sinks and cap")):
        generator = torch.Generator().manual_seed(0)
        shapes = ((1, HEADS, tokens, 8), (1, key_heads, tokens, 8), (1, key_heads, tokens, 6), (HEADS,))
        inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        direction = torch.randn(1, tokens, HEADS, 6, generator=generator)
        computed = []
        for of in (1, ranks):
            sinks_H = inputs[3] if "sinks" in extra else None
            extras = Extras(softcap=1.5 if "cap" in extra else None, sinks_H=sinks_H)
            place = ulysses.index(of)
            q, k, v = (tensor.chunk(of, 2)[place] for tensor in inputs[:3])
            out = PackedLayout(segments, "mask", torch.device("cpu"), of).attend(q, k, v, pattern, extras)
            grads = torch.autograd.grad((out * direction.chunk(of, 1)[place]).sum(), inputs, allow_unused=True)
            filled = [
                torch.zeros_like(i) if grad is None else grad.contiguous()
                for i, grad in zip(inputs, grads, strict=True)
            ]
            whole = torch.zeros(direction.shape)
            whole.chunk(of, 1)[place].copy_(out.detach())
            for tensor in (whole, *filled) if of > 1 else ():
                dist.all_reduce(tensor, group=ulysses.group_of(of))
            computed.append([whole, *filled])
        pairs = [(a, b) for a, b in zip(*computed, strict=True) if bool(a.any())]
        largest = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        results[f"{key_heads} {pattern.kind} {extra}"] = largest
    return results


def of_critic(ranks: int) -> float:
    """Return how far a critic's values and gradients are."""
    torch.manual_seed(0)
    trunk = decoder_of(built("qwen3").model)
    critic = Critic(trunk, 64).train()
    torch.nn.init.normal_(critic.value_head.weight)
    return max(apart_of_values(critic, micro_batch(model_zoo.groups(model_zoo.LONG)), ranks))


def apart_of_values(critic: Critic, batch: Any, ranks: int) -> tuple[float, float]:
    whole_N, whole = gradients(critic, critic(batch))
    part_N, parts = gradients(critic, critic(shards.split(batch, ranks)[ulysses.index(ranks)]))
    dist.all_reduce(parts, group=ulysses.group_of(ranks))
    values = float((part_N - whole_N).abs().max() / whole_N.abs().max()) if len(part_N) else 0.0
    return values, float((parts - whole).abs().max() / whole.abs().max())


def settings(name: str) -> Settings:
    tables = {name: value for name, value in RUNS[name].items() if name not in ("batch", "zero_stage")}
    tables["trainer"] = {"sequence_parallel": 2, "micro_batch_tokens": CAP, **tables.get("trainer", {})}
    return trainer_ranks.settings(RUNS[name].get("zero_stage", 1), RANKS, **tables)


def steps(name: str) -> dict[str, Any]:
    """Two steps, and how many of this rank's forward passes with a gradient were of a row in parts, and of rows of its own."""
    passes, forward = [0, 0], Policy.forward

    def counted(self: Policy, batch: MicroBatch) -> Any:
        passes[batch.shard is None] += torch.is_grad_enabled()
        return forward(self, batch)

    with mock.patch.object(Policy, "forward", counted):
        made = trainer_ranks.two_steps(settings(name), trainer_ranks.LONGER, RUNS[name].get("batch", test_update.batch))
    return {**made, "passes": gathered(passes)}


def without_memory() -> dict[str, Any]:
    """A step in which rank 3 has no memory for two samples of its own, and its replay; then one in which none has
    memory for a row in parts.
    """
    rank, replayed, forward = Rank(settings("short of memory")), Rank(settings("short of memory")), Policy.forward

    def tight(self: Policy, batch: MicroBatch) -> Any:
        if torch.is_grad_enabled() and dist.get_rank() == 3 and batch.shard is None and len(batch.places_S) > 1:
            raise torch.OutOfMemoryError("no memory")
        return forward(self, batch)

    def tighter(self: Policy, batch: MicroBatch) -> Any:
        if torch.is_grad_enabled() and batch.shard is not None:
            raise torch.OutOfMemoryError("no memory for a part")
        return forward(self, batch)

    with mock.patch.object(Policy, "forward", tight):
        made = {"measured": [rank.learn(1, trainer_ranks.LONGER)], "weights": rank.weights()}
    replayed.learn(1, trainer_ranks.LONGER, rank.plan)
    together = Rank(settings("four ranks a row"))
    with mock.patch.object(Policy, "forward", tighter):
        try:
            together.learn(1, trainer_ranks.LONGER)
        except torch.OutOfMemoryError as error:
            made["ended"] = str(error)
    same = rank.plan == replayed.plan
    return {**made, "replayed": replayed.weights(), "same plan": same}


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, value)
    return every


@contextlib.contextmanager
def refusals() -> Iterator[list[str]]:
    said: list[str] = []
    try:
        yield said
    except SettingsError as error:
        said.append(str(error))


def started() -> dict[str, Any]:
    """Return what self-tests say that compare a row in parts: of a right one, and of one with its heads in a wrong order."""
    tested = self_test.run(built("qwen3"), "auto", sequence_parallel=2)
    with mock.patch.object(self_test, "_ROOM_BYTES", 0):  # others may leave less
        half = self_test.run(built("qwen3").to(torch.bfloat16), "auto", sequence_parallel=2)
    assert half.widened is not None
    said: dict[str, Any] = {"right": [*dataclasses.astuple(tested.gap), *dataclasses.astuple(half.widened)]}
    exchange = ulysses.to_tokens
    with refusals() as said["wrong"]:
        ulysses.to_tokens = lambda ranks, out_THD: exchange(ranks, out_THD).roll(1, 1)
        try:
            self_test.run(built("qwen3"), "auto", sequence_parallel=2)
        finally:
            ulysses.to_tokens = exchange
    return said


def main(folder: Path) -> None:
    start_ranks("cpu")
    torch.set_num_threads(1)
    for ranks in (2, RANKS):
        ulysses.group_of(ranks)
    results: dict[str, Any] = {"attention": attention(RANKS), "critic": of_critic(2), "started": started()}
    results["families"] = {name: of_family(name, 2) for name in families()[dist.get_rank() // 2 :: 2]}
    results["four"] = {
        name: of_family(name, RANKS) for name in ("qwen3", "gpt_oss", "gemma2+swa(short)", "deepseek_v3")
    }
    with tolerance.smooth_adam():
        results["steps"] = {name: steps(name) for name in RUNS if name != "short of memory"}
        results["memory"] = without_memory()
    every = gathered({name: results[name] for name in ("attention", "critic", "families", "four")})
    if dist.get_rank() == 0:
        torch.save({**results, "ranks": every}, folder / "found.pt")
        print(json.dumps(sorted(results)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
