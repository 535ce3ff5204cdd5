"""vLLM's CPU workers with linear layers and experts as on a GPU, whose weights are not packed: a copy plan reaches them."""

from typing import Any

import torch

from penstock.services.rollout.engines.vllm.worker import WorkerExtension


class Unpacked(WorkerExtension):
    """The replica's worker; set before vLLM builds the model."""

    def __new__(cls, *arguments: Any, **named: Any) -> "Unpacked":
        unpack_linear_layers()
        unpack_experts()
        return super().__new__(cls, *arguments, **named)  # type: ignore[return-value]


def unpack_linear_layers() -> None:
    from vllm.model_executor.layers import utils

    def multiply(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, weight, bias)

    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None
    utils.cpu_unquantized_gemm = multiply


def unpack_experts() -> None:
    """Let vLLM build mixtures as for its Triton kernels, with PyTorch in the kernel's place."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    method.select_unquantized_moe_backend = lambda moe_config: (UnquantizedMoeBackend.TRITON, _plain_experts())


def _plain_experts() -> Any:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    class PlainExperts(CPUUnquantizedExperts):  # type: ignore[misc, unused-ignore]
        process_weights_after_loading = FusedMoEExperts.process_weights_after_loading

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, **others: Any
        ) -> None:
            mixed = torch.zeros_like(output)
            for token, slot in torch.ones_like(topk_ids).nonzero().tolist():
                expert = int(topk_ids[token, slot])
                gate, up = (w1[expert] @ hidden_states[token]).chunk(2)
                mixed[token] += topk_weights[token, slot] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
            output.copy_(mixed)

    return PlainExperts
