"""Scaling and capping around a model's output layer.

    logits_V = output(hidden_D / divisor) · factor,   then  cap · tanh(logits_V / cap)  where there is a cap

Depends on config and class: Granite divides by ``logits_scaling``, HyperCLOVA X multiplies by it. Unknown settings are
refused. Changed logits are float32.

Shapes: ``N`` tokens, ``D`` hidden size, ``V`` vocabulary.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.shared.errors import SettingsError

_CAPS = {
    "final_logit_softcapping": r"Gemma2|Gemma3ForCausalLM|Gemma3n|Gemma4|VaultGemma|NanoChat|MuseGlimmer",
    "logits_soft_cap": r"RecurrentGemma",
    "output_logit_soft_cap": r"xLSTM",
}
_FACTORS = {
    "logit_scale": r"Cohere",
    "lm_head_multiplier": r"FalconH1",
    "output_multiplier": r"MuseGlimmer",
    "logits_scaling": r"HyperCLOVAX",
}
_DIVISORS_OF_LOGITS = {"logits_scaling": r"Granite"}
_DIVISORS_OF_HIDDEN_STATES = {"logits_scaling": r"MiniCPM3", "logits_mup_width_multiplier": r"Inkling"}
_KNOWN = frozenset((*_CAPS, *_FACTORS, *_DIVISORS_OF_LOGITS, *_DIVISORS_OF_HIDDEN_STATES))
_ABOUT_LOGITS = re.compile(
    r"(logit|lm_head|output|unembed).*(scal|cap|mult|mup)|(scal|cap|mult).*(logit|lm_head|unembed)"
)
_ABOUT_OTHERS = re.compile(r"attn|attention|router|ssm|mlp|expert|init|max_logit_scale|vision|audio")
_NEUTRAL: tuple[Any, ...] = (None, 0, 1, False)


@dataclasses.dataclass(frozen=True, slots=True)
class LogitsTransform:
    divisor: float = 1.0
    """For hidden states."""
    factor: float = 1.0
    """For logits."""
    cap: float | None = None
    """Soft cap of logits, or None."""
    words: int | None = None
    """Only this many first words have logits; None: all."""

    def before(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND if self.divisor == 1 else hidden_ND / self.divisor

    def after(self, logits_NV: Tensor) -> Tensor:
        if self.words is not None:
            logits_NV = logits_NV[..., : self.words]
        if self.factor != 1:
            logits_NV = logits_NV.float() * self.factor
        return logits_NV if self.cap is None else self.cap * torch.tanh(logits_NV.float() / self.cap)


PLAIN = LogitsTransform()


def logits_transform(model: Any, name: str = "policy.model") -> LogitsTransform:
    """Raise SettingsError if the config of ``model`` (of setting ``name``) is unknown."""
    config, kind = model.config.get_text_config(), type(model).__name__
    _check_head(model, kind, name)
    fields = {**config.to_dict(), **{key: getattr(config, key, None) for key in _KNOWN}}  # some are properties
    settings = {key: value for key, value in fields.items() if value not in _NEUTRAL and _is_about_logits(key)}
    divisor, factor = _take(settings, _DIVISORS_OF_HIDDEN_STATES, kind), _take(settings, _FACTORS, kind)
    divisor_of_logits, cap = _take(settings, _DIVISORS_OF_LOGITS, kind), _take(settings, _CAPS, kind)
    if settings:
        key, value = next(iter(settings.items()))
        raise SettingsError(
            f"expected a model whose logits are those of its output layer, or scaled and capped in a known way, found {key} = {value!r} in "
            f"the config of {kind}: change {name}"
        )
    words = getattr(config, "unpadded_vocab_size", None) if "Inkling" in kind else None
    return LogitsTransform(
        divisor=1.0 if divisor is None else divisor,
        factor=(1.0 if factor is None else factor) / (1.0 if divisor_of_logits is None else divisor_of_logits),
        cap=cap,
        words=words,
    )


def _check_head(model: Any, kind: str, name: str) -> None:
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    for child_name, child in model.named_children():
        parts = set(child.modules())
        if embedding not in parts and child is not output and any(True for _ in child.parameters()):
            raise SettingsError(
                f"expected a model of an embedding, layers and one output layer, found {child_name} besides in {kind}: change {name}"
            )


def _is_about_logits(key: str) -> bool:
    return key in _KNOWN or bool(_ABOUT_LOGITS.search(key) and not _ABOUT_OTHERS.search(key))


def _take(settings: dict[str, Any], table: Mapping[str, str], kind: str) -> float | None:
    for key, classes in table.items():
        if key in settings and re.match(classes, kind):
            return float(settings.pop(key))
    return None
