"""Make the calculator's policy and its rows: `python -m examples.calculator.make`.

A token is a character, a role, or half of the envelope of a call, which a real model writes in tokens of its own:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "37*48"}}
    </tool_call>

Reinforcement learning can only raise what a policy already does now and then. So it imitates a pupil who seldom calls, often
mistypes and miscopies, and otherwise guesses, until it solves a tenth of the products when sampled.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from examples.arithmetic.make import EOS, IGNORED_LABEL, PAD, Problem, supervised_step, write_problems
from examples.calculator.measure import measured

OPENING, CLOSING = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS, MISTYPES, MISCOPIES, ADDS = 0.25, 0.35, 0.3, 0.7
"""The pupil's habits: probabilities."""
ROWS, EVALUATE_EVERY_STEPS, MAX_STEPS = 64, 20, 1500
TARGET = 0.1
"""The share of products solved when sampled, at which the warm start ends."""


def build_tokenizer(
    symbols: str = "0123456789+*=?", calls: Sequence[str] = (OPENING, CLOSING), template: str = TEMPLATE
) -> Qwen2Tokenizer:
    """Return Qwen2's tokenizer with characters, the roles, and tokens of which calls consist."""
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: place for place, symbol in enumerate([PAD, EOS, *symbols])},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=64,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
    tokenizer.add_tokens(list(calls))
    tokenizer.chat_template = template
    return tokenizer


def build_policy(
    tokenizer: PreTrainedTokenizerBase, layers: int = 3, width: int = 96, heads: int = 3
) -> Qwen2ForCausalLM:
    """Return a transformer of random weights, drawn from torch's global generator."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def problem(left: int, sign: str, right: int) -> Problem:
    """Return a row."""
    return Problem(f"{left}{sign}{right}=", str(left * right if sign == "*" else left + right))


def make_rows(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return rows to train on, every second a sum; and 200 products that are not among them, with all sums."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    products = [problem(a, "*", b) if rng.random() < 0.5 else problem(b, "*", a) for a, b in pairs]
    sums = [problem(a, "+", b) for a in range(10) for b in range(10)]
    train = [row for product in products[200:1200] for row in (product, rng.choice(sums))]
    return train, products[:200] + sums


def pupil(row: Problem, rng: random.Random) -> list[tuple[bool, str]]:
    """Return what the pupil's episode adds to the question: whether the policy wrote it, and the text."""
    expression, answer = row.prompt.removesuffix("="), row.answer
    if rng.random() < CALLS:
        if rng.random() < MISTYPES:
            expression = _slip(expression, rng)
        left, sign, right = expression.partition("*" if "*" in expression else "+")
        result = problem(int(left), sign, int(right)).answer
        copied = _slip(result, rng) if rng.random() < MISCOPIES else result
        turn = f"{OPENING}{expression}{CLOSING}{EOS}"
        return [(True, turn), (False, f"<|tool|>{result}{EOS}<|assistant|>"), (True, copied + EOS)]
    if "*" in expression:
        answer = answer[0] + "".join(rng.choice("0123456789") for _ in answer[1:-1]) + answer[-1]
    elif rng.random() > ADDS:
        answer = str(rng.randrange(19))
    return [(True, answer + EOS)]


def _slip(text: str, rng: random.Random) -> str:
    """Return a text with another digit in one place."""
    place = rng.choice([place for place, character in enumerate(text) if character.isdigit()])
    return f"{text[:place]}{rng.choice('123456789')}{text[place + 1 :]}"


def encode(tokenizer: PreTrainedTokenizerBase, rows: list[Problem], rng: random.Random) -> tuple[torch.Tensor, ...]:
    """Return (tokens_BT, labels_BT) of episodes of the pupil; the labels are what the policy writes."""
    tokens, labels = [], []
    for row in rows:
        parts = [(False, f"<|user|>{row.prompt}{EOS}<|assistant|>"), *pupil(row, rng)]
        encoded = [(is_policys, tokenizer(text)["input_ids"]) for is_policys, text in parts]
        tokens.append(torch.tensor([token for _, ids in encoded for token in ids]))
        labels.append(torch.tensor([token if mine else IGNORED_LABEL for mine, ids in encoded for token in ids]))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(tokens, True, tokenizer.pad_token_id), pad(labels, True, IGNORED_LABEL)


def warm_start(policy: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, train: list[Problem], seed: int) -> None:
    """Train the policy in place until it meets the target. Raises RuntimeError: it never does."""
    rng = random.Random(seed)
    products = [{"prompt": row.prompt, "answer": row.answer} for row in train if "*" in row.prompt][:400]
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, MAX_STEPS + 1):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, step / 50)
        supervised_step(policy, optimizer, *encode(tokenizer, rng.sample(train, ROWS), rng))
        if step % EVALUATE_EVERY_STEPS == 0:
            sampled = measured(policy, tokenizer, products, is_sampled=True)
            print(f"step {step}: of products, {sampled.success:.3f} solved, {sampled.calls:.2f} calls", flush=True)
            if sampled.success >= TARGET:
                return
    raise RuntimeError(
        f"expected to solve {TARGET} of the products, found {sampled.success}: change the pupil's habits"
    )


def main() -> None:
    """Write `train.jsonl`, `heldout.jsonl` and `policy/`."""
    parser = argparse.ArgumentParser(description="make the calculator's policy and its rows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of rows, weights and warm start")
    arguments = parser.parse_args()
    train, heldout = make_rows(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_problems(arguments.out / "train.jsonl", train)
    write_problems(arguments.out / "heldout.jsonl", heldout)
    torch.set_num_threads(1)  # the order of sums, and so the weights, depend on the number of threads
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer)
    warm_start(policy, tokenizer, train, arguments.seed)
    policy.to(torch.bfloat16).save_pretrained(arguments.out / "policy")
    tokenizer.save_pretrained(arguments.out / "policy")


if __name__ == "__main__":
    main()
