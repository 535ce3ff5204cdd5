"""Time of vLLM's scheduler per step, with the shorter way for plain decoding and without it, alternately.

    python -m benchmarks.rollout.scheduling --requests 256 --rounds 5    # needs no GPU, and no free one

The scheduler is alone: a list of tokens takes the place of the model. ``--requests`` requests are in the middle of
their completions, two steps are under way, as with asynchronous scheduling. Prints milliseconds of a step (means of a
round, medians of rounds): ``schedule``, ``update`` (adding the tokens) and their sum, of Penstock's (``ours``) and
vLLM's own (``theirs``), and ``ratio``: the sum of ours / theirs.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from penstock.services.rollout.engines.vllm.arguments import check_version, set_environment

BLOCK_SIZE = 16
_PROMPT_TOKENS, _NEW_TOKENS, _CONTEXT = 64, 512, 1024
_WARM_UPS, _STEPS = 20, 300


def scheduler_config(folder: Path, shape: Mapping[str, Any], *, sequences: int, context: int, tokens: int) -> Any:
    """Return vLLM's configuration of an asynchronous scheduler; ``folder`` gets a model's ``config.json``.

    Args:
        shape: more of the model's configuration than that it is a Qwen2.
        sequences: most that are scheduled at a time.
        context: tokens of the longest sequence.
        tokens: most in a step.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; default: a share of the machine's memory
    set_environment()
    model = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": context, **shape}
    (folder / "config.json").write_text(json.dumps(model))
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(get_hash_fn_by_name("sha256"))
    return AsyncEngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=context, max_num_seqs=sequences, dtype="float32",
        enforce_eager=True, enable_prefix_caching=True, async_scheduling=True, block_size=BLOCK_SIZE,
        max_num_batched_tokens=tokens,
    ).create_engine_config()  # fmt: skip


def scheduler(kind: Any, config: Any, blocks: int, specs: Sequence[Any] = ()) -> Any:
    """Return a scheduler of the class ``kind`` for a model with ``blocks`` of KV cache.

    Args:
        specs: vLLM's, of each kind of layer; default: full attention alone.
    """
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = blocks
    full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs or [full])]
    cache = KVCacheConfig(blocks, [], groups)
    return kind(config, cache, StructuredOutputManager(config), block_size=BLOCK_SIZE)


def request(name: str, prompt: list[int], **sampling: Any) -> Any:
    """Return a request that wants its final output."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    parameters = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
    hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256"))
    return Request(name, list(prompt), parameters, None, arrival_time=0.0, block_hasher=hasher)


def output(step: Any, tokens: dict[str, list[int]]) -> Any:
    """Return the model runner's answer to ``step``."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=[tokens[name] for name in names])


def measure(kind: Any, config: Any, requests: int) -> tuple[float, float]:
    """Return seconds of ``schedule`` and of ``update_from_output`` in a step."""
    made = scheduler(kind, config, requests * (_CONTEXT // BLOCK_SIZE))
    for number in range(requests):
        prompt = [number % 100, *range(1, _PROMPT_TOKENS)]
        made.add_request(request(f"request-{number}", prompt, max_tokens=_NEW_TOKENS, ignore_eos=True))
    under_way: list[Any] = [made.schedule()]
    spent: list[tuple[float, float]] = []
    gc.collect()
    gc.freeze()
    for number in range(_WARM_UPS + _STEPS):
        begin_s = time.perf_counter()
        under_way.append(made.schedule())
        scheduled_s = time.perf_counter()
        step = under_way.pop(0)
        drawn = output(step, {name: [7] for name in step.num_scheduled_tokens})
        drawn_s = time.perf_counter()
        made.update_from_output(step, drawn)
        if number >= _WARM_UPS:
            spent.append((scheduled_s - begin_s, time.perf_counter() - drawn_s))
    gc.unfreeze()
    return statistics.fmean(schedule_s for schedule_s, _ in spent), statistics.fmean(update_s for _, update_s in spent)


def compare(folder: Path, requests: int, rounds: int) -> dict[str, Any]:
    """Return the result."""
    config = scheduler_config(
        folder, SHAPES["0.5b"], sequences=requests, context=_CONTEXT, tokens=requests * _PROMPT_TOKENS
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from penstock.services.rollout.engines.vllm.scheduling.schedulers import HoldingAsyncScheduler

    kinds = {"ours": HoldingAsyncScheduler, "theirs": AsyncScheduler}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            measured[name].append(measure(kind, config, requests))
    figures: dict[str, dict[str, float]] = {}
    for name, of_kind in measured.items():
        schedule_s, update_s = (statistics.median(part) for part in zip(*of_kind, strict=True))
        figures[name] = {
            "schedule_ms": round(schedule_s * 1e3, 3),
            "update_ms": round(update_s * 1e3, 3),
            "sum_ms": round((schedule_s + update_s) * 1e3, 3),
        }
    return {
        "ratio": round(figures["ours"]["sum_ms"] / figures["theirs"]["sum_ms"], 3),
        **figures,
        "requests": requests,
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 1),
        "versions": {"vllm": check_version()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(Path(folder), arguments.requests, arguments.rounds)))


if __name__ == "__main__":
    main()
