"""A frozen language model, the initial policy or a teacher: logprobs of given tokens after given prompts. Imports torch.

    logprob of token t = log_softmax(logits at t − 1 / its temperature)_t       (shared/model/logits.py)

With ``top_k``, also the most probable tokens at each position, at the same temperature and over the same logits.
Sequences are right-padded rows, with logits in chunks for completion tokens only. If ``self_test`` finds a difference
to the unmodified model, sequences are computed one by one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.services.reward.models.placement import Placed, pick_device, pick_dtype
from penstock.services.reward.models.reading import Reading
from penstock.services.reward.models.self_test import LENGTHS, choose_alone
from penstock.shared.bus.messages import Float32Array, Int32Array
from penstock.shared.model.causal_model import eager_attention, load_causal_model, ordinary_ids
from penstock.shared.model.logits import logprobs
from penstock.shared.model.logits_projection import projection
from penstock.shared.model.logits_transform import logits_transform
from penstock.shared.model.rope import settle_rope
from penstock.shared.process.memory_timeline import Held
from penstock.shared.settings import Settings

CHUNK_TOKENS = 2048
"""Tokens whose logits are in memory at a time: 1.2 GB for a vocabulary of 150,000."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """A completion after its prompt."""

    prompt_token_ids: Int32Array
    token_ids: Int32Array
    temperature: float

    @property
    def tokens(self) -> int:
        """Tokens read; the last one predicts nothing."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1

    @property
    def input_ids(self) -> Int32Array:
        return np.concatenate([self.prompt_token_ids, self.token_ids[:-1]])


