"""A random policy, and how an engine gets it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.services.rollout.engines.engine import Engine, SwapReport
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from penstock.shared.weights.transport.offer import Offer

PROMPT_TOKENS = 64


def random_policy(folder: Path, shape: Mapping[str, Any], dtype: torch.dtype) -> Offer:
    """Write a random Qwen2 without stop token to ``folder/policy``; return an offer of it as version 0."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**shape, bos_token_id=None, eos_token_id=None)
    device = "cuda" if torch.cuda.device_count() else "cpu"
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(folder / "policy")
    written = write_snapshot(folder / "weights", PolicyVersion(0), 0, model.named_parameters(), dtype)
    if device == "cuda":
        del model
        torch.cuda.empty_cache()
    return file_offer(PolicyRecord(PolicyVersion(0), None, 0, 0.0, written.digest, str(written.location)), 60.0)


async def put(engine: Engine, offer: Offer) -> SwapReport:
    """Let ``engine`` generate with the offered weights."""
    await engine.stage(offer)
    return await engine.swap(offer.header.version)
