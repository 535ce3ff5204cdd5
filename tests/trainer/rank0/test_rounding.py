"""When gradients that are added in bfloat16 are reported."""

import torch

from penstock.services.trainer.rank0.rounding import rounding
from penstock.shared.settings import loads


def test_many_micro_batches_whose_gradients_are_added_in_bfloat16_are_told() -> None:
    """512 that are alike give half their sum (DeepSpeed 0.19 at ZeRO 1, 2 and 3)."""

    def told(micro_batches: int, *flags: str) -> str:
        return rounding(micro_batches, loads("", "test", flags, environment={}))

    half = "--policy.dtype=bfloat16"
    assert told(64, half) == told(1000, "--policy.dtype=float32") == ""
    assert "of 65 micro-batches" in told(65, half)
    setting = ["--trainer.zero_stage=2", '--trainer.deepspeed={data_types = {grad_accum_dtype = "fp32"}}']
    assert told(1000, half, *setting) == ""
    total = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(512):
        total += 1
    assert total == 256
