"""The settings of a run: one TOML file, then environment (``PENSTOCK__TRAINER__LEARNING_RATE``), then dotted flags.

What two services must agree on stands once. Unknown keys are errors. Loaded in ``__main__``, passed down as values;
nothing else reads the environment.
"""

import difflib
import hashlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from shared.algorithm import AlgorithmSettings
from shared.checkpoint_store import StoreSettings
from shared.connection import redact
from shared.deepspeed_keys import check_deepspeed
from shared.errors import SettingsError
from shared.evaluation import EvaluationSettings
from shared.expression import Expression
from shared.guards import GuardsSettings
from shared.reward_models import ReferenceSettings
from shared.scorers import AnswerScorer, Scorer
from shared.section import Section

ENVIRONMENT_PREFIX = "PENSTOCK__"


class RunSettings(Section):
    """What this run is."""

    id: str = Field(default="", max_length=64)
    """Names the run on the bus and in its folder; empty: made from the file's name and the time."""
    folder: Path = Field(default=Path("runs"))
    """Where run folders are made; everything a run leaves lies in `<folder>/<id>/`."""
    steps: PositiveInt = Field(default=100)
    """How many optimizer steps the run makes."""
    seed: NonNegativeInt = Field(default=0)
    """Seeds the dataset order, sampling and the trainer."""


class BusSettings(Section):
    """Redis or Valkey."""

    url: str = Field(default="embedded")
    """`embedded` (a Valkey of its own under the run's folder), redis://, rediss://, unix://, redis+sentinel:// or
    redis+cluster://. Give a URL with a password by the environment: PENSTOCK__BUS__URL."""
    claim_after_s: PositiveFloat = Field(default=30.0)
    """An entry whose consumer has not renewed it for so long is taken over by another."""
    max_attempts: PositiveInt = Field(default=5)
    """An entry that failed so often is moved to the dead letters."""
    drain_s: NonNegativeFloat = Field(default=20.0)
    """How long a service that is told to stop finishes what it holds before it gives it back."""
    start_wait_s: PositiveFloat = Field(default=30.0)
    """How long a service waits for the bus at its start; later it waits for ever."""
    audit_entries: NonNegativeInt = Field(default=100_000)
    """How many endings of groups the audit stream keeps; 0: none."""


class LoraSettings(Section):
    """Low-rank adapters instead of the weights themselves (Hu et al. 2021, arXiv:2106.09685): W + (alpha / rank) · B · A."""

    rank: NonNegativeInt = Field(default=0)
    """Width of the adapters; 0: none, every weight is trained."""
    alpha: PositiveFloat = Field(default=32.0)
    """An adapter counts alpha / rank times."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0)
    """Share of an adapter's inputs that are left out while it trains."""
    target_modules: str | tuple[str, ...] = Field(default="all-linear")
    """Names of the layers that get one, such as ["q_proj", "v_proj"]; `all-linear`: all but the output layer."""


class PolicySettings(Section):
    """The model that is trained."""

    model: str = Field(default="")
    """A folder in Hugging Face form (config, safetensors, tokenizer), or a hub name where there is a network."""
    tokenizer: str = Field(default="")
    """Where the tokenizer is; empty: with the model."""
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16")
    """Number type of the weights in rollout and in snapshots."""
    trust_remote_code: bool = Field(default=False)
    """Run Python code that comes with the model."""
    lora: LoraSettings = Field(default=LoraSettings())
    """Low-rank adapters."""


class DataSettings(Section):
    """The prompts that the run trains on."""

    path: Path = Field(default=Path("train.jsonl"))
    """JSONL, Parquet, or a folder of a Hugging Face dataset saved to disk."""
    prompt_field: str = Field(default="prompt")
    """The column with the prompt's text."""
    messages_field: str = Field(default="messages")
    """The column with chat messages (`[{role, content}]`); used where the prompt's column is missing."""
    answer_field: str = Field(default="answer")
    """The column with the reference answer; every other column goes to the scorers."""
    scorers_field: str = Field(default="")
    """The column that names the scorers of a problem, as a list or with commas between; where it is empty, or no such column
    is set here, all score it."""
    max_bad_rows: NonNegativeInt = Field(default=10)
    """So many rows that cannot be read are counted and passed over; one more stops the start."""
    shuffle: bool = Field(default=True)
    """Draw each epoch in another order, from run.seed."""


