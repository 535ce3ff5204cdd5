"""Make the tiny coding policy and its problems: everything else in this folder comes from here.

    python -m examples.code.make

A problem describes a small formula in words and asks for a Python function, or for a program that reads its numbers from
standard input. Its tests are made here by evaluating the right formula. Read ``examples/arithmetic/make.py`` first: the policy is
made as there, with fewer layers. In the order of this file:

1. the problems, with their tests in two of the shapes that the code scorer reads;
2. the pupil, who knows Python but mostly forgets parentheses, or takes a subtraction the wrong way round;
3. the tokenizer: that of the arithmetic example, and merges learned from the pupil's texts, a word a token;
4. the warm start: the policy imitates the pupil, so that it writes right programs now and then.

The same seed, machine and library versions give the same files. This script does no reinforcement learning.

Shapes: B problems, T tokens, V = 4 ways to slip or not.
"""

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from examples.arithmetic.make import EOS, IGNORED_LABEL, build_policy, build_tokenizer, supervised_step

MAX_POSITIONS = 64
LAYERS = 2
TEST_INPUTS = ((2, 3), (7, -4), (0, 11), (-5, -9))
"""No slip gives the right results on all of them."""

FIRST = {"plus": "a + b", "minus": "a - b", "times": "a * b", "taken from": "b - a"}
SECOND = {"plus": "{} + {c}", "times": "{} * {c}", "modulo": "{} % {c}", "taken from": "{c} - {}"}
REVERSED = {"b - a": "a - b", "{c} - {}": "{} - {c}"}


# 1. and 2. the problems, and the pupil who answers them


@dataclass(frozen=True)
class Problem:
    """One formula: ``a`` ``first`` ``b``, then ``second`` ``c``; wanted as a ``function`` or else as a program."""

    first: str
    second: str
    c: int
    function: bool

    @property
    def prompt(self) -> str:
        """What the policy is asked."""
        asked = "f" if self.function else "program"
        return f"{asked}: a {self.first} b, {self.second} {self.c}\n"

    def row(self) -> dict[str, object]:
        """Return the line of the data files."""
        results = [(a, b, eval(self.formula(), {"a": a, "b": b})) for a, b in TEST_INPUTS]
        if self.function:
            return {"prompt": self.prompt, "tests": [f"assert f({a}, {b}) == {result}" for a, b, result in results]}
        tests = [{"input": f"{a} {b}\n", "output": f"{result}\n"} for a, b, result in results]
        return {"prompt": self.prompt, "tests": tests}

    def formula(self, forget: bool = False, reverse: bool = False) -> str:
        """Return the formula in Python as a person writes it who forgets parentheses, or reverses "taken from"."""
        first, second = FIRST[self.first], SECOND[self.second]
        if reverse:
            first, second = REVERSED.get(first, first), REVERSED.get(second, second)
        bound_less_tightly = "*" not in first and second != "{} + {c}"
        return second.format(f"({first})" if bound_less_tightly and not forget else first, c=self.c)

    def completion(self, forget: bool = False, reverse: bool = False) -> str:
        """Return the answer with that formula, in a fenced block."""
        formula = self.formula(forget, reverse)
        if self.function:
            return f"```python\ndef f(a, b):\n    return {formula}\n```"
        return f"```python\na, b = map(int, input().split())\nprint({formula})\n```"


def split_problems(seed: int, heldout_formulas: int = 100) -> tuple[list[Problem], list[Problem]]:
    """Return the (train, held-out) problems, shuffled; no formula is in both, and each has at least one slip."""
    rng = random.Random(seed)
    formulas = [
        (first, second, c)
        for first, second, c in itertools.product(FIRST, SECOND, range(2, 100))
        if slips(Problem(first, second, c, function=True))
    ]
    rng.shuffle(formulas)
    problems = [[Problem(*formula, function) for function in (True, False)] for formula in formulas]
    heldout = list(itertools.chain(*problems[:heldout_formulas]))
    train = list(itertools.chain(*problems[heldout_formulas:]))
    rng.shuffle(train)
    return train, heldout


def slips(problem: Problem) -> bool:
    """Whether each slip that shows in the text shows in some test's result, and at least one does."""
    ways = {problem.formula(bool(v & 1), bool(v & 2)) for v in range(4)}
    results = {way: [eval(way, {"a": a, "b": b}) for a, b in TEST_INPUTS] for way in ways}
    right = results.pop(problem.formula())
    return bool(results) and right not in results.values()


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems))


# 3. the tokenizer


def learn_tokenizer(problems: Sequence[Problem]) -> Qwen2Tokenizer:
    """Return a byte-level tokenizer that has a token for each word of the pupil's; any other text it spells out."""
    texts = [problem.prompt + problem.completion(bool(v & 1), bool(v & 2)) for problem in problems for v in range(4)]
    learned = build_tokenizer(MAX_POSITIONS).train_new_from_iterator(texts, vocab_size=512)  # fewer: there are no more
    assert isinstance(learned, Qwen2Tokenizer)
    return learned


