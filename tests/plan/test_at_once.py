"""Laws of trainer and engines on the same GPUs at the same time; figures are those of benchmarks/results."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.cli.plan import corrections, layout_of, make, preferences
from penstock.services.plan import certain
from penstock.services.plan.hardware import GIB, parse_cluster
from penstock.services.plan.layouts import Candidate, Planner
from penstock.services.plan.measured import Corrections, measured
from penstock.services.plan.memory import peak, total
from penstock.services.plan.rates import decode_seconds
from penstock.services.plan.report import text as report_of
from penstock.services.plan.workload import Lengths, Workload, workload_of
from penstock.services.rollout.engines.vllm.several.plan import Demand, Memory
from penstock.services.up.display.summary import text
from penstock.services.up.run import time_slices
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings, load, loads

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = json.loads((RESULTS / "2026-11-23-one-gpu-h200.json").read_text())
WORK = [
    *("--sampling.group_size=8", "--sampling.max_new_tokens=512", "--rollout.max_groups=64", "--rollout.replicas=1"),
    "--trainer.micro_batch_tokens=32768",
]
PROMPTS = {"prompt": "x" * 256}
"""Of 64 tokens."""
MODES = {
    "shared": ["--placement.mode=shared"],
    "at_once": ["--trainer.gpus=[0]", "--rollout.gpus=[0]", "--rollout.engines_per_gpu=3"],
}


def as_run(folder: Path, mode: str) -> Settings:
    """Return the settings of a run that was measured."""
    (folder / "prompts.jsonl").write_text(json.dumps(PROMPTS) + "\n")
    settings = load(None, [*WORK, *MODES[mode], f"--data.path={folder / 'prompts.jsonl'}"])
    assert workload_of(settings, "0.5b").prompt_tokens == 64
    return settings


def of_run(folder: Path, mode: str) -> Corrections:
    """Return what the run in ``mode`` corrects."""
    lines: list[Mapping[str, Any]] = [
        {**step, "samples": 256, "response_tokens_mean": 512.0} for step in MEASURED["steps"][mode]
    ]
    own = as_run(folder, mode)
    return corrections(measured(lines, 1), own, fixed(own), parse_cluster("1xH200"))


def fixed(settings: Settings) -> Workload:
    """Return the work, whose completions all have 512 tokens."""
    return dataclasses.replace(workload_of(settings, "0.5b"), lengths=Lengths(512, 512, 0.0))


def planner(folder: Path, corrected: Corrections | None = None) -> Planner:
    settings = as_run(folder, "shared")
    return Planner(fixed(settings), parse_cluster("1xH200"), preferences(settings), corrected or Corrections())


def rates(plan: Planner) -> dict[tuple[str, int], float]:
    """Return samples/s by placement and engines."""
    best: dict[tuple[str, int], float] = {}
    for candidate in plan.compare()[0]:
        key = candidate.layout.placement, candidate.layout.engines
        best[key] = max(best.get(key, 0.0), 256 / candidate.pace.step_s)
    return best


def test_the_run_in_turn_predicts_the_one_at_once_of_the_same_host(tmp_path: Path) -> None:
    predicted = rates(planner(tmp_path, of_run(tmp_path, "shared")))
    assert predicted["shared", 1] == pytest.approx(MEASURED["samples_per_s"]["shared"], rel=0.03)
    assert predicted["at once", 3] == pytest.approx(MEASURED["samples_per_s"]["at_once"], rel=0.09)
    assert max(predicted, key=lambda layout: predicted[layout]) == ("at once", 3)


def test_a_run_at_once_corrects_the_rates_without_what_the_two_take_from_each_other(tmp_path: Path) -> None:
    corrected = of_run(tmp_path, "at_once")
    assert rates(planner(tmp_path, corrected))["at once", 3] == pytest.approx(82.1, rel=0.06)
    assert corrected.train == pytest.approx(of_run(tmp_path, "shared").train, rel=0.02)


def geometric(mean: int, most: int) -> Lengths:
    """Return the lengths of completions whose tokens are each the last with a probability of 1 / ``mean``."""
    places = [(index + 0.5) / 1000 for index in range(1000)]
    sample = tuple(min(most, math.ceil(math.log(1 - place) / math.log(1 - 1 / mean))) for place in places)
    return Lengths(sum(sample) / len(sample), most, sample=sample)


def test_a_run_with_completions_of_one_length_predicts_that_of_a_long_tail() -> None:
    """Of the measured lengths' mean, which grew in that run; three engines under MPS, and the trainer on its own GPU."""
    stored = json.loads((RESULTS / "2026-11-23-pipeline-h200.json").read_text())
    lines = [{**step, "samples": 256} for step in stored["long"]["steps"]]
    own = load(None, ["--trainer.gpus=[0]", "--rollout.gpus=[1]", "--rollout.engines_per_gpu=3", *WORK])
    gpus = parse_cluster("2xH200")
    work = dataclasses.replace(workload_of(own, "0.5b"), prompt_tokens=64, lengths=Lengths(512, 512, 0.0))
    corrected = corrections(measured(lines, 1), own, work, gpus, mps=True)
    tail = dataclasses.replace(work, lengths=geometric(1360, 2048))
    trained = [step["response_tokens_mean"] for step in stored["tail"]["steps"][4:]]
    assert tail.lengths.mean == pytest.approx(sum(trained) / len(trained), rel=0.02)
    rates = {
        each: 256 / Planner(each, gpus, preferences(own), corrected).as_set(layout_of(own, mps=True)).pace.step_s
        for each in (work, tail)
    }
    assert rates[work] == pytest.approx(stored["long"]["result"]["samples_per_s"]["async"], rel=0.03)
    assert rates[tail] == pytest.approx(stored["tail"]["result"]["samples_per_s"]["async"], rel=0.08)