class SamplingSettings(Section):
    """How completions are drawn. The whole distribution is sampled (no top-p or top-k), so that behavior logprobs are
    those of the distribution that the trainer computes."""

    group_size: Annotated[int, Field(ge=2)] = Field(default=16)
    """Completions per prompt. At least 2: the group is the baseline of its advantages."""
    max_new_tokens: PositiveInt = Field(default=256)
    """Length limit of a completion, in tokens."""
    temperature: PositiveFloat = Field(default=1.0)
    """Softmax temperature; the trainer divides its logits by the same number."""


class VllmSettings(Section):
    """vLLM, where it generates."""

    tensor_parallel_size: PositiveInt = Field(default=1)
    """GPUs of one replica, which share each layer."""
    max_num_seqs: NonNegativeInt = Field(default=0)
    """Most samples decoded at a time; 0: rollout.max_groups × sampling.group_size."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(default=0.85)
    """Share of the GPU's memory that vLLM may take, weights and key-value cache together."""
    max_model_len: NonNegativeInt = Field(default=0)
    """Longest prompt with its completion, in tokens; 0: the model's own context."""
    enforce_eager: bool = Field(default=False)
    """Run without CUDA graphs: a quicker start, slower decoding."""
    enable_prefix_caching: bool = Field(default=True)
    """Prefill a prompt once for all of its samples. Prompts never reuse what older weights computed."""
    logprobs: Literal["captured", "native"] = Field(default="captured")
    """Behavior logprobs as our hook captures them where tokens are drawn, or as vLLM returns them."""
    arguments: dict[str, Any] = Field(default={})
    """Anything else for vLLM's AsyncEngineArgs, by its name there."""


class RolloutSettings(Section):
    """The replicas that generate."""

    replicas: PositiveInt = Field(default=1)
    """How many `penstock up` starts."""
    nodes: PositiveInt = Field(default=1)
    """Hosts of one replica, for a model that one host's GPUs cannot hold; each of them starts the service by itself, and
    has as many of rollout.vllm.tensor_parallel_size GPUs as the others. vLLM only."""
    node: NonNegativeInt = Field(default=0)
    """Which of rollout.nodes this host is. The first, 0, leads: it is the replica; the others hold workers of its engine."""
    rendezvous: str = Field(default="", pattern=r"^$|^.+:[0-9]+$")
    """`host:port` at which the first of several hosts lets the others join."""
    secret_file: Path | None = Field(default=None)
    """A file whose first line is a secret, the same on each of several hosts: by it the first knows the others' workers."""
    engine: Literal["auto", "vllm", "transformers", "scripted"] = Field(default="auto")
    """What generates: vLLM, Hugging Face transformers, or a script for tests; `auto`: vLLM where it is installed and
    there is a GPU, else transformers."""
    max_groups: PositiveInt = Field(default=16)
    """How many groups one replica generates at a time."""
    device: str = Field(default="auto")
    """`auto` (a GPU where there is one), `cpu`, or `cuda:0`."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """Which GPUs of this machine `penstock up` gives to the replicas, in turn, as many to each as it needs; none: they
    all see every GPU."""
    threads: NonNegativeInt = Field(default=0)
    """CPU threads of one replica; 0: as torch decides."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz; 0: any free one."""
    vllm: VllmSettings = Field(default=VllmSettings())
    """vLLM, where it generates."""

    @model_validator(mode="after")
    def _agree(self) -> "RolloutSettings":
        if (self.nodes, self.node) == (1, 0):
            return self
        if not self.rendezvous or self.node >= self.nodes or self.secret_file is None:
            raise ValueError(
                f"expected rollout.rendezvous, rollout.secret_file and rollout.node < {self.nodes} with rollout.nodes = "
                f"{self.nodes}, found {self.rendezvous!r}, {self.secret_file} and {self.node}: change one of them"
            )
        if self.vllm.tensor_parallel_size % self.nodes:
            raise ValueError(
                f"expected rollout.vllm.tensor_parallel_size to be a multiple of rollout.nodes = {self.nodes}, as many GPUs on "
                f"each host, found {self.vllm.tensor_parallel_size}: change one of them"
            )
        return self


