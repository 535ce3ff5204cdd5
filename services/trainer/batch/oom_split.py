"""Split a micro-batch that did not fit into memory; samples stay in order."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.services.trainer.batch.packing import PackedRow, micro_batch, only
from penstock.services.trainer.batch.token_data import LossInputs


def rows_by_place(rows: Sequence[PackedRow]) -> dict[int, PackedRow]:
    return {place: row for row in rows for place in row.places}


def halves(inputs: LossInputs, rows: Mapping[int, PackedRow], *, together: int = 1) -> list[LossInputs]:
    """Split ``inputs`` into two parts of similar sample counts; the second may be empty.

    ``together`` neighbouring samples stay together: 2 with preferences.
    """
    samples = len(inputs.batch.places_S)
    middle = -(-samples // (2 * together)) * together
    return [part(inputs, rows, 0, min(middle, samples)), part(inputs, rows, min(middle, samples), samples)]


def part(inputs: LossInputs, rows: Mapping[int, PackedRow], start: int, end: int) -> LossInputs:
    places = [int(place) for place in inputs.batch.places_S[start:end]]
    batch = micro_batch(_rows(places, rows))
    assert batch.places_S.tolist() == places
    first, last = int(inputs.batch.lengths_S[:start].sum()), int(inputs.batch.lengths_S[:end].sum())
    tensors = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs) if field.name != "batch"}
    cut: dict[str, Any] = {
        name: None if tensor is None else tensor[start:end] if name.endswith("_S") else tensor[first:last]
        for name, tensor in tensors.items()
    }
    return LossInputs(batch=batch, **cut)


def _rows(places: Sequence[int], rows: Mapping[int, PackedRow]) -> list[PackedRow]:
    runs: list[list[int]] = []
    for place in places:
        if runs and rows[runs[-1][0]] is rows[place]:
            runs[-1].append(place)
        else:
            runs.append([place])
    return [only(rows[run[0]], [rows[run[0]].places.index(place) for place in run]) for run in runs]
