"""``penstock plan``: from the command's options to a plan.

``python -m penstock.services.cli.plan docs/plan.md`` writes the outputs of the page's examples.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.services.plan import measured as runs
from penstock.services.plan import report
from penstock.services.plan.certain import trainer_options, visible_gpus
from penstock.services.plan.hardware import GIB, Cluster, parse_cluster
from penstock.services.plan.layouts import Planner, Preferences
from penstock.services.plan.measured import Corrections, Measured
from penstock.services.plan.pace import GpuLayout
from penstock.services.plan.rates import SLOWED
from penstock.services.plan.report import Plan, text
from penstock.services.plan.workload import Lengths, Workload, with_turns, workload_of
from penstock.services.up.display import console
from penstock.shared.errors import SettingsError
from penstock.shared.model.context import check_context
from penstock.shared.settings import SETTINGS_FILE, RunKind, Settings, given_tables, load

if TYPE_CHECKING:
    from penstock.services.cli.reports.data_check import PromptLengths

_HOSTS, _DECODING = (0.1, 2.0), (0.1, 10.0)
"""Seconds of an engine's scheduler, over those of vLLM's own on the measured hosts, and of decoding steps over the planned
ones."""
_HALVINGS = 16
_LEAST_WAIT = 0.05
"""Of a step: with less, training bounds the run, which does not tell how fast generation is."""


def show(plan: Plan, *, as_json: bool) -> None:
    if as_json:
        console.say_json(report.as_json(plan))
    else:
        console.say(text(plan))


def write(plan: Plan, config: Path | None, flags: Sequence[str], file: Path) -> None:
    """Write what the file and flags give, with the plan's layout. Raises SettingsError."""
    by_hand = report.write(plan, given_tables(config, flags), file)
    console.warn("\n".join([f"written: {file}", *by_hand]))


def make(settings: Settings, gpus: str, model: str = "", calibrate: Path | None = None, turns: str = "") -> Plan:
    """Return the plan of a run; ``turns``: of an episode, as :func:`_stated` reads them.

    Raises:
        SettingsError: something is not known, or not planned.
    """
    if settings.kind is RunKind.MIXTURE:
        raise SettingsError(
            f"expected algorithm.imitation = 0 with penstock plan, found {settings.algorithm.imitation:g}: how many groups of a step are "
            "demonstrations, which are not generated, is not predicted; with 0, all of them are planned as generated, an upper bound"
        )
    if calibrate is not None and not (runs.folder_of(calibrate) / SETTINGS_FILE).is_file():
        raise SettingsError(f"no run's folder at {calibrate}: change --calibrate")
    if not model:
        check_context(settings)
    work, stated = work_of(settings, model), _stated(settings, turns, calibrate)
    if not work.kind.generates and not work.lengths.sample:
        raise SettingsError(
            f"expected demonstrations or preference pairs on this machine with penstock plan, whose lengths no setting tells, found no file "
            f"{', '.join(settings.data.sources)}, or none of JSON lines and no tokenizer in policy.model to count with: change data.path"
        )
    if stated is not None:
        work = with_turns(work, settings, *stated)
    planner = Planner(work, parse_cluster(gpus), _for_longest(preferences(settings), work, settings))
    together, most = settings.trainer.sequence_parallel, planner.cluster.per_node
    if together > most:
        raise SettingsError(
            f"expected trainer.sequence_parallel of at most the {most} GPUs of a host, found {together}: lower it"
        )
    if calibrate is not None:
        figures, own = runs.read_run(calibrate)
        of_run = work_of(own, model)
        given = max(0.0, figures.given_tokens - of_run.prompt_tokens)
        of_run, planned = (as_measured(each, of, figures, given) for each, of in ((of_run, own), (work, settings)))
        corrected = corrections(figures, own, of_run, planner.cluster, mps=runs.under_mps(calibrate))
        planner = dataclasses.replace(planner, corrections=corrected, work=planned)
    return Plan(settings, planner, *planner.compare())


def with_host_memory(gpus: str) -> str:
    """Return the words of --gpus, with this machine's memory if it has as many GPUs as a host of theirs."""
    cluster = parse_cluster(gpus)
    if cluster.host_memory_bytes or len(visible_gpus()) != cluster.per_node:
        return gpus
    from penstock.shared.process.memory_timeline import host_bytes  # imports numpy

    return f"{gpus},{host_bytes()[0] / GIB:.1f}GiB"