class ExecutorSettings(Section):
    """The process that runs model-written code, isolated (docs/sandbox.md)."""

    address: str = Field(default="", pattern=r"^(|unix:/.+|[^/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+)$")
    """Where it is: `unix:/path` or `host:port`; empty: `penstock up` starts one, where a scorer needs it."""
    isolation: Literal["auto", "namespace", "landlock", "unsafe"] = Field(default="auto")
    """How programs are isolated; `auto`: the strongest of namespace and landlock that holds on this host, else refuse.
    `unsafe` isolates nothing and is for code that you wrote yourself."""
    slots: NonNegativeInt = Field(default=0)
    """Programs that run at a time; 0: one a core."""
    profiles: tuple[Literal["stdlib", "numpy"], ...] = Field(default=("stdlib", "numpy"), min_length=1)
    """Interpreters that are kept warm: with the standard library alone, or with numpy."""
    interpreter: str = Field(default="")
    """Python that runs the programs; empty: the one that runs Penstock."""
    user_id: PositiveInt = Field(default=65_534)
    """User that programs run as when the executor is started by root; otherwise they run as the executor's own."""
    recycle_after: PositiveInt = Field(default=5_000)
    """A warm interpreter is replaced after so many programs."""
    check_every_s: PositiveFloat = Field(default=15.0)
    """Each so often a program that tries to escape is run; unless it is contained, /readyz says no."""
    max_waiting: PositiveInt = Field(default=1024)
    """So many programs of one connection may wait or run; further ones are not read before."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz; 0: any free one."""


class RewardSettings(Section):
    """What a completion is worth."""

    replicas: PositiveInt = Field(default=1)
    """How many `penstock up` starts."""
    expression: str = Field(default="")
    """The reward from the scorers' values, as `0.9 * answer + 0.1 * format`; empty: the mean of those that apply."""
    scorers: tuple[Scorer, ...] = Field(default=(AnswerScorer(kind="answer"),), min_length=1)
    """Who scores; all run at once."""
    max_groups: PositiveInt = Field(default=32)
    """How many groups one replica scores at a time; the others wait on the bus."""
    reference: ReferenceSettings = Field(default=ReferenceSettings())
    """The frozen initial policy, where algorithm.reference = "reward"."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """Which GPUs of this machine `penstock up` gives to the replicas, in turn, as many to each; none: they all see every
    GPU."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz; 0: any free one."""
    executor: ExecutorSettings = Field(default=ExecutorSettings())
    """The process that runs model-written code."""


