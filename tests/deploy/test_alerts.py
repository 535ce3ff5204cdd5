"""Laws of the alert rules: each fires by its cause, not before, and has a runbook section. promtool evaluates
handwritten series, one value a minute.
"""

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.shared.settings.guards import GUARDS
from tests.chaos import hurried
from tests.conftest import PATIENCE_S, need

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "k8s" / "penstock-monitoring" / "rules" / "penstock.yaml"
RUN = 'run="r"'
ONE = 'run="r",instance="x",service="s"'
LOOP = 'run="r",instance="x",service="episodes"'
TRAINER = 'run="r",instance="x",service="trainer"'


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    alert: str
    series: dict[str, str]
    fine_at: int
    fires_at: int
    labels: str
    """Of the alert, besides name, state and severity."""
    severity: str = ""
    """Where it depends on labels; empty: the rule's."""


RUNNING = {f'penstock_coordinator_run_state{{{RUN},state="running"}}': "1x120"}
FAULTS = (
    Fault("PenstockServiceDown", {f"up{{{ONE}}}": "1x5 0x10"}, 5, 9, ONE, "warning"),
    Fault("PenstockServiceDown", {f"up{{{TRAINER}}}": "1x5 0x10"}, 5, 9, TRAINER, "critical"),
    Fault("PenstockServiceRestarting", {f"process_start_time_seconds{{{ONE}}}": "1x20 2 3 4x9"}, 19, 25, ONE),
    Fault("PenstockOutOfMemory", {f"penstock_reward_model_out_of_memory_total{{{ONE}}}": "0x20 1x10"}, 19, 25, ONE),
    Fault("PenstockOutOfMemory", {f"penstock_trainer_out_of_memory_samples{{{ONE}}}": "0x20 1x10"}, 19, 25, ONE),
    Fault("PenstockBusUnavailable", {f"penstock_bus_available{{{ONE}}}": "1x5 0x10"}, 5, 9, ONE),
    Fault(
        "PenstockNoLeader",
        {
            f"up{{{ONE}}}": "1x20",
            f'penstock_coordinator_leading{{{RUN},instance="a"}}': "1x5 0x10",
            f'penstock_coordinator_leading{{{RUN},instance="b"}}': "0x20",
        },
        5,
        9,
        RUN,
    ),
    Fault(
        "PenstockNoLeader",
        {f"up{{{ONE}}}": "1x20", f'penstock_coordinator_leading{{{RUN},instance="a"}}': "1x5 stale"},
        5,
        9,
        RUN,
    ),
    Fault("PenstockBusFull", {f"penstock_coordinator_bus_full{{{ONE}}}": "0x5 1x10"}, 8, 12, RUN),
    Fault(
        "PenstockBusRewound",
        {
            f"penstock_coordinator_rewound_steps{{{ONE}}}": "0x5 3x80",
            f"penstock_coordinator_rewound_timestamp_seconds{{{ONE}}}": "0x5 360x80",
        },
        5,
        9,
        RUN,
    ),
    Fault(
        "PenstockBusNearlyFull",
        {
            f"penstock_coordinator_bus_memory_bytes{{{ONE}}}": "70x5 81x10",
            f"penstock_coordinator_bus_maxmemory_bytes{{{ONE}}}": "100x20",
        },
        8,
        12,
        RUN,
    ),
    Fault(
        "PenstockDiskNearlyFull",
        {
            f"penstock_coordinator_disk_free_bytes{{{ONE}}}": "11x5 9x10",
            f"penstock_coordinator_disk_size_bytes{{{ONE}}}": "100x20",
        },
        8,
        12,
        RUN,
    ),
    Fault("PenstockRunNotStarted", {f'penstock_coordinator_run_state{{{RUN},state="created"}}': "1x80"}, 59, 61, RUN),
    Fault(
        "PenstockRunHoldsGpus",
        {
            f'penstock_coordinator_run_state{{{RUN},state="finished"}}': "0x5 1x60",
            f'up{{{RUN},service="rollout"}}': "1x70",
        },
        33,
        37,
        RUN,
    ),
    Fault("PenstockRunStalled", RUNNING | {f"penstock_coordinator_step{{{RUN}}}": "0+1x20 20x50"}, 30, 45, RUN),
    Fault("PenstockRunPaused", {f'penstock_coordinator_run_state{{{RUN},state="paused"}}': "0x5 1x60"}, 20, 40, RUN),
    Fault(
        "PenstockGenerationSlow",
        RUNNING | {f"penstock_rollout_drawn_tokens_total{{{RUN}}}": "0+6000x60 360600+600x40"},
        58,
        85,
        RUN,
    ),
    Fault(
        "PenstockTrainerStarving",
        {
            f'penstock_trainer_phase_seconds_sum{{{RUN},phase="wait"}}': "0+10x30 350+50x60",
            f'penstock_trainer_phase_seconds_sum{{{RUN},phase="forward_backward"}}': "0+50x30 1510+10x60",
        },
        30,
        70,
        RUN,
    ),
    Fault(
        "PenstockRolloutsStarving",
        {
            f'penstock_coordinator_stream_entries{{{RUN},stream="prompts"}}': "5x30 0x60",
            f"penstock_coordinator_groups_in_flight{{{RUN}}}": "64x90",
            f"penstock_coordinator_slots{{{RUN}}}": "64x90",
        },
        30,
        80,
        RUN,
    ),
    Fault(
        "PenstockWeightSyncLag",
        {
            f"penstock_coordinator_head_version{{{RUN}}}": "0+1x60",
            f"penstock_rollout_policy_version{{{ONE}}}": "0+1x20 20x40",
        },
        20,
        35,
        ONE,
    ),
    Fault(
        "PenstockWeightPullFailures",
        {f'penstock_rollout_weight_pull_failures_total{{{ONE},transport="none",reason="ask"}}': "0x20 2 4 6x9"},
        20,
        25,
        'run="r",instance="x"',
    ),
    Fault("PenstockProbeGap", {f"penstock_rollout_probe_alarms_total{{{ONE}}}": "0x20 1x9"}, 20, 25, ONE),
    Fault(
        "PenstockLagGrowing",
        {
            f"penstock_trainer_lag_steps_sum{{{RUN}}}": "0x10 0+10x50 550+50x60",  # ten minutes without a step first
            f"penstock_trainer_lag_steps_count{{{RUN}}}": "0x10 0+10x110",
        },
        58,
        78,
        RUN,
    ),
    Fault(
        "PenstockLagGrowing",
        {
            f'penstock_trainer_groups_untrained_total{{{RUN},reason="stale"}}': "0x20 0+10x60",
            f'penstock_bus_entries_total{{{RUN},stream="rollouts",outcome="handed_over"}}': "0+10x90",
        },
        20,
        60,
        RUN,
    ),
    Fault(
        "PenstockGradientExplosion",  # a policy with little left to learn: an ordinary gradient does not fire
        {
            f"penstock_trainer_grad_norm{{{ONE}}}": "0x60 0.5x10 50x10",
            f"penstock_trainer_grad_norm_limit{{{ONE}}}": "1x80",
        },
        68,
        75,
        ONE,
    ),
    Fault(
        "PenstockNotFinite",
        {f'penstock_trainer_groups_untrained_total{{{ONE},reason="nonfinite"}}': "0x20 1x9"},
        20,
        25,
        f'{ONE},reason="nonfinite"',
    ),
    Fault(
        "PenstockRewardCollapse",
        {f'penstock_coordinator_guard_active{{{RUN},guard="no_signal"}}': "0x5 1x5"},
        5,
        9,
        RUN,
    ),
    Fault(
        "PenstockGuardActive",
        {f'penstock_coordinator_guard_active{{{RUN},guard="kl"}}': "0x5 1x5"},
        5,
        9,
        f'{RUN},guard="kl"',
    ),
    Fault(
        "PenstockRollbackFailed",
        {f'penstock_coordinator_rollbacks_total{{{ONE},state="failed"}}': "0x20 1x9"},
        20,
        25,
        f'{ONE},state="failed"',
    ),
    Fault(
        "PenstockCheckpointFailures", {f"penstock_trainer_checkpoint_failures_total{{{ONE}}}": "0x20 1x9"}, 20, 25, ONE
    ),
    Fault(
        "PenstockCheckpointNotStored",
        {f"penstock_trainer_checkpoint_unstored_seconds{{{ONE}}}": "0x20 0+60x60"},
        45,
        55,
        ONE,
    ),
    Fault("PenstockDeadLetters", {f"penstock_coordinator_dead_letters{{{ONE}}}": "0x5 2x5"}, 5, 9, RUN),
    Fault(
        "PenstockScorerUnavailable",
        {f'penstock_reward_scorer_available{{{ONE},scorer="answer"}}': "1x5 0x9"},
        5,
        9,
        f'{ONE},scorer="answer"',
    ),
    Fault(
        "PenstockRewardDependsOnLeniency",
        {
            f'penstock_reward_lenient_total{{{ONE},scorer="answer",rule="prose"}}': "0+10x40 410+60x60",
            f'penstock_reward_samples_scored_total{{{ONE},scorer="answer",status="ok"}}': "0+90x100",
            f'penstock_reward_samples_scored_total{{{ONE},scorer="answer",status="wrong_format"}}': "0+10x100",
        },
        40,
        80,
        f'{RUN},scorer="answer",rule="prose"',
    ),
    Fault(
        "PenstockExecutorErrors",
        {f'penstock_executor_executions_total{{{ONE},outcome="sandbox_error",profile="stdlib"}}': "0x20 1x9"},
        20,
        25,
        'run="r",instance="x"',
    ),
    Fault(
        "PenstockExecutorErrors",
        {f'penstock_executor_zygote_restarts_total{{{ONE},reason="died",profile="stdlib"}}': "0x20 4x9"},
        20,
        25,
        'run="r",instance="x"',
    ),
    Fault("PenstockExecutorEscape", {f"penstock_executor_contained{{{ONE}}}": "1x5 0x5"}, 5, 9, ONE),
    Fault(
        "PenstockExecutorUnsafe",
        {f'penstock_executor_info{{{ONE},tier="unsafe"}}': "_x5 1x5"},
        4,
        9,
        f'{ONE},tier="unsafe"',
    ),
    Fault(
        "PenstockEpisodesLost",
        {
            f'penstock_episodes_lost_total{{{ONE},cause="process"}}': "0+4x20 80+6x30",
            f'penstock_episodes_ended_total{{{ONE},reason="stop"}}': "0+90x60",
        },
        20,
        45,
        RUN,
    ),
    Fault(
        "PenstockEpisodesBranching",
        {
            f'penstock_episodes_forks_total{{{ONE},cause="history"}}': "0+19x20 380+22x30",
            f"penstock_episodes_turns_total{{{ONE}}}": "0+100x60",
        },
        20,
        45,
        RUN,
    ),
    Fault(
        "PenstockEpisodesStarving",
        {
            f'penstock_event_loop_stall_seconds_bucket{{{LOOP},le="0.1"}}': "0+96x20 1920+94x30",
            f'penstock_event_loop_stall_seconds_bucket{{{LOOP},le="0.25"}}': "0+100x60",
            f'penstock_event_loop_stall_seconds_bucket{{{LOOP},le="+Inf"}}': "0+100x60",
        },
        20,
        45,
        'run="r",instance="x"',
    ),
)


