"""``penstock calibrate``: this device's rates, for ``penstock plan --calibrate``. It takes about a minute.

::

    training    forward and backward passes of the trainer's own engine over a packed micro-batch, on as many random
                layers of the policy's shape as fit
    memory      copies within the device, which bound decoding
    transfer    copies to another GPU; on a CPU, bytes through a loopback socket
    host        copies from pinned memory to the GPU

One process, which imports torch and DeepSpeed.
"""

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.plan.hardware import Calibration
from penstock.services.plan.rates import REACHED, mfu_of
from penstock.services.plan.shapes import Shape, shape_of
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, plan
from penstock.services.trainer.model.engine import TrainingEngine, built_in_parts, pick_device
from penstock.services.trainer.model.layers import attention, kernels
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.rank_group import start_ranks
from penstock.shared.bus.messages import FinishReason, Sample
from penstock.shared.errors import SettingsError
from penstock.shared.files.durable import write_whole
from penstock.shared.model.flops import BACKWARD
from penstock.shared.settings import Settings

_BYTES_PER_WEIGHT = 24
_SHARE = 0.4
"""Of the device's memory, for weights and states."""
_MOST_WEIGHTS_ON_CPU = 100e6
_FIRST_TOKENS, _ENOUGH_S = 256, 1.0
"""Micro-batches are doubled until a pass takes this long."""
_PROMPT, _SAMPLES = 32, 8
_SENT_BYTES, _MESSAGE_BYTES = 256 << 20, 1 << 20


def measure(settings: Settings, seconds: float) -> Calibration:
    """Return the rates of this machine's device, measured for ``seconds`` each at most.

    Raises:
        SettingsError: the policy's sizes cannot be read.
    """
    shape, device = shape_of(settings.policy.model), pick_device(settings.run.device)
    start_ranks(device)
    try:
        training = _training(settings, shape, device, seconds)
    finally:
        dist.destroy_process_group()
    return Calibration(
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        model=shape.name,
        flops_per_s=training / mfu_of(shape),
        bytes_per_s=_copies(device, device, seconds) * 2 / REACHED,
        link_bytes_per_s=_link(device, seconds),
        host_bytes_per_s=_copies("cpu", "cuda", seconds) if device == "cuda" else 0.0,
    )


def check_folder(file: Path) -> None:
    """Raise SettingsError where ``file`` could not be written after the measurement."""
    if not file.parent.is_dir():
        raise SettingsError(f"no folder {file.parent} to write {file.name} to: change --to")


def write(calibration: Calibration, file: Path) -> None:
    """Write the file that ``penstock plan --calibrate`` reads; raises SettingsError if that fails."""
    try:
        write_whole(file, json.dumps(dataclasses.asdict(calibration), indent=2) + "\n")
    except OSError as error:
        raise SettingsError(f"expected a file to write to at {file}, found: {error}: change --to") from error


# ---------------------------------------------------------------- training


def _training(settings: Settings, shape: Shape, device: str, seconds: float) -> float:
    """Return the model's operations per second in forward and backward passes."""
    engine = _engine(settings, shape, device)
    most, tokens = settings.trainer.micro_batch_tokens, _FIRST_TOKENS
    batch = _batch(engine, tokens)
    while _fastest_pass(engine, batch, 0.0) < _ENOUGH_S and tokens < most:
        tokens = min(most, 2 * tokens)
        batch = _batch(engine, tokens)
    return batch.flops * (1 + BACKWARD) / _fastest_pass(engine, batch, seconds)


def _engine(settings: Settings, shape: Shape, device: str) -> TrainingEngine:
    from transformers import AutoConfig, AutoModelForCausalLM

    policy, dtype = settings.policy, torch.bfloat16
    if device == "cpu" or policy.dtype == "float32":
        dtype = torch.float32
    config = AutoConfig.from_pretrained(policy.model, trust_remote_code=policy.trust_remote_code)
    _cut(config.get_text_config(), _layers(shape, device))
    with built_in_parts(1, device, dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=policy.trust_remote_code)
    kernels.install(model, settings.trainer.kernels, device)
    plain = {"zero_stage": 1, "offload": "none", "optimizer": "adamw", "gradient_checkpointing": False, "ranks": 1}
    trainer = settings.trainer.model_copy(update=plain)
    fused = kernels.fuses_logits(trainer.kernels)
    chunk = settings.internal.logits_chunk_tokens
    kind = attention.kind_of(settings.internal.attention, trainer.kernels)
    own = Policy(model, kind=kind, chunk_tokens=chunk, fused_logits=fused).train()
    return TrainingEngine(own, settings.model_copy(update={"trainer": trainer}), device)


