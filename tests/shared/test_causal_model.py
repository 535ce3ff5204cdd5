"""A checkpoint is loaded whole, or refused with the names of what it lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.services.reward.models.frozen_policy import FrozenPolicy
from penstock.services.rollout.engines.transformers.loading import open_model
from penstock.services.trainer.model.policy import load_model, load_trunk
from penstock.shared.errors import SettingsError
from penstock.shared.settings import PolicySettings, Settings
from tests.support import tiny

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"
UNTIED = "lm_head.weight"


def changed(folder: Path, change: Callable[[Tensors], Tensors], of: Callable[[], Any] = tiny.model) -> str:
    """Return a tiny model whose checkpoint has other tensors."""
    file = tiny.save(folder / "model", of=of()) / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(folder / "model")


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def prefixed(tensors: Tensors) -> Tensors:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def cut(tensors: Tensors) -> Tensors:
    return {name: tensor[:-1].contiguous() if name == DOWN else tensor for name, tensor in tensors.items()}


def as_policy(model: str) -> None:
    load_model(PolicySettings(model=model), torch.float32)


def as_trunk(model: str) -> None:
    load_trunk(PolicySettings(model="elsewhere"), model, torch.float32)


def as_teacher(model: str) -> None:
    FrozenPolicy(Settings.model_validate({"run": {"device": "cpu"}}), model, "model of teacher 'wise'")


def in_engine(model: str) -> None:
    open_model(PolicySettings(model=model), tiny.tokenizer(), "cpu")


@pytest.mark.parametrize(
    ("load", "setting"),
    [
        (as_policy, "policy.model"),
        (as_trunk, "algorithm.critic.model"),
        (as_teacher, "model of teacher 'wise'"),
        (in_engine, "policy.model"),
    ],
)
@pytest.mark.parametrize(
    ("change", "of", "named"),
    [
        (without(DOWN), tiny.model, f"lack {DOWN}, which"),
        (without("model.norm.weight"), tiny.mixture, "lack model.norm.weight, which"),
        (prefixed, tiny.model, r"lack .*model\.\S+ and 2\d more, which"),
        (cut, tiny.model, f"found others for {DOWN}"),
    ],
)
def test_a_model_that_lacks_tensors_is_refused_by_their_names(
    tmp_path: Path, load: Callable[[str], None], setting: str, change: Any, of: Callable[[], Any], named: str
) -> None:
    model = changed(tmp_path, change, of)
    with pytest.raises(SettingsError, match=f"{named}.* change {setting}$"):
        load(model)


def test_an_output_layer_may_lack_where_it_is_tied_or_not_used(tmp_path: Path) -> None:
    untied = changed(tmp_path, without(UNTIED), tiny.mixture)
    with pytest.raises(SettingsError, match=UNTIED):
        as_policy(untied)
    as_trunk(untied)  # a critic has an output layer of its own
    tied = changed(tmp_path, lambda tensors: tensors)
    assert UNTIED not in load_file(Path(tied) / "model.safetensors")
    as_policy(tied)


def test_a_tensor_that_the_model_does_not_have_is_no_reason_to_refuse_it(tmp_path: Path) -> None:
    as_policy(changed(tmp_path, lambda tensors: {**tensors, "v_head.weight": torch.zeros(1, 32)}))
