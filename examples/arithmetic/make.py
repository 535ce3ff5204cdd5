"""Make the tiny arithmetic policy and its problems: everything else in this folder comes from here.

    python examples/arithmetic/make.py

Read it as a template for a tiny policy of your own. In the order of the file:

1. the problems: every two-digit addition, split so that no held-out pair of numbers is trained on in either order;
2. the tokenizer: one character, one token;
3. the policy: a Qwen2 of about a million weights, drawn at random;
4. the warm start: the policy imitates a careless pupil, who adds well but mostly forgets to carry.

Reinforcement learning can only raise what a policy already does now and then. A policy stopped early in ordinary
supervised training does not know how digits add up, and rewards hardly teach it; one that imitates the careless pupil
writes the right answer to almost every problem sometimes, and to few of them mostly. Some training problems are set
aside to tell when to stop; the held-out problems measure the policy once, when it is made. The same seed, machine and
library versions give the same files.

This script does no reinforcement learning.

Shapes: B problems, T tokens, V = 4 ways to carry or not.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
MAX_POSITIONS = 64
IGNORED_LABEL = -100  # what `cross_entropy` leaves out by default


@dataclass(frozen=True)
class Problem:
    """One line of the data files: `{"prompt": "12+34=", "answer": "46"}`."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class WarmStart:
    """How the policy imitates the careless pupil.

    It ends at the first evaluation that is not before `min_steps` and has `target` low <= greedy accuracy <= high, on
    `validation_pairs` pairs of training numbers that are set aside, in both orders. Evaluations before `min_steps`
    only show progress.
    """

    forget_probability: float = 0.57
    batch_problems: int = 128
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    ramp_steps: int = 50
    min_steps: int = 500
    max_steps: int = 900
    evaluate_every_steps: int = 10
    early_evaluate_every_steps: int = 100
    validation_pairs: int = 500
    target: tuple[float, float] = (0.32, 0.36)


# 1. the problems


def split_pairs(seed: int, heldout_count: int = 500) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (train, held-out) pairs of numbers, shuffled; train has both orders of each pair it has."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    heldout = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs[:heldout_count]]
    train = sorted({ordered for a, b in pairs[heldout_count:] for ordered in ((a, b), (b, a))})
    rng.shuffle(train)
    return train, heldout


def set_aside(pairs: Sequence[tuple[int, int]], count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (the rest, those set aside): the first `count` of the pairs are set aside in either order."""
    aside = {(min(a, b), max(a, b)) for a, b in pairs[:count]}
    is_aside = [(min(a, b), max(a, b)) in aside for a, b in pairs]
    return (
        [pair for pair, apart in zip(pairs, is_aside, strict=True) if not apart],
        [pair for pair, apart in zip(pairs, is_aside, strict=True) if apart],
    )


def addition(a: int, b: int, forget_units: bool = False, forget_tens: bool = False) -> Problem:
    """Return `a+b=` with its answer as a person writes it who forgets to carry from the units, or from the tens."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + (units > 9 and not forget_units)
    hundred = "1" if tens > 9 and not forget_tens else ""
    return Problem(prompt=f"{a}+{b}=", answer=f"{hundred}{tens % 10}{units % 10}")


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems))


# 2. the tokenizer


def build_tokenizer(max_positions: int = MAX_POSITIONS) -> Qwen2Tokenizer:
    """Return a tokenizer of printable ASCII and newline, a character a token, that adds nothing by itself.

    It is Qwen2's byte-level BPE without merges, because `AutoTokenizer` gives every Qwen2 model that class, whatever
    the files say. Characters outside the vocabulary are dropped without an error.
    """
    byte_symbols = {" ": "\u0120", "\n": "\u010a"}  # byte-level BPE writes white space as visible letters
    tokens = [PAD, EOS, *(byte_symbols.get(character, character) for character in CHARACTERS)]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        unk_token=PAD,  # never produced; the default would be one token more
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=max_positions,
    )


# 3. the policy


def build_policy(tokenizer: Qwen2Tokenizer, layers: int = 4) -> Qwen2ForCausalLM:
    """Return a Qwen2 with random float32 weights, drawn from torch's global generator.

    Heads have 32 dimensions: some attention kernels of inference engines refuse fewer.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.1,  # the usual 0.02 suits wide models
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


# 4. the warm start


def encode(tokenizer: Qwen2Tokenizer, problems: Sequence[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens_BT, labels_BT) of prompt, answer and end; the labels leave out the prompt and the padding."""
    texts = [problem.prompt + problem.answer + EOS for problem in problems]
    tokens_BT = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    prompt_tokens_B = torch.tensor([len(ids) for ids in tokenizer([p.prompt for p in problems])["input_ids"]])
    is_prompt_BT = torch.arange(tokens_BT.shape[1]) < prompt_tokens_B[:, None]
    return tokens_BT, tokens_BT.masked_fill(is_prompt_BT | (tokens_BT == tokenizer.pad_token_id), IGNORED_LABEL)