def _layers(shape: Shape, device: str) -> int:
    """Return how many layers of the policy fit with their states."""
    if device == "cuda":
        weights = _SHARE * torch.cuda.get_device_properties(0).total_memory / _BYTES_PER_WEIGHT
    else:
        weights = _MOST_WEIGHTS_ON_CPU
    each = shape.decoder / shape.layers
    return max(1, min(shape.layers, int((weights - shape.embeddings) / each)))


def _cut(config: Any, layers: int) -> None:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def _batch(engine: TrainingEngine, tokens: int) -> MicroBatch:
    """Return one packed group of about ``tokens``."""
    lot, length = np.random.default_rng(0), max(2, (tokens - _PROMPT) // _SAMPLES + 1)

    def ids(count: int) -> Any:
        return lot.integers(0, engine.vocabulary, count).astype(np.int32)

    nothing, spans = np.zeros(length, np.float32), np.zeros((1, 2), np.int32)
    samples = tuple(Sample(ids(length), nothing, spans, FinishReason.LENGTH, "") for _ in range(_SAMPLES))
    row = PackedRow(ids(_PROMPT), samples, tuple(range(_SAMPLES)))
    return plan([row], tokens + _SAMPLES, 1, sizes=engine.sizes)[0][0]


def _fastest_pass(engine: TrainingEngine, batch: MicroBatch, seconds: float) -> float:
    return min(_repeated(lambda: _pass_seconds(engine, batch), seconds))


def _pass_seconds(engine: TrainingEngine, batch: MicroBatch) -> float:
    _wait(engine.device.type)
    started_s = time.perf_counter()
    engine.backward(engine.forward(batch).policy_logprobs_N.mean(), last=True)
    _wait(engine.device.type)
    taken_s = time.perf_counter() - started_s
    engine.step(0.0)
    return taken_s


def _repeated(work: Callable[[], float], seconds: float) -> list[float]:
    """Return the seconds that ``work`` reports, at least twice and for ``seconds`` at most."""
    taken, ends_at_s = [work(), work()], time.monotonic() + seconds
    while time.monotonic() + taken[-1] < ends_at_s:
        taken.append(work())
    return taken


def _wait(device: str) -> None:
    if device == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


# ---------------------------------------------------------------- memory and transfer


def _copies(source: str, target: str, seconds: float) -> float:
    """Return the bytes per second copied from one device to another."""
    count = (1 << 30) if "cuda" in target else (128 << 20)
    pinned = source == "cpu" and target != "cpu"
    original = torch.zeros(count, dtype=torch.uint8, device=source, pin_memory=pinned)
    other = torch.empty(count, dtype=torch.uint8, device=target)
    return count / min(_repeated(lambda: _copy_seconds(original, other), seconds / 4))


def _copy_seconds(original: Tensor, other: Tensor) -> float:
    _wait(other.device.type)
    started_s = time.perf_counter()
    other.copy_(original)
    _wait(other.device.type)
    return time.perf_counter() - started_s


def _link(device: str, seconds: float) -> float:
    """Return the bytes per second between two processes' devices; 0: there is one GPU."""
    if device == "cpu":
        return _SENT_BYTES / min(_repeated(_socket_seconds, seconds / 4))
    return _copies("cuda:0", "cuda:1", seconds) if torch.cuda.device_count() > 1 else 0.0


def _socket_seconds() -> float:
    message, room = bytes(_MESSAGE_BYTES), bytearray(_MESSAGE_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(), message))
        sender.start()
        reader, _ = server.accept()
        started_s = time.perf_counter()
        with reader:
            while reader.recv_into(room):
                pass
        taken_s = time.perf_counter() - started_s
        sender.join()
    return taken_s


def _send(address: tuple[str, int], message: bytes) -> None:
    with socket.create_connection(address) as writer:
        for _ in range(_SENT_BYTES // _MESSAGE_BYTES):
            writer.sendall(message)
