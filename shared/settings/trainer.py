"""``[trainer]`` and ``[trainer.store]``; AWS's own tools find the credentials of object storage."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from penstock.shared.settings.algorithm import AlgorithmSettings
from penstock.shared.settings.rollout import RolloutSettings
from penstock.shared.settings.section import Count, OptionalPath, Section, shown

DEEPSPEED_KEYS = {
    "train_batch_size": "algorithm.groups_per_step",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "gradient_clipping": "trainer.max_grad_norm",
    "bf16": "policy.dtype",
    "bfloat16": "policy.dtype",
    "fp16": "policy.dtype",
    "amp": "policy.dtype",
    "torch_autocast": "policy.dtype",
    "optimizer": "trainer.learning_rate and its neighbours",
    "scheduler": "trainer.schedule",
    "activation_checkpointing": "trainer.gradient_checkpointing",
    "zero_optimization.stage": "trainer.zero_stage",
    "zero_optimization.offload_optimizer": "trainer.offload",
    "zero_optimization.offload_param": "trainer.offload",
    "zero_optimization.cpu_offload": "trainer.offload",
    "zero_optimization.cpu_offload_params": "trainer.offload",
    "steps_per_print": "telemetry.log_level",
    "expert_parallel": "trainer.expert_parallel",
}
"""What ``trainer.deepspeed`` must not say because another setting decides it."""

DEEPSPEED_ALLOWED = frozenset(
    {
        *("aio", "communication_data_type", "comms_logger", "compile", "disable_allgather", "disable_python_gc"),
        *("dump_state", "flops_profiler", "log_level", "memory_breakdown", "timers"),
        "data_types.grad_accum_dtype",
        *(
            f"zero_optimization.{name}"
            for name in (
                *("allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "enable_sanity_checks"),
                *("ignore_unused_parameters", "leaf_module", "log_trace_cache_warnings", "memory_efficient_linear"),
                *("overlap_comm", "reduce_bucket_size", "reduce_scatter", "sub_group_size"),
                *("stage3_allgather_sequential", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
                *("stage3_model_persistence_threshold", "stage3_module_granularity_threshold"),
                *("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"),
                *("stage3_use_all_reduce_for_fetch_params", "use_multi_rank_bucket_allreduce"),
            )
        ),
    }
)
"""What it may say: it changes time, memory, communication and diagnosis, and neither shards nor what a step computes but for
the rounding of its sums. Others do (`zero_hpz_partition_size`, `round_robin_gradients`, `zero_quantized_weights`,
`gradient_allreduce_op`, `zenflow`, parallelism other than over data, …), or DeepSpeed ignores them."""

PROVEN = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text"),
        *("qwen3_moe", "qwen3_next"),
    }
)
"""Model types of which a step with shared experts is equal to that without (``tests/trainer/model/test_experts.py``)."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class StoreSettings(Section):
    """Where checkpoints are copied to beside training, for folders that do not outlive their machine."""

    uri: str = Field(default="", pattern=r"^$|^s3://[^/@]+(/.*)?$")
    """`s3://bucket/prefix` in S3 or a compatible store; this run uses `<prefix>/<run id>/`. Empty: no copies."""
    endpoint: str = Field(default="", pattern=r"^$|^https?://[^@]+$")
    """URL of a server that is not AWS's; empty: as AWS's own tools find it."""
    counts: Literal["stored", "written"] = Field(default="stored")
    """When a checkpoint counts: once it is `stored`, or once it is `written` to the run's folder, which must then
    outlive the machine."""


