"""Faults in a step: no memory for a sample, a gradient that is not finite."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.trainer.algorithm.step_totals import NotFinite
from penstock.services.trainer.batch import oom_split
from penstock.services.trainer.batch import token_data as known
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.loop import Trainer
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.rank0.artifacts import Rank0Artifacts
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind
from penstock.services.trainer.rank0.mailbox.queues import NoMailbox
from penstock.services.trainer.rank0.mailbox.results import Replayed, Result, StepMade, StepSkipped
from penstock.services.trainer.rank0.publication import Publication
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, PolicyVersion, StepPlan
from penstock.shared.settings import Settings
from penstock.shared.settings.policy import LoraSettings
from tests.support.tolerance import FORWARD, GRADIENT
from tests.trainer.algorithm.test_update import Rank, batch, settings, timeless

pytestmark = pytest.mark.usefixtures("one_rank")


def refused_by_a_device() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def refused_by_the_host() -> None:
    torch.empty(1 << 48, dtype=torch.uint8)  # more than there are addresses


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fail forward passes with gradients above a number of tokens."""
    forward = Policy.forward

    def limit(
        most_tokens: int, refused: Callable[[], None] = refused_by_a_device
    ) -> contextlib.AbstractContextManager[None]:
        def tight(self: Policy, batch_: Any) -> Any:
            if torch.is_grad_enabled() and batch_.tokens > most_tokens:
                refused()
            return forward(self, batch_)

        monkeypatch.setattr(Policy, "forward", tight)
        return enough_again()

    @contextlib.contextmanager
    def enough_again() -> Iterator[None]:
        yield
        monkeypatch.setattr(Policy, "forward", forward)

    return limit


@pytest.mark.parametrize("preset", ["grpo", "ppo", "dpo", "tis"])
def test_a_micro_batch_that_does_not_fit_is_cut_and_the_step_is_the_same(memory: Any, preset: str) -> None:
    whole, tight = Rank(settings(preset=preset)), Rank(settings(preset=preset))
    expected = whole.learn(batch())
    memory(15)
    figures = tight.learn(batch())
    assert expected["micro_batch_splits"] == 0.0
    assert figures["micro_batch_splits"] > 0.0
    assert figures["dropped_out_of_memory"] == 0.0
    assert figures["loss"] == pytest.approx(expected["loss"], abs=FORWARD)
    assert figures["grad_norm"] == pytest.approx(expected["grad_norm"], rel=GRADIENT)


@pytest.mark.parametrize("refused", [refused_by_a_device, refused_by_the_host])
def test_a_sample_that_does_not_fit_alone_is_left_out_and_counted(memory: Any, refused: Callable[[], None]) -> None:
    learner = Rank(settings())
    # prompts of 3, 4, 5, 6, samples of 2, 5, 3, 4: only 6 + 5 − 1 exceeds 9
    memory(9, refused)
    figures = learner.learn(batch())
    assert figures["dropped_out_of_memory"] == 1.0
    assert np.isfinite(figures["loss"])
    assert figures["grad_norm"] > 0.0


@pytest.mark.parametrize("variant", [{}, {"preset": "ppo", "epochs": 2, "minibatches": 2}, {"preset": "dpo"}])
def test_a_replay_with_its_plan_repeats_what_was_cut_and_left_out_to_the_bit(
    memory: Any, variant: dict[str, Any]
) -> None:
    made, repeated, unplanned = (Rank(settings(**variant)) for _ in range(3))
    with memory(9):
        figures = made.learn(batch())
    assert figures["micro_batch_splits"] > figures["dropped_out_of_memory"] > 0.0
    plan = made.learner.plan
    assert timeless(repeated.learn(batch(), plan=wire.decode(wire.encode(plan), StepPlan))) == timeless(figures)
    assert repeated.learner.plan == plan
    assert all(torch.equal(repeated.weights()[name], tensor) for name, tensor in made.weights().items())
    unplanned.learn(batch())
    assert not all(torch.equal(unplanned.weights()[name], tensor) for name, tensor in made.weights().items())


def test_a_replay_repeats_the_dropout_of_adapters_whatever_was_drawn_before(memory: Any) -> None:
    of = settings()
    lora = {"rank": 4, "dropout": 0.3}
    of = of.model_copy(update={"policy": of.policy.model_copy(update={"lora": LoraSettings.model_validate(lora)})})
    made, repeated = Rank(of), Rank(of)
    with memory(9):
        figures = made.learn(batch())
    torch.rand(7)
    assert timeless(repeated.learn(batch(), plan=made.learner.plan)) == timeless(figures)
    assert all(torch.equal(repeated.weights()[name], tensor) for name, tensor in made.weights().items())
    other = Rank(of)
    assert other.learn(batch(), step=2)["grad_norm"] != figures["grad_norm"], "each step draws its own"


