"""Load cuBLAS, and compile Triton's and FlashAttention 4's kernels, in a thread while weights are loaded.

It leaves torch's state and random generators unchanged, and errors to the actual use.
"""

import contextlib
import importlib.util
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from penstock.services.trainer.model.layers import kernels, norms, variable_length
from penstock.shared.model.logits import logprobs_and_entropies

log = logging.getLogger(__name__)

_TOKENS = (256, 251)
"""Triton specializes kernels for multiples of 16, of tokens as of widths."""


@contextlib.contextmanager
def beside(config: Mapping[str, Any], kind: kernels.KernelKind, device: str) -> Iterator[None]:
    """Warm up for the model with ``config`` within the block; nothing on a CPU."""
    if device != "cuda" or kind == "torch":
        yield
        return
    place = torch.device("cuda", torch.cuda.current_device())
    thread = threading.Thread(target=_run, args=(config, place), name="warm-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _run(config: Mapping[str, Any], device: torch.device) -> None:
    torch.cuda.set_device(device)
    text = config.get("text_config", config)
    parts = [
        _product,
        _logits,
        *([_norm, _gated, _rotary] if importlib.util.find_spec("liger_kernel") else []),
        _attention,
        _variable_length,
    ]
    seconds = {}
    for part in parts:
        began_s = time.monotonic()
        for tokens, dtype in itertools.product(_TOKENS, (torch.float32, torch.bfloat16)):
            try:
                part(text, tokens, {"device": device, "dtype": dtype})
            except Exception as error:  # noqa: BLE001 (of any model's sizes)
                log.debug("warm-up skipped", extra={"part": part.__name__, "detail": str(error)})
        seconds[part.__name__.strip("_")] = round(time.monotonic() - began_s, 3)
    log.info("kernels are compiled", extra={"seconds": seconds})


def _ones(*shape: int, **where: Any) -> torch.Tensor:
    return torch.ones(shape, **where).requires_grad_()


def _product(text: Mapping[str, Any], tokens: int, where: dict[str, Any]) -> None:
    given, weight = _ones(tokens, 64, **where), _ones(64, 64, **where)
    bias = _ones(64, **where)
    _backward(torch.softmax(torch.nn.functional.linear(given, weight, bias), -1), given, weight, bias)


def _logits(text: Mapping[str, Any], tokens: int, where: dict[str, Any]) -> None:
    width = 512 + int(text["vocab_size"]) % 16
    targets = torch.zeros(tokens, dtype=torch.int64, device=where["device"])
    temperatures = torch.ones(tokens, dtype=torch.float32, device=where["device"])
    logits = _ones(tokens, width, **where)
    _backward(logprobs_and_entropies(logits, targets, temperatures)[0], logits)


def _norm(text: Mapping[str, Any], tokens: int, where: dict[str, Any]) -> None:
    width = int(text["hidden_size"])
    given, weight = _ones(1, tokens, width, **where), _ones(width, **where)
    _backward(norms.rms_norm(given, weight, 1e-6), given, weight)


def _gated(text: Mapping[str, Any], tokens: int, where: dict[str, Any]) -> None:
    fused = kernels.liger("ops").LigerSiLUMulFunction
    gate, up = (_ones(1, tokens, int(text["intermediate_size"]), **where) for _ in range(2))
    _backward(fused.apply(gate, up), gate, up)


def _rotary(text: Mapping[str, Any], tokens: int, where: dict[str, Any]) -> None:
    rotate = kernels.liger("transformers.rope").liger_rotary_pos_emb
    heads, shared, size = _heads(text)
    query, key = (_ones(1, tokens, count, size, **where) for count in (heads, shared))
    angles = torch.ones(1, tokens, size, **where)
    out = rotate(query.transpose(1, 2), key.transpose(1, 2), angles, angles)
    _backward(torch.cat([rotated.flatten() for rotated in out]), query, key)


def _attention(text: Mapping[str, Any], tokens: int, where: dict[str, Any]) -> None:
    heads, _, size = _heads(text)
    query, key, value = (_ones(1, heads, tokens, size, **where) for _ in range(3))
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=where["device"]).tril()
    _backward(torch.nn.functional.scaled_dot_product_attention(query, key, value, mask), query, key, value)


def _variable_length(text: Mapping[str, Any], tokens: int, where: dict[str, Any]) -> None:
    heads, shared, size = _heads(text)
    variable_length.choose(_ones(tokens, heads, size, **where), shared, size, windowed=False, flash4=True)


def _heads(text: Mapping[str, Any]) -> tuple[int, int, int]:
    heads = int(text["num_attention_heads"])
    shared = int(text.get("num_key_value_heads") or heads)
    return heads, shared, int(text.get("head_dim") or int(text["hidden_size"]) // heads)


def _backward(out: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.autograd.grad(out.float().sum(), inputs)
