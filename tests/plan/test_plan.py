"""Laws of `penstock plan` and of what uses it."""

import dataclasses
import io
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

from penstock.services.cli import plan as plans
from penstock.services.cli.__main__ import main
from penstock.services.cli.plan import corrections, layout_of, make, preferences, with_outputs
from penstock.services.client.views import RunView
from penstock.services.coordinator.policies.relay_tree import FAN_OUT, sources
from penstock.services.plan import certain, report
from penstock.services.plan.hardware import parse_cluster
from penstock.services.plan.measured import measured
from penstock.services.plan.memory import TrainerOptions, peak, trainer_table
from penstock.services.plan.pace import GpuLayout, Placement
from penstock.services.plan.rates import checkpoint_seconds, transfer_seconds
from penstock.services.plan.report import write
from penstock.services.plan.shapes import SHAPES, shape_of
from penstock.services.plan.workload import workload_of
from penstock.services.up import disk_space
from penstock.services.up.disk_space import checkpoint_notice
from penstock.services.up.display import view
from penstock.services.up.display.summary import text as closing
from penstock.shared.errors import SettingsError
from penstock.shared.process import memory_timeline
from penstock.shared.settings import Settings, given_tables, load, loads
from tests.support import tiny

ROOT = Path(__file__).parents[2]
H200 = 140.4 * 2**30


def test_the_examples_of_the_page_are_what_the_command_prints() -> None:
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    assert page.count("$ penstock plan --model") == 1
    assert with_outputs(page) == page, "run python -m penstock.services.cli.plan docs/plan.md"


def test_what_is_shown_fits() -> None:
    plan = make(load(None, ["--sampling.max_new_tokens", "2048"]), "8xH200", "7b")
    assert {candidate.layout.placement for candidate in plan.candidates} == {"separate", "shared"}
    for candidate in plan.candidates:
        assert candidate.layout.gpus <= 8
        assert all(peak(table) <= plan.planner.limit_bytes * 1.0001 for table in candidate.memory.values())


def test_ranks_that_compute_a_sample_together_are_planned_together() -> None:
    settings = load(None, ["--trainer.ranks=2", "--trainer.sequence_parallel=2"])
    ranks = {candidate.layout.trainer.ranks for candidate in make(settings, "5xH200", "0.5b").candidates}
    assert ranks == {2, 4}, "not 5 in turn with generation"
    with pytest.raises(SettingsError, match=r"trainer.sequence_parallel of at most the 1 GPUs .*: lower it"):
        make(settings, "1xH200", "0.5b")


@pytest.mark.parametrize(
    ("config", "flags", "reason"),
    [
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 14}, [], "Lfm2ShortConv, whose state"),
        ({"model_type": "jamba"}, [], "JambaMambaMixer, whose state passes along the whole row"),
        ({}, ["--policy.lora.rank=8", "--policy.lora.dropout=0.1"], "policy.lora.dropout, whose noise"),
    ],
)
def test_rows_that_ranks_cannot_share_are_not_planned_with_them(
    tmp_path: Path, config: dict[str, Any], flags: list[str], reason: str
) -> None:
    together = ["--trainer.ranks=2", "--trainer.sequence_parallel=2"]
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["7b"], **config}))
    with pytest.raises(SettingsError, match=f"found {reason}.*: set trainer.sequence_parallel to 1"):
        make(load(None, [*together, *flags]), "2xH200", str(tmp_path))
    assert make(load(None, flags), "2xH200", str(tmp_path)).candidates


def test_a_hybrid_with_attention_alone_is_planned_with_ranks_that_share_rows(tmp_path: Path) -> None:
    """As Granite 4's small ones."""
    config = {**SHAPES["7b"], "model_type": "granitemoehybrid", "layer_types": ["attention"] * 28}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert make(load(None, ["--trainer.ranks=2", "--trainer.sequence_parallel=2"]), "2xH200", str(tmp_path)).candidates


def test_ranks_share_experts_whether_or_not_they_compute_samples_together(tmp_path: Path) -> None:
    flags = ["--trainer.ranks=2", "--trainer.sequence_parallel=2"]
    alone, together = (make(load(None, of), "8xH100", "30b-a3b") for of in ([], flags))
    best = together.candidates[0]
    assert (best.layout.trainer.expert_parallel, best.layout.trainer.sequence_parallel) == (4, 2)
    assert best.memory == alone.candidates[0].memory, "a rank computes no more tokens of a pass"
    report.write(together, {"trainer": {"sequence_parallel": 2}}, tmp_path / "run.toml")
    written = load(tmp_path / "run.toml", environment={}).trainer
    assert (written.ranks, written.expert_parallel, written.sequence_parallel) == (4, 4, 2)


def test_the_memory_of_hosts_that_holds_inputs_of_layers_is_said() -> None:
    flags = ["--sampling.max_new_tokens=131072", "--trainer.gradient_checkpointing=true"]
    said = "   inputs of layers take up to "
    long, short = (make(load(None, of), "2xH200", "7b") for of in (flags, []))
    assert f"{said}24.5 GiB of a host's memory, a rank 24.5" in report.text(long)
    assert said not in report.text(short)
    assert {entry["offloaded_inputs_bytes"] for entry in report.as_json(short)["layouts"]} == {0.0}