class TrainerSettings(Section):
    """The optimizer and its engine."""

    ranks: Count = Field(default=1)
    """Processes that train together on this host."""
    nodes: Count = Field(default=1)
    """Hosts that train together, with trainer.ranks processes each. Start the trainer on each."""
    node: NonNegativeInt = Field(default=0)
    """Index of this host among trainer.nodes. Host 0 leads."""
    rendezvous: str = Field(default="", pattern=r"^$|^.+:[0-9]+$")
    """`host:port` on the first of several hosts at which the others join; without a password."""
    zero_stage: Literal[0, 1, 2, 3] = Field(default=1)
    """DeepSpeed ZeRO stage. Ranks share nothing (0), the optimizer's state (1), gradients too (2), weights too (3)."""
    expert_parallel: PositiveInt = Field(default=1)
    """Ranks that share one copy of a mixture's experts, from zero_stage 1 on: each has that part of every layer's
    experts, their gradients and states, and tokens travel to them. Divides the number of ranks, and of experts."""
    router_replay: bool = Field(default=False)
    """Send each token of a mixture to the experts that it went to when it was sampled, with the live scores of these. The
    experts stay on the replicas' shelves; samples, or turns of episodes, whose experts are lost are routed live. docs/models.md
    has the models."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """GPU indices for the ranks, one each, among those in CUDA_VISIBLE_DEVICES, under `penstock up`.
    Empty: all."""
    optimizer: Literal["adamw", "adamw_8bit"] = Field(default="adamw")
    """AdamW, or AdamW with its moments in 8 bits (bitsandbytes): a quarter of their memory."""
    learning_rate: NonNegativeFloat = Field(default=1e-6)
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = Field(default=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant")
    """Learning rate after the warm-up, until run.steps."""
    final_learning_rate: NonNegativeFloat = Field(default=0.0)
    """Learning rate at the end of `linear` and `cosine`."""
    adam_betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999))
    """AdamW's decay rates of the first and the second moment."""
    adam_eps: PositiveFloat = Field(default=1e-8)
    """What AdamW adds to the root of the second moment."""
    weight_decay: NonNegativeFloat = Field(default=0.0)
    """AdamW's weight decay, of matrices and embeddings: norms, biases and other vectors have none."""
    max_grad_norm: PositiveFloat = Field(default=1.0)
    """Global norm to which gradients are clipped."""
    micro_batch_tokens: PositiveInt = Field(default=16_384)
    """Maximum tokens per forward pass and rank. A longer sample is not trained, unless several ranks compute it together
    (trainer.sequence_parallel). A group's prompt counts once, or per sample where trainer.packing computes it so."""
    sequence_parallel: PositiveInt = Field(default=1)
    """Ranks of a host that compute a sample together if it is longer than trainer.micro_batch_tokens: its limit is as many
    times that. Only for models that mix tokens in attention alone."""
    packing: Literal["auto", "rows", "sequences"] = Field(default="auto")
    """`rows`: a group's prompt is computed once, and so are equal beginnings of short completions. `sequences`: each prompt
    and completion separately; exact for every causal model, slower. `auto`: rows if the model's layers are known."""
    kernels: Literal["auto", "torch", "liger"] = Field(default="auto")
    """Norms, rotary embeddings and gated MLPs on a GPU: by torch (then also logprobs and attention), or by Liger's
    fused kernels (extra fused-kernels). `auto`: Liger's if installed and if they know the model."""
    logits: Literal["model", "float32"] = Field(default="model")
    """Type of logits of bfloat16 hidden states, also in the reward service's reference. `model`: the model's, as in
    vLLM; `float32`: exact logprobs, where the others are rounded (docs/algorithms.md)."""
    gradient_checkpointing: Literal["auto"] | bool = Field(default="auto")
    """Recompute each layer's activations in the backward pass: less memory, a third more work. `auto`: on a GPU, in as
    many layers as its memory requires."""
    offload: Literal["none", "optimizer", "all"] = Field(default="none")
    """Keep in the host's memory between uses: the optimizer's state (zero_stage 1 to 3), or weights too (zero_stage
    3)."""
    deepspeed: dict[str, Any] = Field(default={})
    """More DeepSpeed settings, of communication, buckets, memory and diagnosis. Others are refused."""
    checkpoint_every_steps: PositiveInt = Field(default=20)
    """Steps between checkpoints. The journal replays the steps after the newest."""
    keep_last: PositiveInt = Field(default=2)
    """Newest checkpoints that are kept, in the run's folder and in trainer.store, besides pinned ones. With 2, a
    damaged newest one costs no step."""
    signing_key_file: OptionalPath = Field(default=None)
    """File with a secret key, at least 32 characters, that signs each checkpoint; unsigned ones are refused. Several
    keys, one per line: the first signs, all are accepted."""
    store: StoreSettings = Field(default=StoreSettings())
    """Object storage that checkpoints are copied to."""
    max_skipped_steps: ClassVar[int] = 3
    """Consecutive batches with a non-finite loss or gradient that are skipped (dropped:nonfinite); one more pauses the
    run."""

    @property
    def row_tokens(self) -> int:
        """Most tokens of a sample that can be trained, its prompt included."""
        return self.micro_batch_tokens * self.sequence_parallel

    @property
    def row_setting(self) -> str:
        """Name of what decides ``row_tokens``."""
        return "trainer.micro_batch_tokens" + (" × trainer.sequence_parallel" if self.sequence_parallel > 1 else "")

    @model_validator(mode="after")
    def _agree(self) -> "TrainerSettings":
        if self.gpus and (len(self.gpus) != self.ranks or len(set(self.gpus)) != len(self.gpus)):
            raise ValueError(
                f"expected {self.ranks} different numbers in trainer.gpus, one for each of trainer.ranks, found {list(self.gpus)}: change "
                "one of them, or leave trainer.gpus empty"
            )
        if self.ranks % self.sequence_parallel:
            raise ValueError(
                f"expected trainer.sequence_parallel to divide trainer.ranks, found {self.sequence_parallel} and {self.ranks}: "
                "change one of them"
            )
        if self.sequence_parallel > 1 and self.packing == "sequences":
            raise ValueError(
                'expected trainer.packing = "auto" or "rows" with trainer.sequence_parallel > 1, found "sequences": change one of '
                "them"
            )
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
        for name, value, default, needed in (
            (
                "final_learning_rate",
                self.final_learning_rate,
                0.0,
                self.schedule == "constant" and 'schedule "linear" or "cosine"',
            ),
            ("rendezvous", self.rendezvous, "", self.nodes == 1 and "nodes > 1"),
            ("node", self.node, 0, self.nodes == 1 and "nodes > 1"),
            ("store.endpoint", self.store.endpoint, "", not self.store.uri and "store.uri"),
            ("store.counts", self.store.counts, "stored", not self.store.uri and "store.uri"),
        ):
            if needed and value != default:
                raise ValueError(
                    f"expected trainer.{needed} with trainer.{name}, which has no effect otherwise, found {shown(value)}: change one of them"
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
        self._check_experts()
        return self

    def _check_experts(self) -> None:
        own, ranks, rows = self.expert_parallel, self.ranks * self.nodes, self.sequence_parallel
        if own == 1:
            return
        if ranks % own:
            raise ValueError(
                f"expected trainer.expert_parallel to divide the {ranks} ranks of trainer.ranks × trainer.nodes, found {own}: "
                "change one of them"
            )
        fixed = {"contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"}
        passed = fixed & self.deepspeed.get("zero_optimization", {}).keys()
        sums = self.deepspeed.get("data_types", {}).get("grad_accum_dtype") if self.zero_stage == 1 else None
        for name, value, expected, wrong in (
            ("zero_stage", self.zero_stage, "1, 2 or 3", not self.zero_stage),
            ("sequence_parallel", rows, "a divisor or a multiple", bool(rows % own and own % rows)),
            ("deepspeed.zero_optimization", sorted(passed), f"none of {', '.join(sorted(fixed))}", bool(passed)),
            ("deepspeed.data_types.grad_accum_dtype", sums, "nothing at zero_stage 1", sums is not None),
        ):
            if wrong:
                raise ValueError(
                    f"expected {expected} in trainer.{name} with trainer.expert_parallel = {own}, found {shown(value)}: "
                    "change one of them"
                )


def check_replay(
    trainer: TrainerSettings, algorithm: AlgorithmSettings, rollout: RolloutSettings, *, merges_alone: bool
) -> None:
    """Raise ValueError if routers replay with what has no routes, or other routers than the trainer's.

    ``merges_alone``: replicas merge adapters themselves.
    """
    for key, is_used in (
        ("adapters that vLLM merges (weights.lora)", merges_alone),
        (f"algorithm.loss = {algorithm.loss!r}", algorithm.loss in ("dpo", "cross_entropy")),
        (f"rollout.engine = {rollout.engine!r}", rollout.engine not in ("transformers", "vllm")),
        (f"rollout.vllm.quantization = {rollout.vllm.quantization!r}", rollout.vllm.quantization != "none"),
    ):
        if trainer.router_replay and is_used:
            raise ValueError(f"expected trainer.router_replay = false with {key}, found true: change one of them")


def bucket_as_set(deepspeed: Mapping[str, Any]) -> int:
    """Return the gradients that trainer.deepspeed wants reduced at a time; 0: it does not say."""
    return int(deepspeed.get("zero_optimization", {}).get("reduce_bucket_size", 0))


def reduced_together(gradients: int, bucket: int) -> int:
    """Return how many of a rank's ``gradients`` DeepSpeed reduces at a time, in a buffer that it allocates whole: ``bucket``,
    or if that is 0 its default, or all of them if they are fewer, which is the same.
    """
    return bucket or min(500_000_000, gradients)


def check_deepspeed(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that are not in DEEPSPEED_ALLOWED."""
    for key, value in settings.items():
        if not any(allowed.startswith(f"{key}.") for allowed in DEEPSPEED_ALLOWED):
            _check_deepspeed_key(key, value)
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"expected a table in trainer.deepspeed.{key}, found {value!r}: change it")
        for name, inner in value.items():
            _check_deepspeed_key(f"{key}.{name}", inner)


def _check_deepspeed_key(key: str, value: object) -> None:
    if setting := DEEPSPEED_KEYS.get(key):
        raise ValueError(
            f"expected no {key} in trainer.deepspeed, found {value!r}: take it out; what decides it is {setting}"
        )
    if key not in DEEPSPEED_ALLOWED:
        raise ValueError(
            f"expected no {key} in trainer.deepspeed, which may change how state is sharded or what a step computes, found "
            f"{value!r}: take it out; allowed are {', '.join(sorted(DEEPSPEED_ALLOWED))}"
        )
