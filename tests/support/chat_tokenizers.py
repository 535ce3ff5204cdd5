"""Tokenizers with the chat templates of model families, made on the spot: a byte-level BPE whose merges make texts encode in
other ways than they were sampled.
"""

import functools
from importlib import resources
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = {
    "qwen3": ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    "qwen2_5": ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    "llama3_1": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "glm4moe": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
    "deepseekv3": (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
    ),
    "lfm2": ("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_response_start|>"),
    "gptoss": ("<|startoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    "nemotron_3_nano": ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    "qwen3_5_think": ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
}
STOP = {
    "qwen3": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "glm4moe": "<|user|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "lfm2": "<|im_end|>",
    "gptoss": "<|return|>",
    "nemotron_3_nano": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
}
_TEXT = 'the tool says that a number was {"name": "add", "arguments": {"a": 1, "b": 22}} not and is, result: 345 ' * 40


@functools.cache
def family(name: str) -> Any:
    """Return a tokenizer with 300 merges or so, a family's control tokens, and its template as TRL has it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=STOP[name], bos_token=CONTROL[name][0])
    made.add_special_tokens({"additional_special_tokens": list(CONTROL[name])})
    templates = resources.files("trl") / "chat_templates"
    made.chat_template = (templates / f"{name}.jinja").read_text(encoding="utf-8")
    return made


CHARACTERS_TEMPLATE = (
    "{%- if tools %}t:{{ tools | length }}<eos>{% endif %}"
    "{%- for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{%- if add_generation_prompt %}a:{% endif %}"
)


@functools.cache
def characters() -> Any:
    """Return a tokenizer whose ids are character codes, as the scripted engine's, and 0 the end; with a template of its own."""
    vocabulary = {"<eos>": 0, **{chr(code): code for code in range(1, 127)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    made.chat_template = CHARACTERS_TEMPLATE
    return made