TWO_GPUS = {
    "fourth": json.loads((RESULTS / "2026-11-26-two-gpus-at-once-h100.json").read_text()),
    "fifth": json.loads((RESULTS / "2026-11-26-two-gpus-tail-h100.json").read_text()),
}
"""By the host's number in docs/performance.md."""


def on_two_gpus(host: str, run: str) -> tuple[Settings, Workload, list[Mapping[str, Any]]]:
    """Return settings and work of a run on two H100s at once, and what its lines say."""
    stored = TWO_GPUS[host]
    tail = run == "lag-4-two-engines"
    kind = stored["tail" if tail else "long"]
    entry = (kind if host == "fourth" else kind["second host"])[run]
    most = 2048 if tail else 512
    more = ["--rollout.max_groups=64", f"--sampling.max_new_tokens={most}", "--trainer.micro_batch_tokens=32768"]
    own = load(None, ["--sampling.group_size=8", *more, *entry["flags"]])
    lengths = geometric(847, most) if tail else Lengths(most, most, 0.0)
    work = dataclasses.replace(workload_of(own, "0.5b"), prompt_tokens=64, lengths=lengths)
    assert not tail or lengths.mean == pytest.approx(entry["tokens_per_sample"], rel=0.02)

    def line(step: Mapping[str, float]) -> Mapping[str, Any]:
        rest = step["step_s"] - step["phase_wait_s"] - step["phase_forward_backward_s"]
        return {**step, "samples": 256, "phase_optimizer_s": rest}

    return own, work, [line(step) for step in entry["steps"]]


@pytest.mark.parametrize(
    ("host", "calibrates", "predicted", "within"),
    [
        ("fourth", "lag-1-two-engines", "lag-2-two-engines", 0.05),
        ("fourth", "lag-1-one-engine", "lag-2-two-engines", 0.13),
        ("fourth", "lag-2-two-engines", "lag-1-one-engine", 0.24),
        ("fifth", "lag-2-one-engine", "lag-2-two-engines", 0.12),
        ("fifth", "lag-2-one-engine", "lag-4-two-engines", 0.12),
        ("fifth", "lag-2-two-engines", "lag-4-two-engines", 0.23),
    ],
)
def test_a_run_on_two_gpus_at_once_predicts_others_of_its_host(
    host: str, calibrates: str, predicted: str, within: float
) -> None:
    """Of another lag, another number of engines, and completions of very different lengths."""
    gpus = parse_cluster("2xH100")
    own, work, lines = on_two_gpus(host, calibrates)
    corrected = corrections(measured(lines, work.max_lag), own, work, gpus, mps=True)
    other, its_work, its_lines = on_two_gpus(host, predicted)
    planned = Planner(its_work, gpus, preferences(other), corrected).as_set(layout_of(other, mps=True))
    assert 256 / planned.pace.step_s == pytest.approx(measured(its_lines, its_work.max_lag).samples_per_s, rel=within)