# 4. the warm start


@dataclass(frozen=True)
class WarmStart:
    """How the policy imitates the pupil: for ``steps``, at a rate that rises for a while and then falls to nothing.

    In the end the pupil's four ways to write must have together ``enough`` of its probability, on problems set aside.
    """

    slip_probability: float = 0.55
    batch_problems: int = 32
    learning_rate: float = 2.5e-3
    ramp_steps: int = 30
    steps: int = 300
    evaluate_every_steps: int = 100
    validation_problems: int = 64
    enough: float = 0.8


def encode(tokenizer: Qwen2Tokenizer, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens_VBT, labels_VBT); way v forgets parentheses if v & 1 and reverses if v & 2. The labels leave out
    the prompt and the padding."""
    asked = [problem.prompt for _ in range(4) for problem in problems]
    answers = [problem.completion(bool(v & 1), bool(v & 2)) + EOS for v in range(4) for problem in problems]
    texts = [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]
    tokens = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    prompt_tokens = torch.tensor([len(ids) for ids in tokenizer(asked)["input_ids"]])
    is_prompt = torch.arange(tokens.shape[1]) < prompt_tokens[:, None]
    labels = tokens.masked_fill(is_prompt | (tokens == tokenizer.pad_token_id), IGNORED_LABEL)
    return tokens.view(4, len(problems), -1), labels.view(4, len(problems), -1)


@torch.no_grad()
def probabilities(
    policy: Qwen2ForCausalLM, tokens_VBT: torch.Tensor, labels_VBT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (right_B, pupil_B): the probability of the right text, and of all texts of the pupil together.

    Other texts that are right count for nothing; the pupil writes none.
    """
    V, B, T = tokens_VBT.shape
    tokens, labels = tokens_VBT.view(V * B, T), labels_VBT.view(V * B, T)
    logits = policy(tokens[:, :-1]).logits
    nats = functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none").sum(-1)
    probability_VB = torch.exp(-nats).view(V, B)
    same_VVB = (labels_VBT[:, None] == labels_VBT[None]).all(-1)
    copies_VB = same_VVB.sum(1)  # a way in which nothing slips writes what another writes
    return probability_VB[0], (probability_VB / copies_VB).sum(0)


def warm_start(
    policy: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, train: Sequence[Problem], settings: WarmStart
) -> None:
    """Train the policy in place to write what the pupil writes.

    Raises:
        RuntimeError: it does not.
    """
    aside, practised = train[: settings.validation_problems], train[settings.validation_problems :]
    validation = encode(tokenizer, aside)
    tokens_VBT, labels_VBT = encode(tokenizer, practised)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, settings.steps + 1):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * min(
            step / settings.ramp_steps, 1 - step / settings.steps
        )
        problem_B = torch.randint(len(practised), (settings.batch_problems,))
        slips_2B = torch.rand(2, settings.batch_problems) < settings.slip_probability
        way_B = slips_2B[0] + 2 * slips_2B[1]
        supervised_step(policy, optimizer, tokens_VBT[way_B, problem_B], labels_VBT[way_B, problem_B])
        if step % settings.evaluate_every_steps == 0:
            right_B, pupil_B = probabilities(policy, *validation)
            print(f"step {step}: right {right_B.mean():.3f}, the pupil's {pupil_B.mean():.3f}", flush=True)
    if pupil_B.mean() < settings.enough:
        raise RuntimeError(
            f"expected the pupil's texts to have a probability of {settings.enough} after {settings.steps} steps, found "
            f"{pupil_B.mean():.3f}; change WarmStart or the seed"
        )


def main() -> None:
    """Write `train.jsonl`, `heldout.jsonl` and `policy/`."""
    parser = argparse.ArgumentParser(description="make the tiny coding policy and its problems")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the weights and the warm start")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_problems(arguments.seed)
    write_problems(arguments.out / "train.jsonl", train)
    write_problems(arguments.out / "heldout.jsonl", heldout)

    torch.set_num_threads(1)  # the order of sums, and so the weights, depend on the number of threads
    torch.manual_seed(arguments.seed)
    tokenizer = learn_tokenizer(train)
    policy = build_policy(tokenizer, LAYERS)
    warm_start(policy, tokenizer, train, WarmStart())
    right_B, pupil_B = probabilities(policy, *encode(tokenizer, heldout))
    print(f"held-out: right {right_B.mean():.3f}, the pupil's {pupil_B.mean():.3f}")
    policy.save_pretrained(arguments.out / "policy")
    tokenizer.save_pretrained(arguments.out / "policy")


if __name__ == "__main__":
    main()