class TrainerSettings(Section):
    """The optimizer and its engine."""

    ranks: PositiveInt = Field(default=1)
    """Processes that train together on this host, started by torchrun."""
    nodes: PositiveInt = Field(default=1)
    """Hosts that train together, with trainer.ranks processes each; each of them starts the trainer by itself."""
    node: NonNegativeInt = Field(default=0)
    """Which of trainer.nodes this host is. The first, 0, leads: it speaks to the bus and serves weights."""
    rendezvous: str = Field(default="", pattern=r"^$|^.+:[0-9]+$")
    """`host:port` at which the first of several hosts lets the others join."""
    zero_stage: Literal[0, 1, 2, 3] = Field(default=1)
    """DeepSpeed ZeRO stage: ranks share nothing (0), the optimizer's state (1), gradients too (2), weights too (3)."""
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto")
    """`auto`: a GPU where there is one."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """Which GPUs of this machine `penstock up` gives to the ranks, one to each; none: they see every GPU."""
    threads: NonNegativeInt = Field(default=0)
    """CPU threads of one rank; 0: as torch decides."""
    optimizer: Literal["adamw", "adamw_8bit"] = Field(default="adamw")
    """AdamW, or the same with its two moments in 8 bits each (bitsandbytes): a quarter of their memory."""
    learning_rate: NonNegativeFloat = Field(default=1e-6)
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegativeInt = Field(default=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant")
    """What the learning rate does after the warm-up, until run.steps."""
    final_learning_rate: NonNegativeFloat = Field(default=0.0)
    """Where `linear` and `cosine` end."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9)
    """AdamW's first moment decay."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.999)
    """AdamW's second moment decay."""
    weight_decay: NonNegativeFloat = Field(default=0.0)
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = Field(default=1.0)
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: PositiveInt = Field(default=16_384)
    """Most tokens in one forward pass on one rank; a longer sample leaves untrained."""
    attention: Literal["auto", "mask", "varlen"] = Field(default="auto")
    """How packed sequences attend: torch's variable-length attention (`varlen`; CUDA, half precision), or rectangles of similar
    sequences with a mask (`mask`, anywhere); `auto`: varlen where it runs. Both give the logprobs of separate sequences."""
    kernels: Literal["auto", "torch", "liger"] = Field(default="auto")
    """What computes norms, rotary embeddings and gated MLPs on a GPU: torch, or Liger's fused kernels (extra fused-kernels); `auto`: Liger's
    where they are installed and know the model."""
    logits_chunk_tokens: NonNegativeInt = Field(default=2048)
    """Logits of so many tokens are in memory at a time, and computed again in the backward pass; 0: of a whole micro-batch."""
    gradient_checkpointing: bool = Field(default=False)
    """Compute each layer's activations again in the backward pass instead of keeping them: less memory, a third more work."""
    offload: Literal["none", "optimizer", "all"] = Field(default="none")
    """What lies in the host's memory between uses: the optimizer's state (zero_stage 1 to 3), or weights too (zero_stage 3)."""
    deepspeed: dict[str, Any] = Field(default={})
    """More settings of DeepSpeed, in its own words; those that other settings decide are refused."""
    peak_flops: NonNegativeFloat = Field(default=0.0)
    """What one GPU can do, in TFLOP/s, to report utilisation (`mfu`); 0: by the GPU's name, where it is known."""
    checkpoint_every_steps: PositiveInt = Field(default=20)
    """Steps between checkpoints; the journal replays what lies after the newest."""
    keep_last: PositiveInt = Field(default=2)
    """Checkpoints that are kept in the run's folder."""
    store: StoreSettings = Field(default=StoreSettings())
    """Object storage that checkpoints are copied to."""
    max_skipped_steps: NonNegativeInt = Field(default=3)
    """So many batches in a row may give a loss or gradient that is not finite: each leaves uncommitted, counted as
    dropped:nonfinite. One more pauses the run."""
    stopped_exit_status: Annotated[int, Field(ge=0, le=255)] = Field(default=0)
    """Exit status of a trainer of one rank that is told to stop before its run is over (with several, torchrun's is 1). Where 0 means
    done, as in a Job of Kubernetes, 143 has it started again."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz of rank 0; 0: any free one."""

    @model_validator(mode="after")
    def _agree(self) -> "TrainerSettings":
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < least:
            raise ValueError(
                f'expected trainer.zero_stage >= {least} with trainer.offload = "{self.offload}", found {self.zero_stage}: '
                "change one of them"
            )
        if self.optimizer == "adamw_8bit" and self.offload != "none":
            raise ValueError(
                f'expected trainer.offload = "none" with trainer.optimizer = "adamw_8bit", found "{self.offload}": its '
                "moments are small enough to stay; change one of them"
            )
        if self.nodes > 1 and (not self.rendezvous or self.node >= self.nodes):
            raise ValueError(
                f"expected trainer.rendezvous and trainer.node < {self.nodes} with trainer.nodes = {self.nodes}, found "
                f"{self.rendezvous!r} and {self.node}: change one of them"
            )
        if self.nodes > 1 and self.store.uri and self.store.counts == "stored":
            raise ValueError(
                f'expected trainer.store.counts = "written" with trainer.nodes = {self.nodes}, found "stored": hosts that train '
                "together share the run's folder, which outlives each of them; change one of them"
            )
        check_deepspeed(self.deepspeed)
        return self


