"""Measure policies on held-out products, and on sums: `python -m examples.calculator.measure POLICY [POLICY ...]`.

It prints the share of right answers, and calls per episode. Episodes are played by transformers' `generate`, without Penstock.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from examples.calculator.calculator import Calculator

HELDOUT = Path(__file__).parent / "heldout.jsonl"
TURNS = 3
TURN_TOKENS = 12
_CALL = re.compile(r'<tool_call>\n\{"name": "calculator", "arguments": \{"expression": "(.*)"\}\}\n</tool_call>')


@dataclass
class Played:
    """An episode: its last text, and how often it called."""

    text: str = ""
    calls: int = 0


@dataclass(frozen=True)
class Measured:
    """Means over episodes."""

    success: float
    calls: float


def play(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, is_sampled: bool
) -> list[Played]:
    """Play an episode for each prompt."""
    played = [Played() for _ in prompts]
    environments = [Calculator() for _ in prompts]
    histories = [[{"role": "user", "content": prompt}] for prompt in prompts]
    running = list(range(len(prompts)))
    for environment in environments:
        environment.reset()
    for _ in range(TURNS):
        texts = _answers(policy, tokenizer, [histories[place] for place in running], is_sampled=is_sampled)
        for place, text in zip(list(running), texts, strict=True):
            played[place].text = text
            call = _CALL.fullmatch(text)
            if call is None:
                running.remove(place)
                continue
            played[place].calls += 1
            result = environments[place].calculator(call[1])
            histories[place] += [{"role": "assistant", "content": text}, {"role": "tool", "content": result}]
        if not running:
            break
    return played


@torch.no_grad()
def _answers(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, histories: Sequence[object], *, is_sampled: bool
) -> list[str]:
    texts = [tokenizer.apply_chat_template(h, tokenize=False, add_generation_prompt=True) for h in histories]
    given = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt", add_special_tokens=False)
    how = {"do_sample": True, "top_k": 0} if is_sampled else {"do_sample": False}
    ids_BT = policy.generate(**given, max_new_tokens=TURN_TOKENS, **how)
    answers = tokenizer.batch_decode(ids_BT[:, given["input_ids"].shape[1] :], skip_special_tokens=False)
    return [answer.split(tokenizer.eos_token)[0] for answer in answers]


def measured(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, str]], *, is_sampled: bool
) -> Measured:
    """Return the means over an episode a row."""
    played = play(policy, tokenizer, [row["prompt"] for row in rows], is_sampled=is_sampled)
    right = sum(episode.text == row["answer"] for episode, row in zip(played, rows, strict=True))
    return Measured(right / len(rows), sum(episode.calls for episode in played) / len(rows))


def measure(folder: Path) -> dict[str, Measured]:
    """Return the figures of a policy, by the heads of the table's columns."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    kinds = {kind: [row for row in rows if sign in row["prompt"]] for kind, sign in (("products", "*"), ("sums", "+"))}
    return {
        f"{kind}, {how}": measured(policy, tokenizer, of_kind * times, is_sampled=times > 1)
        for kind, of_kind in kinds.items()
        for how, times in (("greedy", 1), ("sampled", 4))
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="measure policies of the calculator's task")
    parser.add_argument("policies", type=Path, nargs="+", metavar="POLICY", help="folder of a policy")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    figures = [measure(folder) for folder in arguments.policies]
    names = ["success, calls", *map(str, arguments.policies)]
    width = max(map(len, names))
    rows = [list(figures[0]), *([f"{f.success:.2f}, {f.calls:.2f}" for f in each.values()] for each in figures)]
    for name, cells in zip(names, rows, strict=True):
        print(f"{name:{width}}  " + "  ".join(f"{cell:>17}" for cell in cells))


if __name__ == "__main__":
    main()
