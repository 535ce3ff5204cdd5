"""Sequence boundaries for layers that carry state along the row: recurrences (gated delta nets, Mamba), convolutions.

Within :meth:`Boundaries.of`, token mixers run transformers' own forward pass on the row's sequences (``spans``). If a
mixer can continue from a state, a long prompt's final, differentiable state is forked to its completions.

Mixers' classes are replaced by subclasses, so hooks (ZeRO), adapters and names stay. Recomputed layers (gradient
checkpointing) get the boundaries with their arguments.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.services.trainer.batch.segments import Segments
from penstock.services.trainer.model.layers import spans
from penstock.services.trainer.model.layers.gather import gather_rows

_CONTINUING = {
    "BambaMixer": "cache_params",
    "FalconH1Mixer": "cache_params",
    "GraniteMoeHybridMambaLayer": "cache_params",
    "KimiLinearDeltaAttention": "cache_params",
    "Lfm2MoeShortConv": "past_key_values",
    "Lfm2ShortConv": "past_key_values",
    "Mamba2Mixer": "cache_params",
    "NemotronHMamba2Mixer": "cache_params",
    "OlmoHybridGatedDeltaNet": "cache_params",
    "Qwen3NextGatedDeltaNet": "cache_params",
    "Qwen3_5GatedDeltaNet": "cache_params",
    "Qwen3_5MoeGatedDeltaNet": "cache_params",
    "Zamba2MambaMixer": "cache_params",
    "ZayaCCAProjection": "past_key_values",
}
"""transformers' mixers that can continue from a state, with its argument."""
_WHOLE = frozenset(
    {
        "FalconMambaMixer",
        "JambaMambaMixer",
        "MambaMixer",
        "MiniMaxLightningAttention",
        "RecurrentGemmaRecurrentBlock",
        "ZambaMambaMixer",
    }
)
_STATES = frozenset({"cache_params", "layer_past", "past_key_value", "past_key_values", "state"})


