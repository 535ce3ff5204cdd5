"""Keep the experts that vLLM's routers choose, in each pass of the model.

Routers call a function with their choice, in CUDA graphs a copy into a buffer, which replays repeat::

    load_model       every router gets its function               (before vLLM compiles and captures)
    a pass           the choice of token t, layer l ─▶ buffer[t, l]

vLLM's own mechanism (``enable_return_routed_experts``, later ``aux_output_config``) hands all tokens' experts through its
scheduler: it excludes the shorter scheduling (``scheduling.plain_decoding``), and in 0.26 the newer runner.

Shapes: ``T`` tokens of a pass, ``L`` decoder layers, ``K`` experts per token.
"""

import functools
from typing import Any

import torch

from penstock.services.rollout.engines.vllm.arguments import release
from penstock.services.rollout.engines.vllm.routing.route_record import RouteRecord
from penstock.shared.errors import SettingsError
from penstock.shared.model.routes import id_type

COMPARED = {(0, 26), (0, 32)}
FAMILIES = {**dict.fromkeys(("gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), (0, 26)), "glm4_moe": (0, 32)}
"""Model types whose recorded experts were compared with the trainer's (``tests/support/vllm_agreement.py``), and since which
release.
"""
_SET_FALSE = "set trainer.router_replay to false"


class RouteCapture:
    """The experts of the last pass of ``worker``'s model, whose weights are loaded.

    Raises:
        SettingsError: they cannot be kept.
    """

    def __init__(self, worker: Any) -> None:
        config = worker.vllm_config
        _check(config)
        text, layers = config.model_config.hf_text_config, _layers(worker.model_runner.get_model())
        experts = config.model_config.get_num_experts()
        top_k = {int(layer.router.top_k) for layer in layers.values()}
        if len(top_k) != 1:
            raise SettingsError(
                f"expected layers with routers, and as many experts a token in each, found {top_k}: {_SET_FALSE}"
            )
        self.kind = id_type(experts).__name__
        shape = config.scheduler_config.max_num_batched_tokens, int(text.num_hidden_layers), top_k.pop()
        # PyTorch hardly indexes uint16; ids have the same bytes
        dtype = torch.uint8 if self.kind == "uint8" else torch.int16
        self.chosen_TLK = torch.zeros(shape, dtype=dtype, device=worker.device)
        self.silent = set(layers)
        """Layers whose choice was not seen yet, in a pass or in the capture of one."""
        self._layers = list(layers.values())
        for place, layer in layers.items():
            layer.router.set_capture_fn(functools.partial(self._keep, place))

    def _keep(self, layer: int, ids_TK: torch.Tensor) -> None:
        self.silent.discard(layer)
        kept_TK = ids_TK[: len(self.chosen_TLK)]
        self.chosen_TLK[: len(kept_TK), layer].copy_(kept_TK)

    def check(self) -> None:
        """Raise SettingsError if vLLM has kernels for some layers that choose experts without the router."""
        methods = [layer.routed_experts.quant_method for layer in self._layers]
        if names := sorted({type(each).__name__ for each in methods if each.is_monolithic}):
            raise SettingsError(
                f"expected experts that vLLM's routers choose, with trainer.router_replay, found {', '.join(names)} with kernels "
                f"that choose by themselves: set rollout.vllm.arguments.moe_backend, or {_SET_FALSE}"
            )


def _check(config: Any) -> None:
    """Raise SettingsError for what was not compared."""
    family, parallel = config.model_config.hf_text_config.model_type, config.parallel_config
    installed = release()
    if installed not in COMPARED:
        releases = " or ".join(f"{major}.{minor}" for major, minor in sorted(COMPARED))
        raise SettingsError(
            f"expected vLLM {releases} with trainer.router_replay, found {installed[0]}.{installed[1]}: {_SET_FALSE}"
        )
    known = sorted(name for name, since in FAMILIES.items() if since <= installed)
    if family not in known:
        raise SettingsError(
            f"trainer.router_replay is tested in vLLM {installed[0]}.{installed[1]} with {', '.join(known)}, found {family!r}: "
            f"{_SET_FALSE}"
        )
    for name, is_used in (
        ("enable_dbo", parallel.enable_dbo),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size > 1),
    ):
        if is_used:
            raise SettingsError(
                f"{name} is not allowed in rollout.vllm.arguments with trainer.router_replay: leave it out"
            )


def _layers(model: Any) -> dict[int, Any]:
    """Return the layers with experts by their place in the decoder."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    layers = [module for module in model.modules() if isinstance(module, MoERunner)]
    if others := {type(layer.router).__name__ for layer in layers if not isinstance(layer.router, BaseRouter)}:
        raise SettingsError(f"expected routers that report their choice, found {sorted(others)}: {_SET_FALSE}")
    return {int(layer.layer_id): layer for layer in layers}


def capture_routes(worker: Any) -> None:
    """Let ``worker`` have a :class:`RouteCapture`, or the reason why not, as ``penstock_routes`` after it loads its model."""
    load = worker.load_model

    def load_model(*arguments: Any, **named: Any) -> None:
        load(*arguments, **named)
        try:
            worker.penstock_routes = RouteCapture(worker)
        except SettingsError as error:
            worker.penstock_routes = error

    worker.load_model = load_model


def route_record(worker: Any, refusal: str) -> RouteRecord | None:
    """Return the record of ``worker``'s captured routes, if it captures any.

    Raises:
        SettingsError: they cannot be kept, or ``refusal``, the reason why logprobs are not captured.
    """
    captured = getattr(worker, "penstock_routes", None)
    if captured is None:
        return None
    if isinstance(captured, SettingsError):
        raise captured
    if refusal:
        raise SettingsError(
            f"expected logprobs of vLLM's workers with trainer.router_replay, found none ({refusal}): {_SET_FALSE}"
        )
    captured.check()
    return RouteRecord(captured.chosen_TLK, captured.kind, captured.silent)