@torch.no_grad()
def greedy_accuracy(policy: Qwen2ForCausalLM, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> float:
    """Return the share of problems whose greedy answer, end included, is exact.

    Greedy decoding writes the labels exactly when each of them is the likeliest token after those before it, so one
    forward pass over the answers tells what generating would.
    """
    likeliest_BT = policy(tokens_BT).logits[:, :-1].argmax(-1)
    wanted_BT = labels_BT[:, 1:]
    right_B = ((likeliest_BT == wanted_BT) | (wanted_BT == IGNORED_LABEL)).all(-1)
    return float(right_B.float().mean())


def encode_careless(tokenizer: Qwen2Tokenizer, pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens_VBT, labels_VBT); way v forgets the units' carry if v & 1 and the tens' carry if v & 2."""
    problems = [addition(a, b, bool(v & 1), bool(v & 2)) for v in range(4) for a, b in pairs]
    tokens, labels = encode(tokenizer, problems)
    return tokens.view(4, len(pairs), -1), labels.view(4, len(pairs), -1)


def learning_rate(step: int, settings: WarmStart) -> float:
    """Return the rate of a step: a linear ramp up, then a line down to the final rate at `max_steps`."""
    left = 1 - step / settings.max_steps
    falling = settings.final_learning_rate + (settings.learning_rate - settings.final_learning_rate) * left
    return falling * min(1.0, step / settings.ramp_steps)


def warm_start(
    policy: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    train: Sequence[tuple[int, int]],
    settings: WarmStart,
) -> None:
    """Train the policy in place until it meets the target.

    Raises:
        RuntimeError: no evaluation met the target.
    """
    practised, validation = set_aside(train, settings.validation_pairs)
    tokens_VBT, labels_VBT = encode_careless(tokenizer, practised)
    validation_tokens, validation_labels = encode(tokenizer, [addition(a, b) for a, b in validation])
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, settings.max_steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings)
        problem_B = torch.randint(len(practised), (settings.batch_problems,))
        forgets_2B = torch.rand(2, settings.batch_problems) < settings.forget_probability
        way_B = forgets_2B[0] + 2 * forgets_2B[1]
        supervised_step(policy, optimizer, tokens_VBT[way_B, problem_B], labels_VBT[way_B, problem_B])
        may_end = step >= settings.min_steps
        every_steps = settings.evaluate_every_steps if may_end else settings.early_evaluate_every_steps
        if step % every_steps == 0:
            accuracy = greedy_accuracy(policy, validation_tokens, validation_labels)
            print(f"step {step}: greedy validation accuracy {accuracy:.3f}", flush=True)
            if may_end and settings.target[0] <= accuracy <= settings.target[1]:
                return
    low, high = settings.target
    raise RuntimeError(
        f"expected a greedy validation accuracy of {low} to {high} by step {settings.max_steps}, "
        f"found {accuracy:.3f} there; change WarmStart.forget_probability or the seed"
    )


def supervised_step(
    policy: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, tokens_BT: torch.Tensor, labels_BT: torch.Tensor
) -> None:
    """Take one optimizer step on the cross-entropy of the labels."""
    logits = policy(tokens_BT[:, :-1]).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten())
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Write `train.jsonl`, `heldout.jsonl` and `policy/`."""
    parser = argparse.ArgumentParser(description="make the tiny arithmetic policy and its problems")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the weights and the warm start")
    arguments = parser.parse_args()

    arguments.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_pairs(arguments.seed)
    write_problems(arguments.out / "train.jsonl", [addition(a, b) for a, b in train])
    write_problems(arguments.out / "heldout.jsonl", [addition(a, b) for a, b in heldout])

    torch.set_num_threads(1)  # the order of sums, and so the weights, depend on the number of threads
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer)
    warm_start(policy, tokenizer, train, WarmStart())
    accuracy = greedy_accuracy(policy, *encode(tokenizer, [addition(a, b) for a, b in heldout]))
    print(f"greedy held-out accuracy {accuracy:.3f}")
    policy.save_pretrained(arguments.out / "policy")
    tokenizer.save_pretrained(arguments.out / "policy")


if __name__ == "__main__":
    main()