def test_experts_are_divided_among_the_ranks_of_a_host_or_as_set(tmp_path: Path) -> None:
    plan = make(load(None, []), "8xH100", "30b-a3b")
    best = plan.candidates[0].layout.trainer
    assert (best.ranks, best.expert_parallel, best.offload) == (4, 4, "optimizer")
    assert "train on 4, ZeRO 1, offload optimizer, experts over 4; 2 replicas" in report.text(plan)
    assert "   trainer.offload takes 511.8 GiB of a host's memory" in report.text(plan), "18 bytes of each weight"
    report.write(plan, {}, tmp_path / "run.toml")
    assert load(tmp_path / "run.toml", environment={}).trainer.expert_parallel == 4
    given = make(load(None, ["--trainer.ranks=2", "--trainer.expert_parallel=2"]), "8xH100", "30b-a3b")
    assert preferences(given.settings).trainer.expert_parallel == 2
    for model, refused in (("7b", "found 7b, whose experts"), ("30b-a3b", "found 128 in 30b-a3b")):
        with pytest.raises(SettingsError, match=rf"trainer.expert_parallel = 3 divides, {refused}.*: change it"):
            make(load(None, ["--trainer.ranks=3", "--trainer.expert_parallel=3"]), "8xH100", model)
    dense = make(load(None, []), "8xH100", "7b")
    assert {each.layout.trainer.expert_parallel for each in dense.candidates} == {1}


def test_a_rank_has_its_part_of_divided_experts_and_the_rest_whole_before_zero_divides() -> None:
    work = workload_of(load(None, []), "30b-a3b")
    experts = 48 * 128 * 3 * 2048 * 768
    rest = work.shape.weights - experts
    for stage, weights, gradients in (
        (1, rest + experts / 4, rest + experts / 4),
        (2, rest + experts / 4, (rest + experts) / 8),
        (3, (rest + experts) / 8, (rest + experts) / 8),
    ):
        table, _ = trainer_table(work, TrainerOptions(8, stage, expert_parallel=4), H200)
        sizes = {part.name: part.nbytes for part in table["forward and backward"]}
        assert sizes["weights"] == 2 * weights
        assert sizes["gradients"] == 2 * gradients
        assert sizes["moments"] == rest + experts, "8 bytes over 8 ranks"


@pytest.mark.parametrize("critic", ["30b-a3b", "7b"])
def test_a_rank_has_its_part_of_a_critics_own_experts(critic: str) -> None:
    work = workload_of(load(None, ["--algorithm.preset=ppo"]), "30b-a3b")
    shape = shape_of(critic)
    table, _ = trainer_table(dataclasses.replace(work, critic=shape), TrainerOptions(8, 1, expert_parallel=8), H200)
    sizes = {part.name: part.nbytes for part in table["critic"]}
    own = 2 * (shape.weights - shape.expert_weights * 7 / 8)
    assert sizes["gradients"] == own
    assert sizes["critic"] == own + shape.weights * 12 / 8, "12 bytes of states over 8 ranks"


def test_up_starts_a_critic_of_divided_experts_that_no_gpu_holds_whole(tmp_path: Path) -> None:
    mixture = {**SHAPES["30b-a3b"], "model_type": "qwen3_moe"}
    parts = {"algorithm.preset": "ppo", "weights.transport": "file", "rollout.vllm.tensor_parallel_size": 2}
    parts |= {"trainer.ranks": 8, "trainer.expert_parallel": 8}
    certain.check_gpus(named(settings_with(tmp_path, **mixture), range(8), (8, 9), **parts), [H200] * 10)


@pytest.mark.parametrize(("critic", "divides"), [("", True), ("7b", False)])
def test_experts_are_planned_on_ranks_together_if_the_critic_has_some_too(critic: str, *, divides: bool) -> None:
    flags = ["--algorithm.preset=ppo", f"--algorithm.critic.model={critic}"]
    planned = make(load(None, flags), "8xH200", "30b-a3b").candidates
    assert any(each.layout.trainer.expert_parallel > 1 for each in planned) == divides


def ways(model: str, gpus: str, *flags: str) -> set[tuple[bool, bool]]:
    """Return whether weights are pulled, and from all ranks, in the layouts of a plan."""
    trainers = [each.layout.trainer for each in make(load(None, flags), gpus, model).candidates]
    return {(trainer.snapshots > 0, trainer.sharded) for trainer in trainers}


def test_snapshots_are_in_shares_where_no_gpu_holds_whole_ones_or_as_set() -> None:
    assert not any(sharded for _, sharded in ways("7b", "8xH200"))
    assert (True, True) in ways("7b", "8xH200", "--weights.snapshots", "sharded")
    of_70b = ways("70b", "4x8xH200")
    assert (True, True) in of_70b
    assert (True, False) not in of_70b
    assert ways("70b", "4x8xH200", "--weights.transport", "file") == {(False, False)}


@pytest.mark.parametrize(("model", "gpus", "parallel"), [("70b", "4x8x80GiB", 8), ("235b-a22b", "8x8x80GiB", 32)])
def test_models_that_no_gpu_holds_are_planned_in_shares_and_start_as_written(
    model: str, gpus: str, parallel: int, tmp_path: Path
) -> None:
    plan = make(load(None, []), gpus, model)
    best = plan.candidates[0]
    trainer = best.layout.trainer
    assert (best.layout.placement, trainer.zero_stage, trainer.sharded) == ("separate", 3, True)
    assert all(peak(table) <= plan.planner.limit_bytes * 1.0001 for table in best.memory.values())
    report.write(plan, {"trainer": {"nodes": 3, "rendezvous": "a:1"}}, tmp_path / "run.toml")
    written = load(tmp_path / "run.toml", environment={})
    assert (written.trainer.nodes, written.rollout.nodes) == (1, 1), "of other hosts"
    assert (written.weights.snapshots, written.trainer.zero_stage) == ("sharded", 3)
    assert written.trainer.ranks == 8
    hosts = trainer.ranks // 8, max(1, parallel // 8)
    text = (tmp_path / "run.toml").read_text()
    assert f"trainer.nodes = {hosts[0]}, trainer.gpu.count = 8" in text
    assert f"--trainer.nodes {hosts[0]} --trainer.node N" in text
    assert (f"--rollout.nodes {hosts[1]} --rollout.node N" in text) == (hosts[1] > 1)
    assert written.rollout.vllm.tensor_parallel_size == best.layout.tensor_parallel == parallel
    copied_s, written_s = checkpoint_seconds(plan.planner.work, plan.planner.cluster, trainer)
    states = (6 if trainer.optimizer == "adamw_8bit" else 12) * plan.planner.work.shape.weights
    assert copied_s == pytest.approx(states / trainer.ranks / 50e9), "each rank's, to its host's memory"
    assert written_s - copied_s == pytest.approx(states / 2e9), "of all, to storage that hosts share"


