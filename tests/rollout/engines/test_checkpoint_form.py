"""Published weights have the names and shapes of the checkpoint's files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, MixtralConfig, Qwen2MoeConfig

from penstock.services.rollout.engines.checkpoint_form import CheckpointForm, checkpoint_names
from penstock.shared.errors import WeightsError
from tests.support import tiny

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, num_experts=4, shared_expert_intermediate_size=24, decoder_sparse_step=1),
    # converts two router tensors under another prefix
    "ernie4_5_moe": Ernie4_5_MoeConfig(**SIZES, moe_num_experts=4, moe_k=2, moe_layer_start_index=0, moe_layer_end_index=1),
}  # fmt: skip


def saved(folder: Path, of: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (*of.parameters(), *of.buffers()):
            if tensor.is_floating_point():
                tensor.normal_()
    of.save_pretrained(folder)
    files: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return files


def published(of: Any) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = of.state_dict().keys()
    yield from of.named_parameters()
    yield from ((name, buffer) for name, buffer in of.named_buffers() if name in persistent)


def converted(folder: Path, of: Any) -> dict[str, torch.Tensor]:
    return dict(CheckpointForm(str(folder)).convert((name, tensor.detach()) for name, tensor in published(of)))


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", [*CONFIGS, "qwen3_moe", "tied"])
def test_published_tensors_become_those_of_the_checkpoints_files(tmp_path: Path, name: str) -> None:
    own = {"qwen3_moe": tiny.mixture, "tied": tiny.model}
    model = own[name]() if name in own else AutoModelForCausalLM.from_config(CONFIGS[name])
    files = saved(tmp_path, model)
    assert checkpoint_names(str(tmp_path)) == files.keys()
    assert any("experts.3." in other for other in files) == (name != "tied")
    assert_equal(converted(tmp_path, model), files)


def test_what_the_files_hold_decides_and_not_what_this_version_would_save(tmp_path: Path) -> None:
    model = tiny.mixture()
    whole = saved(tmp_path, model)
    stacked = dict(model.named_parameters())
    save_file({name: tensor.detach() for name, tensor in stacked.items()}, tmp_path / "model.safetensors")
    assert_equal(converted(tmp_path, model), {name: tensor.detach() for name, tensor in stacked.items()})
    # without the trunk's prefix, in several files
    bare = {name.removeprefix("model."): tensor.contiguous() for name, tensor in whole.items()}
    (tmp_path / "model.safetensors").unlink()
    parts = [{name: bare[name] for name in sorted(bare)[start::2]} for start in (0, 1)]
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, part in zip(files, parts, strict=True):
        save_file(part, tmp_path / file)
    index = {"weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(WeightsError, match=r"found 'model\.layers\.0\.mlp\.experts\.0\..*save_pretrained"):
        converted(tmp_path, model)
    dense = tiny.model()
    bare = {name.removeprefix("model."): tensor for name, tensor in saved(tmp_path / "dense", dense).items()}
    save_file(bare, tmp_path / "dense" / "model.safetensors")
    assert_equal(converted(tmp_path / "dense", dense), bare)


def test_without_files_the_form_is_that_in_which_this_version_saves(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    files = saved(tmp_path, model)
    (tmp_path / "model.safetensors").unlink()
    assert_equal(converted(tmp_path, model), files)


def test_tensors_of_another_model_and_models_that_cannot_be_built_are_refused(tmp_path: Path) -> None:
    model = tiny.mixture()
    saved(tmp_path, model)
    form = CheckpointForm(str(tmp_path))
    with pytest.raises(WeightsError, match=r"found 'model\.nothing': its names cannot be traced back"):
        dict(form.convert([("model.nothing", torch.ones(1))]))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}', encoding="utf-8")
    with pytest.raises(WeightsError, match=r"transformers cannot build .*: change policy\.model"):
        CheckpointForm(str(tmp_path)).open()