class FrozenPolicy:
    """``model``, as the setting ``where`` names it; "" for ``policy.model``.

    With ``top_k``, its readings have its most probable tokens among the first ``words`` of its vocabulary.

    Raises:
        SettingsError: it does not load, lacks tensors, or its logit scaling or positions are unsupported.
    """

    def __init__(
        self, settings: Settings, model: str = "", where: str = "policy.model", top_k: int = 0, words: int = 0
    ) -> None:
        work, policy, source = settings.model_work, settings.policy, model or settings.policy.model
        device = pick_device(work.device, "reward.models.device")
        trust = policy.trust_remote_code and source == policy.model
        dtype = pick_dtype(device, on_gpu=policy.dtype)
        module = load_causal_model(where, source, dtype, trust_remote_code=trust)
        settle_rope(module, settings.rollout.max_model_len, name=where)
        self._transform = logits_transform(module)
        self._logits = settings.trainer.logits  # as in the policy, so that logprobs differ by weights only
        projection(module.get_output_embeddings(), self._logits)  # fail now rather than at the first group
        self._where, self._top_k, self._words = where, top_k, words
        self._placed = Placed(module, device, work.threads)
        self._alone = False
        self._alone = self._placed.guarded(self._test)

    def _test(self) -> bool:
        module, lot = self._placed.module, np.random.default_rng(0)
        ids, context = (
            ordinary_ids(module.config),
            getattr(module.config.get_text_config(), "max_position_embeddings", 0),
        )
        lengths = [max(2, min(length, int(context or length))) for length in LENGTHS]
        drawn = [(lot.choice(ids, length // 2), lot.choice(ids, length - length // 2)) for length in lengths]

        def reference(sequence: TokenSequence) -> Float32Array:
            with eager_attention(module):
                return self._plainly(sequence).logprobs_N

        return choose_alone(
            [TokenSequence(prompt, completion, 1.0) for prompt, completion in drawn],
            lambda batch: [reading.logprobs_N for reading in self._read(batch)],
            reference,
            half=module.dtype != torch.float32,
            setting=self._where,
        )

    def _plainly(self, sequence: TokenSequence) -> Reading:
        inputs_BT = torch.from_numpy(sequence.input_ids[None]).long().to(self._placed.device)
        logits_TV = self._placed.module(input_ids=inputs_BT, use_cache=False).logits[
            0, len(sequence.prompt_token_ids) - 1 :
        ]
        targets_T = torch.from_numpy(sequence.token_ids).long().to(logits_TV.device)
        temperatures_T = torch.full(targets_T.shape, sequence.temperature, device=logits_TV.device)
        return _reading(self._of_logits(logits_TV.float(), targets_T, temperatures_T))

    def compute(self, batch: Sequence[TokenSequence]) -> list[Reading]:
        """Return the logprobs of each completion's tokens (float32, nats). Raises NoRoom."""
        return self._placed.guarded(lambda: self._read(batch))

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        return int(self._placed.module.get_input_embeddings().num_embeddings)

    def held(self, component: str) -> Held:
        """Return what the model holds on its device, as ``component``."""
        return self._placed.held(component)

    @property
    def on_cpu(self) -> bool:
        return self._placed.device.type == "cpu"

    def offload(self) -> None:
        self._placed.offload()

    def restore(self) -> None:
        """Move them back. Raises NoRoom."""
        self._placed.restore()

    def _read(self, batch: Sequence[TokenSequence]) -> list[Reading]:
        if self._alone:
            return [self._plainly(sequence) for sequence in batch]
        hidden_ND = self._hidden_states(batch)
        targets_N = (
            torch.from_numpy(np.concatenate([sequence.token_ids for sequence in batch])).to(hidden_ND.device).long()
        )
        temperatures = np.repeat(
            [sequence.temperature for sequence in batch], [len(sequence.token_ids) for sequence in batch]
        )
        temperatures_N = torch.from_numpy(temperatures.astype(np.float32)).to(hidden_ND.device)
        output = projection(self._placed.module.get_output_embeddings(), self._logits)
        parts = []
        for start in range(0, len(targets_N), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            logits_NV = self._transform.after(output(self._transform.before(hidden_ND[chunk])))
            parts.append(self._of_logits(logits_NV, targets_N[chunk], temperatures_N[chunk]))
        lengths = [len(sequence.token_ids) for sequence in batch]
        whole = (torch.split(torch.cat(column), lengths) for column in zip(*parts, strict=True))
        return [_reading(tensors) for tensors in zip(*whole, strict=True)]

    def _of_logits(self, logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, ...]:
        logprobs_N = logprobs(logits_NV, targets_N, temperatures_N)
        if not self._top_k:
            return (logprobs_N,)
        return logprobs_N, *most_probable(logits_NV, temperatures_N, self._top_k, self._words)

    def _hidden_states(self, batch: Sequence[TokenSequence]) -> Tensor:
        """Return the states that predict completion tokens (N × D)."""
        inputs_BT = np.zeros((len(batch), max(sequence.tokens for sequence in batch)), dtype=np.int64)
        mask_BT, predicts_BT = np.zeros_like(inputs_BT), np.zeros_like(inputs_BT, dtype=bool)
        for row, sequence in enumerate(batch):
            inputs_BT[row, : sequence.tokens] = sequence.input_ids
            mask_BT[row, : sequence.tokens] = 1
            predicts_BT[row, len(sequence.prompt_token_ids) - 1 : sequence.tokens] = True
        device = self._placed.device
        hidden_BTD: Tensor = self._placed.module.get_decoder()(
            input_ids=torch.from_numpy(inputs_BT).to(device),
            attention_mask=torch.from_numpy(mask_BT).to(device),
            use_cache=False,
        ).last_hidden_state
        return hidden_BTD[torch.from_numpy(predicts_BT).to(device)]


def most_probable(logits_NV: Tensor, temperatures_N: Tensor, top_k: int, words: int) -> tuple[Tensor, Tensor]:
    """Return the ids of the ``top_k`` most probable of the first ``words`` tokens, ascending, and their logprobs over all.

    A model's vocabulary may be padded beyond the tokenizer's words, and not alike in teacher and policy.
    """
    x_NV = logits_NV.float() / temperatures_N[:, None]
    ids_NK = x_NV[:, :words].topk(top_k, dim=-1).indices.sort(dim=-1).values
    return ids_NK, x_NV.gather(-1, ids_NK) - torch.logsumexp(x_NV, dim=-1, keepdim=True)


def _reading(tensors: Sequence[Tensor]) -> Reading:
    logprobs_N: Float32Array = tensors[0].cpu().numpy()
    if len(tensors) == 1:
        return Reading(logprobs_N)
    top_NK: Float32Array = tensors[2].clamp(max=0.0).cpu().numpy()
    return Reading(logprobs_N, tensors[1].cpu().numpy().astype(np.int32), top_NK)