SHOWN = ["--algorithm.loss=cross_entropy"]
PAIRS = ["--algorithm.preset=dpo", "--data.completion_field=good", "--data.rejected_field=bad"]


def supervised(folder: Path, flags: Sequence[str]) -> Settings:
    """Return the settings of a run over rows with prompts of 40 characters, and completions of 80 and 160."""
    rows = [
        {"prompt": "p" * 40, "completion": "c" * length, "good": "g" * length, "bad": "b" * 80} for length in (80, 160)
    ]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(None, [*flags, f"--data.path={folder / 'shown.jsonl'}"])


@pytest.mark.parametrize(
    ("flags", "batch", "mean", "step_tokens", "passes"),
    [
        (SHOWN, "32 demonstrations a step", 30, 32 * (10 + 30), 1.0),
        (PAIRS, "32 preference pairs a step", 25, 32 * (10 + 2 * 25), 4 / 3),
        ([*PAIRS, "--policy.lora.rank=16"], "32 preference pairs a step", 25, 32 * (10 + 2 * 25), 4 / 3),
    ],
)
def test_a_supervised_run_is_planned_as_its_trainer_alone(
    tmp_path: Path, flags: list[str], batch: str, mean: float, step_tokens: int, passes: float
) -> None:
    plan = make(supervised(tmp_path, flags), "8xH200", "7b")
    work, said = plan.planner.work, report.text(plan)
    assert (work.lengths.mean, work.step_tokens, work.passes) == (mean, step_tokens, passes)
    assert f"on 8xH200: {batch}\nprompts of 10 tokens (estimated), completions of {mean}, at most 40; " in said
    assert not any(words in said for words in ("replica", "generat", "weights, pulled", "max_lag"))
    assert [candidate.layout.trainer.ranks for candidate in plan.candidates] == [8, 4, 2, 1]
    for candidate in plan.candidates:
        table, _ = trainer_table(work, candidate.layout.trainer, plan.planner.limit_bytes)
        assert candidate.memory == {"trainer": table}, "as beside replicas"
        assert candidate.pace.step_s == candidate.rates.train_s + candidate.rates.token_s * step_tokens
    parts = {part.name: part.nbytes for part in plan.candidates[0].memory["trainer"]["wait"]}
    assert parts.get("reference") == (work.policy_bytes if flags is PAIRS else None), "with adapters, it is the base"


def test_demonstrations_of_messages_have_what_the_assistant_says_last_as_completion(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "u" * 100}, {"role": "assistant", "content": "a" * 50}]
    (tmp_path / "shown.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    work = workload_of(load(None, [*SHOWN, f"--data.path={tmp_path / 'shown.jsonl'}"]), "7b")
    assert (work.prompt_tokens, work.lengths.mean) == (33, 22), "with the names of JSON: 132 and 87 characters"


@pytest.mark.parametrize(
    ("row", "prompt_tokens", "mean"),
    [
        ({"messages": None}, 1, 1),
        ({"messages": 5}, 1, 1),
        ({"prompt": 5, "completion": "c" * 80}, 1, 20),
        ({"prompt": {"text": "p" * 27}, "completion": 5}, 10, 1),  # 40 characters of JSON
        ({"prompt": ["p" * 36], "completion": ["c" * 76]}, 10, 20),  # 40 and 80
        ({"messages": ["p" * 36], "completion": "c" * 80}, 10, 20),
    ],
)
def test_a_row_of_any_form_is_counted_as_its_text_and_its_prompt_is_whole_beside_a_completion(
    tmp_path: Path, row: dict[str, object], prompt_tokens: int, mean: int
) -> None:
    """Whether it is a bad row is decided where it is read; `penstock up` plans before."""
    (tmp_path / "shown.jsonl").write_text(json.dumps(row) + "\n")
    work = workload_of(load(None, [*SHOWN, f"--data.path={tmp_path / 'shown.jsonl'}"]), "7b")
    assert (work.prompt_tokens, work.lengths.mean) == (prompt_tokens, mean)


def test_a_supervised_run_is_written_with_the_ranks_of_its_fastest_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervised(tmp_path, SHOWN)
    of_rewards = 'algorithm.clip = [0.2, 0.28]\nreward.scorers = [{kind = "format"}]\n'  # which `sft` leaves aside, too
    (tmp_path / "run.toml").write_text(f'{of_rewards}[data]\npath = "{tmp_path}/shown.jsonl"\n')
    words = ["plan", str(tmp_path / "run.toml"), "--sft", "--model", "7b", "--json", "--gpus", "4xH200"]
    assert main([*words, "--write", str(tmp_path / "planned.toml")]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert (first["placement"], first["gpus"], first["replicas"], first["supported"]) == ("alone", 4, 0, True)
    written = load(tmp_path / "planned.toml", environment={})
    assert (written.kind.generates, written.trainer.ranks, written.trainer.gpus) == (False, 4, (0, 1, 2, 3))
    assert "rollout" not in tomllib.loads((tmp_path / "planned.toml").read_text())


def test_supervised_runs_are_planned_on_hosts_and_by_the_tokens_of_their_tokenizer(tmp_path: Path) -> None:
    plan = make(supervised(tmp_path, SHOWN), "2x8xH200", "70b")
    assert [candidate.layout.trainer.ranks for candidate in plan.candidates] == [16, 8]
    assert "# For 2 hosts. The Helm chart does not run it.\n" in plan.run_file(plan.candidates[0])
    flags = ["--algorithm.clip=[0.2, 0.2]", "--data.completion_field=answer", "--evaluation.path="]
    work = make(load(ROOT / "config/arithmetic.toml", [*SHOWN, *flags]), "1xH200").planner.work
    assert (work.prompt_tokens, work.counts_prompts, work.lengths.most) == (6, True, 4), "three digits and the end"


def test_demonstrations_that_are_not_on_this_machine_are_not_planned() -> None:
    with pytest.raises(
        SettingsError, match=r"whose lengths no setting tells, found no file hf://a/b:train.*data\.path"
    ):
        make(load(None, [*SHOWN, "--data.path=hf://a/b:train"]), "1xH200", "7b")


def test_a_supervised_run_corrects_the_rates_and_not_the_lengths(tmp_path: Path) -> None:
    line = {"phase_forward_backward_s": 1.5, "phase_optimizer_s": 0.5, "phase_wait_s": 9.0, "step_s": 11.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in range(1, 7)))
    own = supervised(tmp_path, SHOWN)
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(own.model_dump(mode="json", exclude_unset=True)))
    (tmp_path / "summary.json").write_text("{}")
    plan = make(own, "1xH200", "7b", tmp_path)
    assert plan.planner.work.lengths.mean == 30
    assert plan.planner.as_set(layout_of(own)).pace.step_s == pytest.approx(2.0, rel=0.01), (
        "without the wait for the first rows"
    )


