"""The policy as the trainer sees it: a Hugging Face causal model that gives the logprobs of given tokens.

The only file of the trainer that knows transformers. It computes logits only where a trained token is predicted.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.packing import MicroBatch, attention_mask
from shared.errors import SettingsError
from shared.model_source import check_source
from shared.settings import PolicySettings

_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of each trained token: its logprob, and the entropy of the distribution it was drawn from (no gradient), nats."""

    policy_logprobs_N: Tensor
    entropy_N: Tensor


class Policy(nn.Module):
    """A causal language model whose forward pass takes a micro-batch.

    Args:
        model: a Hugging Face causal model.
        temperature: the softmax temperature of sampling; logits are divided by it.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        """Return the logprobs of ``batch``'s trained tokens under the current weights."""
        device = next(self.model.parameters()).device
        hidden_BTD = self.model.get_decoder()(
            input_ids=torch.from_numpy(batch.input_ids_BT).to(device),
            position_ids=torch.from_numpy(batch.position_ids_BT).to(device),
            attention_mask=torch.from_numpy(attention_mask(batch.segments_BT)).to(device),
            use_cache=False,
        ).last_hidden_state
        rows_N, columns_N = torch.from_numpy(batch.rows_N).to(device), torch.from_numpy(batch.columns_N).to(device)
        hidden_ND = hidden_BTD[rows_N, columns_N]
        logits_NV = self.model.get_output_embeddings()(hidden_ND).float() / self._temperature
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        targets_N = torch.from_numpy(batch.targets_N).to(device)
        chosen_N = logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        with torch.no_grad():
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return TokenLogprobs(policy_logprobs_N=chosen_N, entropy_N=entropy_N)


def load_model(settings: PolicySettings, training_dtype: torch.dtype) -> Any:
    """Return the Hugging Face model in ``policy.model``.

    Raises:
        SettingsError: there is none, or it scales its logits in a way that this forward pass does not know.
    """
    check_source("policy.model", settings.model, ("config.json",))
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


def export(model: Any, settings: PolicySettings, folder: Path) -> None:
    """Write model and tokenizer in Hugging Face form, whole or not at all."""
    from transformers import AutoTokenizer

    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    AutoTokenizer.from_pretrained(settings.tokenizer or settings.model).save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