@pytest.mark.parametrize(
    ("run", "measured_rate", "planned_rate"), [("lag-1-two-engines", 167, 135), ("lag-2-two-engines", 201, 155)]
)
def test_without_a_run_two_gpus_are_planned_as_the_page_says(run: str, measured_rate: int, planned_rate: int) -> None:
    own, work, lines = on_two_gpus("fourth", run)
    planned = Planner(work, parse_cluster("2xH100"), preferences(own)).as_set(layout_of(own, mps=True))
    assert round(measured(lines, work.max_lag).samples_per_s) == measured_rate
    assert round(256 / planned.pace.step_s) == planned_rate


def test_in_turn_the_snapshot_is_away_while_the_trainer_trains_from_rung_2_on() -> None:
    """Full AdamW at 7B fits by it. On an H200 the optimizer's states are away too while the engine generates, as a run
    found too little memory for both."""

    def in_turn(model: str, gpus: str) -> list[Candidate]:
        candidates = make(load(None, []), gpus, model).candidates
        return [each for each in candidates if each.layout.placement == "shared" and each.layout.trainer.snapshots]

    on_h200 = in_turn("7b", "1xH200")[0].layout
    assert (on_h200.rung, on_h200.trainer.optimizer, on_h200.trainer.offload) == (3, "adamw", "none")
    large, small = in_turn("7b", "1x150GiB")[0], in_turn("0.5b", "1xH200")[0]
    assert (large.layout.trainer.optimizer, large.layout.trainer.offload) == ("adamw", "none")
    assert large.layout.rung >= 2 > small.layout.rung
    for candidate, away in ((large, True), (small, False)):
        shared = candidate.memory["shared"]
        for phase in ("forward and backward", "optimizer"):
            assert ("snapshots" not in [part.name for part in shared[phase]]) == away
    (waiting,) = [part.nbytes for part in large.memory["shared"]["generate"] if part.name == "trainer, waiting"]
    assert waiting > 2 * 2 * 7.6e9, "weights and the snapshot"


def test_without_a_run_the_error_is_what_the_page_says(tmp_path: Path) -> None:
    predicted = rates(planner(tmp_path))
    assert round(predicted["at once", 3] / 82.1 - 1, 2) == 0.15
    assert round(predicted["shared", 1] / 54.4 - 1, 2) == 0.14


def tokens_per_s(engines: int, host: float, *, mps: bool = False) -> float:
    """Return what is predicted for 512 sequences of 512 tokens."""
    work = dataclasses.replace(fixed(load(None, [])), prompt_tokens=64)
    return 512 / decode_seconds(work, parse_cluster("1xH200"), 1, engines, 512, mps=mps, host=host)


def host_of(one_engine: float) -> float:
    """Return how much slower the scheduler is where one engine decodes so many tokens/s."""
    gpu_s, both_s = 512 / tokens_per_s(1, 0.0), 512 / tokens_per_s(1, 1.0)
    return (512 / one_engine - gpu_s) / (both_s - gpu_s)


DECODED = json.loads((RESULTS / "2026-11-23-pipeline-h200.json").read_text())["decode"]


def decoded(sharing: str, engines: int) -> float:
    rates: list[float] = DECODED[sharing]["engines"][str(engines)]["tokens_per_s"]
    return sum(rates) / len(rates)