class WeightsSettings(Section):
    """How policy versions reach the replicas."""

    transport: Literal["pull", "file"] = Field(default="pull")
    """`pull`: replicas fetch each version over the network from the trainer's memory and from one another, beside
    running generation; `file`: safetensors on storage that trainer and replicas share."""
    source_port: Annotated[int, Field(ge=0, le=65_535)] = Field(default=0)
    """Port at which the trainer serves weights; 0: any free one."""
    deadline_s: PositiveFloat = Field(default=30.0)
    """No wait of a pull takes longer: for an answer, for a peer, for a bucket. Then the next source is tried."""
    bucket_mib: PositiveInt = Field(default=512)
    """Weights move in buckets of at most so many MiB, unless a single tensor is larger."""
    fan_out: PositiveInt = Field(default=2)
    """How many replicas pull from the trainer; so many more pull from each of them, and so on."""
    kv: Literal["keep", "recompute"] = Field(default="keep")
    """At new weights, running completions go on with their key-value cache, or it is computed anew."""
    update: Literal["inflight", "drain"] = Field(default="inflight")
    """New weights go live between two decoding steps, or once the completions that run are finished."""
    shadow: Literal["auto", "full", "bucketed"] = Field(default="auto")
    """Where a replica receives: into a second copy of the weights (`full`), or bucket by bucket into the live ones while
    generation is held (`bucketed`); `auto`: full where the memory is there."""
    probe_every_versions: NonNegativeInt = Field(default=10)
    """Each so many versions, and at the trainer's start, replicas check logprobs of a few sequences; 0: never."""
    probe_gap_nats: PositiveFloat = Field(default=0.05)
    """A mean absolute difference between trainer's and replica's logprobs above this is an alarm."""
    folder: Path | None = Field(default=None)
    """Where snapshots lie; none: /dev/shm/penstock-<user>/<run id>-<letters of the run's folder>."""
    keep: Annotated[int, Field(ge=2)] = Field(default=4)
    """Newest snapshots that are kept on disk."""
    lora: Literal["auto", "adapter", "merged"] = Field(default="auto")
    """With policy.lora: publish the `adapter` alone, by file in weights.folder, which trainer and replicas must share
    (vLLM only), or whole weights with the adapter `merged` in, by weights.transport; `auto`: the adapter where
    rollout.engine is "vllm"."""


class CoordinatorSettings(Section):
    """Admission, ledger and the HTTP API."""

    host: str = Field(default="127.0.0.1")
    """Address of the HTTP API."""
    port: NonNegativeInt = Field(default=0)
    """Port of the HTTP API; 0: any free one, written to <run folder>/coordinator.json."""
    metrics_port: NonNegativeInt = Field(default=0)
    """Port of /metrics, /healthz and /readyz, which ask for no token; 0: any free one."""
    token_file: Path | None = Field(default=None)
    """A file whose first line is the bearer token that may read and operate; needed where `host` is no loopback address."""
    read_token_file: Path | None = Field(default=None)
    """A file whose first line is a bearer token that may only read."""
    autostart: bool = Field(default=True)
    """Start the run as soon as the services are there; otherwise wait for POST /v1/run/start."""
    sample_every_steps: PositiveInt = Field(default=5)
    """Each so many steps one trained group is written to rollouts.jsonl, to be read."""


