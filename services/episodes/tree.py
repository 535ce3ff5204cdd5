"""The tree of an episode's tokens: append-only, so that every sampled token is trained exactly as it was drawn.

::

    segment    given (of a message, by the template) or sampled (a turn), after its parent
    turn       the answer in a sampled segment, with the messages between it and the turn before

A history that repeats the messages sent before continues at the turn's own ids (:meth:`Tree.attach`). Any other one, as it
was edited, compacted, or written again in other tokens, branches from the longest common prefix of its ids
(:meth:`Tree.place`). Given segments may be cut in two there; sampled ones never are, and are shared whole or not at all.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.services.episodes.messages import Message
from penstock.shared.bus.messages import FinishReason, Float32Array, Int32Array, no_ids
from penstock.shared.model.routes import join
from penstock.shared.peers.turns import DrawnTurn


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    """Tokens after ``parent``; ``drawn`` is None if they were given."""

    parent: "Segment | None"
    token_ids: Int32Array
    drawn: DrawnTurn | None = None
    children: list["Segment"] = dataclasses.field(default_factory=list)
    turn: "Turn | None" = None
    """Whose answer it is."""

    @property
    def path(self) -> Int32Array:
        """All tokens from the root to this segment's last."""
        parts, segment = [self.token_ids], self.parent
        while segment is not None:
            parts.append(segment.token_ids)
            segment = segment.parent
        return np.concatenate(parts[::-1])

    @property
    def is_kept(self) -> bool:
        """Whether it, or a segment below it, was sampled."""
        return self.drawn is not None or any(child.is_kept for child in self.children)


@dataclasses.dataclass(slots=True, eq=False)
class Turn:
    """An answer, after the messages ``before`` it, which follow the answer of the turn ``parent``."""

    number: int
    parent: "Turn | None"
    before: tuple[Message, ...]
    answer: Message
    segment: Segment
    children: list["Turn"] = dataclasses.field(default_factory=list)

    @property
    def history(self) -> list[Message]:
        """All messages up to the answer."""
        earlier = self.parent.history if self.parent is not None else []
        return [*earlier, *self.before, self.answer]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TreeColumns:
    """An episode's tokens in depth-first order, as :class:`Sample` has them."""

    token_ids: Int32Array
    behavior_logprobs: Float32Array
    version_spans: Int32Array
    segments: Int32Array
    support_sizes: Int32Array
    support_ids: Int32Array


class Tree:
    """One episode's."""

    def __init__(self) -> None:
        self._root = Segment(None, no_ids())
        self._turns: list[Turn] = []
        self._drawn = 0

    @property
    def turns(self) -> int:
        """Number of answers drawn."""
        return self._drawn

    def attach(self, messages: Sequence[Message]) -> tuple[Turn | None, int]:
        """Return the turn that most of ``messages`` repeat, the newest of equals, and how many do."""
        best: tuple[int, int, Turn | None] = (0, -1, None)
        waiting = [(0, turn) for turn in self._turns]
        while waiting:
            start, turn = waiting.pop()
            end = start + len(turn.before) + 1
            written = [*turn.before, turn.answer]
            if end > len(messages) or not all(map(Message.is_same, written, messages[start:end])):
                continue
            if (end, turn.number) > best[:2]:
                best = (end, turn.number, turn)
            waiting += [(end, child) for child in turn.children]
        return best[2], best[0]

    def place(self, token_ids: Int32Array, after: Turn | None) -> tuple[Segment, int]:
        """Add given tokens after a turn, None: from the root; return their last segment, and how many were there."""
        at = self._root if after is None else after.segment
        common, segment, within = _deepest(at, token_ids)
        if within < len(segment.token_ids):
            segment = _cut(segment, within)
        if common < len(token_ids):
            rest = Segment(segment, token_ids[common:])
            segment.children.append(rest)
            segment = rest
        return segment, common

    def add(
        self, at: Segment, drawn: DrawnTurn, after: Turn | None, before: Sequence[Message], answer: Message
    ) -> Turn:
        """Add an answer, whose tokens were drawn at the end of ``at``."""
        segment = Segment(at, drawn.token_ids, drawn)
        at.children.append(segment)
        turn = Turn(self._drawn, after, tuple(before), answer, segment)
        segment.turn = turn
        self._drawn += 1
        (self._turns if after is None else after.children).append(turn)
        return turn

    def columns(self) -> TreeColumns:
        """Return the sampled tokens and what they saw. Raises ValueError: nothing was sampled."""
        rows = list(_rows(self._root))
        if not rows:
            raise ValueError("expected an episode with a sampled turn, found none")
        starts = np.cumsum([0, *(len(part.token_ids) for part, _ in rows)])[:-1]
        segments = [
            (start, parent, int(part.drawn is not None)) for start, (part, parent) in zip(starts, rows, strict=True)
        ]
        parts = [part.drawn or _given(part.token_ids) for part, _ in rows]
        restricted = any(len(part.support_sizes) for part in parts)
        sizes = [part.support_sizes if len(part.support_sizes) else np.zeros_like(part.token_ids) for part in parts]
        return TreeColumns(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            behavior_logprobs=np.concatenate([part.logprobs for part in parts]),
            version_spans=_spans([(int(start), part) for start, part in zip(starts, parts, strict=True)]),
            segments=np.array(segments, dtype=np.int32),
            support_sizes=np.concatenate(sizes) if restricted else no_ids(),
            support_ids=np.concatenate([part.support_ids for part in parts]) if restricted else no_ids(),
        )

    def routes(self) -> bytes:
        """Return the experts of its turns' tokens (``penstock.shared.model.routes``); empty: none has any."""
        drawn = [segment.drawn for segment, _ in _rows(self._root) if segment.drawn is not None]
        return join([(len(each.token_ids), each.routes) for each in drawn])

    def rows(self) -> dict[int, int]:
        """Return the row in ``segments`` of each sampled segment, by its identity."""
        return {id(segment): row for row, (segment, _) in enumerate(_rows(self._root)) if segment.drawn is not None}


