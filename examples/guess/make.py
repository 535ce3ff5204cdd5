"""Make the policy of this folder, at random, and its rows: `python examples/guess/make.py`.

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
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
NUMBERS = range(15)
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Return Qwen2's tokenizer with four characters and a token for each role and call."""
    symbols = [PAD, EOS, "?", "<", ">", "="]
    tokenizer = Qwen2Tokenizer(
        vocab={symbol: place for place, symbol in enumerate(symbols)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=64,
    )
    calls = [{"name": "guess", "arguments": {"number": number}} for number in NUMBERS]
    tokenizer.add_special_tokens({"additional_special_tokens": list(ROLES)})
    tokenizer.add_tokens([f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_policy(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return a transformer of two layers."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


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
