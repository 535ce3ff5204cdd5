"""Gap between the engine's and the trainer's logprobs of truncated samples, beside that of whole distributions.

    python -m benchmarks.truncation --engine transformers
    python -m benchmarks.truncation --engine vllm

A small random model in float32, 8 × 64 samples a row. "over all tokens" is what a trainer without the support would
compute for the same samples.
"""

import argparse
import asyncio
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.services.rollout.engines.engine import GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion, Sampling, no_ids
from tests.support import tiny
from tests.support.truncated import trainer_logprobs

_PROMPTS, _SAMPLES, _TOKENS = 8, 64, 24
_ROWS: dict[str, dict[str, Any]] = {
    "whole": {},
    "top_p 0.9": {"top_k": 256, "top_p": 0.9},
    "top_k 20": {"top_k": 20},
    "min_p 0.05": {"top_k": 256, "min_p": 0.05},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


def _model() -> Any:
    from tests.rollout.engines.vllm.test_engine import MODELS

    return MODELS[0]


@torch.inference_mode()
def _by_transformers(model: Any, requests: list[GenerationRequest]) -> list[tuple[GeneratedSample, ...]]:
    batch, made = Batch(model, requests, Tokens((1,)), torch.device("cpu")), dict[int, tuple[GeneratedSample, ...]]()
    while not batch.finished:
        made.update(batch.step(PolicyVersion(0)))
    return [made[place] for place in range(len(requests))]


async def _by_vllm(model: Any, rows: list[list[GenerationRequest]]) -> list[list[tuple[GeneratedSample, ...]]]:
    from penstock.services.rollout.engines.vllm.arguments import gather
    from penstock.services.rollout.engines.vllm.start import open_vllm
    from penstock.shared.weights.format.snapshot import write_snapshot
    from penstock.shared.weights.receiver.puller import file_offer

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        engine = await open_vllm(
            gather(folder, dtype="float32", seed=1, max_num_seqs=64, max_model_len=256, enforce_eager=True)
        )
        weights = write_snapshot(Path(folder), PolicyVersion(0), 0, model.named_parameters(), torch.float32)
        record = PolicyRecord(PolicyVersion(0), None, 0, 0.0, weights.digest, str(weights.location))
        await engine.stage(file_offer(record, 10.0))
        await engine.swap(PolicyVersion(0))
        made = [[(await engine.generate(request)).samples for request in row] for row in rows]
        await engine.close()
        return made


def _gap(model: Any, row: list[GenerationRequest], made: list[tuple[GeneratedSample, ...]]) -> tuple[float, float]:
    gaps = []
    for request, samples in zip(row, made, strict=True):
        own_logprobs = trainer_logprobs(model, request.prompt_token_ids, samples, request.sampling.temperature)
        gaps += [np.abs(own - s.behavior_logprobs) for own, s in zip(own_logprobs, samples, strict=True)]
    joined = np.concatenate(gaps)
    return float(joined.mean()), float(joined.max())


def main() -> None:
    """Print one row for each kind of truncation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    engine, model = parser.parse_args().engine, _model()
    prompts = [np.arange(2 + place, 14 + place, dtype=np.int32) for place in range(_PROMPTS)]
    rows = [
        [GenerationRequest(prompt, Sampling(_SAMPLES, _TOKENS, 1.0, **limits)) for prompt in prompts]
        for limits in _ROWS.values()
    ]
    made = asyncio.run(_by_vllm(model, rows)) if engine == "vllm" else [_by_transformers(model, row) for row in rows]
    print(f"{'':12} mean gap   largest    over all tokens   mean support")
    for name, row, groups in zip(_ROWS, rows, made, strict=True):
        unknown = [
            tuple(dataclasses.replace(s, support_sizes=no_ids(), support_ids=no_ids()) for s in g) for g in groups
        ]
        mean, largest = _gap(model, row, groups)
        sizes = [size for group in groups for sample in group for size in sample.support_sizes.tolist()]
        support = f"{np.mean(sizes):.1f}" if sizes else "48"
        print(f"{name:12} {mean:.2e}   {largest:.2e}   {_gap(model, row, unknown)[0]:.2e}          {support}")


if __name__ == "__main__":
    main()
