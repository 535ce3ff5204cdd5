"""Open a Hugging Face policy: architecture and initial weights."""

import dataclasses
from typing import TYPE_CHECKING

from penstock.shared.errors import SettingsError
from penstock.shared.model.causal_model import load_causal_model
from penstock.shared.model.model_source import check_model
from penstock.shared.model.tokenizer import UNUSABLE, Tokenizer, first_line, stop_tokens
from penstock.shared.process.importing import importing

if TYPE_CHECKING:
    import torch

    from penstock.services.rollout.engines.transformers.decoding import LanguageModel
    from penstock.services.rollout.engines.transformers.routes import RouteRecorder
    from penstock.shared.settings import PolicySettings


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    model: "LanguageModel"
    parameters: "dict[str, torch.Tensor]"
    """Tensors that a snapshot may fill, by Hugging Face name; tied ones under each name."""
    required: frozenset[str]
    """Names that a snapshot must fill."""
    device: "torch.device"
    stop: tuple[int, ...]
    context_tokens: int
    vocabulary: int
    recorder: "RouteRecorder | None" = None
    """Keeps the experts of each token, with trainer.router_replay."""


def check_for_vllm(policy: "PolicySettings") -> None:
    """Raise SettingsError for models that vLLM and the trainer compute differently."""
    check_model("policy.model", policy.model)
    with importing():
        from transformers import AutoConfig

        from penstock.shared.model.rope import check_rope_for_vllm

    try:
        config = AutoConfig.from_pretrained(policy.model, trust_remote_code=policy.trust_remote_code)
    except UNUSABLE:
        return
    check_rope_for_vllm(config)


def open_model(policy: "PolicySettings", tokenizer: Tokenizer, device: str, context_tokens: int = 0) -> OpenedModel:
    """Return the model on ``device`` (``auto``: a GPU if available), with ``context_tokens`` (0: its own context).
    Raises SettingsError: no such model or device, or unknown rotary embeddings.
    """
    check_model("policy.model", policy.model)
    with importing():
        import torch

        from penstock.shared.model.rope import settle_rope

    place, dtype = _device(device), getattr(torch, policy.dtype)
    model = load_causal_model("policy.model", policy.model, dtype, trust_remote_code=policy.trust_remote_code)
    settle_rope(model, context_tokens)
    model = model.eval().requires_grad_(False).to(place)
    config = model.config.get_text_config()
    stop = {*_ids(model.generation_config.eos_token_id), *_ids(config.eos_token_id), *stop_tokens(tokenizer)}
    return OpenedModel(
        model=model,
        parameters=dict(model.state_dict(keep_vars=True)),
        required=frozenset(name for name, _ in model.named_parameters()),
        device=place,
        stop=tuple(sorted(stop)),
        context_tokens=context_tokens or int(getattr(config, "max_position_embeddings", 0) or 1 << 30),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
    )


def _device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingsError(
            f"expected auto, cpu or a device of this machine, but {name!r} cannot be used ({first_line(error)}): "
            f"change run.device"
        ) from error
    return device


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