def _for_longest(own: Preferences, work: Workload, settings: Settings) -> Preferences:
    """Return ``own`` with micro-batches that hold the longest sample, which is not trained otherwise; demonstrations that are
    longer are bad rows."""
    if not work.kind.generates:
        return own
    longest = min(work.longest, settings.rollout.max_model_len or work.longest)
    tokens = max(own.trainer.micro_batch_tokens, -(-longest // own.trainer.sequence_parallel))
    return dataclasses.replace(own, trainer=dataclasses.replace(own.trainer, micro_batch_tokens=tokens))


def _stated(settings: Settings, turns: str, calibrate: Path | None) -> tuple[float, float, float] | None:
    """Return what --turns says of an episode: ``turns,given tokens,seconds of tools``."""
    if not turns:
        if settings.episodes.is_on and calibrate is None:
            raise SettingsError(
                "expected the turns of an episode with [episodes], whose number and lengths no settings tell: add --turns "
                "TURNS,TOKENS,SECONDS, with the tokens that its tools give and the seconds that they take, such as 4,600,2.5, or --calibrate "
                "with a run of such episodes"
            )
        return None
    if not settings.episodes.is_on or calibrate is not None:
        beside = "[episodes]" if not settings.episodes.is_on else "no --calibrate, whose run says it"
        raise SettingsError(f"expected {beside} with --turns: leave it out")
    try:
        number, given, wait_s = map(float, turns.split(","))
        if not all(map(math.isfinite, (number, given, wait_s))):
            raise ValueError
    except ValueError as error:
        raise SettingsError(
            f"expected TURNS,TOKENS,SECONDS such as 4,600,2.5, found {turns!r}: change --turns"
        ) from error
    return number, given, wait_s


def as_measured(work: Workload, settings: Settings, figures: Measured, given_tokens: float) -> Workload:
    """Return ``work`` with the lengths, and turns, of a run, whose tools gave ``given_tokens`` in an episode; lengths of
    demonstrations and pairs are those of their data.

    Raises:
        SettingsError: it played no episodes, or has not recorded how.
    """
    if not work.kind.generates:
        return work
    if not settings.episodes.is_on:
        return with_mean(work, figures.tokens)
    if not figures.turns:
        raise SettingsError(
            "expected a run of episodes with --calibrate, found no `episode_turns_mean` in its metrics.jsonl: give another run, or --turns"
        )
    of_turn = with_mean(work, figures.tokens / figures.turns)
    return with_turns(of_turn, settings, figures.turns, given_tokens, figures.turns_wait_s)


def work_of(settings: Settings, model: str = "") -> Workload:
    """Return :func:`workload_of` with the data's prompts as replicas render them, and its completions, where that can be done
    here."""
    work = workload_of(settings, model)
    counted = _counted(settings)
    if counted is None or not counted.tokens:
        return work
    tokens = max(1, round(sum(counted.tokens) / len(counted.tokens)))
    lengths = Lengths.of(counted.completions) if counted.completions else work.lengths
    return dataclasses.replace(work, prompt_tokens=tokens, counts_prompts=True, lengths=lengths)


def _counted(settings: Settings) -> "PromptLengths | None":
    """Return the tokens as ``data check`` counts them; None if data or tokenizer are not on this machine.

    Raises:
        SettingsError: they are here, and cannot be read.
    """
    named = [*settings.data.sources, settings.policy.tokenizer_source[1]]
    if not all(name and Path(name).exists() for name in named):
        return None
    try:
        from penstock.services.cli.reports import data_check
    except ModuleNotFoundError:  # a plain installation plans without the libraries of a run
        return None
    return data_check.prompt_lengths(settings)


def with_mean(work: Workload, tokens: float) -> Workload:
    """Return ``work`` with completions of ``tokens`` on average, at most as many as are allowed."""
    lengths = dataclasses.replace(work.lengths, mean=min(tokens, work.lengths.most))
    return dataclasses.replace(work, lengths=lengths)


def preferences(settings: Settings) -> Preferences:
    rollout = settings.rollout
    return Preferences(trainer_options(settings), rollout.max_groups, rollout.vllm.gpu_memory_utilization)


def corrections(
    figures: Measured, own: Settings, work: Workload, cluster: Cluster, *, mps: bool | None = None
) -> Corrections:
    """Return what a run measured over what is predicted for it, with its own settings, on GPUs of this kind.

    ``mps``: whether its engines shared a GPU under CUDA MPS, if that is known.

    Raises:
        SettingsError: the run does not tell the rates.
    """
    _check_calibrating(own, mps)
    planner, layout = Planner(work, cluster, preferences(own)), layout_of(own, figures.rung, mps=mps)
    at_once = layout.placement == "at once"
    predicted = planner.as_set(layout).rates
    slowed = SLOWED if at_once and work.max_lag else 1.0
    switching_s = figures.switch_s + figures.moving_s
    has_switches = bool(predicted.switch_s and figures.switches)
    known = Corrections(
        train=figures.compute_s / (predicted.token_s * work.step_tokens * slowed),
        update=figures.other_s / (predicted.train_s * slowed),
        switch=switching_s / figures.switches / predicted.switch_s if has_switches else 1.0,
    )
    computed_s = figures.compute_s + figures.other_s + figures.moving_s
    if figures.wait_s < _LEAST_WAIT * computed_s or not layout.replicas:
        return known
    return _decoding(known, figures.wait_s + computed_s, lambda tried: _step_s(planner, layout, tried))


def layout_of(settings: Settings, rung: int = 0, *, mps: bool | None = None) -> GpuLayout:
    """Return the layout of a run; where it is not known how processes share a GPU, as it is planned."""
    trainer, rollout = trainer_options(settings), settings.rollout
    parallel, replicas = rollout.vllm.tensor_parallel_size, rollout.replicas
    engines = rollout.engines_per_gpu if isinstance(rollout.engines_per_gpu, int) else 1
    if not settings.kind.generates:
        return GpuLayout("alone", trainer, 1, 0)
    if settings.common_gpus:
        return GpuLayout("at once", trainer, parallel, replicas, engines, mps=True)
    if settings.shared_devices:
        together = engines > 1 and mps is not False
        return GpuLayout("shared", trainer, parallel, replicas, engines, together, min(rung, 3), shadow=False)
    return GpuLayout("separate", trainer, parallel, replicas, engines, mps=engines > 1 and mps is True)


def _check_calibrating(own: Settings, mps: bool | None) -> None:
    """Raise SettingsError if reward models took turns on the trainer's GPUs, or trainer and replicas had some GPUs in common and others not, or shared one in time slices."""
    if own.scores_in_turns:
        raise SettingsError(
            "expected a run whose reward models have a device of their own with --calibrate, found models that use the trainer's "
            "in turn, where the seconds of scoring include the wait for it: give another run"
        )
    at_once = bool(own.common_gpus)
    one_each = len(own.rollout.gpus) == own.trainer.ranks == own.rollout.replicas
    if at_once and not (one_each and set(own.rollout.gpus) == set(own.trainer.gpus)):
        raise SettingsError(
            f"expected a run with the same GPUs in trainer.gpus and rollout.gpus, a rank and a replica on each, or with no GPU in both, "
            f"with --calibrate, found {list(own.trainer.gpus)} and {list(own.rollout.gpus)}, {own.trainer.ranks} ranks and "
            f"{own.rollout.replicas} replicas, which generate at rates of their own: give another run"
        )
    if at_once and own.rollout.engines_per_gpu == "auto":
        raise SettingsError(
            "expected a number in rollout.engines_per_gpu of a run with the same GPUs in trainer.gpus and rollout.gpus with --calibrate, found "
            '"auto", whose choice is not recorded: give another run'
        )
    if at_once and mps is False:
        raise SettingsError(
            "expected a run under CUDA MPS with --calibrate if trainer.gpus and rollout.gpus name the same GPU, found one in time "
            "slices, in which what trainer and engines take from each other is not modelled: give another run"
        )


def _decoding(known: Corrections, seconds: float, predict: Callable[[Corrections], float]) -> Corrections:
    """Return ``known`` with what gives the measured seconds: another scheduler's, as far as these may differ from the
    measured hosts', and beyond that, decoding steps of another length."""

    def solved(name: str, low: float, high: float, of: Corrections) -> Corrections:
        for _ in range(_HALVINGS):
            tried = math.sqrt(low * high)
            enough = predict(dataclasses.replace(of, **{name: tried})) >= seconds
            low, high = (low, tried) if enough else (tried, high)
        return dataclasses.replace(of, **{name: math.sqrt(low * high)})

    slow, fast = (dataclasses.replace(known, host=host) for host in reversed(_HOSTS))
    if predict(fast) <= seconds <= predict(slow):
        return solved("host", *_HOSTS, known)
    return solved("decode", *_DECODING, slow if seconds > predict(slow) else fast)


def _step_s(planner: Planner, layout: GpuLayout, corrected: Corrections) -> float:
    return dataclasses.replace(planner, corrections=corrected).as_set(layout).pace.step_s


_EXAMPLE = re.compile(r"```console\n\$ penstock plan ([^\n]*)\n.*?```", re.DOTALL)


def with_outputs(page: str) -> str:
    """Return ``page`` with what its examples print; they use --model and --gpus, and flags for settings."""

    def printed(example: re.Match[str]) -> str:
        words = dict(zip(*[iter(example[1].split())] * 2, strict=True))
        model, gpus = words.pop("--model"), words.pop("--gpus")
        settings = load(None, [word for pair in words.items() for word in pair])
        return f"```console\n$ penstock plan {example[1]}\n{text(make(settings, gpus, model))}\n```"

    return _EXAMPLE.sub(printed, page)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_outputs(document.read_text(encoding="utf-8")), encoding="utf-8")
