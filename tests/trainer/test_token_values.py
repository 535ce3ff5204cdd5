"""Laws of the tokens that are recorded of a group: the trainer's own logprobs, at the tokens that it trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.services.trainer.batch.staleness import trained_tokens
from penstock.services.trainer.token_values import TokenRecorder, token_texts
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, PolicyVersion
from penstock.shared.bus.stores.policy.ledger import RunState
from penstock.shared.files.token_records import TokenValues, read_record, record_path, thin_out, write_record
from penstock.shared.settings import Settings
from tests.support import builders, real_tokenizers, tiny
from tests.support.driven import Driven
from tests.support.tolerance import FORWARD
from tests.trainer.algorithm import test_tree_steps
from tests.trainer.algorithm.test_update import GROUPS, Rank, batch, demonstrated, settings
from tests.trainer.rank0.test_driver import batch as numbered
from tests.trainer.rank0.test_driver import is_at
from tests.trainer.rank0.test_driver import settings as driver_settings

pytestmark = pytest.mark.usefixtures("one_rank")

LAST, DUE = 3, 2
"""The last group's place, and a step that shows it."""


def of_policy(groups: list[Experience]) -> list[Any]:
    """Behavior logprobs of the last group, which are those of the policy before the step where ``gap`` is 0."""
    return [sample.behavior_logprobs for sample in groups[LAST].group.samples]


@pytest.mark.parametrize(
    "of",
    [
        settings(preset="grpo"),
        settings(micro_batch_tokens=12),
        settings(preset="grpo", epochs=2),
        settings(proximal="recomputed", correction="token_tis"),
    ],
    ids=["packed", "split", "epochs", "recomputed"],
)
def test_they_are_the_policys_before_the_step_however_the_group_is_packed(of: Settings) -> None:
    rank = Rank(of)
    rank.learn(batch(0.3), DUE)
    assert sorted(rank.learner.logprobs) == [0, 1, 2, 3]
    for index, expected in enumerate(of_policy(batch(0.0))):
        assert rank.learner.logprobs[index] == pytest.approx(expected, abs=FORWARD)


def test_a_step_that_shows_no_group_takes_none_from_the_device() -> None:
    rank = Rank(settings())
    rank.learn(batch(0.3), DUE)
    rank.learn(batch(0.3), DUE + 1)
    assert rank.learner.logprobs == {}


def test_a_preference_has_those_of_its_two_samples_alone() -> None:
    rank = Rank(settings(preset="dpo"))
    rank.learn(batch(0.3), DUE)
    expected = of_policy(batch(0.0))
    assert len(rank.learner.logprobs) == 2
    for index, logprobs in rank.learner.logprobs.items():
        assert logprobs == pytest.approx(expected[index], abs=FORWARD)


def test_beside_demonstrations_they_are_still_those_of_the_samples() -> None:
    groups = batch(0.3)
    rank = Rank(settings(imitation=0.5))
    rank.learn([*demonstrated(groups[:1]), *groups[1:]], DUE)
    for index, expected in enumerate(of_policy(batch(0.0))):
        assert rank.learner.logprobs[index] == pytest.approx(expected, abs=FORWARD)


def test_stale_and_given_tokens_have_none() -> None:
    rank, contexts = Rank(settings()), (*[0] * 12, 0, 2, 3, 1)
    rank.learn(batch(0.3), DUE, contexts=contexts)
    trained = [
        np.isfinite(rank.learner.logprobs.get(index, np.full(n, np.nan))).tolist()
        for index, n in enumerate((2, 5, 3, 4))
    ]
    assert trained == [[True] * 2, [False] * 2 + [True] * 3, [False] * 3, [False] + [True] * 3]

    groups = test_tree_steps.episodes()
    rank = Rank(settings())
    rank.learn(groups, DUE)
    for index, sample in enumerate(groups[-1].group.samples):
        assert np.isfinite(rank.learner.logprobs[index]).tolist() == trained_tokens(sample).tolist()


def test_the_texts_of_tokens_are_together_the_text_and_wait_for_a_whole_character() -> None:
    tokenizer = real_tokenizers.deepseek()
    text = "So 3+4 = 7 👩‍🔬, 漢字 and é.\n\n<|not special|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids) == text
    assert len(texts) == len(ids)
    assert "" in texts, "of a character of several tokens"
    assert "�" not in texts


def test_no_sequence_of_ids_is_too_odd_to_be_recorded() -> None:
    for tokenizer in (real_tokenizers.deepseek(), tiny.tokenizer()):
        generator = np.random.default_rng(0)
        for _ in range(50):
            ids = [*generator.integers(0, 2 * len(tokenizer), 60).tolist(), (1 << 31) - 1]
            assert len(token_texts(tokenizer, ids)) == 61


