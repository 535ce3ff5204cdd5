"""Refuse a model whose layers attend within other windows in vLLM than in the trainer.

The trainer follows transformers: a token attends to ``sliding_window`` tokens, itself among them. vLLM 0.32 gives Cohere 2's layers one more.
Logprobs then differ for every token beyond the window, by 0.03 nats in a tiny model with a window of 24.
"""

from typing import Any

from torch import nn

from shared.errors import SettingsError
from shared.process.importing import importing


def check_windows(model: nn.Module, source: str, context_tokens: int, *, trust_remote_code: bool = False) -> None:
    """Compare the windows of vLLM's ``model`` with the configuration in ``source``, as the trainer reads it.

    Args:
        model: of vLLM, loaded.
        source: folder or name of the checkpoint.
        context_tokens: the longest sequence that is served; windows of that length are none.

    Raises:
        SettingsError: a layer's differs from it.
    """
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
    """Return how many tokens a layer of vLLM's attends to; 0: all, or it is no such layer."""
    held: Any = getattr(module, "sliding_window", None) if hasattr(module, "impl") else None
    return held if isinstance(held, int) else 0
