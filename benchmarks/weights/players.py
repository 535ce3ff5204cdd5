"""Processes of ``benchmarks.weights.update``.

Each answers requests over a pipe until it closes. Times use the host-wide monotonic clock.
"""

import asyncio
import dataclasses
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.gpu_meter import only

SECRET = b"the secret of a benchmark"

Answers: TypeAlias = dict[str, Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every process of a run."""

    folder: Path
    """A Hugging Face configuration without weights."""
    device: str
    dtype: str
    sequences: int
    tensor_parallel_size: int
    max_model_len: int
    gpu_memory_utilization: float
    bucket_bytes: int
    deadline_s: float
    shadow: str


def environment(on_gpu: bool, numbers: list[int]) -> dict[str, str]:
    """Return an environment limited to the GPUs ``numbers``."""
    if on_gpu:
        return only(*numbers)
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


def gpus(number: int, ranks: int) -> list[int]:
    """Return replica ``number``'s GPUs, after the trainer's."""
    return [1 + number * ranks + rank for rank in range(ranks)]


async def serve(connection: Connection, answers: Answers) -> None:
    """Answer requests ``(name, arguments)`` until the pipe closes."""
    while True:
        try:
            name, arguments = await asyncio.to_thread(connection.recv)
        except (EOFError, OSError):
            return
        try:
            answer = answers[name](**arguments)
            connection.send((True, await answer if asyncio.iscoroutine(answer) else answer))
        except Exception:  # noqa: BLE001 (the caller is told, and decides)
            connection.send((False, traceback.format_exc()))


def layout_of(options: Options) -> Any:
    """Return the layout of the model in ``options.folder``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from penstock.shared.weights.format.layout import plan_layout

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.folder))
    return plan_layout(
        ((name, options.dtype, tuple(parameter.shape)) for name, parameter in model.named_parameters()),
        options.bucket_bytes,
    )
