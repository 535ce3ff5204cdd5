"""The policy as the trainer sees it: a Hugging Face causal model that gives the logprobs of given tokens.

It computes logits only where a trained token is predicted, and not all of them at once (``logits``). Only this file and
``attention`` know transformers.
"""

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer import adapter, attention, kernels
from services.trainer.flops import ModelSizes
from services.trainer.logits import TokenLogprobs, token_logprobs
from services.trainer.packing import MicroBatch
from shared.errors import SettingsError
from shared.importing import importing
from shared.model_source import check_source
from shared.settings import PolicySettings

_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """A causal language model whose forward pass takes a micro-batch; logits are divided by each token's temperature.

    Args:
        model: a Hugging Face causal model.
        entropy_gradient: whether entropies carry a gradient, for an entropy bonus.
        kind: which attention.
        chunk_tokens: logits of so many tokens are there at a time; 0: of all.
        fused: whether one kernel may make logprobs of logits, on a GPU.
    """

    def __init__(
        self,
        model: Any,
        *,
        entropy_gradient: bool = False,
        kind: attention.Kind = "auto",
        chunk_tokens: int = 0,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.sizes = measure(model)
        """What its forward pass costs depends on."""
        attention.install(model)
        self._entropy_gradient = entropy_gradient
        self._kind: attention.Kind = kind
        self._chunk_tokens = chunk_tokens
        self._fused = fused

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the logprobs of ``batch``'s trained tokens under the current weights."""
        hidden_ND = attention.hidden_states(self.model.get_decoder(), batch, self._kind)
        return token_logprobs(
            hidden_ND,
            self.model.get_output_embeddings(),
            torch.from_numpy(batch.targets_N).to(hidden_ND.device),
            torch.from_numpy(batch.temperatures_N).to(hidden_ND.device),
            self._chunk_tokens,
            entropy_gradient=self._entropy_gradient,
            fused=self._fused,
        )


def measure(model: Any) -> ModelSizes:
    """Return what a forward pass of ``model`` costs depends on; of experts, all are counted."""
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    linear = sum(
        int(getattr(module.weight, "ds_numel", module.weight.numel()))  # whole, where a rank has a part of it
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not output
    )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSizes(
        linear_weights=linear,
        attention_width=config.num_hidden_layers * config.num_attention_heads * head,
        output_weights=config.vocab_size * config.hidden_size,
    )


def load_model(settings: PolicySettings, training_dtype: torch.dtype) -> Any:
    """Return the Hugging Face model in ``policy.model``.

    Raises:
        SettingsError: there is none, or it scales its logits in a way that this forward pass does not know.
    """
    check_source("policy.model", settings.model, ("config.json",))
    with importing():
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            settings.model,
            dtype=training_dtype,
            attn_implementation="sdpa",
            trust_remote_code=settings.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"expected a Hugging Face causal model in {settings.model!r}, found: {error}: change policy.model"
        ) from error
    scaled = [name for name in _SCALED_LOGITS if getattr(model.config, name, None)]
    if scaled:
        raise SettingsError(
            f"expected a model with plain logits, found {scaled[0]} in {settings.model}'s config: "
            "this version cannot train it; change policy.model"
        )
    return model


def load_reference(
    settings: PolicySettings,
    dtype: torch.dtype,
    device: str,
    *,
    kind: attention.Kind = "auto",
    fused: kernels.Kind = "auto",
    chunk_tokens: int = 0,
) -> Policy:
    """Return the initial policy, frozen, on this rank's device: whole on every rank, whatever the ZeRO stage."""
    model = load_model(settings, dtype)
    kernels.install(model, fused, device)
    reference = Policy(model, kind=kind, chunk_tokens=chunk_tokens, fused=fused != "torch")
    return reference.to(torch.device(device)).eval().requires_grad_(False)


def load_trunk(settings: PolicySettings, model: str, dtype: torch.dtype) -> tuple[Any, int]:
    """Return ``model`` (empty: the policy's) without its output layer, for a critic, and its hidden states' width."""
    chosen = settings.model_copy(update={"model": model or settings.model})
    whole = load_model(chosen, dtype)
    return whole.get_decoder(), int(whole.config.get_text_config().hidden_size)


def export(model: Any, tensors: Iterable[tuple[str, Tensor]], settings: PolicySettings, folder: Path) -> None:
    """Write ``model`` with ``tensors`` (copied one by one) and the tokenizer in Hugging Face form, whole or not at all."""
    from transformers import AutoTokenizer

    with _whole(folder) as beside:
        model.save_pretrained(beside, state_dict={name: tensor.to("cpu", copy=True) for name, tensor in tensors})
        AutoTokenizer.from_pretrained(settings.tokenizer or settings.model).save_pretrained(beside)


def export_adapter(factors: Mapping[str, Tensor], settings: PolicySettings, folder: Path) -> None:
    """Write an adapter's ``factors`` (names of a PEFT file) in PEFT form, whole or not at all."""
    from safetensors.torch import save_file

    with _whole(folder) as beside:
        (beside / "adapter_config.json").write_bytes(adapter.file_configuration(settings, factors))
        copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in factors.items()}
        save_file(copies, beside / "adapter_model.safetensors")


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Give the block a folder to write, which takes the place of ``folder`` when all is written."""
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
