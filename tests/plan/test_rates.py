"""Laws of calibrated rates, and of their comparison with real runs (benchmarks/runs/layouts.py)."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from benchmarks.runs import layouts
from penstock.services.cli.plan import corrections, layout_of, preferences
from penstock.services.plan import rates
from penstock.services.plan.hardware import parse_cluster
from penstock.services.plan.layouts import Planner
from penstock.services.plan.measured import measured, steady, under_mps
from penstock.services.plan.memory import TrainerOptions
from penstock.services.plan.rates import decode_seconds, train_seconds
from penstock.services.plan.workload import Lengths, Workload, workload_of
from penstock.services.trainer.model.memory import whole_layers
from penstock.shared.settings import Settings, load, loads

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DOCS = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
ONE_GPU = json.loads((RESULTS / "2026-11-23-one-gpu-h200.json").read_text())
CLUSTER = parse_cluster("1xH200")


@given(st.integers(3, 60), st.integers(0, 6))
def test_steady_steps_are_whole_turns_without_warm_up_and_end(steps: int, max_lag: int) -> None:
    counted = range(steps)[steady(steps, max_lag)]
    assert counted
    assert counted[0] >= max(1, steps // 3)
    if steps - steps // 3 >= 2 * max_lag + 2:
        assert len(counted) % (max_lag + 1) == 0
        assert counted[-1] == steps - max_lag - 1


@given(st.floats(1.0, 4096.0), st.integers(2, 4096))
@examples(max_examples=30)
def test_the_mean_of_lengths_is_that_after_the_cut(mean: float, most: int) -> None:
    lengths = Lengths(min(mean, 0.98 * most), most).quantiles(997)
    assert sum(lengths) / len(lengths) == pytest.approx(max(1.0, min(mean, 0.98 * most)), rel=1e-3)
    assert max(lengths) <= most


def test_completions_that_nearly_all_reach_the_limit_are_not_taken_for_short_ones() -> None:
    nearly, all_ = (sum(Lengths(mean, 512).quantiles(997)) / 997 for mean in (511.4, 512.0))
    assert nearly == pytest.approx(511.4, rel=1e-3)
    assert all_ == 512


def work(*flags: str) -> Workload:
    return dataclasses.replace(workload_of(load(None, flags), "0.5b"), lengths=Lengths(512, 512, 0.0))


def test_gathering_weights_takes_longer_than_small_micro_batches_compute() -> None:
    work, cluster = workload_of(loads("", "a test", environment={}), "7b"), parse_cluster("2xH200")
    few, many = (
        train_seconds(work, cluster, TrainerOptions(2, stage, micro_batch_tokens=4096), 0, 131_072.0)
        for stage in (1, 3)
    )
    assert many > 1.2 * few
    adapted = dataclasses.replace(work, lora_rank=8)  # gathered module by module
    sharded = TrainerOptions(2, 3, micro_batch_tokens=4096)
    assert train_seconds(adapted, cluster, sharded, 0, 131_072.0) > 1.3 * many
    alone = [train_seconds(work, CLUSTER, TrainerOptions(1, stage), 0, 8192.0) for stage in (1, 3)]
    assert alone[0] == alone[1]


def test_the_plan_and_the_trainer_gather_the_same_layers_as_a_whole() -> None:
    assert rates._MOST_WHOLE == whole_layers.MOST_NUMBERS


@given(st.sampled_from([64, 256, 1024]), st.floats(0.5, 2.0))
@examples(max_examples=20)
def test_several_engines_hide_their_schedulers_and_no_more(sequences: int, host: float) -> None:
    def step_s(engines: int, of_host: float = host, *, mps: bool = True) -> float:
        return decode_seconds(work(), CLUSTER, 1, engines, sequences, mps=mps, host=of_host)

    for engines in (2, 3):
        busy_s = step_s(1, 0.0)
        assert step_s(engines) > busy_s, "kernels of several engines take no less than those of one"
        assert step_s(engines) <= step_s(engines, mps=False)
        slower = step_s(engines, 2 * host) / step_s(engines)
        assert 1 < slower < step_s(1, 2 * host) / step_s(1), "a slow host slows several engines less than one"


def in_turn(*flags: str) -> tuple[Settings, Workload]:
    own = load(None, ["--placement.mode=shared", "--rollout.max_groups=64", "--sampling.group_size=8", *flags])
    return own, dataclasses.replace(workload_of(own, "0.5b"), lengths=Lengths(512, 512, 0.0))


def lines(wait_s: float, computed_s: float = 1.0, count: int = 9) -> list[dict[str, float]]:
    of_step = {"phase_wait_s": wait_s, "phase_forward_backward_s": computed_s, "step_s": wait_s + computed_s}
    return [{**of_step, "samples": 256, "response_tokens_mean": 512.0}] * count


@pytest.mark.parametrize("wait_s", [2.5, 3.5, 5.0])
def test_a_calibrated_run_in_turn_is_predicted_as_it_was(wait_s: float) -> None:
    own, of_run = in_turn()
    corrected = corrections(measured(lines(wait_s), 1), own, of_run, CLUSTER)
    candidate = Planner(of_run, CLUSTER, preferences(own), corrected).as_set(layout_of(own))
    assert candidate.pace.step_s == pytest.approx(1.0 + wait_s, rel=0.01)
    assert corrected.decode == 1.0


def test_what_no_host_explains_is_taken_for_slower_decoding() -> None:
    own, of_run = in_turn()
    corrected = corrections(measured(lines(20.0), 1), own, of_run, CLUSTER)
    assert corrected.host == 2.0
    assert corrected.decode > 1.5


def test_seconds_of_switches_are_those_of_the_run() -> None:
    own, of_run = in_turn()
    rows = [{**line, "switches": 0.5, "switch_train_s": 0.05, "switch_generate_s": 0.05} for line in lines(4.0)]
    assert corrections(measured(rows, 1), own, of_run, CLUSTER).switch == pytest.approx(0.2 / 0.05)


def test_a_run_says_whether_its_engines_shared_a_gpu_under_mps(tmp_path: Path) -> None:
    assert under_mps(tmp_path) is None
    event = {"name": "engines per GPU", "detail": "3: rollout.engines_per_gpu; they share the GPU by CUDA MPS"}
    (tmp_path / "events.jsonl").write_text(json.dumps({"name": "ready"}) + "\n" + json.dumps(event) + "\n")
    assert under_mps(tmp_path / "summary.json") is True
    event["detail"] = "3: rollout.engines_per_gpu; they share the GPU by time slices"
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert under_mps(tmp_path) is False


# ---------------------------------------------------------------- benchmarks/runs/layouts.py


@pytest.mark.parametrize("work", list(layouts.WORKS))
def test_layouts_of_a_work_are_accepted_and_use_their_gpus(work: str) -> None:
    for name, of in layouts.WORKS[work].items():
        settings = loads("", "flags", ["--rollout.engine=vllm", *of.flags(toy=False)], environment={})
        assert settings.trainer.ranks == of.ranks, name
        assert {*settings.trainer.gpus, *settings.rollout.gpus} == set(range(of.gpus)), name


@pytest.mark.parametrize(
    ("work", "runs", "outside"),
    [
        ("one", "plan-rates", {"turns-more-groups", "turns-1.5b"}),
        ("four", "layouts-four", {"turns-2-engines"}),
        ("two-tail", "layouts-two-tail", set()),
        ("two-7b", "layouts-two-7b", set()),
        ("two-7b", "layouts-two-7b-turns", set()),
    ],
)
def test_real_runs_are_predicted_within_the_bar_from_the_rates_of_one_of_them(
    work: str, runs: str, outside: set[str]
) -> None:
    """Except those that docs/plan.md names; the recommended layout is the fastest, or within 10 % of it."""
    rows = layouts.rows_of(RESULTS / f"2026-11-27-{runs}-h200.json")
    result = layouts.compared(rows, layouts.WORKS[work])
    calibrated = result["calibrated"]
    assert {name for name, deviation in calibrated.items() if abs(deviation) > layouts.BAR} == outside
    assert not outside or result["within"] == len(calibrated) - len(outside)
    assert result["ratio"] <= 1.1 or work == "one"
    without = {name: value for name, value in result["uncalibrated"].items() if name not in outside}
    assert all(-0.35 <= value <= 0.25 for value in without.values()), without


def test_a_failed_layout_is_reported_and_without_the_calibrating_one_nothing_is_recommended() -> None:
    first, second, *rest = layouts.rows_of(RESULTS / "2026-11-27-layouts-four-h200.json")
    failed = {"name": first["name"], "error": "CUDA out of memory"}
    result = layouts.compared([failed, second, *rest], layouts.WORKS["four"])
    assert result["failed"] == {"separate-2-2": "CUDA out of memory"}
    assert "recommended" not in result


def test_the_daemon_of_mps_is_started_and_ended_for_the_runs_that_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(
        '#!/bin/bash\non=${CUDA_MPS_PIPE_DIRECTORY:-/nowhere}/on\nif [ "$1" = -d ]; then touch $on; exit 0; fi\nread -r word\n'
        f'echo $word >> {tmp_path}/words\n[ -e $on ] || exit 1\nif [ "$word" = quit ]; then rm $on; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    with layouts._mps(on=True), layouts._mps(on=False) as answers:
        assert not answers, "a daemon that answers is not found by the processes of a run without"
    with layouts._mps(on=True) as answers:
        assert answers
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert (tmp_path / "words").read_text().split().count("quit") == 2, "each daemon is ended"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
