"""DeepSpeed behind one file: gradients of a step over micro-batches and ranks, the optimizer, and its checkpoints.

The loss of a step is a sum over tokens divided by the tokens of the *global* batch, so every trained token weighs the
same whatever rank or micro-batch it lies in. DeepSpeed averages gradients over ranks, hence the factor ``ranks``.
Nothing is compiled at run time: torch's AdamW, and gloo or NCCL as torch brings them.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.settings import Settings

_TAG = "engine"


def start_ranks(device: str) -> tuple[int, int]:
    """Join the process group that torchrun's environment describes (one rank without it); return (rank, ranks)."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, 1, is_master=True
        )
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(_backend(device))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), dist.get_world_size()


def pick_device(setting: str) -> str:
    """Return ``cuda`` or ``cpu``."""
    return "cuda" if setting == "cuda" or (setting == "auto" and torch.cuda.is_available()) else "cpu"


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


class TrainingEngine:
    """A policy and its optimizer, over all ranks.

    Args:
        policy: the module to train; its forward pass takes a micro-batch.
        settings: the run's settings.
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, policy: nn.Module, settings: Settings, device: str) -> None:
        deepspeed = _import_deepspeed(device)
        self.ranks = dist.get_world_size()
        self.device = torch.device(device)
        self.policy = policy.to(self.device)
        engine, _, _, _ = deepspeed.initialize(
            model=self.policy,
            model_parameters=[parameter for parameter in self.policy.parameters() if parameter.requires_grad],
            config=_config(settings),
        )
        self._engine: Any = engine

    def forward(self, batch: object) -> Any:
        """Run the policy on a micro-batch."""
        return self._engine(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradients; ``last`` reduces them over ranks."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts the micro-batch, changes nothing

    def step(self, learning_rate: float) -> float:
        """Update the weights; return the global gradient norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else 0.0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return the model's tensors under their Hugging Face names, tied ones once."""
        return ((name.removeprefix("model."), tensor) for name, tensor in _unique(self.policy))

    def save(self, folder: Path) -> None:
        """Write model and optimizer state; every rank calls it."""
        self._engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote; every rank calls it."""
        found, _ = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if found is None:
            raise RuntimeError(f"expected a DeepSpeed checkpoint in {folder}, found none")


def _unique(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Named parameters and persistent buffers of ``module``; ``named_parameters`` gives a tied one once."""
    yield from module.named_parameters()
    persistent = module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _import_deepspeed(device: str) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed
    from deepspeed import ops

    if device == "cpu":
        # An all-reduce through shared memory that would be compiled here, with a compiler that may not be there.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _config(settings: Settings) -> dict[str, object]:
    trainer = settings.trainer
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # boundaries are set by hand
        "gradient_clipping": trainer.max_grad_norm,
        "bf16": {"enabled": settings.policy.dtype == "bfloat16"},
        "zero_optimization": {"stage": trainer.zero_stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": trainer.learning_rate,
                "betas": [trainer.adam_beta1, trainer.adam_beta2],
                "weight_decay": trainer.weight_decay,
                "torch_adam": True,
            },
        },
        "steps_per_print": 2**31 - 1,
    }
