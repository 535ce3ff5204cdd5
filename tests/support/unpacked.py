"""vLLM's CPU workers with linear layers as on a GPU, whose weights are not packed: a copy plan reaches them."""

from typing import Any

import torch

from penstock.services.rollout.engines.vllm.worker import WorkerExtension


class Unpacked(WorkerExtension):
    """The replica's worker; set before vLLM builds the model."""

    def __new__(cls, *arguments: Any, **named: Any) -> "Unpacked":
        from vllm.model_executor.layers import utils

        def multiply(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
            return torch.nn.functional.linear(x, weight, bias)

        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
        utils.cpu_unquantized_gemm = multiply
        return super().__new__(cls, *arguments, **named)  # type: ignore[return-value]
