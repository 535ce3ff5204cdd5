"""Resume with other ranks, another ZeRO stage or another division of experts than those that wrote a checkpoint.

From ZeRO stage 1 on, each rank has flat tensors in float32: its parts of the parameters, one after the other, and AdamW's
two moments alike. A rank's file says which range of which parameter, with all experts, is where in them::

    ("layers.0.norm.weight", start 0, 512 numbers, flat tensor 0, from its place 4096 on), …

A resume fills its own flat tensors from the ranges of all files, which are maps: it reads what it needs.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.model import experts
from penstock.shared.errors import SettingsError

RANGES = "penstock_ranges"
"""Key in the optimizer's file of each rank."""
_STATES = "optim_states.pt"
_MASTER, _MOMENTS = "master", ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """A part of a parameter, in a flat tensor of a rank."""

    name: str
    start: int
    """In the parameter, with all experts."""
    numel: int
    flat: int
    """Which flat tensor."""
    offset: int
    """In the flat tensor."""


_Pieces = Mapping[str, Sequence[tuple[Range, Mapping[str, Tensor]]]]
"""By parameter: its saved ranges, each with the flat tensors that hold it."""


def ranges_of(optimizer: Any) -> list[Range] | None:
    """Return what this rank's flat tensors hold, by DeepSpeed's optimizer of ZeRO stage 1, 2 or 3; None of others, such as that of
    ``grad_accum_dtype`` at stage 1 in bfloat16.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(_of_stage_3(optimizer))
    return list(_of_mappings(optimizer)) if hasattr(optimizer, "bit16_groups") else None


def _of_stage_3(optimizer: Any) -> Iterator[Range]:
    for flat, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for parameter in group:
            size = parameter.partition_numel()  # the last ranks' are padded
            start = dist.get_rank(group=parameter.ds_process_group) * size
            numel = min(size, parameter.ds_numel - start)
            if numel > 0:
                start += experts.first_number(parameter)
                yield Range(optimizer.param_names[parameter], start, numel, flat, offset)
            offset += size


def _of_mappings(optimizer: Any) -> Iterator[Range]:
    for flat, group in enumerate(optimizer.bit16_groups):
        for parameter in group:
            if (mapping := parameter._hp_mapping) is not None:
                inside, place = mapping.lp_fragment_address, mapping.hp_fragment_address
                start = experts.first_number(parameter) + inside.start
                yield Range(optimizer.param_names[parameter], start, inside.numel, flat, place.start)


def with_ranges(state_dict: Any, path: str, ranges: Sequence[Range] | None) -> Any:
    """Return what is saved at ``path``, with ``ranges`` if it is the optimizer's file."""
    if not path.endswith(_STATES) or ranges is None:
        return state_dict
    return {**state_dict, RANGES: [dataclasses.astuple(each) for each in ranges]}


def load_ranges(optimizer: Any, folder: Path) -> None:
    """Fill this rank's master weights and moments, and the model's weights, from all ranks' files in ``folder``; collective.

    Raises:
        SettingsError: the files do not say what they hold, or lack a part of it.
    """
    pieces = _read(folder)
    step = _step_of(pieces, folder)
    if (own := ranges_of(optimizer)) is None:
        raise _refused(folder, "grad_accum_dtype in trainer.deepspeed at stage 1 cannot continue it")
    is_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    flats = optimizer.fp32_partitioned_groups_flat if is_stage_3 else optimizer.single_partition_of_fp32_groups
    if is_stage_3:
        optimizer.checkpoint_event_prologue()
    for number, flat in enumerate(flats):
        ranges = [each for each in own if each.flat == number]
        states = {name: torch.zeros_like(flat.data) for name in _MOMENTS}
        for name, target in {_MASTER: flat.data.zero_(), **states}.items():
            for part in ranges:
                _fill(target, part, pieces[part.name], name)
        optimizer.optimizer.state[flat] = {"step": step.clone(), **states}
    # DeepSpeed's own way from these to the model's weights, as if it had read them
    rank = dist.get_rank(group=optimizer.dp_process_group)
    optimizer.load_state_dict([optimizer.state_dict()] * (rank + 1), load_from_fp32_weights=True)
    if is_stage_3:
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()


def joined(folder: Path, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of a rank's weights, in its ``parts``, that all ranks' files in ``folder`` have, with all experts."""
    pieces, whole = _read(folder), {}
    for name, part in parts.items():
        if ranges := pieces.get(name):
            numel = max(piece.start + piece.numel for piece, _ in ranges)
            flat = torch.empty(numel)
            _fill(flat, Range(name, 0, numel, 0, 0), ranges, _MASTER)
            whole[name] = flat.view(-1, *part.shape[1:]).to(part.dtype)
    return whole


def _read(folder: Path) -> _Pieces:
    pieces: dict[str, list[tuple[Range, Mapping[str, Tensor]]]] = defaultdict(list)
    for path in sorted(folder.rglob(f"*{_STATES}")):
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if RANGES not in saved:
            raise _refused(folder, "an older Penstock, or grad_accum_dtype in trainer.deepspeed at stage 1, wrote it")
        flats = _flats(saved["optimizer_state_dict"])
        for part in (Range(*each) for each in saved[RANGES]):
            pieces[part.name].append((part, flats[part.flat]))
    if not pieces:
        raise _refused(folder, "trainer.zero_stage = 0 wrote it")
    return pieces


def _step_of(pieces: _Pieces, folder: Path) -> Tensor:
    """Return AdamW's step."""
    states = [flats for parts in pieces.values() for _, flats in parts]
    if not all({"step", *_MOMENTS} <= each.keys() for each in states):
        raise _refused(folder, 'it has no moments of trainer.optimizer = "adamw"')
    return states[-1]["step"]


def _flats(states: Any) -> list[Mapping[str, Tensor]]:
    is_stage_3 = "fp32_flat_groups" in states
    base = states["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"]
    masters = states["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
    order = [number for group in base["param_groups"] for number in group["params"]]
    return [{_MASTER: master, **base["state"].get(number, {})} for master, number in zip(masters, order, strict=True)]


def _fill(target: Tensor, part: Range, pieces: Sequence[tuple[Range, Mapping[str, Tensor]]], name: str) -> None:
    covered = 0
    for piece, flats in pieces:
        begin, end = max(part.start, piece.start), min(part.start + part.numel, piece.start + piece.numel)
        if begin < end:
            source = flats[name].narrow(0, piece.offset + begin - piece.start, end - begin)
            target.narrow(0, part.offset + begin - part.start, end - begin).copy_(source)
            covered += end - begin
    if covered != part.numel:
        raise SettingsError(
            f"expected {part.numel:,} numbers of {part.name} from place {part.start:,} on in the checkpoint, found {covered:,}: put an "
            "intact copy in its place, or resume it with the trainer.ranks, trainer.zero_stage and trainer.expert_parallel that wrote it"
        )


def _refused(folder: Path, reason: str) -> SettingsError:
    return SettingsError(
        f"the checkpoint in {folder} can be continued only with the trainer.ranks × trainer.nodes, trainer.zero_stage and "
        f"trainer.expert_parallel that wrote it ({reason}): change them back, or start a new run from what `penstock export` writes"
    )