def rules() -> dict[str, dict[str, dict[str, str]]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def law(fault: Fault) -> dict[str, object]:
    severity = fault.severity or rules()[fault.alert]["labels"]["severity"]
    labels = f'alertname="{fault.alert}",alertstate="firing",severity="{severity}",{fault.labels}'
    asked = f'ALERTS{{alertname="{fault.alert}",alertstate="firing"}}'
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in fault.series.items()],
        "promql_expr_test": [
            {"expr": asked, "eval_time": f"{fault.fine_at}m", "exp_samples": []},
            {
                "expr": asked,
                "eval_time": f"{fault.fires_at}m",
                "exp_samples": [{"labels": f"ALERTS{{{labels}}}", "value": 1}],
            },
        ],
    }


@pytest.mark.debian
def test_each_alert_fires_by_its_fault_and_not_before(tmp_path: Path) -> None:
    promtool = need("promtool", "prometheus")
    tests = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [law(fault) for fault in FAULTS]}
    (tmp_path / "laws.json").write_text(json.dumps(tests))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "laws.json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.debian
def test_what_an_alert_says_is_filled_in(tmp_path: Path) -> None:
    promtool = need("promtool", "prometheus")
    said = {
        "summary": "x of run r does not answer",
        "description": "The s replica has not answered a scrape for 2 minutes.",
        "runbook_url": "docs/operations.md#penstockservicedown",
    }
    expected = {
        "exp_labels": {"severity": "warning", "run": "r", "instance": "x", "service": "s"},
        "exp_annotations": said,
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": f"up{{{ONE}}}", "values": "0x10"}],
        "alert_rule_test": [{"eval_time": "5m", "alertname": "PenstockServiceDown", "exp_alerts": [expected]}],
    }
    (tmp_path / "law.json").write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "law.json"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_fault_above() -> None:
    assert {fault.alert for fault in FAULTS} == set(rules())


