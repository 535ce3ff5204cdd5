"""Refuse models whose attention windows differ between vLLM and the trainer.

vLLM 0.32 gives Cohere 2's layers one token more than transformers, which changed logprobs by 0.03 nats.
"""

from typing import Any

from torch import nn

from penstock.shared.errors import SettingsError
from penstock.shared.process.importing import importing


def check_windows(model: nn.Module, source: str, context_tokens: int, *, trust_remote_code: bool = False) -> None:
    """Compare windows, up to ``context_tokens``, with the configuration in ``source``; may raise SettingsError."""
    held = {name: window for name, module in model.named_modules() if (window := _window(module))}
    if not held:
        return
    with importing():
        from transformers import AutoConfig
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    own = getattr(config, "sliding_window", None)
    for name, window in held.items():
        if isinstance(own, int) and window != own and min(own, window) < context_tokens:
            raise SettingsError(
                f"expected windows of {own} tokens in vLLM, as in the model's configuration and the trainer, found {window} in {name}: set "
                f"rollout.vllm.arguments.hf_overrides = {{sliding_window = {2 * own - window}}}, or rollout.vllm.max_model_len to "
                f"at most {min(own, window)}, or change rollout.engine"
            )


def _window(module: nn.Module) -> int:
    """Return a layer's window in tokens; 0: unlimited, or no attention."""
    held: Any = getattr(module, "sliding_window", None) if hasattr(module, "impl") else None
    return held if isinstance(held, int) else 0
