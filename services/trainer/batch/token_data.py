"""Per-token loss inputs, on the rank's device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import MicroBatch, RoutedSample
from penstock.shared.bus.messages import Experience, Float32Array, Purpose
from penstock.shared.errors import SettingsError


@dataclasses.dataclass(slots=True)
class LossInputs:
    """Filled in field order; unneeded fields are None.

    ``N`` trained tokens, ``lengths_S`` of each sample. Logprobs are in nats.
    """

    batch: MicroBatch
    lengths_S: Tensor
    behavior_logprobs_N: Tensor
    lags_N: Tensor
    """Steps from the group's oldest trained token to the newest version."""
    proximal_logprobs_N: Tensor | None = None
    """Under the weights before this step."""
    reference_logprobs_N: Tensor | None = None
    teacher_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    """The critic's, before this step's updates."""
    advantages_N: Tensor | None = None
    returns_N: Tensor | None = None
    demonstrated_S: npt.NDArray[np.bool_] | None = None
    """Whether a sample is a demonstration; None: none of the batch is."""

    def chosen(self, values_N: Tensor, *, demonstrated: bool = False) -> Tensor:
        """Return the values of tokens that a policy drew, or those of demonstrations."""
        if self.demonstrated_S is None:
            return values_N[:0] if demonstrated else values_N
        return values_N[torch.from_numpy(self._places(self.demonstrated_S == demonstrated)).to(values_N.device)]

    def _places(self, chosen_S: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        return np.flatnonzero(np.repeat(chosen_S, self.batch.lengths_S))

    def lengths(self, *, demonstrated: bool) -> Tensor:
        """Return the lengths of the samples whose tokens :meth:`chosen` returns."""
        shown_S = np.zeros(len(self.batch.lengths_S), np.bool_) if self.demonstrated_S is None else self.demonstrated_S
        return torch.from_numpy(self.batch.lengths_S[shown_S == demonstrated]).to(self.lengths_S.device)

    @property
    def routed(self) -> list[RoutedSample]:
        """What may have routes: samples that a policy drew."""
        shown_S = [False] * len(self.batch.routed) if self.demonstrated_S is None else self.demonstrated_S
        return [sample for sample, shown in zip(self.batch.routed, shown_S, strict=True) if not shown]

    def without_demonstrations(self) -> "LossInputs":
        """Return the inputs of the tokens that a policy drew; of ``batch``, only its teacher's tokens are chosen."""
        if self.demonstrated_S is None:
            return self
        batch, teacher = self.batch, self.batch.teacher
        if teacher is not None:
            batch = dataclasses.replace(batch, teacher=teacher.at(self._places(~self.demonstrated_S)))
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        drawn: dict[str, Any] = {
            name: self.chosen(value) for name, value in fields.items() if name.endswith("_N") and value is not None
        }
        lengths_S = self.lengths(demonstrated=False)
        return dataclasses.replace(self, **drawn, batch=batch, lengths_S=lengths_S, demonstrated_S=None)


def of(
    batch: MicroBatch, lags_M: Sequence[Float32Array], demonstrated_M: Sequence[bool], device: torch.device
) -> LossInputs:
    """``lags_M`` are the lags of the samples' trained tokens, ``demonstrated_M`` whether they are demonstrations."""
    lags_N = np.concatenate([np.zeros(0, np.float32), *(lags_M[place] for place in batch.places_S)])
    demonstrated_S = np.array([demonstrated_M[place] for place in batch.places_S], dtype=np.bool_)
    return LossInputs(
        batch=batch,
        lengths_S=torch.from_numpy(batch.lengths_S).to(device),
        behavior_logprobs_N=torch.from_numpy(batch.behavior_logprobs_N).to(device),
        lags_N=torch.from_numpy(lags_N).to(device),
        demonstrated_S=demonstrated_S if any(demonstrated_M) else None,
    )


def add_reference(inputs: Sequence[LossInputs], batch: Sequence[Experience]) -> None:
    """Raises SettingsError: an older, journalled group has none."""
    logprobs_M = [logprobs for experience in batch for logprobs in _reference_of_samples(experience)]
    for micro_batch in inputs:
        micro_batch.reference_logprobs_N = _of_trained_tokens(logprobs_M, micro_batch)


def add_teacher(inputs: Sequence[LossInputs], batch: Sequence[Experience], top_k: int = 0) -> None:
    """Raises SettingsError: a journalled group has none, or other most probable tokens than ``top_k``, as it was trained
    with another algorithm.distillation or distillation_top_k.
    """
    logprobs_M = [logprobs for experience in batch for logprobs in _teacher_of_samples(experience)]
    for experience in batch:
        if experience.group.prompt.purpose is Purpose.DEMONSTRATE:
            continue
        if top_k and (number := experience.group.teacher_top_k) != top_k:
            raise SettingsError(
                f"expected the teacher's {top_k} most probable tokens with group {experience.group.prompt.group_id} in the journal, "
                f"found {number}: it was trained with algorithm.distillation_top_k = {number}; set that"
            )
    for micro_batch in inputs:
        micro_batch.teacher_logprobs_N = _of_trained_tokens(logprobs_M, micro_batch)


def _of_trained_tokens(logprobs_M: Sequence[Float32Array], micro_batch: LossInputs) -> Tensor:
    trained_S = zip(micro_batch.batch.places_S, micro_batch.batch.trained_S, strict=True)
    parts = [logprobs_M[place][trained] for place, trained in trained_S]
    logprobs_N = np.concatenate([np.zeros(0, np.float32), *parts])
    return torch.from_numpy(logprobs_N).to(micro_batch.behavior_logprobs_N.device)


def _of_no_model(experience: Experience) -> list[Float32Array]:
    """Return zeros, which no loss reads, for a demonstration: it never reached the reward service."""
    return [np.zeros(len(sample.token_ids), np.float32) for sample in experience.group.samples]


def _teacher_of_samples(experience: Experience) -> list[Float32Array]:
    if experience.group.prompt.purpose is Purpose.DEMONSTRATE:
        return _of_no_model(experience)
    logprobs = [sample.teacher_logprobs for sample in experience.group.samples if sample.teacher_logprobs is not None]
    if len(logprobs) < len(experience.group.samples):
        raise SettingsError(
            f"expected teacher logprobs with group {experience.group.prompt.group_id} in the journal, found none: it was trained "
            "with algorithm.distillation = 0; set that"
        )
    return logprobs


def _reference_of_samples(experience: Experience) -> list[Float32Array]:
    if experience.group.prompt.purpose is Purpose.DEMONSTRATE:
        return _of_no_model(experience)
    if experience.reference_logprobs is None:
        raise SettingsError(
            f"expected reference logprobs with group {experience.group.prompt.group_id} in the journal, found none: it was "
            'trained with algorithm.reference = "trainer"; set that'
        )
    ends = np.cumsum([len(sample.token_ids) for sample in experience.group.samples])
    return np.split(experience.reference_logprobs, ends[:-1])
