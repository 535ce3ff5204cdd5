"""Checks of the embedded engine before it serves, and its seed."""

import hashlib

import numpy as np
import torch

from penstock.services.rollout.engines.engine import GenerationRequest
from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens
from penstock.services.rollout.engines.transformers.loading import OpenedModel
from penstock.shared.bus.messages import PolicyVersion, Sampling
from penstock.shared.errors import SettingsError


def try_out(opened: OpenedModel) -> None:
    """Decode two tokens of two samples; raises SettingsError without a usual key-value cache or enough memory."""
    request = GenerationRequest(np.zeros(1, dtype=np.int32), Sampling(samples=2, max_new_tokens=2, temperature=1.0))
    try:
        with torch.inference_mode():
            decoding = Batch(opened.model, [request], Tokens(stop=()), opened.device)
            while not decoding.finished:
                decoding.step(PolicyVersion(0))
    except (TypeError, AttributeError, RuntimeError, ValueError, LookupError) as error:
        raise SettingsError(
            f"expected a decoder-only language model with a key-value cache that fits {opened.device}, found "
            f"{type(opened.model).__name__}, which failed to decode ({type(error).__name__}: {error}): "
            "change policy.model or run.device"
        ) from error


def seed_of(run_seed: int, replica: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{replica}".encode()).digest()[:8], "little") >> 1
