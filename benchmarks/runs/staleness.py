"""What each preset learns from samples that are 0, 4 and 8 steps old, on two tasks, with several seeds.

    python -m benchmarks.runs.staleness --jobs 16 --out cells.jsonl          # a GPU or CPUs; a second call continues
    python -m benchmarks.runs.staleness --table cells.jsonl                  # docs/algorithms.md, "Choosing a preset"

A *cell* is one training: a preset (or a variant of one), a lag, a task and a seed. Every sample of a step is drawn by
the policy of ``lag`` steps before, advantages, losses and updates are the trainer's own (``Learner``), and problems and
settings are the same in all cells. There is no bus and no overlap, so the lag is exact. A cell's figure is the mean
probability of the right completion over the held-out problems, which is what sampled accuracy estimates.

arithmetic  two-digit additions, completions of 3 or 4 tokens (examples/arithmetic)
code        Python functions and programs, completions of 20 to 27 tokens (examples/code); right is the text of the
            right formula, so that nothing is executed

Needs torch, transformers and pydantic, and no DeepSpeed. Prints a JSON line per cell, then one JSON object.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from penstock.services.trainer.algorithm.advantages import has_signal, shaped_rewards
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.optimizer import adamw
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.phases import Phases
from penstock.shared.bus.messages import (
    Experience,
    FinishReason,
    GroupId,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    Sample,
    SampleScores,
    Sampling,
    Score,
    ScoreStatus,
)
from penstock.shared.settings import Settings
from penstock.shared.settings.algorithm import Preset

ROOT = Path(__file__).parents[2]
LEARNING_RATE, WARMUP_STEPS = 4e-4, 5
"""Those of both examples."""
RECOMMENDED = "dapo"
"""What docs/algorithms.md recommends at every lag; the last line says how far it is behind the best."""
_DRAWS = 4
"""Rounds of groups drawn for a step with dynamic sampling."""

TUNED: Mapping[str, Mapping[str, Any]] = {
    "gspo": {"clip": (0.2, 0.28)},
    "dapo": {"overlong": (0.0, 1.0)},
    "ppo": {"critic": {"learning_rate": 1e-3}},
}
"""Overrides for a small model; GSPO's bounds assume steps a thousand times smaller, and DAPO's buffer, a fifth
of 4 tokens, has no token."""
NEAR = (0.8, 1.2)
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    **{preset: {"preset": preset, **TUNED.get(preset, {})} for preset in get_args(Preset)},
    "grpo, clip 0.28": {"preset": "grpo", "clip": (0.2, 0.28)},
    "grpo, dynamic sampling": {"preset": "grpo", "dynamic_sampling": True},
    "grpo, two minibatches": {"preset": "grpo", "minibatches": 2},
    "grpo, dual clip 2": {"preset": "grpo", "clip": (0.2, 0.2, 2.0)},
    "tis, mask 0.8 … 1.2": {"preset": "tis", "correction": "token_mask", "correction_band": NEAR},
    "decoupled_ppo, mask 0.8 … 1.2": {"preset": "decoupled_ppo", "correction": "token_mask", "correction_band": NEAR},
    "reinforce, mask 0.8 … 1.2": {"preset": "reinforce", "correction": "token_mask", "correction_band": NEAR},
    "tis, ignored": {"preset": "tis", "correction": "ignored"},
}
"""Presets, and others. With one update a step the policy is the recomputed proximal, so a mask of ``tis`` is one on the
total ratio of policy to behavior; that of ``reinforce`` always is. ``grpo`` with a dual clip of 2 is ``tis`` with a
clip on the total ratio. ``ignored``: no correction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One training."""

    task: str
    variant: str
    lag: int
    seed: int
    steps: int
    device: str


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Problems as (prompt, right completion), and the work of a step."""

    model: Path
    train: Sequence[tuple[str, str]]
    held_out: Sequence[tuple[str, str]]
    new_tokens: int
    groups: int
    samples: int


@functools.cache
def task(name: str) -> Task:
    """Return ``arithmetic`` or ``code``."""
    folder = ROOT / "examples" / name
    if name == "arithmetic":
        train, held_out = (_lines(folder / f"{part}.jsonl") for part in ("train", "heldout"))
        return Task(folder / "policy", train, held_out, new_tokens=4, groups=16, samples=16)
    from examples.code.make import split_problems

    train, held_out = ([(each.prompt, each.completion()) for each in part] for part in split_problems(seed=0))
    return Task(folder / "policy", train, held_out, new_tokens=32, groups=16, samples=8)


def _lines(path: Path) -> list[tuple[str, str]]:
    return [(row["prompt"], row["answer"]) for row in map(json.loads, path.read_text().splitlines())]


