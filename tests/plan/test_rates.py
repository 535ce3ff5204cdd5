"""Laws of calibrated rates, and of their comparison with real runs (benchmarks/runs/plan_rates.py)."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from benchmarks.runs import plan_rates
from benchmarks.runs.plan_rates import CALIBRATING, CONFIGURATIONS, compared, rows_of
from services.cli.plan import corrections, layout_of, make, preferences, settings_of
from services.plan import rates, report
from services.plan.files import run_values
from services.plan.hardware import GIB, parse_cluster
from services.plan.layouts import Planner
from services.plan.measured import Corrections, measured, steady, under_mps
from services.plan.memory import TrainerOptions, peak
from services.plan.rates import decode_seconds, train_seconds
from services.plan.workload import Lengths, Workload, workload_of
from services.trainer.model.memory import whole_layers
from shared.errors import SettingsError
from shared.settings import Settings, loads

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
    return dataclasses.replace(workload_of(settings_of(None, flags), "0.5b"), lengths=Lengths(512, 512, 0.0))


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


def test_the_docs_say_how_long_a_decoding_step_of_a_small_model_is_planned_without_a_calibration() -> None:
    said = re.search(r"with (\d+) and (\d+) sequences took\s.+?, and ([\d.]+) and ([\d.]+) are planned", DOCS, re.S)
    assert said is not None
    sequences, planned_ms = map(int, said.groups()[:2]), said.groups()[2:]
    of_h100 = [decode_seconds(work(), parse_cluster("1xH100"), 1, 1, count) for count in sequences]
    assert tuple(f"{1e3 * seconds:.1f}" for seconds in of_h100) == planned_ms


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
    own = settings_of(None, ["--placement.mode=shared", "--rollout.max_groups=64", "--sampling.group_size=8", *flags])
    return own, dataclasses.replace(workload_of(own, "0.5b"), lengths=Lengths(512, 512, 0.0))


def lines(wait_s: float, computed_s: float = 1.0, count: int = 9) -> list[dict[str, float]]:
    of_step = {"phase_wait_s": wait_s, "phase_forward_backward_s": computed_s, "step_s": wait_s + computed_s}
    return [{**of_step, "samples": 256, "response_tokens_mean": 512.0}] * count


@pytest.mark.parametrize("wait_s", [2.5, 3.5, 5.0])
def test_a_calibrated_run_in_turn_is_predicted_as_it_was(wait_s: float) -> None:
    own, of_run = in_turn()
    corrected = corrections(measured(lines(wait_s), 1), own, of_run, CLUSTER)
    candidate = Planner(of_run, CLUSTER, preferences(own), corrected).as_set(layout_of(own))
    assert candidate.step_s == pytest.approx(1.0 + wait_s, rel=0.01)
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


# ---------------------------------------------------------------- several engines in turn


def test_engines_in_turn_have_no_second_copies_and_their_own_contexts_and_caches() -> None:
    plan = make(settings_of(None, ["--rollout.max_groups=64"]), "1xH200", "0.5b")
    shared = {each.layout.engines: each for each in plan.candidates if each.layout.placement == "shared"}
    assert set(shared) == {1, 2, 3}
    weights, context = plan.planner.work.policy_bytes, 0.6 * GIB
    for engines, candidate in shared.items():
        parts = {part.name: part.nbytes for part in candidate.memory["shared"]["generate"]}
        assert parts["weights"] == engines * weights
        assert parts["context"] == pytest.approx(engines * context)
        assert not parts.get("shadow")
        assert peak(candidate.memory["shared"]) <= plan.planner.limit_bytes
    assert shared[3].utilization > shared[2].utilization > 0


def test_engines_in_turn_free_more_on_higher_rungs_where_memory_is_short() -> None:
    rungs = {}
    for gpus in ("1xH200", "1x56GiB", "1x48GiB"):
        plan = make(settings_of(None, ["--rollout.max_groups=64"]), gpus, "0.5b")
        shared = [each for each in plan.candidates if each.layout.placement == "shared" and each.layout.engines == 3]
        rungs[gpus] = [each.layout.rung for each in shared][:1]
    assert rungs["1xH200"] == [0]
    assert rungs["1x56GiB"] > [0]


def test_large_models_have_one_engine_in_turn() -> None:
    plan = make(settings_of(None, []), "8xH200", "7b")
    assert {each.layout.engines for each in plan.candidates} == {1}


def test_engines_in_turn_lie_between_one_in_turn_and_all_at_once() -> None:
    own, of_run = in_turn("--rollout.replicas=1")
    best: dict[tuple[str, int], float] = {}
    for each in Planner(of_run, CLUSTER, preferences(own)).compare()[0]:
        key = each.layout.placement, each.layout.engines
        best[key] = min(best.get(key, each.step_s), each.step_s)
    assert best["at once", 3] < best["shared", 3] < best["shared", 1]


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_engines_in_turn_are_written_and_planned_as_accepted_if_the_settings_accept_them(engines: int) -> None:
    settings = settings_of(None, ["--rollout.max_groups=64", "--rollout.replicas=1", "--weights.shadow=bucketed"])
    plan = make(settings, "1xH200", "0.5b")
    (candidate, *_) = [
        each for each in plan.candidates if (each.layout.placement, each.layout.engines) == ("shared", engines)
    ]
    written = run_values(settings, candidate, CLUSTER)
    assert written["placement"] == {"mode": "shared"}
    assert (written["rollout"]["engines_per_gpu"], written["rollout"]["replicas"]) == (engines, 1)
    assert written["rollout"]["vllm"].get("gpu_memory_utilization", 0.0) == candidate.utilization
    assert written["weights"]["shadow"] == "auto", "several engines refuse another, and it means the same in turn"
    try:
        accepted = loads(tomli_w.dumps(written), "run.toml").rollout.engines_per_gpu == engines
    except SettingsError:
        accepted = False
    assert accepted == report.accepted(candidate.layout, CLUSTER, plan.planner.work)
    assert ("not supported yet" in report.text(dataclasses.replace(plan, candidates=[candidate]))) != accepted


# ---------------------------------------------------------------- benchmarks/runs/plan_rates.py


def row(name: str, steps: str, *flags: str, mps: bool = False, **more: Any) -> dict[str, Any]:
    """Return a run as the benchmark stores it, from a stored measurement."""
    settings = settings_of(None, [f"--algorithm.max_lag={CONFIGURATIONS[name].max_lag}", *flags])
    lengths = CONFIGURATIONS[name].lengths
    measured_steps = [{**step, "samples": 256, "response_tokens_mean": 512.0} for step in ONE_GPU["steps"][steps]]
    return {
        "name": name, "device": "NVIDIA H200", "host": "a", "shape": "0.5b", "gpus": "1xH200", "mps": mps,
        "prompt_tokens": 64, "lengths": dataclasses.asdict(lengths), "steps": measured_steps,
        "settings": settings.model_dump(mode="json", exclude_unset=True), **more,
    }  # fmt: skip


def stored() -> Iterator[dict[str, Any]]:
    at_once = dataclasses.replace(CONFIGURATIONS["at-once-3"], micro_batch_tokens=32_768).flags(toy=False)
    yield row(CALIBRATING, "shared", *CONFIGURATIONS[CALIBRATING].flags(toy=False))
    yield row("at-once-3", "at_once", *at_once, mps=True)
    yield row("at-once-3-slices", "at_once", *at_once)
    yield {"name": "turns-1.5b", "device": "NVIDIA H200", "host": "a", "shape": "1.5b", "error": "not done"}


def test_stored_runs_are_predicted_from_the_one_that_calibrates_or_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in stored()))
    result = compared(rows_of(tmp_path / "rows.jsonl"))
    at_once, slices = result["results"]
    assert at_once["measured"] == pytest.approx(80.6, rel=0.01)
    assert at_once["deviation"] == pytest.approx(0.09, abs=0.02)
    assert at_once["bar_met"]
    assert "in time slices are not predicted" in slices["refused"]
    assert [failed["name"] for failed in result["failed"]] == ["turns-1.5b"]
    assert (result["within"], result["of"], result["bar_met"]) == (1, 1, False), "eight are needed"
    (tmp_path / "result.json").write_text(json.dumps({"rows": list(stored())}, indent=1))
    assert compared(rows_of(tmp_path / "result.json")) == result


def test_a_run_is_stored_with_all_that_its_prediction_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(folder: Path, work: None, steps: int, max_lag: int, flags: list[str], limit_s: float, name: str) -> Any:
        if name == "turns-short":
            raise SystemExit("not done in 1 s")
        (folder / name).mkdir()
        made = row(name, "shared", *flags)
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in made["steps"]))
        (folder / name / "settings.toml").write_text(tomli_w.dumps(made["settings"]))
        return 1.0, {}, {"0": {"busy": 0.5}}

    monkeypatch.setattr(plan_rates, "run_penstock", runs)
    monkeypatch.setattr(plan_rates, "_gpu", lambda: ("NVIDIA H100 80GB HBM3", 79.6 * GIB))
    monkeypatch.setattr(plan_rates.Runs, "_work", lambda _self, _of: None)
    of_host = plan_rates.Runs(tmp_path, toy=False, limit_s=1.0, cold_s=0.0)
    rows = [
        of_host.row(name, CONFIGURATIONS[name]) for name in (CALIBRATING, "turns-lag-0", "turns-short", "turns-tail")
    ]
    result = compared(json.loads(json.dumps(rows)))
    assert [each["name"] for each in result["results"]] == ["turns-lag-0", "turns-tail"]
    assert all("deviation" in each for each in result["results"])
    assert result["failed"] == [{"name": "turns-short", "error": "not done in 1 s"}]
    assert rows[0]["gpus"] == "1xH100"
    again = compared([*rows, {**rows[1], "name": "turns-short"}])
    assert not again["failed"], "it has succeeded since"


def test_a_host_without_a_calibration_takes_that_of_the_same_device_and_says_so() -> None:
    calibrating, other, *_ = stored()
    (of_other_host,) = compared([calibrating, {**other, "host": "b"}])["results"]
    assert not of_other_host["same_host"]
    (alone,) = compared([other])["results"]
    assert "expected the run 'turns' on a NVIDIA H200, found none" in alone["refused"]


def test_every_configuration_has_settings_and_a_prediction() -> None:
    assert len(CONFIGURATIONS) - 1 >= plan_rates.LEAST
    rates = {}
    for name, of in CONFIGURATIONS.items():
        made = row(name, "shared", *of.flags(toy=False), mps=True, shape=of.shape)
        rates[name] = plan_rates.predict(made, Corrections())
    assert rates["turns-short"] > rates[CALIBRATING] > max(rates["turns-long"], rates["turns-tail"])
    assert rates["turns-lag-0"] < rates[CALIBRATING]
    assert rates["turns-1.5b"] < rates[CALIBRATING] < rates["at-once-3"]


def test_the_tail_is_the_distribution_that_its_model_was_made_for() -> None:
    lengths = CONFIGURATIONS["turns-tail"].lengths
    assert lengths.most == 2048
    assert lengths.mean == pytest.approx(800 * (1 - (1 - 1 / 800) ** 2048), rel=0.01)


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
    with plan_rates._mps(on=True), plan_rates._mps(on=False) as answers:
        assert not answers, "a daemon that answers is not found by the processes of a run without"
    with plan_rates._mps(on=True) as answers:
        assert answers
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert (tmp_path / "words").read_text().split().count("quit") == 2, "each daemon is ended"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
