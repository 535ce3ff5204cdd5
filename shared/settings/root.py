"""The whole file of a run: its tables, what follows from several of them, and what they must agree on.

Rules for one table are with that table; rules over several are here.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.errors import SettingsError
from penstock.shared.expression import Expression
from penstock.shared.settings.algorithm import AlgorithmSettings, follow_length
from penstock.shared.settings.evaluation import EvaluationSettings
from penstock.shared.settings.guards import GuardsSettings
from penstock.shared.settings.internal import InternalSettings
from penstock.shared.settings.placement import PlacementSettings, check_placement
from penstock.shared.settings.policy import FabricSettings, PolicySettings, WeightsSettings
from penstock.shared.settings.rewards.models import ModelWork
from penstock.shared.settings.rewards.reward import RewardSettings
from penstock.shared.settings.rollout import EpisodesSettings, RolloutSettings, SamplingSettings
from penstock.shared.settings.run import (
    BusSettings,
    CoordinatorSettings,
    DataSettings,
    RunKind,
    RunSettings,
    TelemetrySettings,
    TrackingSettings,
)
from penstock.shared.settings.section import Section, shown
from penstock.shared.settings.trainer import TrainerSettings, check_replay

_TOP_BYTES = 8
"""Of a token id and its logprob."""
_KEPT_BYTES = 4
"""Of the id of a token that could be drawn."""
_MOST_BYTES = 256 * 1024**2
"""A message is one value of Redis, of at most 512 MiB."""


class Settings(Section):
    """One run."""

    run: RunSettings = Field(default=RunSettings())
    """What this run is."""
    bus: BusSettings = Field(default=BusSettings())
    """Redis or Valkey."""
    policy: PolicySettings = Field(default=PolicySettings())
    """The model that is trained."""
    data: DataSettings = Field(default=DataSettings())
    """The prompts that the run trains on."""
    evaluation: EvaluationSettings = Field(default=EvaluationSettings())
    """Held-out problems."""
    sampling: SamplingSettings = Field(default=SamplingSettings())
    """How completions are drawn."""
    rollout: RolloutSettings = Field(default=RolloutSettings())
    """The replicas that generate."""
    episodes: EpisodesSettings = Field(default=EpisodesSettings())
    """Turns with tools, an environment or an agent."""
    reward: RewardSettings = Field(default=RewardSettings())
    """What a completion is worth."""
    algorithm: AlgorithmSettings = Field(default=AlgorithmSettings())
    """The update rule."""
    trainer: TrainerSettings = Field(default=TrainerSettings())
    """The optimizer and its engine."""
    placement: PlacementSettings = Field(default=PlacementSettings())
    """Which processes share a device."""
    fabric: FabricSettings = Field(default=FabricSettings())
    """What connects GPUs of several pods or machines."""
    weights: WeightsSettings = Field(default=WeightsSettings())
    """How policy versions reach the replicas."""
    coordinator: CoordinatorSettings = Field(default=CoordinatorSettings())
    """Admission, ledger and the HTTP API."""
    guards: GuardsSettings = Field(default=GuardsSettings())
    """Conditions that warn, or pause the run."""
    tracking: TrackingSettings = Field(default=TrackingSettings())
    """Experiment trackers."""
    telemetry: TelemetrySettings = Field(default=TelemetrySettings())
    """Logs and heartbeats."""
    internal: InternalSettings = Field(default=InternalSettings())
    """For tests; not supported."""

    @property
    def slots(self) -> int:
        """Maximum number of groups in flight."""
        return (self.algorithm.max_lag + 1) * self.algorithm.groups_per_step

    @property
    def publishes_adapters(self) -> bool:
        """Whether versions are adapters alone, by file, whatever weights.transport says."""
        chosen = self.weights.lora
        return self.policy.lora.rank > 0 and (
            chosen == "adapter" or (chosen == "auto" and self.rollout.engine == "vllm")
        )

    @property
    def frees_snapshots(self) -> bool:
        """Whether the trainer can free its snapshot while it trains, as no replica pulls then."""
        return self.placement.mode == "shared" and self.weights.transport == "pull" and not self.publishes_adapters

    @property
    def shared_devices(self) -> range:
        """Devices that the trainer and replicas use in turn, by trainer rank."""
        return range(self.trainer.ranks if self.placement.mode == "shared" else 0)

    @property
    def scores_in_turns(self) -> bool:
        """Whether the reward service's models share a device with the trainer and a replica."""
        reward = self.reward
        has_models = (
            any(scorer.kind == "model" for scorer in reward.scorers)
            or any(not teacher.url for teacher in reward.teachers)
            or self.algorithm.reference_travels
        )
        in_turn = self.placement.mode == "shared" and reward.models.device == "auto" and not reward.gpus
        return in_turn and has_models and self.kind.generates

    @property
    def common_gpus(self) -> frozenset[int]:
        """GPUs on which trainer and replicas work at the same time, as trainer.gpus and rollout.gpus both name them.

        >>> sorted(Settings.model_validate({"trainer": {"gpus": [0]}, "rollout": {"gpus": [0]}}).common_gpus)
        [0]
        """
        named = self.trainer.gpus if self.placement.mode == "separate" else ()
        return frozenset(named) & frozenset(self.rollout.gpus)

    @property
    def gpu_sharing(self) -> Literal["", "in turn", "at once"]:
        """How all replicas share the trainer's GPUs, or some do; "": they have their own."""
        return "in turn" if self.placement.mode == "shared" else "at once" if self.common_gpus else ""

    @property
    def kind(self) -> RunKind:
        """What the run trains."""
        if self.algorithm.loss == "cross_entropy":
            return RunKind.DEMONSTRATIONS
        if self.algorithm.loss == "dpo" and self.data.rejected_field:
            return RunKind.PAIRS
        return RunKind.MIXTURE if self.algorithm.imitation else RunKind.SAMPLES

    @property
    def needs_executor(self) -> bool:
        """Whether a scorer or a tool runs model-written code."""
        return self.kind.generates and (self.reward.runs_code or bool(self.episodes.executor))

    @property
    def model_work(self) -> ModelWork:
        """How the reward service runs its models."""
        models = self.reward.models
        device = self.run.device if models.device == "auto" else models.device
        return ModelWork(**{**models.model_dump(), "device": device}, threads=self.run.threads)

    @property
    def executor_profiles(self) -> tuple[str, ...]:
        """The interpreters that the code executor keeps warm: with the standard library alone, or with numpy."""
        chosen = {each.profile for each in self.reward.scorers if each.kind == "code"} | {*self.episodes.profiles}
        return self.internal.executor_profiles or tuple(sorted(chosen)) or ("stdlib", "numpy")

    @property
    def run_folder(self) -> Path:
        """Where everything this run leaves lies."""
        return self.run.folder / self.run.id

    @property
    def snapshot_folder(self) -> Path:
        """Where this run's weight snapshots lie."""
        place = hashlib.sha256(str(self.run_folder.absolute()).encode())  # runs elsewhere may share the id
        name = f"{self.run.id}-{place.hexdigest()[:8]}"
        return self.weights.folder or Path("/dev/shm") / f"penstock-{os.getuid()}" / name  # noqa: S108

    _follow_length = model_validator(mode="before")(follow_length)

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        for rule in (
            _check_scorers,
            _check_teachers,
            _check_top_k,
            _check_kept,
            _check_warm_up,
            _check_gpus,
            _check_quantization,
            _check_trainer,
            _check_slots,
            _check_sampling,
            _check_overlong,
            _check_pairs,
            _check_supervised,
            _check_mixture,
            _check_episodes,
            check_placement,
        ):
            rule(self)
        self.bus.check_shelves(self.kind, self.run.deterministic, replays=self.trainer.router_replay)
        if self.rollout.engine in ("transformers", "scripted"):
            check_plain_engine(self, self.rollout.engine)
        check_reproducible(self, self.rollout.engine)
        return self


