"""Make the policy of this folder, at random, and its rows: `python -m examples.guess.make`.

A token is a role, a hint, or a whole call of the tool, such as

    <tool_call>
    {"name": "guess", "arguments": {"number": 7}}
    </tool_call>

so that a policy of 100,000 random weights calls from the first episode on, and reinforcement learning alone teaches it which
number to try. A real model writes the same text in tokens of its own.
"""

import json
from pathlib import Path

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from examples.calculator import make

NUMBERS = range(15)
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Return Qwen2's tokenizer with four characters and a token for each role and call."""
    calls = [{"name": "guess", "arguments": {"number": number}} for number in NUMBERS]
    return make.build_tokenizer("?<>=", [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls], TEMPLATE)


def build_policy(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return a transformer of two layers."""
    return make.build_policy(tokenizer, layers=2, width=64, heads=4)


def main() -> None:
    """Write `train.jsonl` and `policy/`."""
    folder = Path(__file__).parent
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    build_policy(tokenizer).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    rows = [{"prompt": "?", "secret": number} for number in NUMBERS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
