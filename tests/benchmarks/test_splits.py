"""Laws of the comparison of layouts, and of the whole run's figures."""

import dataclasses
import doctest
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.work import PROMPT_TOKENS
from benchmarks.runs import splits, whole_run
from benchmarks.runs.plan_rates import BAR, Configuration, rows_of
from benchmarks.runs.splits import WORKS, compared
from services.plan.workload import Lengths
from shared.settings import loads


def row(name: str, of: Configuration, samples_per_s: float) -> dict[str, Any]:
    """Return a run as it is stored, whose trainer waits for a third of each step."""
    groups = [f"--algorithm.max_lag={of.max_lag}", "--rollout.engine=vllm", *of.flags(toy=False)]
    samples, seconds = of.groups * of.group_size, of.groups * of.group_size / samples_per_s
    step = {
        "samples": samples, "response_tokens_mean": of.lengths.mean, "step_s": seconds, "phase_wait_s": seconds / 3,
        "phase_forward_backward_s": seconds / 2, "phase_optimizer_s": seconds / 6, "generate_s_mean": seconds,
    }  # fmt: skip
    return {
        "name": name, "device": "NVIDIA H200", "host": "a", "shape": of.shape, "gpus": f"{of.gpus}xH200", "mps": of.mps,
        "prompt_tokens": PROMPT_TOKENS, "lengths": dataclasses.asdict(of.lengths),
        "settings": loads("", "flags", groups, environment={}).model_dump(mode="json", exclude_unset=True),
        "steps": [{**step, "step": number, "finished_at_s": seconds * number} for number in range(1, of.steps + 1)],
    }  # fmt: skip


def test_the_examples_in_its_docstrings_hold() -> None:
    results = doctest.testmod(whole_run)
    assert results.attempted >= 1
    assert results.failed == 0


@pytest.mark.parametrize("work", list(WORKS))
def test_layouts_of_a_work_use_the_same_gpus_for_the_same_samples(work: str) -> None:
    layouts = WORKS[work].values()
    assert len({(of.gpus, of.groups, of.group_size, of.tokens, of.max_lag, of.steps) for of in layouts}) == 1
    for name, of in WORKS[work].items():
        settings = loads("", "flags", ["--rollout.engine=vllm", *of.flags(toy=False)], environment={})
        assert settings.trainer.ranks == of.ranks, name
        used = {*settings.trainer.gpus, *settings.rollout.gpus}
        assert used == set(range(of.gpus)), name


@pytest.mark.parametrize("work", [work for work, layouts in WORKS.items() if len(layouts) > 2])
def test_the_best_of_the_measured_layouts_is_compared_with_the_one_that_the_plan_recommends(work: str) -> None:
    names = list(WORKS[work])
    rows = [row(name, of, 100.0) for name, of in WORKS[work].items()]
    alike = compared(rows, WORKS[work])
    recommended = alike["recommended"]
    assert (alike["ratio"], alike["bar_met"]) == (1.0, True)
    assert alike["planned"][recommended] == max(alike["planned"].values())
    other = next(name for name in names if name not in (recommended, names[0]))
    rows[names.index(other)] = row(other, WORKS[work][other], 130.0)
    better = compared(rows, WORKS[work])
    assert (better["recommended"], better["best"], better["bar_met"]) == (recommended, other, False)
    assert better["ratio"] == pytest.approx(1.3, abs=0.01)


def test_a_failed_layout_is_reported_and_without_the_calibrating_one_nothing_is_recommended() -> None:
    first, second, *_ = WORKS["four"]
    failed = {"name": first, "error": "CUDA out of memory"}
    result = compared([failed, row(second, WORKS["four"][second], 80.0)], WORKS["four"])
    assert result["failed"] == {first: "CUDA out of memory"}
    assert result["samples_per_s"] == {second: pytest.approx(80.0, abs=0.1)}
    assert "recommended" not in result


def test_the_tail_has_the_lengths_of_its_model() -> None:
    assert all(of.lengths.most == 2048 and isinstance(of.lengths, Lengths) for of in WORKS["two-tail"].values())


STORED = Path(splits.__file__).parent / "results"


@pytest.mark.parametrize(
    ("work", "runs"),
    [
        ("four", "layouts-four"),
        ("two-tail", "layouts-two-tail"),
        ("two-7b", "layouts-two-7b"),
    ],
)
def test_the_runs_that_were_measured_are_predicted_within_the_bar(work: str, runs: str) -> None:
    """From the rates of one of them; except two engines in turn (docs/plan.md)."""
    rows = rows_of(STORED / f"2026-11-27-{runs}-h200.json")
    deviations = compared(rows, WORKS[work])["deviation"]
    assert set(deviations) == {row["name"] for row in rows} & {*WORKS[work]} - {next(iter(WORKS[work]))}
    deviations.pop("turns-2-engines", None)
    assert all(abs(deviation) <= BAR for deviation in deviations.values()), deviations