def _check_scorers(settings: Settings) -> None:
    names = [scorer.name for scorer in settings.reward.scorers]
    if len(set(names)) != len(names):
        raise ValueError(f"expected scorers with different names, found {names}: change name in [[reward.scorers]]")
    if "reference" in names:
        raise ValueError(
            "expected another name for a scorer than 'reference', which metrics and alarms call the frozen policy: "
            "change name in [[reward.scorers]]"
        )
    try:
        Expression(settings.reward.expression, names)
    except SettingsError as error:
        raise ValueError(str(error)) from error


def _check_teachers(settings: Settings) -> None:
    teachers, sampling = settings.reward.teachers, settings.sampling
    names = [*(teacher.name for teacher in teachers), *(scorer.name for scorer in settings.reward.scorers), "reference"]
    if len(set(names)) != len(names):
        raise ValueError(
            "expected names of teachers that are different from each other, from those of scorers and from 'reference', found "
            f"{names[: len(teachers)]}: change name in [[reward.teachers]]"
        )
    if settings.data.teacher_field and not teachers:
        raise ValueError(
            f'expected [[reward.teachers]] with data.teacher_field = "{settings.data.teacher_field}", found none: change one of them'
        )
    drawn = [sampling, *map(sampling.of, settings.data.sources)]
    if teachers and any(part.kept_tokens or part.min_new_tokens for part in drawn):
        raise ValueError(
            "expected no top_p, top_k, min_p or min_new_tokens in [sampling] with [[reward.teachers]], whose logprobs are over "
            "all tokens and not over those that could be drawn: change one of them"
        )
    if any(teacher.url for teacher in teachers) and any(part.temperature != 1 for part in drawn):
        raise ValueError(
            "expected temperature = 1 in [sampling] with a teacher at a url, whose logprobs are at that temperature: change one of "
            "them, or give the teacher's folder as model in [[reward.teachers]]"
        )


