"""The first module whose output differs from the unmodified model's.

Shapes: ``T`` tokens of the row, ``D`` a module's outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.self_test.unmodified_model import unmodified

_APART = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative tolerance by norm."""


def first(policy: Policy | Critic, rows: Sequence[PackedRow]) -> str:
    """Describe the first module whose outputs differ."""
    model, device = policy.model, next(policy.parameters()).device
    batch: MicroBatch = micro_batch(rows)
    limit = _APART.get(next(policy.parameters()).dtype, 1e-3)
    if policy.trunk.packing != "rows":
        return "each sequence goes through the model by itself, so a kernel or the output layer differs"
    packed = _outputs(model, lambda: policy(batch), batch.tokens)
    with unmodified(model):
        for places in map(batch.segments.places, batch.segments.paths):
            inputs = torch.from_numpy(batch.input_ids_BT[:, places]).to(device)
            alone = _outputs(model, lambda inputs=inputs: model(input_ids=inputs, use_cache=False), len(places))  # type: ignore[misc]
            for name, output_TD in alone.items():
                if name in packed and (apart := _relative(packed[name][places], output_TD)) > limit:
                    return f"the first module whose output differs is {name} ({_kind(model, name)}), by {apart:.2g} of its norm"
    return "all hidden states agree, so the output layer or the scale of logits differs"


def _kind(model: Any, name: str) -> str:
    return type(model.get_submodule(name)).__name__


def _outputs(model: Any, compute: Callable[[], Any], tokens: int) -> dict[str, Tensor]:
    """Return the outputs (1 × ``tokens`` × D) of modules that run once, in finishing order."""
    outputs, twice = dict[str, Tensor](), set[str]()

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            if name in outputs:
                twice.add(name)
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and hidden.ndim == 3 and hidden.shape[:2] == (1, tokens):
                outputs[name] = hidden[0].detach().float()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            compute()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: output for name, output in outputs.items() if name not in twice}


def _relative(found_TD: Tensor, reference_TD: Tensor) -> float:
    if found_TD.shape != reference_TD.shape:
        return 0.0
    return float((found_TD - reference_TD).norm() / reference_TD.norm().clamp(min=1e-30))