@pytest.mark.parametrize(
    ("of_one_engine", "engines", "mps", "measured_rate", "within"),
    [
        (decoded("CUDA MPS", 1), 3, True, decoded("CUDA MPS", 3), 0.03),
        (decoded("time slices", 1), 3, False, decoded("time slices", 3), 0.03),
        (38_800.0, 2, False, 65_600.0, 0.1),  # of a slower host (docs/performance.md)
        (38_800.0, 3, False, 69_900.0, 0.07),
        (38_800.0, 4, False, 66_600.0, 0.09),
    ],
)
def test_one_engine_tells_how_fast_several_decode_on_its_host(
    of_one_engine: float, engines: int, mps: bool, measured_rate: float, within: float
) -> None:
    host = host_of(of_one_engine)
    assert tokens_per_s(1, host) == pytest.approx(of_one_engine)
    assert tokens_per_s(engines, host, mps=mps) == pytest.approx(measured_rate, rel=within)


def at_once(model: str, gpus: str, *flags: str) -> list[Candidate]:
    candidates = make(load(None, flags), gpus, model).candidates
    return [candidate for candidate in candidates if candidate.layout.placement == "at once"]


@pytest.mark.parametrize("model", ["0.5b", "1.5b", "3b"])
def test_no_step_is_shorter_than_what_keeps_the_gpu_busy(model: str) -> None:
    plan = make(load(None, ["--rollout.max_groups=64"]), "1xH200", model).planner
    for candidate in at_once(model, "1xH200", "--rollout.max_groups=64"):
        work = plan.work
        sequences = candidate.max_groups * work.group_size
        alone_s = work.samples * work.lengths.mean / sequences * candidate.rates.decoding(sequences)
        busy = min(1.0, (1 - 1 / 1.07) / candidate.rates.beside)
        train_s = candidate.rates.train_s + candidate.rates.token_s * work.step_tokens
        assert candidate.pace.step_s >= train_s + busy * alone_s


def test_it_is_planned_only_on_one_host_and_where_it_can_gain() -> None:
    assert at_once("0.5b", "1xH200")
    for candidate in at_once("0.5b", "2xH200", "--rollout.max_groups=64"):
        layout = candidate.layout
        assert (layout.trainer.ranks, layout.replicas, layout.gpus) == (2, 2, 2)
    assert not at_once("0.5b", "2x8xH200")
    assert not at_once("7b", "1xH200", "--policy.lora.rank", "16")


def test_four_gpus_at_once_are_said_to_be_verified_and_more_not() -> None:
    plans = {gpus: make(load(None, ["--rollout.max_groups=64"]), f"{gpus}xH200", "0.5b") for gpus in (4, 8)}
    for gpus, plan in plans.items():
        places = [candidate.layout.placement for candidate in plan.candidates]
        assert "at once" in (places[:1] if gpus == 4 else places[:3])
        assert (" at once (not verified on GPUs): " in report_of(plan)) == (gpus > 4)
        assert f"{gpus} replicas, on the same GPUs, " in report_of(plan)


def test_the_memory_of_both_is_the_sum(tmp_path: Path) -> None:
    for candidate in at_once("0.5b", "1xH200"):
        both, engines = candidate.memory["both"], candidate.memory["engines"]
        beside = [part.nbytes for part in both["wait"] if part.name == "engines"]
        assert beside == [pytest.approx(peak(engines))]
        assert peak(both) <= 0.95 * 140.4 * GIB
    small = make(load(None, ["--rollout.max_groups=64"]), "1x16GiB", "0.5b")
    assert not [each for each in small.candidates if each.layout.placement == "at once"]
    (problem, *_) = [each for each in small.problems if each.layout.startswith("at once")]
    assert problem.component.advice == "lower rollout.max_groups or rollout.engines_per_gpu"
    assert problem.needed_bytes > problem.limit_bytes


