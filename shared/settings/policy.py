"""The model that is trained, and how its versions reach the replicas: ``[policy]``, ``[policy.lora]``, ``[weights]``,
``[fabric]``."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from penstock.shared.settings.section import OptionalPath, Section


class LoraSettings(Section):
    """Low-rank adapters instead of the weights themselves (Hu et al. 2021, arXiv:2106.09685): W + (alpha / rank) · B · A."""

    rank: NonNegativeInt = Field(default=0)
    """Rank of the LoRA adapters; 0: no adapters, all weights are trained."""
    alpha: PositiveFloat = Field(default=32.0)
    """Scale of the adapters: they are multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0)
    """Share of an adapter's inputs that are dropped in training."""
    target_modules: str | tuple[str, ...] = Field(default="all-linear")
    """Layers with an adapter, such as ["q_proj", "v_proj"]; `all-linear`: all but the output layer."""


class PolicySettings(Section):
    """The model that is trained."""

    model: str = Field(default="")
    """Model to train: a folder in Hugging Face form (config, safetensors, tokenizer), or a hub name."""
    tokenizer: str = Field(default="")
    """Folder or hub name of the tokenizer; empty: the model's."""
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16")
    """Number type of the weights in rollout and in snapshots."""
    trust_remote_code: bool = Field(default=False)
    """Whether to run Python code that comes with the model."""
    lora: LoraSettings = Field(default=LoraSettings())
    """Low-rank adapters."""

    @property
    def tokenizer_source(self) -> tuple[str, str]:
        """The setting that names the tokenizer, and its folder or hub name."""
        return ("policy.tokenizer", self.tokenizer) if self.tokenizer else ("policy.model", self.model)


class WeightsSettings(Section):
    """How policy versions reach the replicas."""

    transport: Literal["pull", "file"] = Field(default="pull")
    """How versions reach the replicas. `pull`: over the network, from the trainer and from one another. `file`:
    safetensors on storage that trainer and replicas share."""
    snapshots: Literal["whole", "sharded"] = Field(default="whole")
    """Where the two copies are that replicas pull from. `whole`: on the GPU of the trainer's rank 0. `sharded`: over
    all ranks, for a policy that fits on no GPU."""
    deadline_s: PositiveFloat = Field(default=30.0)
    """Longest wait for an answer, a peer or a bucket, in seconds; then the next source is tried."""
    kv: Literal["keep", "recompute"] = Field(default="keep")
    """At new weights, whether running completions keep their key-value cache or recompute it."""
    update: Literal["inflight", "drain"] = Field(default="inflight")
    """When new weights become live: between two decoding steps, or after the running completions (`drain`)."""
    shadow: Literal["auto", "full", "bucketed"] = Field(default="auto")
    """Where a replica receives weights: in a second copy (`full`), or bucket by bucket in the live ones while
    generation is held (`bucketed`). `auto`: full if it fits into memory."""
    folder: OptionalPath = Field(default=None)
    """Folder of the snapshots. Empty: /dev/shm/penstock-<user>/<run id>-<hash of the run's folder>."""
    keep: ClassVar[int] = 4
    """Newest snapshots that are kept on disk."""
    lora: Literal["auto", "adapter", "merged"] = Field(default="auto")
    """With policy.lora, publish the `adapter` alone, by file in weights.folder (vLLM only), or whole weights with the
    adapter `merged`, by weights.transport. `auto`: the adapter if rollout.engine is "vllm"."""


class FabricSettings(Section):
    """What connects GPUs of several pods or machines."""

    require: Literal["any", "rdma"] = Field(default="any")
    """`rdma`: the trainer ends at its start if NCCL chose sockets between machines."""