class TelemetrySettings(Section):
    """Logs and heartbeats."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO")
    """Least severe line that is logged."""
    heartbeat_s: PositiveFloat = Field(default=1.0)
    """Seconds between a replica's heartbeats; it counts as gone after 5 of them."""
    prometheus_port: Annotated[int, Field(ge=0, le=65_535)] = Field(default=9090)
    """Where `penstock up --prometheus` serves, on loopback; 0: any free port."""


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
    reward: RewardSettings = Field(default=RewardSettings())
    """What a completion is worth."""
    algorithm: AlgorithmSettings = Field(default=AlgorithmSettings())
    """The update rule."""
    trainer: TrainerSettings = Field(default=TrainerSettings())
    """The optimizer and its engine."""
    weights: WeightsSettings = Field(default=WeightsSettings())
    """How policy versions reach the replicas."""
    coordinator: CoordinatorSettings = Field(default=CoordinatorSettings())
    """Admission, ledger and the HTTP API."""
    guards: GuardsSettings = Field(default=GuardsSettings())
    """What must not go on unseen, and what is done about it."""
    telemetry: TelemetrySettings = Field(default=TelemetrySettings())
    """Logs and heartbeats."""

    @property
    def slots(self) -> int:
        """How many groups may be in flight."""
        return (self.algorithm.max_lag + 1) * self.algorithm.groups_per_step

    @property
    def publishes_adapters(self) -> bool:
        """Whether versions are adapters alone, by file, whatever weights.transport says."""
        chosen = self.weights.lora
        return self.policy.lora.rank > 0 and (
            chosen == "adapter" or (chosen == "auto" and self.rollout.engine == "vllm")
        )

    @property
    def needs_executor(self) -> bool:
        """Whether a scorer runs model-written code."""
        return any(scorer.kind == "code" for scorer in self.reward.scorers)

    @property
    def run_folder(self) -> Path:
        """Where everything this run leaves lies."""
        return self.run.folder / self.run.id

    @property
    def snapshot_folder(self) -> Path:
        """Where this run's weight snapshots lie."""
        letters = hashlib.sha256(str(self.run_folder.absolute()).encode()).hexdigest()[
            :8
        ]  # runs elsewhere may share the id
        name = f"{self.run.id}-{letters}"
        return self.weights.folder or Path("/dev/shm") / f"penstock-{os.getuid()}" / name  # noqa: S108

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        names = [scorer.name for scorer in self.reward.scorers]
        if len(set(names)) != len(names):
            raise ValueError(f"expected scorers with different names, found {names}: change name in [[reward.scorers]]")
        if self.trainer.zero_stage == 0 and self.policy.dtype == "bfloat16":
            raise ValueError(
                'expected trainer.zero_stage >= 1 with policy.dtype = "bfloat16", found 0: there DeepSpeed steps as for float16, '
                "with a loss scale; stage 1 costs no more, change trainer.zero_stage"
            )
        if "reference" in names:
            raise ValueError(
                "expected another name for a scorer than 'reference', which metrics and alarms call the frozen policy: "
                "change name in [[reward.scorers]]"
            )
        try:
            Expression(self.reward.expression, names)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        if self.trainer.warmup_steps > self.run.steps:
            raise ValueError(
                f"expected trainer.warmup_steps <= run.steps, found {self.trainer.warmup_steps} > {self.run.steps}: "
                "change one of them"
            )
        if self.algorithm.needs_critic and self.algorithm.critic.warmup_steps >= self.run.steps:
            raise ValueError(
                f"expected algorithm.critic.warmup_steps < run.steps, found {self.algorithm.critic.warmup_steps} and "
                f"{self.run.steps}: the policy would never move; change one of them"
            )
        self._check_gpus()
        if self.algorithm.reference == "reward" and self.policy.lora.rank:
            raise ValueError(
                'expected algorithm.reference = "trainer" with policy.lora, where the reference is the policy without its '
                'adapter and costs no memory, found "reward": change one of them'
            )
        if self.algorithm.max_lag > 0 and self.slots > 1_000_000:
            raise ValueError(
                f"expected at most 1,000,000 groups in flight, found (max_lag {self.algorithm.max_lag} + 1) × "
                f"groups_per_step {self.algorithm.groups_per_step}: lower algorithm.max_lag"
            )
        if self.rollout.engine in ("transformers", "scripted"):
            check_plain_engine(self, self.rollout.engine)
        return self

    def _check_gpus(self) -> None:
        ranks = self.trainer.gpus
        if ranks and (len(ranks) != self.trainer.ranks or len(set(ranks)) != len(ranks)):
            raise ValueError(
                f"expected {self.trainer.ranks} different numbers in trainer.gpus, one for each of trainer.ranks, found "
                f"{list(ranks)}: change one of them, or leave trainer.gpus empty"
            )
        for name, gpus, replicas in (
            ("rollout", self.rollout.gpus, self.rollout.replicas),
            ("reward", self.reward.gpus, self.reward.replicas),
        ):
            if len(gpus) % replicas:
                raise ValueError(
                    f"expected as many numbers in {name}.gpus for each of {replicas} {name}.replicas, found "
                    f"{list(gpus)}: change one of them, or leave {name}.gpus empty"
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
        ("weights.kv", settings.weights.kv, "keep"),
        ("weights.shadow", "full" if settings.weights.shadow == "auto" else settings.weights.shadow, "full"),
    )
    for key, found, expected in only_vllm:
        if found != expected:
            raise ValueError(
                f'expected {key} = {_text(expected)} with the engine "{engine}", found {_text(found)}: '
                f'change it, or set rollout.engine = "vllm"'
            )