def test_what_is_planned_as_vllm_on_gpus_though_the_run_says_otherwise_is_said() -> None:
    said = "planned for vLLM on GPUs, whose memory and rates are others than with "
    plain, other = (
        make(load(None, flags), "1xH200", "0.5b")
        for flags in ([], ["--run.device=cpu", "--rollout.engine=transformers"])
    )
    assert said not in report.text(plain)
    assert f'{said}rollout.engine = "transformers" and run.device = "cpu"\n' in report.text(other)


def test_a_layout_beyond_the_memory_of_a_host_is_a_shortage() -> None:
    flags = ["--weights.transport=file"]
    known, enough, unknown = (make(load(None, flags), f"8xH100{host}", "70b") for host in (",700GiB", ",3000GiB", ""))
    assert all(each.layout.trainer.offload == "none" for each in known.candidates)
    assert {each.layout for each in enough.candidates} == {each.layout for each in unknown.candidates}
    assert "in a host's memory: " in report.text(known)
    assert "of 700 GiB" in report.text(known)
    assert ", 700 GiB on a host" in report.text(known)
    assert "on a host" not in report.text(unknown)


def test_this_machines_memory_counts_if_it_has_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "visible_gpus", lambda: [H200] * 2)
    monkeypatch.setattr(memory_timeline, "host_bytes", lambda: (64 * 2.0**30, 0.0))
    assert plans.with_host_memory("2xH200") == "2xH200,64.0GiB"
    assert [plans.with_host_memory(words) for words in ("4xH200", "2xH200,9GiB")] == ["4xH200", "2xH200,9GiB"]


def test_seconds_of_a_model_smaller_than_those_compared_with_runs_are_called_lower_bounds() -> None:
    said = "of a model below 0.49B weights, the smallest compared with runs, seconds are lower bounds"
    assert said in report.text(make(load(ROOT / "config/arithmetic.toml"), "1xH100"))
    assert said not in report.text(make(load(None, []), "1xH100", "0.5b"))


def test_micro_batches_hold_the_longest_sample(tmp_path: Path) -> None:
    flags = ["--sampling.max_new_tokens", "40000", "--trainer.gradient_checkpointing=true"]
    plan = make(load(None, flags), "8xH200", "7b")
    assert plan.planner.own.trainer.micro_batch_tokens == 40_256
    assert "trainer.micro_batch_tokens = 40,256, for the longest sample" in report.text(plan)
    report.write(plan, given_tables(None, flags), tmp_path / "run.toml")
    assert load(tmp_path / "run.toml", environment={}).trainer.micro_batch_tokens == 40_256
    together = make(load(None, [*flags, "--trainer.ranks=4", "--trainer.sequence_parallel=4"]), "8xH200", "7b")
    assert together.planner.own.trainer.micro_batch_tokens == 16_384, "four ranks hold 65,536 tokens"
    assert "for the longest sample" not in report.text(together)


def test_a_model_that_fits_nowhere_is_answered_by_component_and_setting() -> None:
    plan = make(load(None, []), "1xL4", "400b")
    assert not plan.candidates
    assert "raise rollout.vllm.tensor_parallel_size" in report.text(plan) or "trainer." in report.text(plan)