def turn_of(at: Segment) -> tuple[Turn | None, Int32Array]:
    """Return the last turn on the way to a segment, and the given tokens since."""
    given = no_ids()
    segment: Segment | None = at
    while segment is not None and segment.turn is None:
        given, segment = np.concatenate([segment.token_ids, given]), segment.parent
    return (None if segment is None else segment.turn), given


def _deepest(at: Segment, token_ids: Int32Array) -> tuple[int, Segment, int]:
    """Return how many of ``token_ids`` are below ``at``, the segment of the last one, and its place there."""
    best = (0, at, len(at.token_ids))
    waiting = [(at, 0)]
    while waiting:
        parent, start = waiting.pop()
        for child in parent.children:
            common = _common(child.token_ids, token_ids[start:])
            if common == len(child.token_ids):
                waiting.append((child, start + common))
            elif child.drawn is not None:
                continue
            if start + common > best[0]:
                best = (start + common, child, common)
    return best


def _common(left: Int32Array, right: Int32Array) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _cut(segment: Segment, at: int) -> Segment:
    """Cut a given segment; return the new one with its first tokens. Holders of ``segment`` keep its end."""
    parent = segment.parent
    assert parent is not None
    assert segment.drawn is None
    head = Segment(parent, segment.token_ids[:at], children=[segment])
    parent.children[parent.children.index(segment)] = head
    segment.parent, segment.token_ids = head, segment.token_ids[at:]
    return head


def _rows(root: Segment) -> Iterator[tuple[Segment, int]]:
    """Yield the kept segments depth first, each with its parent's row; given ones that were cut in vain are whole."""
    waiting = [(child, -1) for child in reversed(root.children) if child.is_kept]
    row = 0
    while waiting:
        segment, parent = waiting.pop()
        kept = [child for child in segment.children if child.is_kept]
        while segment.drawn is None and len(kept) == 1 and kept[0].drawn is None:
            inner = kept[0]
            segment = Segment(segment.parent, np.concatenate([segment.token_ids, inner.token_ids]))
            kept = [child for child in inner.children if child.is_kept]
        yield segment, parent
        waiting += [(child, row) for child in reversed(kept)]
        row += 1


def _given(token_ids: Int32Array) -> DrawnTurn:
    none = np.zeros((0, 2), dtype=np.int32)
    return DrawnTurn(token_ids, np.zeros(len(token_ids), dtype=np.float32), none, FinishReason.STOP)


def _spans(parts: Sequence[tuple[int, DrawnTurn]]) -> Int32Array:
    """Return (first token, version) rows; given tokens have the version before them, at first the one after."""
    spans: list[tuple[int, int]] = []
    for start, part in parts:
        for first, version in part.version_spans.tolist():
            if not spans:
                spans.append((0, version))
            elif spans[-1][1] != version:
                spans.append((start + first, version))
    return np.array(spans, dtype=np.int32)