class PlainEngine(TrainingEngine):
    """The trainer's engine on one device without DeepSpeed."""

    def __init__(self, policy: torch.nn.Module, settings: Settings, device: str) -> None:
        self.ranks, self.device, self.policy, self._sharded = 1, torch.device(device), policy.to(device), False
        self._most = settings.trainer.max_grad_norm
        self._optimizer = adamw(list(policy.parameters()), settings.trainer, device)

    def forward(self, batch: Any) -> Any:
        return self.policy(batch)

    def evaluate(self, batch: object) -> Any:
        with torch.no_grad():
            return self.policy(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        del last
        torch.autograd.backward(loss)

    def step(self, learning_rate: float) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._most))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm


class Actor:
    """Draws and judges completions. ``B`` rows, ``T`` tokens, ``V`` vocabulary."""

    def __init__(self, of: Task, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(of.model)
        self.model = AutoModelForCausalLM.from_pretrained(of.model, dtype=torch.float32).to(device).eval()
        self._of, self._device = of, device

    @torch.no_grad()
    def right(self) -> float:
        """Return the mean probability of the right completion of the held-out problems."""
        prompts = [self.tokenizer(prompt)["input_ids"] for prompt, _ in self._of.held_out]
        ends = [self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id] for _, text in self._of.held_out]
        whole = [[*prompt, *end] for prompt, end in zip(prompts, ends, strict=True)]
        width = max(map(len, whole))
        ids_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in whole], device=self._device)
        logprobs_BT = self.model(ids_BT).logits[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
        place_T = torch.arange(1, width, device=self._device)
        first_B, end_B = (torch.tensor([*map(len, each)], device=self._device)[:, None] for each in (prompts, whole))
        return float((logprobs_BT * ((place_T >= first_B) & (place_T < end_B))).sum(-1).exp().mean())

    @torch.no_grad()
    def draw(self, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tokens and logprobs (each B × T, after the end anything), ``samples`` rows of each prompt."""
        width, copies = max(map(len, prompts)), self._of.samples
        ids_BT = torch.tensor([[0] * (width - len(ids)) + [*ids] for ids in prompts], device=self._device)
        lengths_B = torch.tensor([len(ids) for ids in prompts], device=self._device)
        seen_BT = (torch.arange(width, device=self._device) >= width - lengths_B[:, None]).long()
        out = self.model(
            ids_BT, attention_mask=seen_BT, position_ids=(seen_BT.cumsum(-1) - 1).clamp(min=0), use_cache=True
        )
        cache = out.past_key_values
        cache.batch_repeat_interleave(copies)
        seen_BT, next_B = seen_BT.repeat_interleave(copies, 0), lengths_B.repeat_interleave(copies)
        logits_BV, tokens, logprobs = out.logits[:, -1].repeat_interleave(copies, 0), [], []
        for _ in range(self._of.new_tokens):
            logprobs_BV = logits_BV.float().log_softmax(-1)
            token_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
            tokens.append(token_B1)
            logprobs.append(logprobs_BV.gather(-1, token_B1))
            if len(tokens) < self._of.new_tokens:
                seen_BT = torch.cat([seen_BT, torch.ones_like(token_B1)], -1)
                out = self.model(
                    token_B1,
                    attention_mask=seen_BT,
                    position_ids=next_B[:, None],
                    past_key_values=cache,
                    use_cache=True,
                )
                logits_BV, next_B = out.logits[:, -1], next_B + 1
        return torch.cat(tokens, -1), torch.cat(logprobs, -1)

    def groups(self, problems: Sequence[int], version: int, generator: torch.Generator) -> list[Experience]:
        """Return scored groups of the problems."""
        prompts = [self.tokenizer(self._of.train[problem][0])["input_ids"] for problem in problems]
        tokens_BT, logprobs_BT = (each.cpu().numpy() for each in self.draw(prompts, generator))
        groups = []
        for place, (problem, ids) in enumerate(zip(problems, prompts, strict=True)):
            rows = slice(place * self._of.samples, (place + 1) * self._of.samples)
            samples = [self._sample(*row, version) for row in zip(tokens_BT[rows], logprobs_BT[rows], strict=True)]
            groups.append(_scored(problem, ids, samples, self._of))
        return groups

    def _sample(self, tokens: Any, logprobs: Any, version: int) -> Sample:
        ends = np.flatnonzero(tokens == self.tokenizer.eos_token_id)
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        text = self.tokenizer.decode(tokens[: length - 1] if len(ends) else tokens)
        reason = FinishReason.STOP if len(ends) else FinishReason.LENGTH
        whole = tokens[:length].astype(np.int32), logprobs[:length].astype(np.float32)
        return Sample(*whole, np.array([[0, version]], dtype=np.int32), reason, text)


def _scored(problem: int, ids: Sequence[int], samples: Sequence[Sample], of: Task) -> Experience:
    right = [each.finish_reason is FinishReason.STOP and each.text == of.train[problem][1] for each in samples]
    sampling, (asked, answer) = Sampling(of.samples, of.new_tokens, 1.0), of.train[problem]
    prompt = Prompt(GroupId(problem), f"train:{problem}", sampling, asked, answer=answer)
    group = RolloutGroup(prompt, np.array(ids, dtype=np.int32), tuple(samples), "actor", 0.0, 0.0)
    scores = tuple(SampleScores((Score("right", ScoreStatus.OK, float(each)),)) for each in right)
    return Experience(group, np.array(right, dtype=np.float32), scores, 0.0, 0.0)


def settings(cell: Cell, of: Task) -> Settings:
    """Return a run's settings."""
    return Settings.model_validate(
        {
            "run": {"seed": cell.seed, "steps": cell.steps, "device": cell.device},
            "policy": {"model": str(of.model), "dtype": "float32"},
            "sampling": {"group_size": of.samples, "max_new_tokens": of.new_tokens, "temperature": 1.0},
            "algorithm": {"groups_per_step": of.groups, "max_lag": cell.lag, **VARIANTS[cell.variant]},
            "trainer": {"learning_rate": LEARNING_RATE, "warmup_steps": WARMUP_STEPS, "adam_betas": (0.9, 0.95)},
        }
    )


def learner(run: Settings, actor: Actor) -> tuple[PlainEngine, Learner]:
    """Return the trained policy's engine, and its learner with critic and reference as needed."""
    algorithm, device = run.algorithm, run.run.device
    model = copy.deepcopy(actor.model).train()
    policy = Policy(model, kind="mask", fused_logits=False, entropy_gradient=algorithm.entropy_bonus > 0).train()
    critic = reference = None
    if algorithm.needs_critic:
        critic = PlainEngine(
            Critic(copy.deepcopy(actor.model).get_decoder(), model.config.hidden_size, kind="mask"), run, device
        )
    if algorithm.needs_reference:
        reference = Policy(copy.deepcopy(actor.model), kind="mask", fused_logits=False).eval().requires_grad_(False)
    engine = PlainEngine(policy, run, device)
    return engine, Learner(engine, run, Phases(), critic, reference)


def train(cell: Cell) -> dict[str, Any]:
    """Return a cell's figures."""
    started_s, of = time.perf_counter(), task(cell.task)
    actor, run = Actor(of, cell.device), settings(cell, of)
    torch.manual_seed(cell.seed)
    engine, learns = learner(run, actor)
    before, versions, rows = actor.right(), deque([_copy(engine)], maxlen=cell.lag + 1), []
    for step in range(1, cell.steps + 1):
        version = step - len(versions)
        actor.model.load_state_dict(versions[0])
        batch, drawn = _batch(actor, run, step, version)
        rows.append(learns.learn(batch, {PolicyVersion(version): step - 1 - version}, step))
        rows[-1] |= {"reward": float(np.mean([group.rewards.mean() for group in batch])), "drawn": drawn / len(batch)}
        versions.append(_copy(engine))
    actor.model.load_state_dict(versions[-1])
    names = ("reward", "drawn", "kl_mean", "ess", "clip_fraction", "masked_fraction", "entropy", "grad_norm")
    figures = {name: round(statistics.fmean(row[name] for row in rows), 5) for name in names}
    right = {"before": round(before, 4), "after": round(actor.right(), 4)}
    return {**dataclasses.asdict(cell), **right, **figures, "seconds": round(time.perf_counter() - started_s, 1)}


def _copy(engine: PlainEngine) -> dict[str, Tensor]:
    policy: Any = engine.policy
    return {name: tensor.detach().clone() for name, tensor in policy.model.state_dict().items()}


def _batch(actor: Actor, run: Settings, step: int, version: int) -> tuple[list[Experience], int]:
    """Return the groups of a step, with dynamic sampling those with signal, and how many were drawn."""
    needed, algorithm, kept = run.algorithm.groups_per_step, run.algorithm, list[Experience]()
    lot, generator = np.random.default_rng([run.run.seed, step]), torch.Generator(run.run.device)
    generator.manual_seed(int(lot.integers(1 << 62)))
    order, rounds = lot.permutation(len(task_of(run).train)), _DRAWS if algorithm.dynamic_sampling else 1
    for first in range(0, rounds * needed, needed):
        drawn = actor.groups(order[first : first + needed].tolist(), version, generator)
        for place, group in enumerate(drawn, start=1):
            if rounds == 1 or has_signal(shaped_rewards(group, algorithm)):
                kept.append(group)
            if len(kept) == needed:
                return kept, first + place
    return (kept + drawn)[:needed], rounds * needed


def task_of(run: Settings) -> Task:
    """Return the task of a run, by its policy."""
    return task(Path(run.policy.model).parent.name)


def _begin() -> None:
    """Make a process one rank, with one thread."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def results(cells: Sequence[Cell], jobs: int, limit_s: float) -> Iterable[dict[str, Any]]:
    """Yield the figures of the cells that end within ``limit_s``, as they end."""
    until_s, spawned = time.monotonic() + limit_s, multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawned, initializer=_begin) as pool:
        waiting = {pool.submit(train, cell) for cell in cells}
        while waiting:
            done, waiting = concurrent.futures.wait(
                waiting, max(0.0, until_s - time.monotonic()), concurrent.futures.FIRST_COMPLETED
            )
            yield from (each.result() for each in done)
            if not done:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()
                return


Means = Mapping[tuple[str, int], Mapping[str, list[float]]]


def by_place(rows: Iterable[Mapping[str, Any]]) -> Means:
    """Return the figures of all seeds by (task, lag) and variant."""
    means: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row["seed"]):
        means[row["task"], row["lag"]][row["variant"]].append(row["after"])
    return means


def behind(means: Means, variant: str) -> dict[str, float]:
    """Return how far a variant's mean is behind the best one's, by task and lag.

    >>> behind({("code", 4): {"grpo": [0.5, 0.7], "tis": [0.65]}}, "grpo")
    {'code, lag 4': 0.05}
    """
    return {
        f"{name}, lag {lag}": round(max(map(statistics.fmean, each.values())) - statistics.fmean(each[variant]), 4)
        for (name, lag), each in sorted(means.items())
        if variant in each
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table: the mean of the seeds, and their range; the best of a column is bold."""
    means = by_place(rows)
    places = sorted(means)
    best = {place: max(map(statistics.fmean, means[place].values())) for place in places}
    lines = [
        "| | " + " | ".join(f"{name}, lag {lag}" for name, lag in places) + " | largest shortfall |",
        "| --- |" + " --- |" * (len(places) + 1),
    ]
    for variant in (each for each in VARIANTS if any(each in of_place for of_place in means.values())):
        shown = [_shown(means[place].get(variant, []), best[place]) for place in places]
        worst = max(behind(means, variant).values())
        name, _, change = variant.partition(", ")
        lines.append(f"| `{name}`{', ' * bool(change)}{change} | {' | '.join(shown)} | {worst:.3f} |")
    return "\n".join(lines)


def _shown(values: Sequence[float], best: float) -> str:
    if not values:
        return "–"
    mean = statistics.fmean(values)
    bold = "**" * (mean == best)
    return f"{bold}{mean:.3f}{bold} ({min(values):.3f}–{max(values):.3f})"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the cells of an ``--out`` file, of a whole output, of its last object, or of a results file."""
    if not path.exists():
        return []
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"')] or [json.loads(text)]
    cells = [cell for row in rows for cell in row.get("cells", [row])]
    return list({tuple(cell[name] for name in ("task", "variant", "lag", "seed")): cell for cell in cells}.values())


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", default="arithmetic,code")
    parser.add_argument("--lags", default="0,4,8")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by semicolons")
    parser.add_argument("--limit-s", type=float, default=100_000.0, help="seconds after which the rest is left out")
    parser.add_argument("--out", type=Path, help="add each cell here, and leave out those that it has")
    parser.add_argument("--table", type=Path, help="print this file's table only")
    return parser.parse_args()


def main() -> None:
    """Train all cells and print."""
    arguments = parse()
    if arguments.table:
        print(table(read(arguments.table)))
        return
    done = read(arguments.out) if arguments.out else []
    known = {Cell(**{field.name: cell[field.name] for field in dataclasses.fields(Cell)}) for cell in done}
    cells = [
        Cell(name, variant, int(lag), int(seed), arguments.steps, arguments.device)
        for seed in arguments.seeds.split(",")
        for lag in arguments.lags.split(",")
        for variant in arguments.variants.split(";")
        for name in arguments.tasks.split(",")
    ]
    started_s = time.perf_counter()
    for row in results([cell for cell in cells if cell not in known], arguments.jobs, arguments.limit_s):
        done.append(row)
        print(json.dumps(row), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{os.cpu_count()} cores"
    said = {"benchmark": "staleness", "hardware": hardware, "torch": torch.__version__, "jobs": arguments.jobs}
    spent = {"seconds": round(time.perf_counter() - started_s, 1), "missing": len(cells) - len(done)}
    print(json.dumps({**said, **spent, "behind_best": behind(by_place(done), RECOMMENDED), "cells": done}))


if __name__ == "__main__":
    main()