def test_the_command_prints_json_and_writes_what_the_settings_accept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(ROOT / "config/two-gpus.toml"), "--gpus", "4xH200", "--model", "7b", "--json"]
    assert main([*words, "--write", str(tmp_path / "run.toml")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["weights"] == 7_615_283_200
    assert printed["layouts"][0]["samples_per_s"] > 0
    written = load(tmp_path / "run.toml", environment={})
    in_turn = written.placement.mode == "shared"
    replicas = written.rollout.replicas * written.rollout.vllm.tensor_parallel_size
    assert (written.trainer.ranks, replicas) == (4, 4) if in_turn else written.trainer.ranks + replicas == 4


def test_the_written_file_has_the_given_values_and_none_that_follows_from_them(tmp_path: Path) -> None:
    (tmp_path / "given.toml").write_text(
        '[algorithm]\npreset = "dapo"\nmax_lag = 1\non_stale = "mask"\n[run]\nseed = 0\n'
        "[evaluation]\ntimeout_s = 819.2\n"
        '[[reward.scorers]]\nkind = "answer"\n[guards.limits]\nkl = 0.5\n'
    )
    flags = ["--sampling.max_new_tokens", "16384", "--algorithm.max_lag", "2"]
    config = tmp_path / "given.toml"
    settings = load(config, flags)
    assert settings.internal.stale_wait_s == settings.guards.limits["stalled"] == 16384 * 0.05, "from the length"
    write(make(settings, "8xH100", "7b"), given_tables(config, flags), tmp_path / "run.toml")
    tables = tomllib.loads((tmp_path / "run.toml").read_text())
    decided = ("trainer", "rollout", "weights", "placement")
    assert {name: table for name, table in tables.items() if name not in decided} == {
        "algorithm": {"preset": "dapo", "max_lag": 2, "on_stale": "mask"},
        "evaluation": {"timeout_s": 819.2},  # follows from the length, too, but given
        "run": {"seed": 0},  # the default, but given
        "sampling": {"max_new_tokens": 16384},
        "reward": {"scorers": [{"kind": "answer"}]},  # its name follows
        "guards": {"limits": {"kl": 0.5}},
    }
    written = load(tmp_path / "run.toml", environment={})
    assert (written.algorithm, written.guards) == (settings.algorithm, settings.guards)


def test_models_of_the_reward_service_on_a_gpu_are_said_not_to_be_counted() -> None:
    flags = ['--reward.scorers=[{kind = "model", model = "m"}]', "--reward.models.device=cuda:0"]
    assert "Not counted, neither memory nor time: " in report.text(make(load(None, flags), "2xH200", "0.5b"))
    assert "Not counted" not in report.text(make(load(None, []), "2xH200", "0.5b"))


def test_planning_imports_no_model_library() -> None:
    code = (
        "import sys; from penstock.services.cli.__main__ import main; main(['plan', '--model', '7b', '--gpus', '2xH200']);"
        "sys.exit(sorted({'torch', 'transformers', 'redis', 'numpy'} & set(sys.modules)) != [])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def settings_with(folder: Path, **config: object) -> Settings:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    return loads(f'[policy]\nmodel = "{folder}"\n', "test")


SEVEN = {
    "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152_064,
}  # fmt: skip


SMALL = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


def test_up_refuses_what_cannot_fit_with_component_and_setting(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, **SEVEN)
    with pytest.raises(SettingsError, match=r"at least 127\.7 GiB, 56\.7 of them for moments: raise trainer\.ranks"):
        certain.check_gpus(settings, [80 * 2**30])
    certain.check_gpus(named(settings, (0,), (1,)), [H200, H200])


def test_up_starts_a_policy_that_no_gpu_holds_whole_at_zero_stage_3_alone(tmp_path: Path) -> None:
    parts = {"trainer.ranks": 8, "trainer.zero_stage": 3, "trainer.offload": "all", "weights.transport": "file"}
    settings = named(settings_with(tmp_path, **SEVEN), range(8), (8, 9), **parts)
    shared = named(settings, range(8), (8, 9), **{"rollout.vllm.tensor_parallel_size": 2})
    certain.check_gpus(shared, [12 * 2**30] * 10)
    whole = named(shared, range(8), (8, 9), **{"trainer.zero_stage": 2, "trainer.offload": "optimizer"})
    with pytest.raises(SettingsError, match=r"for weights: set trainer\.zero_stage = 3"):
        certain.check_gpus(whole, [12 * 2**30] * 10)


def named(settings: Settings, trainer: Sequence[int], rollout: Sequence[int], **more: object) -> Settings:
    """Return ``settings`` with these GPUs of trainer and one replica."""
    return loads(
        tomli_w.dumps(settings.model_dump(mode="json", exclude_unset=True)),
        "test",
        ["--rollout.replicas=1", f"--trainer.gpus={list(trainer)}", f"--rollout.gpus={list(rollout)}"]
        + [f"--{name}={value}" for name, value in more.items()],
    )


def test_up_counts_all_that_name_a_gpu_together(tmp_path: Path) -> None:
    seven = settings_with(tmp_path, **SEVEN)
    together = r"the trainer and a replica, which work at the same time, to fit on a GPU of 140\.4 GiB"
    with pytest.raises(SettingsError, match=together) as refused:
        certain.check_gpus(named(seven, (0,), (0,), **{"rollout.engine": "vllm"}), [H200, H200])
    assert (
        "at least 238.6 GiB, 96.7 of them for its key-value cache: lower rollout.vllm.gpu_memory_utilization, or "
        in str(refused.value)
    )
    certain.check_gpus(named(seven, (0,), (0,), **{"placement.mode": "shared"}), [H200])
    less = {"trainer.optimizer": "adamw_8bit", "rollout.vllm.gpu_memory_utilization": 0.3}
    certain.check_gpus(named(seven, (0,), (0,), **less), [H200])
    with pytest.raises(SettingsError, match=r"42\.6 of them for the engines' weights: lower rollout\.engines"):
        certain.check_gpus(named(seven, (0,), (0,), **less, **{"rollout.engines_per_gpu": 3}), [H200])


def test_up_counts_a_replica_on_the_gpus_that_its_engine_uses(tmp_path: Path) -> None:
    certain.check_gpus(named(settings_with(tmp_path, **SEVEN), (1,), (0, 1)), [H200, H200])


def test_up_counts_replicas_that_name_no_gpu_with_the_trainer_that_names_none(tmp_path: Path) -> None:
    seven = settings_with(tmp_path, **SEVEN)
    with pytest.raises(SettingsError, match=r"give rollout\.gpus other GPUs"):
        certain.check_gpus(seven, [H200, H200])
    with pytest.raises(SettingsError, match=r"give rollout\.gpus other GPUs"):
        certain.check_gpus(named(seven, (0,), ()), [H200])
    certain.check_gpus(named(seven, (0,), ()), [H200, H200])  # CUDA_VISIBLE_DEVICES may show the replica another


def test_up_accepts_the_run_with_both_at_once_that_was_measured(tmp_path: Path) -> None:
    measured_with = {"rollout.engines_per_gpu": 3, "rollout.vllm.gpu_memory_utilization": 0.4, "rollout.max_groups": 64}
    certain.check_gpus(named(settings_with(tmp_path, **SMALL), (0,), (0,), **measured_with), [H200])


def test_up_refuses_two_snapshots_that_fit_on_no_gpu(tmp_path: Path) -> None:
    config = {
        **SEVEN,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    settings = settings_with(tmp_path, **config)
    eight = settings.trainer.model_copy(update={"ranks": 8, "zero_stage": 3})
    pulled = settings.model_copy(update={"trainer": eight})
    with pytest.raises(SettingsError, match=r'26\d\.\d of them for snapshots: set weights\.transport = "file"'):
        certain.check_gpus(pulled, [H200])


def test_up_refuses_nothing_without_gpus_on_a_cpu_or_of_unknown_sizes(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, **SEVEN)
    certain.check_gpus(settings, [])
    certain.check_gpus(loads(f'[policy]\nmodel = "{tmp_path}"\n[run]\ndevice = "cpu"\n', "test"), [1e9])
    certain.check_gpus(settings_with(tmp_path, **{**SEVEN, "model_type": "mamba"}), [1e9])


def test_up_refuses_what_would_move_more_to_the_host_than_its_memory(tmp_path: Path) -> None:
    seven, host = settings_with(tmp_path, **SEVEN), 64 * 2.0**30

    def checked(settings: dict[str, object], gpus: int = 1) -> None:
        certain.check_host(named(seven, (), (), **settings), gpus, host)

    def shared(**more: object) -> dict[str, object]:
        return {"placement.mode": "shared"} | {name.replace("__", "."): value for name, value in more.items()}

    for rung, needed in ((3, "85.1"), (4, "99.3")):
        sentence = rf"with placement\.rung = {rung}, .* found 64\.0 GiB, and they need {needed}: lower it"
        with pytest.raises(SettingsError, match=sentence):
            checked(shared(placement__rung=rung))
    with pytest.raises(SettingsError, match=r'with trainer\.offload = "optimizer", .* need 127\.7: change it'):
        checked({"trainer.offload": "optimizer"})
    checked(shared(placement__rung=3, trainer__optimizer="adamw_8bit"))
    checked(shared(placement__rung=2))
    checked(shared())
    checked(shared(placement__rung=4), 0)
    checked(shared(placement__rung=4, run__device="cpu"))


def test_up_says_at_the_start_that_inputs_of_layers_will_not_fit(tmp_path: Path) -> None:
    def notice(gib: float, tokens: int, gpus: Sequence[float] = (H200,), **trainer: object) -> str:
        flags = {f"trainer.{name}": value for name, value in {"micro_batch_tokens": tokens, **trainer}.items()}
        return certain.inputs_notice(named(settings_with(tmp_path, **SEVEN), (), (), **flags), gpus, gib * 2**30)

    said = "passes of trainer.micro_batch_tokens = 131,072 would keep 24.5 GiB of inputs of layers in this machine's memory, which has 24.0 GiB: the rest stays on the GPUs"
    assert notice(24, 131_072) == said
    assert notice(25, 131_072) == ""
    assert "keep 49.0 GiB" in notice(25, 131_072, ranks=2)
    assert notice(1, 16_384) == notice(1, 131_072, ()) == notice(1, 131_072, gradient_checkpointing=False) == ""


def test_up_says_at_the_start_that_checkpoints_will_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notice(settings: Settings, free_gib: float) -> str:
        return checkpoint_notice(settings, tmp_path, lambda _: int(free_gib * 2**30))

    seven = settings_with(tmp_path, **SEVEN)
    small = named(seven, (0,), (1,), **{"trainer.optimizer": "adamw_8bit"})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert notice(seven, 1) == ""  # no GPU
    monkeypatch.setattr(disk_space, "visible_gpus", lambda: [H200])
    assert notice(seven, 90).startswith(
        "a checkpoint needs 99.3 GiB, none can be written: 90.0 GiB are free on the disk of "
    )
    assert 'choose trainer.optimizer = "adamw_8bit"' in notice(seven, 90)
    assert "needs 99.3 GiB, and trainer.keep_last = 2 stay while the next one is written: 250.0 GiB" in notice(
        seven, 250
    )
    assert notice(seven, 300) == ""
    assert "adamw_8bit" not in notice(small, 20) != ""
    sharded = named(small, (0, 1), (2,), **{"trainer.ranks": 2, "trainer.zero_stage": 3})
    assert notice(sharded, 40).startswith("a checkpoint needs 42.6 GiB, none can")  # 46 GB in 2026-11-26-whole-run-h200
    for step in (5, 10):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert notice(seven, 100) == ""  # the next one replaces the oldest
    assert notice(named(seven, (0,), (1,), **{"policy.lora.rank": 8}), 1) == ""
    assert notice(settings_with(tmp_path, **{**SEVEN, "model_type": "mamba"}), 1) == ""


def test_gpus_are_those_that_nvidia_smi_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert certain.visible_gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU-a, 81559\necho GPU-b, 143771\n")
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    small, large = 81_559 * 2**20, 143_771 * 2**20
    assert certain.visible_gpus() == [small, large]
    for visible, sizes in (("1", [large]), ("GPU-b,0", [large, small]), ("", []), ("7", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert certain.visible_gpus() == sizes
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    program.write_text("#!/bin/sh\necho no devices were found\nexit 6\n")
    assert certain.visible_gpus() == []


def test_the_screen_says_what_bounds_the_run() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view.screen("penstock", RunView(bound="rollout-bound: the trainer waits 25%"), []))
    assert "rollout-bound: the trainer waits 25%" in console.export_text()


def test_the_closing_message_counts_groups_that_were_given_up(tmp_path: Path) -> None:
    counts = {"trained": 9, "dead:prompts": 3, "dead:rollouts": 1, "dead:experience": 0, "dropped:stale": 2}
    summary = {"state": "finished", "groups_admitted": 15, "counts": counts}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "groups given up     4 of 15 (dead letters of prompts, rollouts)" in closing(tmp_path, resumable=False)
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "counts": {"trained": 9, "dead:prompts": 0}}))
    assert "given up" not in closing(tmp_path, resumable=False)


def test_the_closing_message_says_what_bounded_the_run(tmp_path: Path) -> None:
    line = {"step_s": 4.0, "phase_wait_s": 2.0, "lag_max": 1}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in range(1, 7)))
    (tmp_path / "settings.toml").write_text("[rollout]\nreplicas = 2\n")
    (tmp_path / "summary.json").write_text('{"gpu_hours": 0.1}')
    assert "rollout-bound: the trainer waits 50%; 2 more replicas would be 2.0 times as fast" in closing(
        tmp_path, False
    )


