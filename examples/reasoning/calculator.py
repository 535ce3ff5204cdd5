"""A calculator as a tool, and problems that a small model solves only with it.

    python examples/reasoning/calculator.py            # writes products-train.jsonl beside this file

SmolLM2 has seen no tools: each conversation begins with two examples, in the form in which it is to call.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

EXAMPLES = ((12, 17), (64, 38))
ROWS = 3_000


def calculator(expression: str) -> str:
    """Multiply.

    Args:
        expression: Two numbers, such as `12 * 17`.
    """
    factors = re.fullmatch(r"\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*", expression)
    return str(int(factors[1]) * int(factors[2])) if factors else "expected two numbers such as 12 * 17"


def messages(left: int, right: int) -> list[dict[str, str]]:
    """Return a conversation that ends with a question."""
    told = [{"role": "system", "content": "Use the calculator."}]
    for factors in EXAMPLES:
        expression = "{} * {}".format(*factors)
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        told += [
            {"role": "user", "content": f"What is {expression}?"},
            {"role": "assistant", "content": call},
            {"role": "tool", "content": calculator(expression)},
            {"role": "assistant", "content": f"{expression} = {calculator(expression)}"},
        ]
    return [*told, {"role": "user", "content": f"What is {left} * {right}?"}]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return different products of two numbers of two digits."""
    pairs = [(left, right) for left in range(11, 100) for right in range(11, 100) if (left, right) not in EXAMPLES]
    chosen = random.Random(seed).sample(pairs, count)
    return [{"messages": messages(left, right), "answer": str(left * right)} for left, right in chosen]


if __name__ == "__main__":
    lines = [json.dumps(row) + "\n" for row in rows(ROWS)]
    (Path(__file__).parent / "products-train.jsonl").write_text("".join(lines), encoding="utf-8")
