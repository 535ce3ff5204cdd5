"""Trees of tokens: computed once, with the logprobs and gradients of their branches."""

import dataclasses

import numpy as np
import pytest
import torch

from penstock.services.trainer.batch.assignment import assign_pieces
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.batch.segments import Segments
from penstock.services.trainer.model.forward_passes import digest
from penstock.services.trainer.model.layers import attention_layout
from penstock.services.trainer.model.layers.attention import PackedLayout
from penstock.services.trainer.model.layers.attention_layout import CAUSAL, Pattern
from penstock.services.trainer.model.layers.attention_math import PLAIN
from penstock.shared.bus.messages import Sample
from tests.support import builders, model_page, trees
from tests.trainer.model.test_attention import WAYS, loop_varlen, one_by_one

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = 1e-12
"""Float64, sums in another order."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(model_page.verdicts().rows))
def test_trees_have_the_logprobs_and_gradients_of_their_branches(name: str) -> None:
    """Six random trees of every configuration that is packed."""
    for gap in trees.compare(name):
        assert gap.logprob_nats < EXACT, gap
        assert gap.gradient < EXACT, gap


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pattern", [CAUSAL, Pattern("window", 12), Pattern("chunk", 16)], ids=lambda left: left.kind)
def test_every_way_of_attention_sees_the_tokens_of_a_path(
    way: str, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(attention_layout, name, value)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", loop_varlen)
    segments = micro_batch([trees.group(0, 40, segments=40), trees.group(1, 40, 0)]).segments
    shape = (2, int(segments.lengths_K.sum()), 6)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
    packed = PackedLayout(segments, "varlen" if way == "varlen" else "mask", torch.device("cpu"))
    out = packed.attend(q[None], k[None], v[None], pattern)[0]
    assert torch.allclose(out, one_by_one(segments, q, k, v, pattern, PLAIN), rtol=0, atol=EXACT)


def test_a_key_is_visible_exactly_until_the_end_of_its_segments_subtree() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        parents, path = [-1], [0]
        for k in range(1, int(generator.integers(1, 20))):
            path = path[: int(generator.integers(0, len(path) + 1))]
            parents.append(path[-1] if path else -1)
            path.append(k)
        lengths = generator.integers(1, 5, len(parents))
        segments = Segments(np.cumsum(lengths) - lengths, lengths, np.array(parents))
        tokens, owner = int(lengths.sum()), np.repeat(np.arange(len(parents)), lengths)
        query, key = np.arange(tokens)[:, None], np.arange(tokens)
        of_path = np.array([[k in segments.path(int(q)) for k in owner] for q in owner])
        assert np.array_equal((key <= query) & (query < segments.until), (key <= query) & of_path)
        assert [segments.before[k] + lengths[k] for k in range(len(parents))] == [
            len(segments.places(segments.path(k))) for k in range(len(parents))
        ]


def test_rows_over_the_cap_are_cut_between_samples_and_train_every_sampled_token_once() -> None:
    rows = [trees.group(seed, 40, prompt, samples=6) for seed, prompt in ((0, 5), (1, 0), (2, 9))]
    rows = [
        dataclasses.replace(row, places=tuple(10 * n + place for place in row.places)) for n, row in enumerate(rows)
    ]
    most = max(dataclasses.replace(row, samples=(s,), places=(0,)).tokens for row in rows for s in row.samples) + 20
    pieces = [piece for chunks in assign_pieces(rows, most, 2) for chunk in chunks for piece in chunk]
    assert len(pieces) > 4
    assert all(micro_batch([piece]).tokens == piece.tokens <= most for piece in pieces)
    assert sorted(place for piece in pieces for place in piece.places) == sorted(p for row in rows for p in row.places)
    trained = sum(len(micro_batch([piece]).targets_N) for piece in pieces)
    assert trained == sum(sample.sampled_tokens for row in rows for sample in row.samples)


def test_equal_openings_are_computed_once_and_what_nothing_trained_follows_is_not() -> None:
    def sample(ids: list[int], segments: list[list[int]]) -> Sample:
        of = builders.sample(tokens=len(ids))
        return dataclasses.replace(of, token_ids=np.array(ids, np.int32), segments=np.array(segments, np.int32))

    # 7 8 9 is shared, then 5 | 6 are given apart; a given leaf (4 4), and the last token of a turn, are not computed
    first = sample([7, 8, 9, 5, 1, 2, 4, 4], [[0, -1, 0], [4, 0, 1], [6, 1, 0]])
    other = sample([7, 8, 9, 6, 3, 3, 2, 1], [[0, -1, 0], [4, 0, 1], [7, 0, 1]])
    batch = micro_batch([PackedRow(np.zeros(0, np.int32), (first, other), (0, 1))])
    assert batch.input_ids_BT.tolist() == [[7, 8, 9, 5, 1, 6, 3, 3]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5]]
    assert (batch.segments.starts_K.tolist(), batch.segments.parents_K.tolist()) == ([0, 3, 5], [-1, 0, 0])
    assert (batch.targets_N.tolist(), batch.columns_N.tolist()) == ([1, 2, 3, 3, 2, 1], [3, 4, 5, 6, 7, 5])


def completions(prompt: list[int], *ids: list[int], routes: bytes = b"", shares_prompt: bool = True) -> PackedRow:
    samples = tuple(
        dataclasses.replace(builders.sample(tokens=len(own)), token_ids=np.array(own, np.int32), routes=routes)
        for own in ids
    )
    places = tuple(range(len(ids)))
    return PackedRow(np.array(prompt, np.int32), samples, places, shares_prompt=shares_prompt)


def test_equal_beginnings_of_short_completions_are_computed_once() -> None:
    row = completions([5, 6], [1, 2, 3], [1, 4], [1, 2, 9], [7], [1, 2])
    batch = micro_batch([row])
    assert (batch.input_ids_BT.tolist(), batch.position_ids_BT.tolist()) == ([[5, 6, 1, 2]], [[0, 1, 2, 3]])
    assert (batch.segments.starts_K.tolist(), batch.segments.parents_K.tolist()) == ([0, 2], [-1, 0])
    assert batch.targets_N.tolist() == [1, 2, 3, 1, 4, 1, 2, 9, 7, 1, 2]
    assert batch.columns_N.tolist() == [1, 2, 3, 1, 2, 1, 2, 3, 1, 1, 2]
    assert (row.tokens, batch.tokens, batch.merged) == (4, 4, 1)


def test_completions_are_merged_where_that_saves_a_tenth_of_the_row_and_no_token_has_its_own_routes() -> None:
    ids = ([1, 2, 3, 4, 5, 0], [1, 6, 7, 8, 9, 0])
    assert micro_batch([completions([5], *ids)]).tokens == 11, "1 of 11 is less than a tenth"
    assert not completions([5], *ids).is_merged
    alike = ([1, 2, 3, 4, 5, 0], [1, 2, 7, 8, 9, 0])
    assert micro_batch([completions([5], *alike)]).tokens == 9
    assert micro_batch([completions([5], *alike, routes=b"claim")]).tokens == 11
    assert micro_batch([completions([5], *alike, shares_prompt=False)]).tokens == 12


def test_the_layout_in_the_journal_says_which_rows_were_merged() -> None:
    """So that a step of a release that did not merge them is known to be replayed otherwise."""
    merged, plain = completions([5], [1, 2, 0], [1, 2, 0]), completions([5], [1, 2, 0], [3, 4, 0])
    assert digest([[[micro_batch([merged])]]]) != digest([[[micro_batch([plain])]]])
