"""Lay out a row: a group's prompt and its samples, plain completions or trees, as one tree of segments.

Given tokens at the beginning of samples (a system prompt, tools, the task) that are equal are computed once; so are equal
beginnings of short completions (:func:`merges`). What no trained token follows is not computed, and a segment with one
continuation is one with it, except for the prompt.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.services.trainer.batch.segments import Int64Array, Segments
from penstock.shared.bus.messages import Int32Array, Sample

_COMPLETION = [(0, -1, 1)]
_WORTH = 0.1
"""Share of a row's tokens that merging has to save: each segment reads its ancestors' keys."""


def merges(prompt_token_ids: Int32Array, samples: Sequence[Sample]) -> bool:
    """Return whether equal beginnings of completions are computed once: where that saves a tenth of the row."""
    if len(samples) < 2 or any(len(sample.segments) or sample.routes for sample in samples):
        return False  # the routes of a token are its sample's
    ids = sorted(sample.token_ids[:-1].tolist() for sample in samples)
    saved = sum(_equal(first, second) for first, second in itertools.pairwise(ids))
    return saved >= _WORTH * (len(prompt_token_ids) + sum(map(len, ids)))


def _equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (mine, other) in pairs if mine != other), min(len(first), len(second)))


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """Tokens with the numbers ``first``, ``first + 1``, …, in order of arrival."""

    first: int
    token_ids: Int32Array
    is_given: bool
    """And everything before it; of a merged row, always."""
    children: "list[_Node]" = dataclasses.field(default_factory=list)
    given: "dict[int, _Node]" = dataclasses.field(default_factory=dict)
    """Given children by their first token."""
    computed: int = 0
    """Its first tokens that are computed."""

    @property
    def last(self) -> int:
        return self.first + len(self.token_ids) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class RowLayout:
    """Computed tokens of a row; ``columns_S`` predict each sample's trained tokens, ``before_S`` all of its tokens, or are −1."""

    input_ids_T: Int32Array
    segments: Segments
    columns_S: tuple[Int64Array, ...]
    before_S: tuple[Int64Array, ...]


def lay_out(
    prompt_token_ids: Int32Array,
    samples: Sequence[Sample],
    trained_S: Sequence[npt.NDArray[np.bool_]],
    *,
    merged: bool = False,
) -> RowLayout:
    """``trained_S``: which tokens of each sample are trained; ``merged``: equal beginnings are computed once."""
    trie = _Trie(prompt_token_ids, merged=merged)
    numbers_S = [trie.add(sample) for sample in samples]
    input_ids_T, segments, columns = trie.compute(
        [numbers[trained] for numbers, trained in zip(numbers_S, trained_S, strict=True)]
    )
    before_S = tuple(columns[numbers] for numbers in numbers_S)
    columns_S = tuple(before[trained] for before, trained in zip(before_S, trained_S, strict=True))
    return RowLayout(input_ids_T, segments, columns_S, before_S)


class _Trie:
    def __init__(self, prompt_token_ids: Int32Array, *, merged: bool) -> None:
        self._merged = merged
        self._root = _Node(0, prompt_token_ids, is_given=True)
        self._tokens = len(prompt_token_ids)

    def add(self, sample: Sample) -> Int64Array:
        """Add a sample; returns the number of the token before each of its tokens, or −1 (T)."""
        before = np.empty(len(sample.token_ids), dtype=np.int64)
        rows = sample.segments.tolist() or _COMPLETION
        nodes: list[_Node] = []
        for (start, parent, is_sampled), end in zip(rows, [*[row[0] for row in rows[1:]], len(before)], strict=True):
            above = nodes[parent] if parent >= 0 else self._root
            node, numbers = self._append(above, sample.token_ids[start:end], is_given=self._merged or not is_sampled)
            before[start] = above.last
            before[start + 1 : end] = numbers[:-1]
            nodes.append(node)
        return before

    def _append(self, node: _Node, token_ids: Int32Array, *, is_given: bool) -> tuple[_Node, Int64Array]:
        """Return the node whose last token is that of ``token_ids`` after ``node``, and the numbers of all of them."""
        numbers: list[Int64Array] = []
        while is_given and len(token_ids) and (child := node.given.get(int(token_ids[0]))) is not None:
            most = min(len(child.token_ids), len(token_ids))
            differs = child.token_ids[:most] != token_ids[:most]
            equal = int(differs.argmax()) if differs.any() else most
            node = child if equal == len(child.token_ids) else _split(node, child, equal)
            numbers.append(np.arange(node.first, node.first + equal))
            token_ids = token_ids[equal:]
        if len(token_ids):
            added = _Node(self._tokens, token_ids, is_given=is_given and node.is_given)
            node.children.append(added)
            if added.is_given:
                node.given[int(token_ids[0])] = added
            numbers.append(np.arange(self._tokens, self._tokens + len(token_ids)))
            self._tokens += len(token_ids)
            node = added
        return node, np.concatenate(numbers)

    def compute(self, before_S: Sequence[Int64Array]) -> tuple[Int32Array, Segments, Int64Array]:
        """Return the tokens up to those ``before_S`` and all of the prompt, their segments, and the column of each number."""
        needed = np.zeros(self._tokens, dtype=np.bool_)
        for before in before_S:
            needed[before] = True
        for node in reversed(self._in_order()):
            last = np.flatnonzero(needed[node.first : node.last + 1])
            continued = node is self._root or any(child.computed for child in node.children)
            node.computed = len(node.token_ids) if continued else int(last[-1]) + 1 if len(last) else 0
        columns = np.full(self._tokens, -1, dtype=np.int64)
        input_ids, segments, column = [self._root.token_ids[:0]], list[tuple[int, int, int]](), 0
        waiting: list[tuple[_Node, int]] = [(self._root, -1)]
        while waiting:
            node, parent = waiting.pop()
            start = column
            while True:
                columns[node.first : node.first + node.computed] = np.arange(column, column + node.computed)
                input_ids.append(node.token_ids[: node.computed])
                column += node.computed
                following = [child for child in node.children if child.computed]
                if len(following) != 1 or node is self._root:
                    break
                (node,) = following
            if column > start:
                segments.append((start, column - start, parent))
                parent = len(segments) - 1
            waiting += [(child, parent) for child in reversed(following)]
        of = np.array(segments, dtype=np.int64).reshape(-1, 3).T.copy()
        return np.concatenate(input_ids), Segments(*of), columns

    def _in_order(self) -> list[_Node]:
        ordered, waiting = list[_Node](), [self._root]
        while waiting:
            ordered.append(node := waiting.pop())
            waiting += node.children
        return ordered


def _split(above: _Node, node: _Node, length: int) -> _Node:
    """Put the first tokens of ``node`` into a node of their own, before it, and return that."""
    head = _Node(node.first, node.token_ids[:length], is_given=True, children=[node])
    above.children[above.children.index(node)] = head
    above.given[int(head.token_ids[0])] = head
    node.first, node.token_ids = node.first + length, node.token_ids[length:]
    head.given[int(node.token_ids[0])] = node
    return head