def _check_top_k(settings: Settings) -> None:
    sampling, top_k = settings.sampling, settings.algorithm.distillation_top_k
    if top_k and len(settings.reward.teachers) > 1 and not settings.data.teacher_field:
        raise ValueError(
            "expected data.teacher_field with algorithm.distillation_top_k and several [[reward.teachers]], whose mixture's most probable "
            "tokens are not known from theirs: name a teacher in each row, or keep one"
        )
    _check_fits("teachers' logprobs", "algorithm.distillation_top_k", top_k, _TOP_BYTES, sampling)


def _check_kept(settings: Settings) -> None:
    """Refuse groups whose tokens that could be drawn fit into no message; how many top_p and min_p keep is not known."""
    for part in (settings.sampling, *map(settings.sampling.of, settings.data.sources)):
        top_k = part.top_k if part.top_p == 1 and part.min_p == 0 else 0
        _check_fits("tokens that could be drawn", "sampling.top_k", top_k, _KEPT_BYTES, part)


def _check_fits(contents: str, setting: str, kept: int, each_bytes: int, sampling: SamplingSettings) -> None:
    """Refuse groups of which ``contents``, ``kept`` at each token, would fit into no message."""
    most_bytes = sampling.group_size * sampling.max_new_tokens * kept * each_bytes
    if most_bytes > _MOST_BYTES:
        raise ValueError(
            f"expected at most {_MOST_BYTES >> 20} MiB of {contents} in a group, found {most_bytes >> 20}, {each_bytes} bytes for each of "
            f"{setting} = {kept} tokens × {sampling.group_size} samples × {sampling.max_new_tokens} tokens: lower {setting}, "
            "sampling.group_size or sampling.max_new_tokens"
        )


def _check_warm_up(settings: Settings) -> None:
    steps, algorithm = settings.run.steps, settings.algorithm
    if settings.trainer.warmup_steps > steps:
        raise ValueError(
            f"expected trainer.warmup_steps <= run.steps, found {settings.trainer.warmup_steps} > {steps}: change one of them"
        )
    if algorithm.needs_critic and algorithm.critic.warmup_steps >= steps:
        raise ValueError(
            f"expected algorithm.critic.warmup_steps < run.steps, found {algorithm.critic.warmup_steps} and {steps}: "
            "the policy would never move; change one of them"
        )


def _check_gpus(settings: Settings) -> None:
    for name, gpus, replicas in (
        ("rollout", settings.rollout.gpus, settings.rollout.replicas),
        ("reward", settings.reward.gpus, settings.reward.replicas),
    ):
        if len(gpus) % replicas:
            raise ValueError(
                f"expected as many numbers in {name}.gpus for each of {replicas} {name}.replicas, found "
                f"{list(gpus)}: change one of them, or leave {name}.gpus empty"
            )


def _check_quantization(settings: Settings) -> None:
    vllm, algorithm = settings.rollout.vllm, settings.algorithm
    if vllm.quantization == "none":
        return
    setting = f'rollout.vllm.quantization = "{vllm.quantization}"'
    if algorithm.loss != "dpo" and algorithm.correction in ("none", "ignored"):
        raise ValueError(
            f"expected an importance correction with {setting}, whose samples another policy draws than the one that is trained, found "
            f'algorithm.correction = "{algorithm.correction}": set algorithm.correction = "token_tis", or rollout.vllm.quantization = "none"'
        )
    for key, value, expected in (
        ("policy.dtype", settings.policy.dtype, "bfloat16"),
        ("rollout.vllm.tensor_parallel_size", vllm.tensor_parallel_size, 1),
        ("rollout.engines_per_gpu", settings.rollout.engines_per_gpu, 1),
        ("placement.mode", settings.placement.mode, "separate"),
        ("weights.lora", "adapter" if settings.publishes_adapters else "merged", "merged"),
    ):
        if value != expected:
            raise ValueError(
                f"expected {key} = {shown(expected)} with {setting}, which is not verified otherwise, found {shown(value)}: change one of them"
            )


