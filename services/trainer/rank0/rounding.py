"""What is lost where gradients are added in bfloat16."""

from penstock.shared.settings import Settings

_MOST_ADDED = 64
"""Micro-batches; of 512 that are alike, half of the sum is lost."""


def rounding(micro_batches: float, settings: Settings) -> str:
    """Return what to change where DeepSpeed adds the gradients of too many micro-batches in bfloat16, or ""; a part of
    them is lost.

    A sum keeps eight bits: gradients that are alike no longer count from the 256th on.
    """
    kind = settings.trainer.deepspeed.get("data_types", {}).get("grad_accum_dtype")
    if settings.policy.dtype != "bfloat16" or kind == "fp32" or micro_batches <= _MOST_ADDED:
        return ""
    return (
        f"the gradients of {micro_batches:.0f} micro-batches of a rank are added in bfloat16, in which a part of them is lost: raise "
        "trainer.micro_batch_tokens or trainer.ranks, or add them in float32 (2 bytes more per weight and rank) with "
        'trainer.zero_stage = 2 or 3 and trainer.deepspeed = {data_types = {grad_accum_dtype = "fp32"}}'
    )