def test_what_is_written_starts_as_planned(tmp_path: Path) -> None:
    model, config = tmp_path / "model", tmp_path / "in.toml"
    model.mkdir()
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    more = {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True, "model_type": "qwen2"}
    (model / "config.json").write_text(json.dumps({**shape, **more}))
    config.write_text(
        f'[policy]\nmodel = "{model}"\n[rollout]\nmax_groups = 64\n[sampling]\ngroup_size = 8\nmax_new_tokens = 512\n'
        '[placement]\nmode = "shared"\nrung = 2\n'
    )
    assert main(["plan", str(config), "--gpus", "1xH200", "--write", str(tmp_path / "run.toml")]) == 0
    written = load(tmp_path / "run.toml", environment={})
    assert (written.placement.mode, written.trainer.gpus, written.rollout.gpus) == ("separate", (0,), (0,))
    engines = written.rollout.engines_per_gpu
    assert isinstance(engines, int)
    assert (written.common_gpus, written.rollout.replicas, engines > 1) == (frozenset({0}), 1, True)
    gpu_bytes = 140.4 * GIB
    certain.check_gpus(written, [gpu_bytes])
    candidate = next(each for each in make(written, "1xH200").candidates if each.layout.placement == "at once")
    beside = candidate.memory["both"]["forward and backward"]
    free = gpu_bytes - total([part for part in beside if part.name != "engines"])  # at the trainer's peak
    sequences = written.rollout.max_groups * written.sampling.group_size
    demand = Demand(493_961_216, 2 * 493_961_216, sequences * 151_936 * 4 // engines)
    share = Memory(int(gpu_bytes), int(free)).arguments(engines, written.rollout.vllm.gpu_memory_utilization, demand)
    (cache,) = [part.nbytes for part in candidate.memory["engines"]["generate"] if part.name == "key-value cache"]
    assert engines * share["kv_cache_memory_bytes"] >= 0.999 * cache


def test_a_run_with_some_gpus_in_common_does_not_calibrate() -> None:
    own = load(None, ["--trainer.gpus=[0]", "--rollout.gpus=[0, 1]", "--rollout.replicas=2"])
    lines: list[Mapping[str, Any]] = [{"step_s": 1.0, "phase_wait_s": 0.5}] * 4
    with pytest.raises(
        SettingsError, match=r"the same GPUs in trainer\.gpus and rollout\.gpus, a rank and a replica on each"
    ):
        corrections(measured(lines, 1), own, fixed(own), parse_cluster("1xH200"))
    unknown = load(None, [*MODES["at_once"], "--rollout.replicas=1", "--rollout.engines_per_gpu=auto"])
    with pytest.raises(SettingsError, match=r'found "auto", whose choice is not recorded'):
        corrections(measured(lines, 1), unknown, fixed(unknown), parse_cluster("1xH200"))
    slices = load(None, MODES["at_once"])
    with pytest.raises(SettingsError, match="expected a run under CUDA MPS with --calibrate"):
        corrections(measured(lines, 1), slices, fixed(slices), parse_cluster("1xH200"), mps=False)


def test_the_closing_message_of_such_a_run_promises_nothing_of_more_replicas_on_its_gpu(tmp_path: Path) -> None:
    lines = [{**step, "lag_max": 1} for step in MEASURED["steps"]["at_once"]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "settings.toml").write_text("[trainer]\ngpus = [0]\n[rollout]\nreplicas = 1\ngpus = [0]\n")
    (tmp_path / "summary.json").write_text('{"gpu_hours": 0.1}')
    assert "the trainer waits 61% for replicas on its own GPUs; more of them would help on other GPUs" in text(
        tmp_path, False
    )


def test_up_says_that_processes_share_a_gpu_in_time_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    both = loads("[trainer]\ngpus = [0]\n[rollout]\nreplicas = 1\ngpus = [0]\n", "test")
    several = loads("[rollout]\nengines_per_gpu = 3\n", "test")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert time_slices(both) == ""  # no GPU
    program("nvidia-smi", "echo GPU-a, 143771; echo GPU-b, 143771")
    apart = loads("[trainer]\ngpus = [0]\n[rollout]\nreplicas = 1\ngpus = [1]\n", "test")
    in_turn = loads('[placement]\nmode = "shared"\n[rollout]\nreplicas = 1\n', "test")
    assert [time_slices(settings) for settings in (apart, in_turn)] == ["", ""]
    assert time_slices(loads("", "test")) == time_slices(both)  # each sees both GPUs and takes the first
    assert time_slices(both).endswith(", or give rollout.gpus another GPU")
    assert time_slices(both).startswith("trainer and replicas share a GPU in time slices")
    assert "(nvidia-cuda-mps-control -d, " in time_slices(several)
    program("nvidia-cuda-mps-control", "exit 0")
    assert (time_slices(both), time_slices(several)) == ("", "")