def _check_trainer(settings: Settings) -> None:
    least, alone = 1 + max(1, settings.sampling.min_new_tokens), settings.publishes_adapters
    check_replay(settings.trainer, settings.algorithm, settings.rollout, merges_alone=alone)
    if settings.trainer.row_tokens < least:
        raise ValueError(
            f"expected {settings.trainer.row_setting} >= {least}, for a prompt and a completion of at least sampling.min_new_tokens, found "
            f"{settings.trainer.row_tokens}: nothing could be trained; change one of them"
        )
    if settings.trainer.zero_stage == 0 and settings.policy.dtype == "bfloat16":
        raise ValueError(
            'expected trainer.zero_stage >= 1 with policy.dtype = "bfloat16", found 0: there DeepSpeed steps as for float16, '
            "with a loss scale; stage 1 costs no more, change trainer.zero_stage"
        )
    if settings.weights.snapshots == "sharded" and (
        settings.weights.transport == "file" or not settings.trainer.zero_stage
    ):
        raise ValueError(
            'expected weights.transport = "pull" and trainer.zero_stage >= 1 with weights.snapshots = "sharded", found '
            f'"{settings.weights.transport}" and {settings.trainer.zero_stage}: change one of them'
        )
    if settings.algorithm.reference == "reward" and settings.policy.lora.rank:
        raise ValueError(
            'expected algorithm.reference = "trainer" with policy.lora, where the reference is the policy without its '
            'adapter and costs no memory, found "reward": change one of them'
        )


def _check_slots(settings: Settings) -> None:
    algorithm = settings.algorithm
    if algorithm.max_lag > 0 and settings.slots > 1_000_000:
        raise ValueError(
            f"expected at most 1,000,000 groups in flight, found (max_lag {algorithm.max_lag} + 1) × "
            f"groups_per_step {algorithm.groups_per_step}: lower algorithm.max_lag"
        )


def _check_sampling(settings: Settings) -> None:
    """Refuse unknown datasets, and logprobs over all tokens where samples are drawn from some."""
    sampling, sources = settings.sampling, settings.data.sources
    if unknown := sampling.by_dataset.keys() - sources.keys():
        raise ValueError(
            f"expected a dataset of data.path in sampling.by_dataset, found {min(unknown)!r}; data.path has "
            f"{', '.join(sources)}: change one of them"
        )
    drawn = [sampling, *map(sampling.of, sources)]
    truncated = any(part.kept_tokens or part.min_new_tokens for part in drawn)
    if settings.algorithm.distillation and truncated:
        raise ValueError(
            "expected no top_p, top_k, min_p or min_new_tokens in [sampling] with algorithm.distillation, whose teacher's logprobs are over "
            "all tokens and not over those that could be drawn: change one of them"
        )
    if settings.algorithm.reference_travels and truncated:
        raise ValueError(
            'expected algorithm.reference = "trainer" with top_p, top_k, min_p or min_new_tokens in [sampling], found '
            '"reward", whose logprobs are over all tokens and not over those that could be drawn: change one of them'
        )


def _check_overlong(settings: Settings) -> None:
    share, sampling = settings.algorithm.overlong[0], settings.sampling
    tokens = min(part.max_new_tokens for part in (sampling, *map(sampling.of, settings.data.sources)))
    if share and int(share * tokens) == 0:
        raise ValueError(
            f"expected algorithm.overlong to reach a token of sampling.max_new_tokens, found {share:g} of {tokens}, which is none: raise one "
            "of them, or set algorithm.overlong = [0, 1]"
        )


def _check_pairs(settings: Settings) -> None:
    data, algorithm, plain = settings.data, settings.algorithm, AlgorithmSettings()
    if not data.rejected_field:
        return
    if algorithm.loss != "dpo":
        raise ValueError(
            f'expected algorithm.loss = "dpo" with data.rejected_field, whose rows are preference pairs, found "{algorithm.loss}": set '
            'algorithm.preset = "dpo", or leave data.rejected_field out'
        )
    if data.rejected_field in (data.completion_field, data.prompt_field):
        raise ValueError(
            f"expected a column of its own in data.rejected_field, found {data.rejected_field!r}, which is data.completion_field or "
            "data.prompt_field: change one of them"
        )
    if algorithm.reference != plain.reference:
        raise ValueError(
            'expected algorithm.reference = "trainer" with data.rejected_field, where no reward service runs, found '
            f'"{algorithm.reference}": change algorithm.reference'
        )
    if settings.guards.limit("reference_kl"):
        raise ValueError(
            "expected guards.limits.reference_kl = 0 with data.rejected_field, as the KL's estimate needs the policy's own tokens, found "
            f"{settings.guards.limit('reference_kl'):g}: change guards.limits.reference_kl"
        )
    for name in ("entropy_bonus", "filter", "overlong"):
        if (value := getattr(algorithm, name)) != getattr(plain, name):
            raise ValueError(
                f"expected algorithm.{name} to be left at its default with data.rejected_field, whose pairs no policy drew and nothing "
                f"scored, found {shown(value)}: leave it out"
            )


