"""Open a Hugging Face policy: architecture, tokenizer and initial weights. Only this module imports transformers."""

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError

from shared.errors import SettingsError
from shared.model.model_source import check_model, check_source
from shared.process.importing import importing

if TYPE_CHECKING:
    import torch

    from services.rollout.engines.transformers.decoding import LanguageModel
    from shared.settings import PolicySettings

# Raised for missing files, no network (OSError), an unknown architecture, a bad name (ValueError), config.json fields
# (KeyError, TypeError), shapes (RuntimeError), or a missing package (ImportError).
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer(Protocol):
    chat_template: object
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None

    def __call__(self, text: str) -> Any:
        """Return tokens, as ``input_ids``."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **arguments: Any,
    ) -> list[int]:
        """Return a conversation's tokens, up to the assistant's turn."""

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the texts of token ids."""


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


def open_tokenizer(policy: "PolicySettings") -> Tokenizer:
    setting, source = ("policy.tokenizer", policy.tokenizer) if policy.tokenizer else ("policy.model", policy.model)
    check_source(setting, source, _TOKENIZER_FILES)
    with importing():
        from transformers import AutoTokenizer

    _log_as_we_do()
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=policy.trust_remote_code)
    except _UNUSABLE as error:
        raise SettingsError(
            f"could not load a tokenizer from {source!r} ({_first_line(error)}): change {setting}"
        ) from error
    return tokenizer


def check_for_vllm(policy: "PolicySettings") -> None:
    """Raise SettingsError for models that vLLM and the trainer compute differently."""
    check_model("policy.model", policy.model)
    with importing():
        from transformers import AutoConfig

        from shared.model.rope import check_rope_for_vllm

    try:
        config = AutoConfig.from_pretrained(policy.model, trust_remote_code=policy.trust_remote_code)
    except _UNUSABLE:
        return
    check_rope_for_vllm(config)


def open_model(policy: "PolicySettings", tokenizer: Tokenizer, device: str, context_tokens: int = 0) -> OpenedModel:
    """Return the model on ``device`` (``auto``: a GPU if available), with ``context_tokens`` (0: its own context).
    Raises SettingsError: no such model or device, or unknown rotary embeddings.
    """
    check_model("policy.model", policy.model)
    with importing():
        import torch
        from transformers import AutoModelForCausalLM

        from shared.model.rope import settle_rope

    place = _device(device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            policy.model,
            dtype=getattr(torch, policy.dtype),
            trust_remote_code=policy.trust_remote_code,
            use_safetensors=True,
        )
    except _UNUSABLE as error:
        raise SettingsError(
            f"could not load a causal language model from {policy.model!r} ({_first_line(error)}): change policy.model"
        ) from error
    settle_rope(model, context_tokens)
    model = model.eval().requires_grad_(False).to(place)
    config = model.config.get_text_config()
    stop = {*_ids(model.generation_config.eos_token_id), *_ids(config.eos_token_id), *_ids(tokenizer.eos_token_id)}
    return OpenedModel(
        model=model,
        parameters=dict(model.state_dict(keep_vars=True)),
        required=frozenset(name for name, _ in model.named_parameters()),
        device=place,
        stop=tuple(sorted(stop)),
        context_tokens=context_tokens or int(getattr(config, "max_position_embeddings", 0) or 1 << 30),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
    )


def _log_as_we_do() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.disable_default_handler()
    logging.enable_propagation()


def _device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingsError(
            f"expected auto, cpu or a device of this machine, but {name!r} cannot be used ({_first_line(error)}): "
            f"change run.device"
        ) from error
    return device


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
