"""The optimizer, its engine and its checkpoints: ``[trainer]``, ``[trainer.store]``. Imports no DeepSpeed.

Credentials of object storage are no settings: they come from where AWS's own tools look for them (environment, profile, role of
the pod or machine).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.settings.section import Section

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
    "zero_allow_untested_optimizer": "nothing: it is always on",
    "zero_force_ds_cpu_optimizer": "nothing: it is always off",
    "checkpoint.load_universal": "nothing: checkpoints are DeepSpeed's regular ones",
    "checkpoint.writer": "nothing: rank by rank, by torch",
    "datastates_ckpt": "nothing: rank by rank, by torch",
    "nebula": "nothing: rank by rank, by torch",
    "steps_per_print": "telemetry.log_level",
    "wall_clock_breakdown": "nothing: phases are in the measures",
}
"""What ``trainer.deepspeed`` must not say, and which setting decides it."""


class StoreSettings(Section):
    """Where checkpoints are copied to beside training, for folders that do not outlive their machine."""

    uri: str = Field(default="", pattern=r"^$|^s3://[^/@]+(/.*)?$")
    """`s3://bucket/prefix`, in S3 or in what speaks its protocol; `<prefix>/<run id>/` is this run's. Empty: none."""
    endpoint: str = Field(default="", pattern=r"^$|^https?://[^@]+$")
    """URL of a server that is not AWS's; empty: as AWS's own tools find it."""
    region: str = Field(default="")
    """Region of the bucket; empty: as AWS's own tools find it."""
    keep_last: PositiveInt = Field(default=2)
    """Checkpoints that are kept there, besides pinned ones. From 2 on, the journal reaches back to the last but one, so that
    a damaged newest one costs no step."""
    counts: Literal["stored", "written"] = Field(default="stored")
    """From when on a checkpoint may be relied upon, and the journal before it goes: once it is whole in the store, or as soon
    as it is `written` to the run's folder, which must then outlive the machine, as a shared volume does."""


class TrainerSettings(Section):
    """The optimizer and its engine."""

    ranks: PositiveInt = Field(default=1)
    """Processes that train together on this host."""
    nodes: PositiveInt = Field(default=1)
    """Hosts that train together, with trainer.ranks processes each; each of them starts the trainer by itself."""
    node: NonNegativeInt = Field(default=0)
    """Which of trainer.nodes this host is. The first, 0, leads: it speaks to the bus and serves weights."""
    rendezvous: str = Field(default="", pattern=r"^$|^.+:[0-9]+$")
    """`host:port` at which the first of several hosts lets the others join. It listens on that address alone, without a password."""
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
    """Most tokens in one forward pass on one rank; a longer sample leaves untrained. A group's prompt counts once, or once for each sample
    where `trainer.packing` computes it so."""
    attention: Literal["auto", "mask", "varlen"] = Field(default="auto")
    """How packed sequences attend: torch's variable-length attention (`varlen`; CUDA, half precision), or rectangles of similar
    sequences with a mask (`mask`, anywhere); `auto`: varlen where it runs. Both give the logprobs of separate sequences."""
    packing: Literal["auto", "rows", "sequences"] = Field(default="auto")
    """How sequences go through the model. `rows`: a group's prompt is computed once and its completions beside it. `sequences`: each prompt
    and completion by itself, as transformers runs it; exact for every causal model, and several times slower where prompts are long.
    `auto`: rows where the model's layers are known to keep packed sequences apart, else sequences, with a warning."""
    kernels: Literal["auto", "torch", "liger"] = Field(default="auto")
    """What computes norms, rotary embeddings and gated MLPs on a GPU: torch, or Liger's fused kernels (extra fused-kernels); `auto`: Liger's
    where they are installed and know the model. With `torch` the logprobs of logits are left to torch as well."""
    logits_chunk_tokens: NonNegativeInt = Field(default=2048)
    """Logits of so many tokens are in memory at a time, and computed again in the backward pass; 0: of a whole micro-batch."""
    logits: Literal["model", "float32"] = Field(default="model")
    """In which type logits are made of bfloat16 hidden states, here and by the reward service's reference: the `model`'s own, as vLLM makes
    them, or `float32`, whose logprobs are exact where the others are 0.02 nats per token off (docs/algorithms.md)."""
    deterministic: bool = Field(default=False)
    """On a GPU: make each step with operations that repeat it to the bit, some of which are slower, so that a replay does. On a CPU
    steps repeat anyway."""
    gradient_checkpointing: Literal["auto"] | bool = Field(default="auto")
    """Compute each layer's activations again in the backward pass instead of keeping them: less memory, a third more work. `auto`: on a GPU,
    in as many layers as its memory requires, by what earlier steps needed."""
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
    signing_key_file: Path | None = Field(default=None)
    """File with a secret key of the run, at least 32 characters, that signs each checkpoint; one that is not signed, in the run's folder or
    in `trainer.store`, is then refused. Several keys, one per line: the first signs, all are accepted. Without it whoever can
    write to either decides what is trained on."""
    store: StoreSettings = Field(default=StoreSettings())
    """Object storage that checkpoints are copied to."""
    max_skipped_steps: NonNegativeInt = Field(default=3)
    """So many batches in a row may give a loss or gradient that is not finite: each leaves uncommitted, counted as
    dropped:nonfinite. One more pauses the run."""
    stopped_exit_status: Annotated[int, Field(ge=0, le=255)] = Field(default=0)
    """Exit status of a trainer that is told to stop before its run is over. Where 0 means done, as in a Job of Kubernetes, 143 has it
    started again."""
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


def check_deepspeed(found: Mapping[str, Any]) -> None:
    """Raise ValueError where settings of DeepSpeed are ours to make."""
    for key, setting in DEEPSPEED_KEYS.items():
        table, _, name = key.rpartition(".")
        inner = found.get(table, {}) if table else found
        if not isinstance(inner, Mapping):
            raise ValueError(f"expected a table in trainer.deepspeed.{table}, found {inner!r}: change it")
        if name in inner:
            raise ValueError(
                f"expected no {key} in trainer.deepspeed, found {inner[name]!r}: take it out; what decides it is {setting}"
            )
