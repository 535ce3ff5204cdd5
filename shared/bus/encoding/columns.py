"""Columnar encoding of many small records of one kind.

::

    {"rows": 2, "text": ["46", "47"], "token_ids": {"lengths": [3, 2], "joined": array}}
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.shared.bus.encoding.validation import INVALID, Reader, shown

_MOST_ROWS = 65_536


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The concatenated arrays of one column and their lengths."""

    joined: npt.NDArray[Any]
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def written(self) -> dict[str, Any]:
        return {"lengths": self.lengths, "joined": self.joined}

    def split(self) -> list[npt.NDArray[Any]]:
        ends = list(accumulate(self.lengths))
        return list(map(self.joined.__getitem__, map(slice, [0, *ends], ends)))


class Rows(tuple[Any, ...]):
    """Decoded records, with their columns as they are written: to send them on, nothing is joined again."""

    columns: dict[str, Any]


ColumnCheck = Callable[[Mapping[str, Joined]], None]
"""Raises ValueError if array columns do not belong together."""


def write_columns(names: Iterable[str], late: Iterable[str], records: Sequence[object]) -> dict[str, Any]:
    """Return the columns; those of ``late`` only if a record has something in them."""
    if type(records) is Rows:
        return records.columns
    absent = {name for name in late if all(map(_is_empty, map(operator.attrgetter(name), records)))}
    written: dict[str, Any] = {"rows": len(records)}
    for name in names if records else ():
        if name in absent:
            continue
        column = list(map(operator.attrgetter(name), records))
        if isinstance(column[0], np.ndarray):
            written[name] = Joined(np.concatenate(column), list(map(len, column))).written()
        else:
            written[name] = column
    return written


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and not len(value))


def join_columns(tables: Sequence[Mapping[str, Any]], order: Sequence[int], late: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of all tables' rows, as they are written, in ``order``; of columns that all tables have.

    A table without a column of ``late`` has its default in every row.

    Raises:
        ValueError: a column has not the rows of its table.
    """
    joined: dict[str, Any] = {"rows": len(order)}
    used = {name: empty for name, empty in late.items() if any(name in table for table in tables)}
    tables = [{**{name: _repeated(used[name], table["rows"]) for name in used}, **table} for table in tables]
    for name in tables[0]:
        cells = [table[name] for table in tables if name in table]
        if len(cells) < len(tables) or name == "rows":
            continue
        if type(cells[0]) is list:
            rows = _rows_of(name, cells, tables)
            joined[name] = [rows[row] for row in order]
        else:
            lengths = _rows_of(name, [cell["lengths"] for cell in cells], tables)
            arrays = [array for cell in cells for array in _parts(name, cell)]
            if len({array.dtype for array in arrays}) > 1:
                raise ValueError(f"{name}: expected arrays of one type, found several")
            parts = [arrays[row] for row in order]
            joined[name] = {"lengths": [lengths[row] for row in order], "joined": np.concatenate(parts)}
    return joined


def _repeated(empty: Any, rows: int) -> Any:
    return Joined(empty, [0] * rows).written() if isinstance(empty, np.ndarray) else [empty] * rows


def _rows_of(name: str, cells: Sequence[Any], tables: Sequence[Mapping[str, Any]]) -> list[Any]:
    for cell, table in zip(cells, tables, strict=True):
        if type(cell) is not list or len(cell) != table["rows"]:
            raise ValueError(f"{name}: expected the rows of each part, found others")
    return [row for cell in cells for row in cell]


def _parts(name: str, cell: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    joined, lengths = cell["joined"], cell["lengths"]
    if sum(lengths) != len(joined) or min(lengths) < 0:
        raise ValueError(f"{name}: expected an array of its length from each part, found others")
    return [joined] if len(lengths) == 1 else Joined(joined, lengths).split()


def columns_reader(
    row: type, readers: Mapping[str, Reader], check: ColumnCheck | None, length: int, late: Iterable[str] = ()
) -> Reader:
    most = min(length, _MOST_ROWS)
    names, required = list(readers), readers.keys() - set(late)

    def read(written: Any) -> tuple[Any, ...]:
        rows = written["rows"]
        if type(rows) is not int or not 0 <= rows <= most:
            raise ValueError(f"expected 0 to {most} rows, found {shown(rows)}")
        if rows == 0:
            return ()
        columns = {
            name: _read_column(name, reader, written[name]) for name, reader in readers.items() if name in written
        }
        if any(len(column) != rows for column in columns.values()):
            lengths = {name: len(column) for name, column in columns.items()}
            raise ValueError(f"expected columns of {rows} rows, found {lengths}")
        if check is not None:
            check({name: column for name, column in columns.items() if type(column) is Joined})
        cells: list[list[Any]] = [
            column.split() if isinstance(column, Joined) else column for column in columns.values()
        ]
        if required <= columns.keys() and [*columns] == names[: len(columns)]:
            return _rows(row, cells, {"rows": rows, **columns})
        return tuple([row(**dict(zip(columns, values, strict=True))) for values in zip(*cells, strict=True)])

    return Reader(read)


def _rows(row: type, cells: Sequence[list[Any]], columns: Mapping[str, Any]) -> Rows:
    records = Rows(map(row, *cells))
    records.columns = {name: column.written() if type(column) is Joined else column for name, column in columns.items()}
    return records


def _read_column(name: str, reader: Reader, column: Any) -> Joined | list[Any]:
    try:
        if type(column) is dict:
            return _read_joined(reader, column)
        if type(column) is not list:
            raise TypeError(f"expected a column, found {shown(column)}")
        cells = reader.read_all(column)
        if np.ndarray in set(map(type, cells)):
            raise TypeError("expected arrays of all rows, joined, or of none")
        return cells
    except INVALID as error:
        raise ValueError(f"{name}: {error}") from error


def _read_joined(reader: Reader, column: Mapping[str, Any]) -> Joined:
    joined, lengths = reader.read(column["joined"]), column["lengths"]
    if not isinstance(joined, np.ndarray) or type(lengths) is not list:
        raise TypeError("expected an array and the lengths of its parts")
    if not {int}.issuperset(map(type, lengths)) or min(lengths, default=0) < 0 or sum(lengths) != len(joined):
        raise ValueError(f"expected lengths that add up to {len(joined)}, found others")
    return Joined(joined, lengths)
