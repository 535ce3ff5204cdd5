"""A teacher's most probable tokens for groups of a test."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.shared.bus.messages import Experience, Sample
from tests.support import tiny


def with_tops(groups: Sequence[Experience], seed: int, top_k: int) -> list[Experience]:
    """Return ``groups`` with the teaching of the random model ``seed`` (0: the policy of tests), sample by sample."""
    model = tiny.model(seed)

    def taught(prompt: Any, sample: Sample) -> Sample:
        ids = torch.from_numpy(np.concatenate([prompt, sample.token_ids])).long()
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double(), -1)
        sampled_T = logprobs_TV.gather(-1, ids[len(prompt) :, None]).squeeze(-1)
        ids_TK = logprobs_TV.topk(top_k).indices.sort(-1).values
        return dataclasses.replace(
            sample,
            teacher_logprobs=sampled_T.numpy().astype(np.float32),
            teacher_top_ids=ids_TK.numpy().astype(np.int32),
            teacher_top_logprobs=logprobs_TV.gather(-1, ids_TK).numpy().astype(np.float32),
        )

    made = []
    for experience in groups:
        group = experience.group
        samples = tuple(taught(group.prompt_token_ids, sample) for sample in group.samples)
        made.append(dataclasses.replace(experience, group=dataclasses.replace(group, samples=samples)))
    return made