@pytest.mark.parametrize("text", ["\x80", "�", "A"])
def test_a_text_without_characters_costs_no_more_than_another(text: str) -> None:
    """Each of its tokens is decoded a few times, not with all before it, which would take minutes."""
    tokenizer = real_tokenizers.deepseek()
    token_ids = tokenizer.convert_tokens_to_ids("\u0122") if text == "\x80" else tokenizer(text)["input_ids"][-1]
    for repeated in (token_ids, len(tokenizer) + 5):
        texts = token_texts(tokenizer, [repeated] * 20_000)
        assert len(texts) == 20_000
        assert max(map(len, texts)) <= 8


def recorder(folder: Path, model: Path | str = "none/such") -> TokenRecorder:
    of = {"run": {"id": "tokens", "folder": folder}, "policy": {"model": str(model)}}
    return TokenRecorder(Settings.model_validate(of))


def test_a_record_has_engine_and_trainer_side_by_side(tmp_path: Path) -> None:
    tiny.save(tmp_path / "model")
    (tmp_path / "tokens").mkdir()
    group = builders.experience(7, version=3)
    tokens = len(group.group.samples[0].token_ids)
    trainers = np.array([-0.123456, *[np.nan] * (tokens - 2), np.inf], dtype=np.float32)
    recorder(tmp_path, tmp_path / "model").record(PolicyVersion(4), group, {0: trainers})
    first, second = read_record(tmp_path / "tokens", 4, 7)
    assert first["trainer_logprobs"] == [-0.1235, *[None] * (tokens - 1)]
    assert second["trainer_logprobs"] == [None] * tokens
    assert first["logprobs"] == pytest.approx(group.group.samples[0].behavior_logprobs.tolist(), abs=1e-4)
    assert first["versions"] == [3] * tokens
    assert first["ids"] == group.group.samples[0].token_ids.tolist()
    assert len(first["texts"] or ()) == tokens


def test_demonstrations_have_no_engine_and_a_model_without_tokenizer_no_texts(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "model").mkdir()
    recorder(tmp_path, tmp_path / "model").record(PolicyVersion(1), demonstrated([builders.experience(0)])[0], {})
    (first, _) = read_record(tmp_path / "tokens", 1, 0)
    assert set(first["logprobs"]) == {None}
    assert first["texts"] is None


def test_a_disk_that_refuses_and_damaged_records_are_as_if_there_were_none(tmp_path: Path) -> None:
    run = tmp_path / "tokens"
    run.mkdir()
    (run / "tokens").write_text("a file in the folder's place")
    recorder(tmp_path, tmp_path).record(PolicyVersion(1), builders.experience(0), {})
    assert list(read_record(run, 1, 0)) == []
    for text in ("", "[]", "[" * 100_000, '{"completions": '):
        path = record_path(tmp_path, 2, 0)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        assert not any(read_record(tmp_path, 2, 0))


def test_records_on_disk_are_bounded_and_keep_the_newest(tmp_path: Path) -> None:
    for version in range(1, 12):
        values: TokenValues = {
            "ids": [1],
            "texts": None,
            "logprobs": [None],
            "trainer_logprobs": [None],
            "versions": [1],
        }
        write_record(tmp_path, version, 100 - version, [values])
    thin_out(tmp_path / "tokens", 1 << 20)
    assert len(list((tmp_path / "tokens").iterdir())) == 11
    thin_out(tmp_path / "tokens", 10)
    kept = sorted(int(path.name.partition("-")[0]) for path in (tmp_path / "tokens").iterdir())
    assert kept == [1, 3, 5, 7, 9, 11]


async def test_a_step_that_is_due_records_its_last_group_before_its_commit(bus: Bus, tmp_path: Path) -> None:
    of = driver_settings(bus, tmp_path)
    of = of.model_copy(update={"coordinator": of.coordinator.model_copy(update={"sample_every_steps": 2})})
    driven = Driven(bus, of)
    await driven.ledger.create()
    await driven.ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    trained = Rank(of)
    async with driven.running(lambda: driven.train(trained.engine)):
        for step in (1, 2, 3):
            await driven.feed(numbered(step))
            await is_at(driven, step)
    (version,) = [record.version for record in await driven.ledger.policies() if record.step == 2]
    assert [path.name for path in (of.run_folder / "tokens").iterdir()] == [f"{version}-{2 * GROUPS + LAST}.jsonl"]
    completions = list(read_record(of.run_folder, version, 2 * GROUPS + LAST))
    assert [len(each["ids"]) for each in completions] == [2, 5, 3, 4]
    assert all(None not in each["trainer_logprobs"] for each in completions)
