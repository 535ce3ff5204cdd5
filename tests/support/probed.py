"""Both sides of a weights probe without services, and mistakes in loading weights, planted in a Hugging Face model."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.model.policy import Policy, load_model
from penstock.shared.bus.messages import Experience, Float32Array, Int32Array, Probe
from penstock.shared.settings import PolicySettings
from tests.support import builders

FLOAT8 = torch.float8_e4m3fn


def _layers(model: Any) -> nn.ModuleList:
    return max(
        (part for part in model.modules() if isinstance(part, nn.ModuleList)),
        key=lambda part: len(list(part.parameters())),
    )


def _named(model: Any, *words: str, dims: tuple[int, ...] = (1, 2, 3)) -> list[tuple[str, Tensor]]:
    """Return the middle layer's parameters with one of ``words`` in their name."""
    layers = _layers(model)
    names = layers[len(layers) // 2].named_parameters()
    return [
        (name, part)
        for name, part in names
        if part.dim() in dims and (not words or any(word in name for word in words))
    ]


def _matrices(model: Any) -> Iterator[Tensor]:
    yield from (part for part in _layers(model).parameters() if part.dim() > 1)


def _redraw(part: Tensor) -> None:
    drawn = torch.randn(part.shape, generator=torch.Generator().manual_seed(7))
    part.copy_(drawn * part.float().std() + part.float().mean())


def one_matrix(model: Any) -> bool:
    parts = _named(model, "o_proj", "c_proj", "dense", "out_proj", dims=(2,)) or _named(model, dims=(2,))
    _redraw(parts[0][1])
    return True


def one_norm(model: Any) -> bool:
    parts = [part for name, part in _named(model, "norm", "ln_", dims=(1,)) if "q_" not in name and "k_" not in name]
    for part in parts[:1]:
        part.fill_(1.0 if part.float().mean() > 0.5 else 0.0)
    return bool(parts)


def one_expert(model: Any) -> bool:
    parts = _named(model, "experts", dims=(2, 3))
    for _, part in parts[:2]:
        _redraw(part[0] if part.dim() == 3 else part)
    return bool(parts)


def one_bias(model: Any) -> bool:
    parts = _named(model, "bias", dims=(1,))
    for _, part in parts[:1]:
        part.zero_()
    return bool(parts)


def one_layer(model: Any) -> bool:
    for _, part in _named(model, dims=(2, 3)):
        _redraw(part)
    return True


def layers_swapped(model: Any) -> bool:
    layers = _layers(model)
    place = len(layers) // 2
    first, second = (dict(layers[at].named_parameters()) for at in (place - 1, place))
    for name in first.keys() & second.keys():
        if first[name].shape == second[name].shape:
            kept = first[name].clone()
            first[name].copy_(second[name])
            second[name].copy_(kept)
    return True


def head_untied(model: Any) -> bool:
    """The output layer has values of its own; of an untied one, other values than saved."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    _redraw(head.weight)
    return True


def vocabulary_shifted(model: Any) -> bool:
    embeddings = model.get_input_embeddings().weight
    embeddings.copy_(embeddings.roll(1, 0))
    return True


def rope_base(model: Any) -> bool:
    """The base to the power of 1.25: 10,000 becomes 100,000."""
    parts = [part for name, part in model.named_buffers() if name.endswith("inv_freq")]
    for part in parts:
        part.copy_(part.pow(1.25))
    return bool(parts)


def gate_and_up_swapped(model: Any) -> bool:
    pairs = dict(_named(model, "gate_proj.weight", "up_proj.weight", dims=(2,)))
    packed = _named(model, "gate_up_proj", dims=(2, 3))
    if packed:
        part = packed[0][1]
        part.copy_(part.roll(part.shape[-2] // 2, -2))
    elif len(pairs) >= 2:
        first, second = sorted(pairs.values(), key=id)[:2]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    return bool(packed) or len(pairs) >= 2


def heads_in_another_order(model: Any) -> bool:
    parts = _named(model, "v_proj.weight", dims=(2,))
    for _, part in parts[:1]:
        part.copy_(part.roll(part.shape[0] // 2, 0))
    return bool(parts)


def head_in_float8(model: Any) -> bool:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.to(torch.float8_e5m2).to(head.weight.dtype), requires_grad=False)
    return True


def quantised_to_float8(model: Any) -> bool:
    for part in _matrices(model):
        scale = part.abs().max() / torch.finfo(FLOAT8).max
        part.copy_((part / scale).to(FLOAT8).to(part.dtype) * scale)
    return True


def quantised_to_4_bits(model: Any) -> bool:
    for part in _matrices(model):
        scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 7
        part.copy_((part / scale).round() * scale)
    return True


FAULTS: dict[str, Callable[[Any], bool]] = {
    fault.__name__: fault
    for fault in (
        one_matrix, one_norm, one_expert, one_bias, one_layer, layers_swapped, head_untied, vocabulary_shifted, rope_base,
        gate_and_up_swapped, heads_in_another_order, head_in_float8, quantised_to_float8, quantised_to_4_bits,
    )
}  # fmt: skip
"""Each changes a model in place; False if it has no such part."""


def plant(name: str, model: Any) -> bool:
    with torch.no_grad():
        return FAULTS[name](model)


def in_fp8(model: Any) -> Any:
    """Let ``model``'s linear layers compute as vLLM's with FP8 weights per channel and inputs per token; return it."""
    head = model.get_output_embeddings()
    layers = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(_rows_in_float8(layer.weight))
        layer.register_forward_pre_hook(lambda _, inputs: (_rows_in_float8(inputs[0]), *inputs[1:]))
    return model


def _rows_in_float8(rows: Tensor) -> Tensor:
    scale = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-9) / torch.finfo(FLOAT8).max
    return ((rows.float() / scale).to(FLOAT8).float() * scale).to(rows.dtype)


def moved(model: Any, relative: float, *, rank: int = 0) -> None:
    """Change all matrices by ``relative`` of their size, as a step does; ``rank``: by a product of two thin ones."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for part in _matrices(model):
            change = torch.randn(part.shape, generator=generator)
            if rank:
                change = (
                    torch.randn(*part.shape[:-1], rank, generator=generator)
                    @ torch.randn(*part.shape[:-2], rank, part.shape[-1], generator=generator)
                    / math.sqrt(rank)
                )
            part.add_((relative * part.float().std() * change).to(part.dtype))


class ProbedTrainer:
    """What a prober needs of a training engine, around a policy in float32 on the CPU."""

    def __init__(self, model: str) -> None:
        self.policy = Policy(load_model(PolicySettings(model=model), torch.float32), packing="sequences")
        self.device = torch.device("cpu")

    def evaluate(self, batch: Any) -> Any:
        with torch.no_grad():
            return self.policy.eval()(batch)


def scored(engine: Any, probe: Probe) -> list[Float32Array]:
    """Return the logprobs of ``engine``, a Hugging Face model."""
    rows = []
    with torch.no_grad():
        for token_ids, _ in probe.sequences():
            ids_T = torch.from_numpy(token_ids).long()
            logprobs_TV = engine(input_ids=ids_T[None]).logits[0, :-1].float().log_softmax(-1)
            rows.append(logprobs_TV.gather(1, ids_T[1:, None])[:, 0].numpy())
    return rows


def groups_of(texts: Sequence[Int32Array]) -> list[Experience]:
    """Return the texts as groups of a step, each of a prompt of 8 tokens and two completions."""

    def group(ids: Int32Array) -> Experience:
        made = builders.experience()
        samples = [dataclasses.replace(builders.sample(), token_ids=ids[8:end]) for end in (12, len(ids))]
        of = dataclasses.replace(made.group, prompt_token_ids=ids[:8], samples=tuple(samples))
        return dataclasses.replace(made, group=of)

    return [group(ids) for ids in texts]
