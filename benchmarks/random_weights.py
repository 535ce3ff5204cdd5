"""Random checkpoints in Hugging Face form, written tensor by tensor, so that they need not fit on a device."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.shapes import config_of

SHARD_BYTES = 4e9


def write(
    folder: Path, shape: Mapping[str, Any], dtype: torch.dtype, device: str, *, mean_tokens: int = 0, **config: Any
) -> None:
    """Write a random Qwen2, or Qwen3-MoE, to ``folder``.

    ``mean_tokens``: each token is the last with a probability of about 1 / ``mean_tokens``. Layers add nothing to the
    embeddings then, of which the first element is 1. Thus the final norm has the same first element everywhere, and a
    larger one in the end token's output weights raises its logit by a constant. Routers do not see that element, which
    would send most tokens to the same experts.
    """
    made = write_config(folder, shape, dtype, **config)
    generator = torch.Generator(device).manual_seed(0)
    shard, files = dict[str, torch.Tensor](), dict[str, str]()
    for name, sizes in tensors_of(made):
        tensor = torch.empty(*sizes, dtype=dtype, device=device)
        _fill(tensor, name, made, generator)
        if mean_tokens:
            _end_at_random(tensor, name, made, mean_tokens)
        shard[name] = tensor.cpu()
        if sum(each.nbytes for each in shard.values()) > SHARD_BYTES:
            _save(shard, folder, files)
    _save(shard, folder, files)
    if len(names := {*files.values()}) == 1:
        (folder / names.pop()).rename(folder / "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_config(folder: Path, shape: Mapping[str, Any], dtype: torch.dtype, **config: Any) -> Any:
    """Write a model's config.json, with which runs are planned; return it."""
    made = config_of(shape, rope_theta=1e6, dtype=dtype, **config)
    made.architectures = ["Qwen3MoeForCausalLM" if "num_experts" in shape else "Qwen2ForCausalLM"]
    made.save_pretrained(folder)
    return made


def _save(shard: dict[str, torch.Tensor], folder: Path, files: dict[str, str]) -> None:
    if shard:
        file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
        shard.clear()


def tensors_of(config: Any) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield name and sizes of a checkpoint's tensors, in which each expert has its own."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    for name, weight in outline.named_parameters():
        mixture, experts, part = name.partition(".experts.")
        if not experts:
            yield name, weight.shape
            continue
        count, rows, columns = weight.shape
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for number in range(count):
            for each in parts:
                yield f"{mixture}.experts.{number}.{each}.weight", (rows // len(parts), columns)


def _fill(tensor: torch.Tensor, name: str, config: Any, generator: torch.Generator) -> None:
    if tensor.dim() > 1:
        tensor.normal_(0.0, config.initializer_range, generator=generator)
    else:
        tensor.fill_(0.0 if name.endswith(".bias") else 1.0)


def _end_at_random(tensor: torch.Tensor, name: str, config: Any, mean_tokens: int) -> None:
    embeds, scores = (
        "embed_tokens" in name,
        "lm_head" in name or ("embed_tokens" in name and config.tie_word_embeddings),
    )
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        tensor.zero_()
    if name.endswith(".mlp.gate.weight"):
        tensor[:, 0] = 0.0
    if embeds or scores:
        tensor[:, 0] = 1.0
    if scores:
        width = config.hidden_size
        first = math.sqrt(width / (1 + (width - 1) * config.initializer_range**2))
        tensor[config.eos_token_id, 0] += math.log(config.vocab_size / mean_tokens) / first