def test_a_run_corrects_the_rates(tmp_path: Path) -> None:
    line = {
        "step_s": 4.0, "phase_wait_s": 2.0, "phase_forward_backward_s": 1.5, "phase_optimizer_s": 0.5, "samples": 512,
        "response_tokens_mean": 100.0,
    }  # fmt: skip
    run = "".join(json.dumps({**line, "step": step}) + "\n" for step in range(1, 7))
    (tmp_path / "metrics.jsonl").write_text(run)
    settings = settings_with(tmp_path, **SEVEN)
    (tmp_path / "settings.toml").write_text(f'[policy]\nmodel = "{tmp_path}"\n')
    (tmp_path / "summary.json").write_text("{}")
    plan = make(settings, "4xH200", calibrate=tmp_path / "summary.json")
    assert plan.planner.work.lengths.mean == 100.0
    own = plan.planner.as_set(layout_of(load(tmp_path / "settings.toml", environment={})))
    assert own.rates.token_s * plan.planner.work.step_tokens == pytest.approx(1.5)
    assert own.rates.train_s == pytest.approx(0.5)
    assert own.pace.step_s == pytest.approx(4.0, rel=0.01)
    with pytest.raises(SettingsError, match="at least 3 steps"):
        measured([line], 1)


AGENT = ("--episodes.tools", '["a:b"]', "--sampling.group_size", "8", "--sampling.max_new_tokens", "512")