def test_every_alert_and_every_guard_is_raised_in_a_real_run() -> None:
    source = "".join(
        (ROOT / "tests" / "chaos" / f"test_{name}.py").read_text() for name in ("faults", "bus_lost", "episodes")
    )
    raised = set(re.findall(r"Penstock[A-Z]\w+", source))
    guards = {name for name in (*GUARDS, "nonfinite") if f'"{name}"' in source}
    assert raised == rules().keys()
    assert guards == {*GUARDS, "nonfinite"}


def test_shorter_minutes_shorten_durations_and_nothing_else() -> None:
    text = 'max_over_time((x{a="[5m] offset 5m"} == bool 0)[10m:30s]) > 5 and rate(y[1h] offset 5m) < 2.5'
    assert hurried.expression(text, 0.5) == (
        'max_over_time((x{a="[5m] offset 5m"} == bool 0)[5000ms:250ms]) > 5 and rate(y[30000ms] offset 2500ms) < 2.5'
    )
    assert hurried.duration("1d", 1 / 60) == "24000ms"
    with pytest.raises(ValueError, match="expected a duration such as 15m, found '1h30m'"):
        hurried.duration("1h30m", 1.0)


def test_shorter_minutes_leave_the_shipped_rules_as_they_are_but_for_durations() -> None:
    shipped = yaml.safe_load(RULES.read_text())
    assert _in_milliseconds(hurried.hurried(shipped, 60.0, {})) == _in_milliseconds(shipped)
    times = {"PenstockTrainerStarving": 2.0, "PenstockCheckpointNotStored": 0.5}
    groups = hurried.hurried(shipped, 1.0, times)["groups"]
    by_name = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    assert by_name["PenstockTrainerStarving"]["for"] == "15000ms"
    assert by_name["PenstockTrainerStarving"]["expr"].count("[20000ms]") == 2
    assert by_name["PenstockCheckpointNotStored"]["expr"] == "penstock_trainer_checkpoint_unstored_seconds > 15"
    assert "for" not in by_name["PenstockDeadLetters"]


def _in_milliseconds(rules: dict[str, Any]) -> str:
    units = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
    text = json.dumps(rules, sort_keys=True)
    return re.sub(r"\b(\d+)(ms|s|m|h)\b", lambda duration: f"{int(duration[1]) * units[duration[2]]}ms", text)
