"""The model that is trained, and how its versions reach the replicas: ``[policy]``, ``[policy.lora]``, ``[weights]``."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from shared.settings.section import Section


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


class WeightsSettings(Section):
    """How policy versions reach the replicas."""

    transport: Literal["pull", "file"] = Field(default="pull")
    """`pull`: replicas fetch each version over the network from the trainer's memory and from one another, beside
    running generation; `file`: safetensors on storage that trainer and replicas share."""
    deadline_s: PositiveFloat = Field(default=30.0)
    """No wait of a pull takes longer: for an answer, for a peer, for a bucket. Then the next source is tried."""
    kv: Literal["keep", "recompute"] = Field(default="keep")
    """At new weights, running completions go on with their key-value cache, or it is computed anew."""
    update: Literal["inflight", "drain"] = Field(default="inflight")
    """New weights go live between two decoding steps, or once the completions that run are finished."""
    shadow: Literal["auto", "full", "bucketed"] = Field(default="auto")
    """Where a replica receives: into a second copy of the weights (`full`), or bucket by bucket into the live ones while
    generation is held (`bucketed`); `auto`: full where the memory is there."""
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