def test_episodes_are_planned_by_their_turns_the_prefix_cache_and_the_time_of_their_tools() -> None:
    def planned(turns: str, *flags: str) -> report.Plan:
        return make(load(None, [*AGENT, *flags] if turns else AGENT[2:]), "8xH200", "7b", turns=turns)

    plan = planned("4,600,2.5")
    work = plan.planner.work
    assert work.lengths.mean == pytest.approx(4 * 204.8)
    assert work.lengths.most == 8 * 512
    assert work.step_tokens == pytest.approx(32 * (256 + 8 * (819.2 + 600)))
    assert work.read_tokens == pytest.approx(256 + 8 * (600 + 3 * 8)), "each turn reads half a block again"
    assert "in 4.0 turns with 600 given tokens and 2.5 s of tools" in report.text(plan)
    uncached = planned("4,600,2.5", "--rollout.vllm.arguments", "{enable_prefix_caching = false}")
    assert uncached.planner.work.read_tokens == pytest.approx(256 + 8 * (600 + 3 * (256 + 709.6)))
    assert "whose history is read again with each turn" in report.text(uncached)

    def step_s(of: report.Plan) -> float:
        return of.candidates[0].pace.step_s

    assert step_s(planned("1,0,0", "--episodes.max_turns", "1")) == pytest.approx(step_s(planned("")))
    assert step_s(plan) < step_s(planned("4,600,250")) < step_s(plan) + 250 * 4
    assert step_s(plan) < step_s(uncached)


