"""Which of DeepSpeed's settings are ours to make, so that ``trainer.deepspeed`` cannot contradict the rest. Imports no DeepSpeed."""

from collections.abc import Mapping
from typing import Any

DEEPSPEED_KEYS = {
    "train_batch_size": "algorithm.groups_per_step",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "gradient_clipping": "trainer.max_grad_norm",
    "bf16": "policy.dtype",
    "bfloat16": "policy.dtype",
    "fp16": "policy.dtype",
    "amp": "policy.dtype",
    "torch_autocast": "policy.dtype",
    "optimizer": "trainer.learning_rate and its neighbours",
    "scheduler": "trainer.schedule",
    "activation_checkpointing": "trainer.gradient_checkpointing",
    "zero_optimization.stage": "trainer.zero_stage",
    "zero_optimization.offload_optimizer": "trainer.offload",
    "zero_optimization.offload_param": "trainer.offload",
    "zero_optimization.cpu_offload": "trainer.offload",
    "zero_optimization.cpu_offload_params": "trainer.offload",
    "zero_allow_untested_optimizer": "nothing: it is always on",
    "zero_force_ds_cpu_optimizer": "nothing: it is always off",
    "steps_per_print": "telemetry.log_level",
    "wall_clock_breakdown": "nothing: phases are in the measures",
}
"""What ``trainer.deepspeed`` must not say, and which setting decides it."""


def check_deepspeed(found: Mapping[str, Any]) -> None:
    """Raise ValueError where settings of DeepSpeed are ours to make."""
    for key, setting in DEEPSPEED_KEYS.items():
        table, _, name = key.rpartition(".")
        inner = found.get(table, {}) if table else found
        if not isinstance(inner, Mapping):
            raise ValueError(f"expected a table in trainer.deepspeed.{table}, found {inner!r}: change it")
        if name in inner:
            raise ValueError(
                f"expected no {key} in trainer.deepspeed, found {inner[name]!r}: take it out; what decides it is {setting}"
            )
