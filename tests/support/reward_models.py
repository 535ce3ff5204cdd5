"""Tiny random reward models whose values differ between texts."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from penstock.services.reward.models.classifier import Classifier
from penstock.shared.settings.rewards.models import ModelScorer, ModelWork
from tests.support import tiny

POLICY = Path(__file__).parents[2] / "examples" / "arithmetic" / "policy"
SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
WORK = ModelWork(device="cpu")
CHAT = "{% for turn in messages %}{{ turn['role'][0] }}={{ turn['content'] }}{{ eos_token }}{% endfor %}"


def qwen(labels: int = 1, pad: int | None = 0, **more: Any) -> Any:
    torch.manual_seed(0)
    names = {"id2label": {n: f"label {n}" for n in range(labels)}}
    sizes = {**SIZES, **more}
    config = Qwen2Config(**sizes, num_key_value_heads=2, pad_token_id=pad, num_labels=labels, **names)
    return Qwen2ForSequenceClassification(config).eval()


def llama(pad: int | None = None) -> Any:
    torch.manual_seed(1)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1, pad_token_id=pad)).eval()


def bert() -> Any:
    torch.manual_seed(2)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=1, pad_token_id=0)).eval()


def save(model: Any, folder: Path, chat_template: str | None = None, padding_side: str = "right") -> Path:
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer(chat_template)
    tokenizer.padding_side = padding_side
    tokenizer.save_pretrained(folder)
    return folder


def save_example(folder: Path) -> Path:
    """Write a sequence classifier of the example's size with the example's tokenizer."""
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(AutoConfig.from_pretrained(POLICY, num_labels=1)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POLICY / name, folder)
    return folder


def example_flags(model: Path, *, trust_remote_code: bool = False) -> dict[str, object]:
    """Return settings that score the arithmetic example by rules, ``model`` and a reference in the reward service."""
    scorers = [
        '{kind = "answer", mode = "exact", extract = "whole", needs_stop = true}',
        '{kind = "format", pattern = "[0-9]+"}',
        f'{{kind = "model", model = {json.dumps(str(model))}, trust_remote_code = {json.dumps(trust_remote_code)}}}',
    ]
    return {
        "reward.scorers": f"[{', '.join(scorers)}]",
        "reward.expression": "0.8 * answer + 0.1 * format + 0.01 * model",
        "algorithm.reference": "reward",
        "algorithm.kl.coefficient": 0.01,
    }


def save_scalar(folder: Path) -> Path:
    """Write a trunk with a scalar head, named as in TRL."""
    torch.manual_seed(3)
    trunk = LlamaModel(LlamaConfig(**SIZES, pad_token_id=0))
    head = {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.tensor([0.25])}
    trunk.save_pretrained(folder)
    named = {f"model.{name}": tensor.contiguous() for name, tensor in trunk.state_dict().items()}
    save_file(named | head, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.tokenizer().save_pretrained(folder)
    return folder


def settings(folder: Path, **more: Any) -> ModelScorer:
    return ModelScorer(kind="model", model=str(folder), **more)


def classifier(scorer: ModelScorer) -> Classifier:
    return Classifier(scorer, WORK)