@pytest.mark.parametrize(
    ("flags", "turns", "sentence"),
    [
        (AGENT, "", "expected the turns of an episode with [episodes]"),
        (AGENT[2:], "4,600,2", "expected [episodes] with --turns"),
        (AGENT, "4,600", "expected TURNS,TOKENS,SECONDS such as 4,600,2.5, found '4,600'"),
        (AGENT, "nan,600,1", "expected TURNS,TOKENS,SECONDS"),
        (AGENT, "9,600,1", "expected 1 to 8 turns of an episode (episodes.max_turns)"),
        (AGENT, "4,1e6,1", "expected room for 4 turns in the"),
    ],
)
def test_episodes_of_unknown_turns_are_not_planned(flags: Sequence[str], turns: str, sentence: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        make(load(None, flags), "8xH200", "7b", turns=turns)


def test_a_run_of_episodes_says_their_turns(tmp_path: Path) -> None:
    line = {
        "step_s": 8.0, "phase_wait_s": 4.0, "phase_forward_backward_s": 3.5, "phase_optimizer_s": 0.5, "samples": 256,
        "response_tokens_mean": 800.0, "episode_turns_mean": 4.0, "episode_given_tokens_mean": 856.0,
        "episode_wait_s_mean": 1.5,
    }  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in range(1, 7)))
    settings = settings_with(tmp_path, **SEVEN).model_copy(update={"episodes": load(None, AGENT[:2]).episodes})
    (tmp_path / "settings.toml").write_text(f'[policy]\nmodel = "{tmp_path}"\n[episodes]\ntools = ["a:b"]\n')
    work = make(settings, "4xH200", calibrate=tmp_path).planner.work
    assert work.lengths.mean == pytest.approx(800)
    assert work.episode is not None
    assert (work.episode.turns, work.episode.given_tokens, work.episode.wait_s) == (4.0, 600.0, 1.5)
    metrics.write_text(metrics.read_text().replace("episode_turns_mean", "another"))
    with pytest.raises(SettingsError, match="found no `episode_turns_mean`"):
        make(settings, "4xH200", calibrate=tmp_path)


def test_a_run_whose_reward_models_took_turns_does_not_calibrate() -> None:
    turns = load(None, ["--placement.mode=shared", '--reward.scorers=[{kind = "model", model = "m"}]'])
    figures = measured([{"step_s": 5.0, "phase_wait_s": 4.0}] * 6, 1)
    with pytest.raises(SettingsError, match="the seconds of scoring include the wait"):
        corrections(figures, turns, workload_of(turns, "0.5b"), parse_cluster("1xH200"))


def layout_with(placement: Placement, replicas: int, engines: int = 1, *, shadow: bool) -> GpuLayout:
    trainer = dataclasses.replace(preferences(load(None, [])).trainer, ranks=4)
    return GpuLayout(placement, trainer, 1, replicas, engines, shadow=shadow)


@pytest.mark.parametrize(
    ("placement", "replicas", "shadow", "copies"),
    [("separate", 1, True, 1), ("separate", 8, True, 2), ("separate", 8, False, 8), ("shared", 2, False, 2)],
)
def test_rank_0_is_planned_to_send_as_many_copies_as_the_coordinators_tree_has_it_send(
    placement: Placement, replicas: int, *, shadow: bool, copies: int
) -> None:
    tree = sources({f"rollout-{n}": f"h:{n}" if shadow else "" for n in range(replicas)}, FAN_OUT, "trainer:1")
    assert list(tree.values()).count(("trainer:1",)) == copies
    assert layout_with(placement, replicas, shadow=shadow).copies == copies


def test_each_engine_without_a_shadow_takes_its_own_copy_and_the_time_for_it() -> None:
    several = layout_with("separate", 4, 3, shadow=False)
    assert several.copies == 12
    work, cluster = workload_of(load(None, []), "7b"), parse_cluster("8xH200")
    start_s, single_s, all_s = (transfer_seconds(work, cluster, several.trainer, 4, copies) for copies in (0, 1, 12))
    assert all_s - start_s == pytest.approx(12 * (single_s - start_s))


@pytest.mark.parametrize(
    ("gpus", "model", "placement", "supported"),
    [
        ("8x8xH100", "70b", "separate", True),  # larger than a GPU
        ("4x8xH200", "70b", "separate", True),
        ("8xH200", "0.5b", "shared", True),
        ("2x8xH200", "0.5b", "shared", False),  # turns are taken on one host
        ("1xH200", "0.5b", "at once", True),
    ],
)
def test_the_plan_says_which_layouts_this_version_supports(
    gpus: str, model: str, placement: Placement, *, supported: bool
) -> None:
    plan = make(load(None, []), gpus, model)
    candidate = next(each for each in plan.candidates if each.layout.placement == placement)
    said = report.text(dataclasses.replace(plan, candidates=[candidate]))
    assert ("(refused)" not in said) == ("trainer and replicas take turns on one host alone" not in said) == supported


TEMPLATE = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }} {% endfor %}{{ style }}"


def test_prompts_are_counted_as_replicas_render_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save(tmp_path / "model")
    tiny.tokenizer(TEMPLATE).save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": "1" * length}], "answer": "1"} for length in (4, 8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = f'''
        policy.model = "{tmp_path / "model"}"
        data.path = "{tmp_path / "rows.jsonl"}"
        data.system = "be terse"
        data.chat_template = {{ style = "abc" }}
    '''
    (tmp_path / "run.toml").write_text(textwrap.dedent(run))
    assert main(["data", "check", str(tmp_path / "run.toml")]) == 0
    (mean,) = re.findall(r"prompt tokens: mean ([0-9]+)\.0, ", capsys.readouterr().out)
    assert int(mean) > len("111111") + len("be terse") + len("abc"), "a token is a character"
    assert main(["plan", str(tmp_path / "run.toml"), "--gpus", "1xH200", "--model", "0.5b"]) == 0
    assert f"prompts of {mean} tokens, completions" in capsys.readouterr().out


def test_prompts_that_cannot_be_counted_here_are_said_to_be_estimated(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "x" * 400, "answer": "1"}) + "\n")
    plan = make(load(None, [f"--data.path={tmp_path / 'rows.jsonl'}"]), "1xH200", "0.5b")
    assert "prompts of 100 tokens (estimated), completions" in report.text(plan)