def _text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def load(path: Path | None, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in ``path``, overridden by the environment and then by ``flags`` (``--trainer.ranks 2``).

    Without a path: the defaults, overridden in the same way.

    Paths in the file are relative to the working directory.

    Raises:
        SettingsError: no such file, no TOML, an unknown key, a wrong type, or settings that contradict each other.
    """
    environment = os.environ if environment is None else environment
    return loads("" if path is None else _read(path), str(path or "settings"), flags, environment)


def loads(toml: str, name: str, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings in the text ``toml``, which messages call ``name``, overridden as by :func:`load`.

    Raises:
        SettingsError: as :func:`load`.
    """
    try:
        values = tomllib.loads(toml)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"expected TOML in {name}, found: {error}") from error
    for key, text in _environment(environment or {}).items():
        _set(values, key, text)
    for key, text in _flags(flags).items():
        _set(values, key, text)
    return _validated(values, name)


def override(settings: Settings, changes: Mapping[str, object]) -> Settings:
    """Return ``settings`` with ``changes`` (dotted key → value), checked as a whole.

    Raises:
        SettingsError: a value is wrong, or contradicts the other settings.
    """
    values = settings.model_dump(mode="json", exclude_none=True)
    for key, value in changes.items():
        table, name = key.split(".")
        values[table][name] = value
    return _validated(values, "settings")


def _validated(values: dict[str, Any], name: str) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_explain(error, name)) from error


def dump(settings: Settings, path: Path) -> None:
    """Write the resolved settings as TOML, without the password of bus.url, for services and for people to read."""
    path.write_text(dumps(settings), encoding="utf-8")


def dumps(settings: Settings) -> str:
    """Return the resolved settings as TOML, without the password of bus.url."""
    values = settings.model_dump(mode="json", exclude_none=True)
    values["bus"]["url"] = redact(settings.bus.url)
    return f"# The resolved settings of run {settings.run.id}.\n{tomli_w.dumps(values)}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SettingsError(
            f"expected a settings file at {path}, found none: check the path after the command"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"expected a readable settings file at {path}, found: {error}") from error


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def _flags(flags: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    words = iter(flags)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            raise SettingsError(f"expected a setting such as --trainer.ranks 2, found {word!r}")
        if not equals:
            value = next(words, "")
            if value == "":
                raise SettingsError(f"expected a value after {word}, found none")
        found[name.replace("-", "_")] = value
    return found


def _set(values: dict[str, Any], key: str, text: str) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise SettingsError(f"expected the name of a setting, found {key!r}")
    values[name] = _value(text)


def _value(text: str) -> Any:
    """Read ``text`` as a TOML value; anything that is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError, name: str) -> str:
    return "\n".join(f"{name}: {_explain_one(dict(problem))}" for problem in error.errors())


def _explain_one(problem: dict[str, Any]) -> str:
    where = [str(part) for part in problem["loc"]]
    key = ".".join(where)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(where[:-1])
        close = difflib.get_close_matches(where[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"{key}: expected a known setting, found {where[-1]!r}; {hint}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    message = str(problem["msg"])
    return f"{key}: expected {_expectation(message)}, found {problem['input']!r}: change {key}"


def _expectation(message: str) -> str:
    for start in ("Input should be ", "Value should be "):
        if message.startswith(start):
            return message.removeprefix(start)
    return message[:1].lower() + message[1:]


def _known_keys(where: Sequence[str]) -> list[str]:
    model: Any = Settings
    for name in where:
        field = getattr(model, "model_fields", {}).get(name)
        model = field.annotation if field is not None else None
    return list(getattr(model, "model_fields", {}))