def test_a_replay_lays_out_as_the_step_was_where_the_cap_was_raised_and_anew_where_it_was_lowered() -> None:
    made, raised, lowered = Rank(settings(24)), Rank(settings(4096)), Rank(settings(12))
    made.learn(batch())
    plan = made.learner.plan
    assert plan is not None
    for learner in (raised, lowered):
        learner.learn(batch(), plan=plan)
    assert raised.learner.plan == plan
    assert all(torch.equal(raised.weights()[name], tensor) for name, tensor in made.weights().items())
    assert lowered.learner.plan is not None
    assert lowered.learner.plan.micro_batch_tokens == 12
    assert lowered.learner.plan.layout != plan.layout


def test_without_memory_for_anything_it_says_so(memory: Any) -> None:
    learner = Rank(settings())
    memory(0)
    with pytest.raises(torch.OutOfMemoryError, match=r"lower trainer\.micro_batch_tokens"):
        learner.learn(batch())


def test_an_error_that_is_no_lack_of_memory_is_a_bug(memory: Any) -> None:
    def broken() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    learner = Rank(settings())
    memory(15, broken)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        learner.learn(batch())


def test_the_parts_of_a_micro_batch_are_slices_of_what_is_known() -> None:
    groups = [experience.group for experience in batch()[:2]]
    rows = [
        PackedRow(group.prompt_token_ids, group.samples, tuple(range(4 * n, 4 * n + 4)))
        for n, group in enumerate(groups)
    ]
    samples = [sample for group in groups for sample in group.samples]
    lags_M = [np.full(len(sample.token_ids), place, np.float32) for place, sample in enumerate(samples)]
    whole = known.of(micro_batch(rows), lags_M, [False] * 4 + [True] * 4, torch.device("cpu"))
    whole.advantages_N = torch.arange(float(len(whole.lags_N)))
    first, second = oom_split.halves(whole, oom_split.rows_by_place(rows))
    assert (first.batch.places_S.tolist(), second.batch.places_S.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert first.lengths_S.tolist() == [2, 5, 3, 4]
    assert torch.equal(torch.cat([first.lags_N, second.lags_N]), whole.lags_N)
    assert first.advantages_N is not None
    assert first.advantages_N.tolist() == [float(n) for n in range(14)]
    assert second.batch.targets_N.tolist() == whole.batch.targets_N[14:].tolist()
    nothing = oom_split.part(whole, oom_split.rows_by_place(rows), 0, 0)
    assert (len(nothing.batch.places_S), len(nothing.lags_N)) == (0, 0)


def poison(of: list[Experience]) -> list[Experience]:
    rewards = np.array([np.nan, 0, 0, 1], dtype=np.float32)
    return [Experience(e.group, rewards, e.scores, e.scored_at_s, e.score_s) for e in of]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_reaches_neither_weights_nor_optimizer(zero_stage: int) -> None:
    of = settings()
    trainer = of.trainer.model_copy(update={"zero_stage": zero_stage})
    of = of.model_copy(update={"trainer": trainer})
    poisoned, clean = Rank(of), Rank(of)
    before = poisoned.whole()
    with pytest.raises(NotFinite, match="finite gradient of the policy at step 1") as caught:
        poisoned.learn(poison(batch()))
    assert not caught.value.touched
    assert all(torch.equal(before[name], tensor) for name, tensor in poisoned.whole().items())
    assert timeless(poisoned.learn(batch())) == timeless(clean.learn(batch()))
    after = clean.whole()
    assert all(torch.equal(after[name], tensor) for name, tensor in poisoned.whole().items())


def optimizer_tensors(learner: Rank) -> list[torch.Tensor]:
    """All optimizer tensors: moments, step counters, float32 weights."""
    engines = [engine for engine in (learner.engine, learner.critic) if engine is not None]
    states = [engine._engine.optimizer.state_dict() for engine in engines]
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(("zero_stage", "preset"), [(0, "grpo"), (1, "dpo"), (2, "ppo"), (3, "ppo")])
def test_a_trial_leaves_weights_optimizer_and_random_numbers_as_they_were(zero_stage: int, preset: str) -> None:
    of = settings(preset=preset, micro_batch_tokens=24)
    of = of.model_copy(update={"trainer": of.trainer.model_copy(update={"zero_stage": zero_stage})})
    tried, untried = Rank(of), Rank(of)
    for learner in (tried, untried):
        learner.learn(batch())
    weights, optimizer, numbers = tried.whole(), optimizer_tensors(tried), torch.get_rng_state()
    for group in batch():
        tried.try_out(group)
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(torch.equal(weights[name], tensor) for name, tensor in tried.whole().items())
    assert len(optimizer) > 2
    assert all(torch.equal(before, now) for before, now in zip(optimizer, optimizer_tensors(tried), strict=True))
    assert timeless(tried.learn(batch(), step=2)) == timeless(untried.learn(batch(), step=2))
    after = untried.whole()
    assert all(torch.equal(after[name], tensor) for name, tensor in tried.whole().items())


def test_a_group_that_fails_in_the_backward_pass_only_fails_its_trial() -> None:
    learner = Rank(settings())
    (parameter,) = [
        p for name, p in learner.engine.policy.named_parameters() if name.endswith("layers.0.mlp.up_proj.weight")
    ]

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("poison")

    with parameter.register_hook(refuse), pytest.raises(ValueError, match="poison"):
        learner.try_out(batch()[0])
    learner.try_out(batch()[0])


def test_a_trial_cuts_what_does_not_fit_as_a_step_does(memory: Any) -> None:
    learner = Rank(settings())
    with memory(12):
        learner.try_out(batch()[0])


def test_a_trial_leaves_out_the_samples_that_a_step_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, group = Rank(settings()), batch()[0]
    seen, forward = set[int](), learner.engine.forward

    def noted(inputs: Any) -> Any:
        seen.update(inputs.places_S.tolist())
        return forward(inputs)

    monkeypatch.setattr(learner.engine, "forward", noted)
    learner.try_out(group, [len(group.group.samples[0].token_ids)] + [0] * (len(group.group.samples) - 1))
    assert seen == set(range(1, len(group.group.samples)))


def test_once_some_weights_moved_the_error_says_so() -> None:
    data = batch()
    learner = Rank(settings(preset="tis", minibatches=4))
    with pytest.raises(NotFinite) as caught:
        learner.learn([*data[:1], *poison(data[1:2]), *data[2:]])
    order = np.random.default_rng([0, 1]).permutation(4).tolist()
    assert caught.value.touched is (order[0] != 1)


TRAIN = Command(CommandKind.TRAIN, lags={PolicyVersion(0): 1}, learning_rate=1e-3, version=PolicyVersion(1))


def trainer(folder: Path, mode: str = "separate") -> Trainer:
    of = Settings.model_validate(
        {
            **settings().model_dump(),
            "run": {"id": "faults", "folder": folder},
            "internal": {"probe_every_versions": 0},
            "trainer": {"learning_rate": 1e-3, "zero_stage": 0},
            "placement": {"mode": mode},
        }
    )
    artifacts = Rank0Artifacts(of, Publication(of, "127.0.0.1", lambda: b""))
    return Trainer(Rank(of).engine, of, NoMailbox(), artifacts)


def trained(by: Trainer) -> Result:
    return by.execute(dataclasses.replace(TRAIN, groups=tuple(batch())))


def test_a_replay_that_could_not_follow_its_plan_says_so(tmp_path: Path, memory: Any) -> None:
    with memory(9):
        made = trained(trainer(tmp_path / "first"))
    assert isinstance(made, StepMade)
    assert made.plan.misfits

    def replayed(name: str, known: StepPlan | None) -> str:
        command = Command(
            CommandKind.REPLAY, groups=tuple(batch()), lags={PolicyVersion(0): 1}, learning_rate=1e-3, plan=known
        )
        result = trainer(tmp_path / name).execute(command)
        assert isinstance(result, Replayed)
        return result.difference

    assert replayed("as it was", made.plan) == ""
    assert replayed("of an older version", None) == ""
    with memory(9):
        difference = replayed("with less memory", dataclasses.replace(made.plan, misfits=()))
    assert "step 1 was replayed in other forward passes" in difference
    assert "published again as a new version" in difference


def test_a_version_is_offered_again_after_a_batch_or_a_trial_that_makes_no_step(tmp_path: Path) -> None:
    shared, away = trainer(tmp_path, "shared"), dataclasses.replace(TRAIN, groups=tuple(batch()), rung=2)
    assert isinstance(shared.execute(away), StepMade)

    def offered() -> list[list[int]]:
        return [bucket.tolist() for bucket in shared._artifacts.snapshots]

    before = offered()
    assert before
    skipped = shared.execute(dataclasses.replace(away, groups=tuple(poison(batch())), version=PolicyVersion(2)))
    assert isinstance(skipped, StepSkipped)
    assert offered() == before
    shared.execute(dataclasses.replace(away, kind=CommandKind.TRY))
    assert offered() == before
    assert isinstance(shared.execute(dataclasses.replace(away, version=PolicyVersion(2))), StepMade)
    assert offered() != before
