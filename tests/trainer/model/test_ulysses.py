"""A row that several ranks compute together (``trainer.sequence_parallel``) has one rank's numbers, or is refused."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.trainer.algorithm.minibatches import check_parts
from penstock.services.trainer.batch import shards
from penstock.services.trainer.batch.assignment import plan
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.forward_passes import digest
from penstock.services.trainer.model.layers import ulysses
from penstock.services.trainer.model.policy import Policy
from penstock.shared.errors import SettingsError
from penstock.shared.model.flops import ModelSizes
from penstock.shared.settings import Settings
from tests.support import packed, split_ranks, tiny, tiny_hybrids, trainer_ranks, trees
from tests.support.launched_ranks import found_by
from tests.support.split_ranks import RUNS, families
from tests.support.tolerance import GRADIENT
from tests.trainer import test_ranks
from tests.trainer.algorithm import test_update

EXACT = 1e-5
"""Float32 sums in another order, relative to the largest gradient, and nats; 1e-6 is the most observed."""
LONG = ((5, (4, 30, 6)), (9, (2, 2)), (40, (30, 3, 70)), (60, (80, 1)), (3, (10, 12)))


def rows() -> list[PackedRow]:
    return packed.placed(packed.rows(0, LONG))


def of(layout: list[list[MicroBatch]]) -> list[list[tuple[bool, int]]]:
    return [[(each.shard is not None, each.tokens) for each in rank] for rank in layout]


@pytest.mark.parametrize(("ranks", "together", "cap"), [(2, 2, 70), (4, 2, 70), (4, 4, 40), (8, 2, 75), (6, 3, 50)])
@pytest.mark.parametrize("split", [True, False])
def test_only_samples_that_fit_no_rank_are_cut_and_each_sample_is_trained_once(
    ranks: int, together: int, cap: int, split: bool
) -> None:
    layout = plan(
        rows(),
        cap,
        ranks,
        split=split,
        sizes=ModelSizes(linear_weights=10, attention_width=4),
        sequence_parallel=together,
    )
    assert len({len(passes) for passes in layout}) == 1, "ranks wait for each other"
    for passes in layout:
        in_order = [each.shard is not None for each in passes]
        assert in_order == sorted(in_order, reverse=True), "rows in parts come first"
        assert all(each.tokens <= cap for each in passes)
    for first in range(0, ranks, together):
        group = layout[first : first + together]
        cut = [[each for each in passes if each.shard is not None] for passes in group]
        assert len({len(passes) for passes in cut}) == 1, "the ranks of a group are in step"
        for parts in zip(*cut, strict=True):
            assert len({part.tokens for part in parts}) == 1
            alone = [row for row in rows() for place in parts[0].places_S if place in row.places]
            assert alone, "samples are on the first rank"
            assert all(len(part.places_S) == 0 for part in parts[1:])
    trained = sorted(int(place) for passes in layout for each in passes for place in each.places_S)
    assert trained == list(range(sum(len(row.samples) for row in rows())))
    if split:
        long = {
            place
            for row in rows()
            for place, sample in zip(row.places, row.samples, strict=True)
            if len(row.prompt_token_ids) + len(sample.token_ids) - 1 > cap
        }
        in_parts = {int(place) for passes in layout for each in passes if each.shard for place in each.places_S}
        assert in_parts == long
        assert long


def test_a_group_without_a_long_sample_begins_with_its_own() -> None:
    layout = plan(rows(), 120, 4, sizes=ModelSizes(linear_weights=10, attention_width=4), sequence_parallel=2)
    assert [passes[0].shard is not None for passes in layout] == [True, True, False, False]
    assert all(passes[0].tokens > 1 for passes in layout), "no group waits for another one's sample"


def test_without_long_samples_the_plan_is_the_one_without_the_setting() -> None:
    alone, together = (plan(rows(), 200, 4, sequence_parallel=number) for number in (1, 2))
    assert of(alone) == of(together)
    assert digest([alone]) == digest([together])


def test_plans_of_other_groups_have_other_digests() -> None:
    two, four = (plan(rows()[3:4], 75, 4, sequence_parallel=number) for number in (2, 4))
    assert digest([two]) != digest([four])


def test_a_replay_with_parts_larger_than_a_forward_pass_is_refused() -> None:
    of_trainer = {"ranks": 2, "sequence_parallel": 2, "micro_batch_tokens": 30}
    layout = plan(rows()[3:4], 75, 2, sequence_parallel=2)
    with pytest.raises(
        SettingsError, match=r"of at least \d+, which a sample of the journal needs .* set the latter to 1"
    ):
        check_parts([layout], Settings.model_validate({"trainer": of_trainer}))
    check_parts([layout], Settings.model_validate({"trainer": {**of_trainer, "micro_batch_tokens": 75}}))


def test_parts_are_the_row_and_each_target_is_where_its_token_is() -> None:
    whole = micro_batch([trees.group(0, 40, segments=20), *rows()[:2]])
    for ranks in (2, 3, 4, 5):
        parts = [each.shard for each in shards.split(whole, ranks)]
        own = [shard.part for shard in parts if shard is not None]
        ids = np.concatenate([part.input_ids_BT[0] for part in own])
        positions = np.concatenate([part.position_ids_BT[0] for part in own])
        assert ids[: whole.tokens].tolist() == whole.input_ids_BT[0].tolist()
        assert positions[: whole.tokens].tolist() == whole.position_ids_BT[0].tolist()
        assert positions.tolist() == own[0].segments.positions.tolist()
        targets, columns = np.zeros_like(whole.targets_N), np.zeros_like(whole.columns_N)
        for rank, shard in enumerate(parts):
            assert shard is not None
            targets[shard.places_N] = shard.part.targets_N
            columns[shard.places_N] = shard.part.columns_N + rank * len(ids) // ranks
        assert targets.tolist() == whole.targets_N.tolist()
        assert columns.tolist() == whole.columns_N.tolist()


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"trainer.sequence_parallel to divide the attention heads .* 4 and 6 heads"
    ):
        ulysses.to_heads(4, *[torch.zeros(3, heads, 8) for heads in (6, 3, 3)])


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"ranks": 3, "sequence_parallel": 2}, "trainer.sequence_parallel to divide trainer.ranks, found 2 and 3"),
        ({"ranks": 2, "sequence_parallel": 2, "packing": "sequences"}, 'trainer.packing = "auto" or "rows"'),
    ],
)
def test_settings_that_cannot_be_are_refused(trainer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Settings.model_validate({"trainer": trainer})


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_proven_is_refused_at_the_start() -> None:
    refused = {
        "Lfm2ShortConv": Policy(tiny_hybrids.short_convolution()),
        'trainer.packing = "sequences"': Policy(tiny.model(0), packing="sequences"),
        "policy.lora.dropout": _with_dropout(),
    }
    for reason, policy in refused.items():
        with pytest.raises(SettingsError, match=rf"{reason}.* set trainer.sequence_parallel to 1"):
            policy.trunk.check_shards(2)
    Policy(tiny.model(0)).trunk.check_shards(2)


def _with_dropout() -> Policy:
    lora = trainer_ranks.settings(1, 1, lora={"rank": 4, "dropout": 0.1}).policy
    return Policy(adapter.add(tiny.model(0), lora))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("split_ranks", split_ranks.RANKS, tmp_path_factory.mktemp("split"), 1100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestFourRanks:
    """``tests/support/split_ranks.py``."""

    def test_attention_has_the_outputs_and_gradients_of_one_rank(self, four: dict[str, Any]) -> None:
        """With 1, 2, 4 and 8 key heads, windows, chunks, sinks and caps."""
        for measured in four["ranks"]:
            assert len(measured["attention"]) == 48
            assert max(measured["attention"].values()) < EXACT

    @pytest.mark.parametrize("name", families())
    def test_a_family_has_the_logprobs_and_gradients_of_one_rank_or_is_refused(
        self, four: dict[str, Any], name: str
    ) -> None:
        """With shared prompts and trees."""
        results = [measured["families"][name] for measured in four["ranks"] if name in measured["families"]]
        assert len(results) == 2
        mixers = {name for name in families() if isinstance(_result(four, name), str)}
        assert len(mixers) == 22, "others mix tokens in attention alone"
        for result in results:
            if isinstance(result, str):
                assert "set trainer.sequence_parallel to 1" in result
            else:
                assert max(result) < EXACT

    def test_four_ranks_share_the_keys_of_two_heads(self, four: dict[str, Any]) -> None:
        assert max(itertools.chain(*(gap for measured in four["ranks"] for gap in measured["four"].values()))) < EXACT

    def test_a_critic_has_the_values_and_gradients_of_one_rank(self, four: dict[str, Any]) -> None:
        assert max(measured["critic"] for measured in four["ranks"]) < EXACT

    def test_the_self_test_passes_what_is_right_and_refuses_a_wrong_order_of_heads(self, four: dict[str, Any]) -> None:
        assert max(four["started"]["right"]) < EXACT
        (sentence,) = four["started"]["wrong"]
        assert "of a row that 2 ranks compute together" in sentence
        assert "set trainer.sequence_parallel to 1" in sentence

    @pytest.mark.usefixtures("one_rank")
    @pytest.mark.parametrize("name", [name for name in RUNS if name != "short of memory"])
    def test_steps_are_those_of_one_rank(self, four: dict[str, Any], name: str) -> None:
        actual, tables = four["steps"][name], RUNS[name]
        batch = tables.get("batch", test_update.batch)
        options = {"algorithm": tables.get("algorithm", {}), "lora": tables.get("lora", {})}
        expected = test_ranks.on_one_rank(trainer_ranks.LONGER, batch, trainer={"micro_batch_tokens": 400}, **options)
        test_ranks.assert_same(actual, expected)
        assert sum(parts for parts, _ in actual["passes"]) > 0
        assert sum(alone for _, alone in actual["passes"]) > 0

    @pytest.mark.usefixtures("one_rank")
    def test_a_rank_without_memory_for_its_own_rows_leaves_those_in_parts_whole(self, four: dict[str, Any]) -> None:
        measured = four["memory"]
        expected = test_ranks.on_one_rank(trainer_ranks.LONGER, trainer={"micro_batch_tokens": 400})["measured"][0]
        assert measured["measured"][0]["micro_batch_splits"] > 0
        assert measured["measured"][0]["dropped_out_of_memory"] == 0
        assert measured["measured"][0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENT)
        assert measured["same plan"]
        assert all(torch.equal(measured["replayed"][name], tensor) for name, tensor in measured["weights"].items())

    def test_a_rank_without_memory_for_its_part_ends_the_trainer(self, four: dict[str, Any]) -> None:
        assert four["memory"]["ended"] == "no memory for a part"


def _result(four: dict[str, Any], name: str) -> Any:
    return next(measured["families"][name] for measured in four["ranks"] if name in measured["families"])
