"""``penstock plan``: from the command's options to a plan.

``python -m services.cli.plan docs/plan.md`` writes the outputs of the page's examples.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from services.plan import measured as runs
from services.plan.hardware import parse_cluster, read_calibration
from services.plan.layouts import PLACEMENTS, GpuLayout, Planner, Preferences
from services.plan.measured import Corrections, Measured
from services.plan.memory import TrainerOptions
from services.plan.rates import SLOWED
from services.plan.report import Plan, text
from services.plan.workload import Workload, snapshots_of, workload_of
from shared.errors import SettingsError
from shared.settings import Settings, load, loads


def settings_of(config: Path | None, flags: Sequence[str]) -> Settings:
    return loads("", "the flags", flags) if config is None else load(config, flags)


def make(
    settings: Settings, gpus: str, model: str = "", calibrate: Path | None = None, lengths: Path | None = None
) -> Plan:
    if settings.algorithm.is_mixed:
        raise SettingsError(
            f"expected algorithm.imitation = 0 with penstock plan, found {settings.algorithm.imitation:g}: how many groups of a step are "
            "demonstrations, which are not generated, is not predicted; with 0, all of them are planned as generated, an upper bound"
        )
    planner = Planner(workload_of(settings, model, lengths), parse_cluster(gpus), preferences(settings))
    if calibrate is not None and not calibrate.exists():
        raise SettingsError(f"no run's folder or file of rates at {calibrate}: change --calibrate")
    if calibrate is not None and (rates := read_calibration(calibrate)) is not None:
        planner = dataclasses.replace(planner, cluster=rates.of(planner.cluster))
    elif calibrate is not None:
        figures, own = runs.read_run(calibrate)
        planner = dataclasses.replace(planner, corrections=corrections(figures, own, model, gpus))
        lengths_of_run = dataclasses.replace(
            planner.work.lengths, mean=min(figures.tokens, settings.sampling.max_new_tokens)
        )
        if lengths is None:
            planner = dataclasses.replace(planner, work=dataclasses.replace(planner.work, lengths=lengths_of_run))
    candidates, problems = planner.compare()
    return Plan(planner, candidates, problems)


def preferences(settings: Settings) -> Preferences:
    trainer, rollout = settings.trainer, settings.rollout
    options = TrainerOptions(
        ranks=trainer.ranks * trainer.nodes,
        zero_stage=trainer.zero_stage,
        optimizer=trainer.optimizer,
        offload=trainer.offload,
        micro_batch_tokens=trainer.micro_batch_tokens,
        checkpointing=trainer.gradient_checkpointing,
        chunk_tokens=settings.internal.logits_chunk_tokens,
        snapshots=snapshots_of(settings),
        sharded=settings.weights.snapshots == "sharded",
    )
    return Preferences(
        options,
        rollout.max_groups,
        rollout.vllm.gpu_memory_utilization,
        settings.reward.replicas,
        settings.weights.transport,
        [placement for placement in PLACEMENTS if placement != "lend" or not settings.algorithm.imitation],
    )


def corrections(figures: Measured, own: Settings, model: str, gpus: str) -> Corrections:
    """Return what a run measured over what is predicted for it on one GPU of the kind, with its own settings.

    Raises:
        SettingsError: GPUs were lent, so that groups were decoded at two rates, or reward models took turns on them, or
            trainer and replicas had some GPUs in common and others not, or several.
    """
    if own.placement.mode == "lend":
        raise SettingsError(
            'expected a run with placement.mode = "separate" or "shared" with --calibrate, found "lend", where the rates of '
            "guests and other replicas are not measured apart: give another run"
        )
    if own.scores_in_turns:
        raise SettingsError(
            "expected a run whose reward models have a device of their own with --calibrate, found models that use the trainer's "
            "in turn, where the seconds of scoring include the wait for it: give another run"
        )
    at_once = bool(own.common_gpus)
    if at_once and (own.trainer.ranks, own.rollout.replicas, len(own.rollout.gpus)) != (1, 1, 1):
        raise SettingsError(
            f"expected a run with one GPU in trainer.gpus and rollout.gpus, or with no GPU in both, with --calibrate, found "
            f"{list(own.trainer.gpus)} and {list(own.rollout.gpus)}, where replicas generate at rates of their own: give another run"
        )
    if at_once and own.rollout.engines_per_gpu == "auto":
        raise SettingsError(
            "expected a number in rollout.engines_per_gpu of a run with one GPU in trainer.gpus and rollout.gpus with --calibrate, found "
            '"auto", whose choice is not recorded: give another run'
        )
    work = workload_of(own, model)
    work = dataclasses.replace(work, lengths=dataclasses.replace(work.lengths, mean=figures.tokens))
    wants = preferences(own)
    planner = Planner(work, parse_cluster(gpus), wants)
    engines = own.rollout.engines_per_gpu if isinstance(own.rollout.engines_per_gpu, int) else 1
    parallel, replicas = own.rollout.vllm.tensor_parallel_size, own.rollout.replicas
    layout = GpuLayout("separate", wants.trainer, parallel, replicas, engines)
    if at_once:
        layout = GpuLayout("at once", wants.trainer, parallel, 0, engines, borrowed=replicas)
    groups = max(1, min(wants.max_groups, -(-work.slots // own.rollout.replicas)))
    predicted = planner.rates(layout, work.shape.layers, groups)
    decoding_s = predicted.decoding(groups * work.group_size)
    slowed = SLOWED if at_once and work.max_lag else 1.0
    if own.shared_devices or at_once:  # groups also wait for the trainer's turns, and the trainer waits for theirs
        trains_s = (figures.compute_s + figures.other_s) * (work.max_lag > 0)
        spent_s = figures.wait_s - figures.switch_s + predicted.beside * trains_s
        generate_s = work.samples * work.lengths.mean / (own.rollout.replicas * groups * work.group_size) * decoding_s
    else:
        spent_s, generate_s = figures.generate_s, _generate_s(work, groups) * decoding_s
    return Corrections(
        train=figures.compute_s / (predicted.token_s * work.step_tokens * slowed),
        update=figures.other_s / (predicted.train_s * slowed),
        decode=spent_s / generate_s if spent_s > 0 else 1.0,
        score_s=figures.score_s / max(1, groups),
    )


def _generate_s(work: Workload, groups: int) -> float:
    """Return the decoding steps of a group's longest sample, on average."""
    quantiles = work.lengths.quantiles(256)
    size = work.group_size
    return sum(length * size * ((index + 0.5) / 256) ** (size - 1) for index, length in enumerate(quantiles)) / 256


_EXAMPLE = re.compile(r"```console\n\$ penstock plan ([^\n]*)\n.*?```", re.DOTALL)


def with_outputs(page: str) -> str:
    """Return ``page`` with what its examples print; they use --model and --gpus, and flags for settings."""

    def printed(example: re.Match[str]) -> str:
        words = dict(zip(*[iter(example[1].split())] * 2, strict=True))
        model, gpus = words.pop("--model"), words.pop("--gpus")
        settings = settings_of(None, [word for pair in words.items() for word in pair])
        return f"```console\n$ penstock plan {example[1]}\n{text(make(settings, gpus, model))}\n```"

    return _EXAMPLE.sub(printed, page)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_outputs(document.read_text(encoding="utf-8")), encoding="utf-8")
