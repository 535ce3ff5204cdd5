"""The initial policy, frozen: logprobs of given tokens after given prompts. Imports torch.

    logprob of token t = log_softmax(logits at t − 1 / its temperature)_t       (shared/logits.py)

Each sequence is a row of its own, padded on the right, which a causal model's tokens do not see. Logits are computed only where a
completion's token is predicted, and for so many tokens at a time.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.reward.placement import Placed, first_line, pick_device, pick_dtype
from shared.errors import SettingsError
from shared.logits import logprobs
from shared.messages import Float32Array, Int32Array
from shared.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """A completion after its prompt."""

    prompt_token_ids: Int32Array
    token_ids: Int32Array
    temperature: float
    """What the logits are divided by: the one at which it was sampled."""

    @property
    def tokens(self) -> int:
        """How many tokens the model reads: the last one predicts nothing."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1

    @property
    def input_ids(self) -> Int32Array:
        """What the model reads."""
        return np.concatenate([self.prompt_token_ids, self.token_ids[:-1]])


class FrozenPolicy:
    """The model in ``policy.model``.

    Raises:
        SettingsError: there is none that loads.
    """

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        work, policy = settings.reward.reference, settings.policy
        device = pick_device(work.device, "reward.reference.device")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                policy.model,
                dtype=pick_dtype(work.dtype, device, on_gpu=policy.dtype),
                attn_implementation="sdpa",
                trust_remote_code=policy.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"expected a Hugging Face causal model in {policy.model!r}, found: {first_line(error)}: change policy.model"
            ) from error
        self._chunk_tokens = work.logits_chunk_tokens
        self._placed = Placed(model, device, work.threads)

    def compute(self, batch: Sequence[TokenSequence]) -> list[Float32Array]:
        """Return the logprobs of each completion's tokens (float32, nats).

        Raises:
            NoRoom: they do not fit into memory together.
        """
        return self._placed.guarded(lambda: self._logprobs(batch))

    def offload(self) -> None:
        """Move the weights to the host's memory."""
        self._placed.offload()

    def restore(self) -> None:
        """Move them back. Raises NoRoom."""
        self._placed.restore()

    def _logprobs(self, batch: Sequence[TokenSequence]) -> list[Float32Array]:
        hidden_ND = self._hidden_states(batch)
        targets_N = torch.from_numpy(np.concatenate([one.token_ids for one in batch])).to(hidden_ND.device).long()
        temperatures = np.repeat([one.temperature for one in batch], [len(one.token_ids) for one in batch])
        temperatures_N = torch.from_numpy(temperatures.astype(np.float32)).to(hidden_ND.device)
        output = self._placed.module.get_output_embeddings()
        parts = []
        for start in range(0, len(targets_N), self._chunk_tokens):
            chunk = slice(start, start + self._chunk_tokens)
            parts.append(logprobs(output(hidden_ND[chunk]), targets_N[chunk], temperatures_N[chunk]))
        found: Float32Array = torch.cat(parts).cpu().numpy()
        return np.split(found, np.cumsum([len(one.token_ids) for one in batch])[:-1])

    def _hidden_states(self, batch: Sequence[TokenSequence]) -> Tensor:
        """Return what predicts each completion's tokens (N × D), one sequence after another."""
        inputs_BT = np.zeros((len(batch), max(one.tokens for one in batch)), dtype=np.int64)
        mask_BT, predicts_BT = np.zeros_like(inputs_BT), np.zeros_like(inputs_BT, dtype=bool)
        for row, one in enumerate(batch):
            inputs_BT[row, : one.tokens] = one.input_ids
            mask_BT[row, : one.tokens] = 1
            predicts_BT[row, len(one.prompt_token_ids) - 1 : one.tokens] = True
        device = self._placed.device
        hidden_BTD: Tensor = self._placed.module.get_decoder()(
            input_ids=torch.from_numpy(inputs_BT).to(device),
            attention_mask=torch.from_numpy(mask_BT).to(device),
            use_cache=False,
        ).last_hidden_state
        return hidden_BTD[torch.from_numpy(predicts_BT).to(device)]