class PromptState:
    """Final state of prompts in one mixer, in place of transformers' ``Cache``; never written in place, so gradients
    flow.

    """

    record_past = True  # disables transformers' single-token convolution

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}
        self._continues = False

    @property
    def layers(self) -> "_EveryLayer":
        return _EveryLayer(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._continues

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Return a convolution's inputs with preceding ones (G × channels × tokens); keep a prompt's last."""
        if self._continues:
            return torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        self.conv_states[state_idx] = conv_states[..., -(conv_kernel_size or conv_states.shape[-1]) :]
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep a prompt's recurrent state (G × …)."""
        if not self._continues:
            self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _EveryLayer:
    def __init__(self, state: PromptState) -> None:
        self._state = state

    def __getitem__(self, _: int) -> PromptState:
        return self._state


def fork(prompts: list[PromptState], prompts_G: Tensor) -> PromptState:
    forked = PromptState()
    forked._continues = True
    for name in ("conv_states", "recurrent_states"):
        kept: dict[int, Tensor] = getattr(prompts[0], name)
        joined = {number: torch.cat([getattr(prompt, name)[number] for prompt in prompts]) for number in kept}
        setattr(forked, name, {number: gather_rows(state, prompts_G) for number, state in joined.items()})
    return forked


class Boundaries:
    """The row's sequences for mixers; by default, one."""

    def __init__(self) -> None:
        self.plans: Plans | None = None

    def __deepcopy__(self, _: Any) -> "Boundaries":
        return self

    @contextlib.contextmanager
    def of(self, segments: Segments, device: torch.device, *, sharded: bool = False) -> Iterator[None]:
        """Have mixers respect ``segments`` within the block, also in layers recomputed later.

        ``sharded`` (ZeRO stage 3): all ranks make equally many calls; collective.
        """
        with self.use(Plans(segments, device, sharded=sharded)):
            yield

    @contextlib.contextmanager
    def use(self, plans: "Plans | None") -> Iterator[None]:
        before, self.plans = self.plans, plans
        try:
            yield
        finally:
            self.plans = before


class Plans:
    """Plans of one micro-batch, made on first use."""

    def __init__(self, segments: Segments, device: torch.device, *, sharded: bool) -> None:
        self._segments = segments
        self._device = device
        self._sharded = sharded

    @functools.cached_property
    def forked(self) -> spans.SequencePlan:
        """For mixers that continue from a prompt's state."""
        return self._evened(spans.forked(self._segments, self._device))

    @functools.cached_property
    def whole(self) -> spans.SequencePlan:
        return self._evened(spans.whole(self._segments, self._device))

    def _evened(self, plan: spans.SequencePlan) -> spans.SequencePlan:
        more = spans.idle_calls(len(plan.spans), self._device) if self._sharded else 0
        return spans.SequencePlan(plan.spans, plan.places_T, more)


def install(model: nn.Module) -> Boundaries | None:
    """Make the known mixers in ``model`` respect boundaries; return these, or None without mixers."""
    if (installed := getattr(model, "_penstock_boundaries", None)) is not None:
        return installed  # type: ignore[no-any-return]
    boundaries = Boundaries()
    if not any(_is_known(module) for module in model.modules()):
        return None
    from transformers.modeling_layers import GradientCheckpointingLayer

    bounded: dict[Any, Any] = {}
    for module in model.modules():
        kind: Any = type(module)
        if _is_known(module):
            bind = _bounded_mixer
        elif isinstance(module, GradientCheckpointingLayer) and any(_is_known(inner) for inner in module.modules()):
            bind = _bounded_layer
        else:
            continue
        if kind not in bounded:
            bounded[kind] = bind(kind, boundaries)
        module.__class__ = bounded[kind]
    model._penstock_boundaries = boundaries  # type: ignore[assignment]
    return boundaries


def known(model: nn.Module) -> str:
    """Return the class of the first known mixer in ``model``, or ""."""
    return next((type(module).__name__ for module in model.modules() if _is_known(module)), "")


def _is_known(module: nn.Module) -> bool:
    name, origin = type(module).__name__, type(module).__module__
    return origin.startswith("transformers.models.") and (name in _CONTINUING or name in _WHOLE)


def _bounded_mixer(base: type[nn.Module], boundaries: Boundaries) -> type[nn.Module]:
    signature, state_name = inspect.signature(base.forward), _CONTINUING.get(base.__name__)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if boundaries.plans is None:
            return base.forward(self, *args, **kwargs)
        kwargs.pop("layout", None)
        given = signature.bind(self, *args, **kwargs)
        if state_name is None:
            return _run(base.forward, given, boundaries.plans.whole, None)
        return _run(base.forward, given, boundaries.plans.forked, state_name)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _run(
    forward: Callable[..., Any], given: inspect.BoundArguments, plan: spans.SequencePlan, state_name: str | None
) -> Any:
    tokens = len(plan.places_T)

    def call(places_GW: Tensor, state: PromptState | None) -> Any:
        arguments = {name: _gathered(value, places_GW, tokens) for name, value in given.arguments.items()}
        if state_name is not None:
            arguments[state_name] = state
        part = inspect.BoundArguments(given.signature, arguments)
        return forward(*part.args, **part.kwargs)

    outputs, prompts = [], list[PromptState]()
    for span in plan.spans:
        state = PromptState() if span.keeps_state else None
        if span.prompts_G is not None:
            state = fork(prompts, span.prompts_G)
        outputs.append(call(span.places_GW, state))
        prompts += [state] if span.keeps_state and state is not None else []
    idle = [call(plan.spans[0].places_GW[:1, :2], None) for _ in range(plan.idle_calls)]
    return with_idle(spans.scatter(outputs, plan), idle)


def _gathered(value: Any, places_GW: Tensor, tokens: int) -> Any:
    if isinstance(value, dict):
        return {name: spans.gather(argument, places_GW, tokens) for name, argument in value.items()}
    return spans.gather(value, places_GW, tokens)


def with_idle(output: Any, idle: list[Any]) -> Any:
    """Return ``output`` plus ``idle`` outputs with weight 0, so that their backward passes run."""
    if not idle:
        return output
    if isinstance(output, tuple):
        return (with_idle(output[0], [idle_output[0] for idle_output in idle]), *output[1:])
    return output + sum(0.0 * idle_output.sum() for idle_output in idle)


def _bounded_layer(base: type[nn.Module], boundaries: Boundaries) -> type[nn.Module]:
    """Return ``base``, remembering the boundaries of its first computation for recomputation."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base.__call__(self, *args, **kwargs, penstock_plans=boundaries.plans)

    def forward(self: nn.Module, *args: Any, penstock_plans: Plans | None = None, **kwargs: Any) -> Any:
        with boundaries.use(penstock_plans):
            return base.forward(self, *args, **kwargs)

    return type(base.__name__, (base,), {"__call__": call, "forward": forward, "__module__": base.__module__})


def unpackable(trunk: nn.Module) -> str:
    """Return the class of a module that mixes tokens in an unknown way (by cache or convolution); else ""."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    known = {id(inner) for module in trunk.modules() if _is_known(module) for inner in module.modules()}
    for module in trunk.modules():
        if id(module) in known or module is trunk or isinstance(module, GradientCheckpointingLayer):
            continue
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,):
            return type(module).__name__
        innermost = _takes_state(module) and not any(_takes_state(inner) for inner in list(module.modules())[1:])
        if innermost and not _attends_by_interface(type(module)):
            return type(module).__name__
    return ""


def _takes_state(module: nn.Module) -> bool:
    return not _STATES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _attends_by_interface(kind: type[nn.Module]) -> bool:
    """Whether the source of ``kind`` calls the configured attention function."""
    try:
        return "attention_interface(" in inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
