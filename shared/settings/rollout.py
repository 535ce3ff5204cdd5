"""How completions are drawn, and by what: ``[sampling]``, ``[rollout]``, ``[rollout.vllm]``."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shared.settings.section import Section


class SamplingSettings(Section):
    """How completions are drawn. The whole distribution is sampled (no top-p or top-k), so that behavior logprobs are
    those of the distribution that the trainer computes."""

    group_size: Annotated[int, Field(ge=2, le=4096)] = Field(default=16)
    """Completions per prompt, 2 to 4096: the group is the baseline of its advantages. While the run goes on it may become up to 4 times what
    the file says, and slots × group_size up to 16 times."""
    max_new_tokens: PositiveInt = Field(default=256)
    """Length limit of a completion, in tokens."""
    temperature: PositiveFloat = Field(default=1.0)
    """Softmax temperature; the trainer divides its logits by the same number."""


class VllmSettings(Section):
    """vLLM, where it generates."""

    tensor_parallel_size: PositiveInt = Field(default=1)
    """GPUs of one replica, which share each layer."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(default=0.85)
    """Share of the GPU's memory that vLLM may take, weights and key-value cache together."""
    max_model_len: NonNegativeInt = Field(default=0)
    """Longest prompt with its completion, in tokens; 0: the model's own context. With transformers too, and in the trainer: it decides
    which factors a model with longrope takes."""
    arguments: dict[str, Any] = Field(default={})
    """Anything else for vLLM's AsyncEngineArgs, by its name there: {enforce_eager = true} starts without CUDA graphs, {max_num_seqs =
    64} bounds the samples decoded at a time (default: rollout.max_groups × sampling.group_size)."""


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
    """`host:port` at which the first of several hosts lets the others join. It listens on that address alone, without a password."""
    secret_file: Path | None = Field(default=None)
    """A file whose first line is a secret, the same on each of several hosts: by it the first knows the others' workers."""
    engine: Literal["auto", "vllm", "transformers", "scripted"] = Field(default="auto")
    """What generates: vLLM, Hugging Face transformers, or a script for tests; `auto`: vLLM where it is installed and
    there is a GPU, else transformers."""
    max_groups: PositiveInt = Field(default=16)
    """How many groups one replica generates at a time."""
    gpus: tuple[NonNegativeInt, ...] = Field(default=())
    """Which GPUs of this machine `penstock up` gives to the replicas, in turn, as many to each as it needs; none: they
    all see every GPU."""
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
