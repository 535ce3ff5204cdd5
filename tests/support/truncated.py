"""Truncated sampling, computed plainly, and the trainer's logprobs of samples."""

from typing import Any

import numpy as np
import torch

from penstock.services.rollout.engines.engine import GeneratedSample
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy
from penstock.shared.bus.messages import Float32Array, Int32Array, Sample, Sampling


def supports_of(sample: GeneratedSample | Sample) -> list[set[int]]:
    """Return the ids listed at each position."""
    ends = np.cumsum(np.abs(sample.support_sizes))
    return [set(part.tolist()) for part in np.split(sample.support_ids, ends[:-1])]


@torch.inference_mode()
def expected_supports(model: Any, prompt: Int32Array, sample: GeneratedSample, sampling: Sampling) -> list[set[int]]:
    """Return the tokens that min-p, top-k and then top-p leave at each position, in float64."""
    ids = torch.tensor([[*prompt.tolist(), *sample.token_ids.tolist()]])
    logits_TV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / sampling.temperature
    supports = []
    for p_V in logits_TV.softmax(-1).numpy():
        order = [int(v) for v in np.argsort(-p_V, kind="stable") if p_V[v] >= sampling.min_p * p_V.max()]
        order = order[: sampling.top_k]
        before = np.cumsum([0.0, *p_V[order]])[:-1] / p_V[order].sum()
        supports.append({v for v, mass in zip(order, before, strict=True) if mass < sampling.top_p})
    return supports


@torch.inference_mode()
def trainer_logprobs(
    model: Any, prompt: Int32Array, samples: tuple[GeneratedSample, ...], temperature: float, chunk_tokens: int = 0
) -> list[Float32Array]:
    """Return the trainer's logprobs of each sample, packed in one row."""
    made = tuple(
        Sample(s.token_ids, s.behavior_logprobs, s.version_spans, s.finish_reason, "", s.support_sizes, s.support_ids)
        for s in samples
    )
    row = PackedRow(prompt, made, tuple(range(len(made))), temperature)
    found_N = Policy(model, chunk_tokens=chunk_tokens)(micro_batch([row])).policy_logprobs_N.numpy()
    return np.split(found_N, np.cumsum([len(sample.token_ids) for sample in made])[:-1])