def _check_supervised(settings: Settings) -> None:
    if settings.kind.generates:
        return
    start = "data.rejected_field" if settings.kind is RunKind.PAIRS else 'algorithm.loss = "cross_entropy"'
    for key, value, expected in (
        ("placement.mode", settings.placement.mode, PlacementSettings().mode),
        ("data.curriculum", settings.data.curriculum, False),
        ("evaluation.gate.action", settings.evaluation.gate.action, "off"),
    ):
        if value != expected:
            raise ValueError(
                f"expected {key} = {shown(expected)} with {start}, where nothing is generated or scored, found "
                f"{shown(value)}: change one of them"
            )
    if len(settings.evaluation.held_out) > 1:
        raise ValueError(
            f"expected one held-out set with {start}, whose evaluation is one loss, found "
            f"{len(settings.evaluation.held_out)}: give one path in evaluation.path"
        )


def _check_mixture(settings: Settings) -> None:
    if settings.kind is not RunKind.MIXTURE:
        return
    weight = f"{settings.algorithm.imitation:g}"
    if len(settings.data.sources) < 2:
        raise ValueError(
            f"expected several datasets in data.path with algorithm.imitation > 0, found {weight} and one: name the problems and the "
            "demonstrations, each with its weight, or set algorithm.imitation = 0"
        )


def _check_episodes(settings: Settings) -> None:
    beside = {
        'run.deterministic = "run"': settings.run.deterministic == "run",
        "demonstrations or preference pairs as data.path": not settings.kind.generates,
    }
    rewarded = [scorer.name for scorer in settings.reward.scorers if scorer.kind == "environment"]
    settings.episodes.check_beside([name for name, is_set in beside.items() if is_set], rewarded)


def check_reproducible(settings: Settings, engine: str) -> None:
    """Raise ValueError where ``settings`` ask for a run that repeats to the bit, and others of them make it depend on timing."""
    if settings.run.deterministic != "run":
        return
    if settings.algorithm.max_lag:
        raise ValueError(
            f'expected algorithm.max_lag = 0 with run.deterministic = "run", found {settings.algorithm.max_lag}: which version generates '
            "a group depends on timing otherwise; change one of them"
        )
    if settings.data.curriculum and settings.algorithm.dynamic_sampling:
        raise ValueError(
            'expected algorithm.dynamic_sampling = false with data.curriculum and run.deterministic = "run", found true: a trainer '
            "that dies forgets which groups it dropped since its last step; change one of them"
        )
    if engine not in ("auto", "transformers") and settings.kind.generates:
        raise ValueError(
            f'expected the engine "transformers" with run.deterministic = "run", found "{engine}", whose samples depend on timing: change '
            "rollout.engine, or run.deterministic"
        )


def check_plain_engine(settings: Settings, engine: str) -> None:
    """Raise ValueError where ``settings`` ask of ``engine``, which is not vLLM, what only vLLM does."""
    if settings.publishes_adapters:
        raise ValueError(
            f'expected weights.lora = "merged" with the engine "{engine}", which serves no adapters, found '
            f'"{settings.weights.lora}": change it, or set rollout.engine = "vllm"'
        )
    only_vllm = (
        ("rollout.nodes", settings.rollout.nodes, 1),
        ("rollout.vllm.tensor_parallel_size", settings.rollout.vllm.tensor_parallel_size, 1),
        ("rollout.vllm.quantization", settings.rollout.vllm.quantization, "none"),
        ("rollout.engines_per_gpu", 1 if (several := settings.rollout.engines_per_gpu) == "auto" else several, 1),
        ("weights.kv", settings.weights.kv, "keep"),
        ("weights.shadow", "full" if settings.weights.shadow == "auto" else settings.weights.shadow, "full"),
    )
    for key, value, expected in only_vllm:
        if value != expected:
            raise ValueError(
                f'expected {key} = {shown(expected)} with the engine "{engine}", found {shown(value)}: '
                f'change it, or set rollout.engine = "vllm"'
            )
