"""FP8 rollouts beside bfloat16 on one GPU: tokens/s, and how long a swap of all weights stops decoding.

    python -m benchmarks.rollout.quantised                    one GPU, the 7B shape
    python -m benchmarks.rollout.quantised --device cpu       a small shape; weights are reloaded layer by layer there

vLLM with random weights, prompts of 64 tokens, and the replica's :class:`WeightSwapper`; each engine in a process of its
own, one after the other. ``swap_ms`` ends when the device has finished; ``differences`` counts copies that differ from the
version (null without a plan). Prints a JSON object for each engine, then one for all; ``ratio`` is against bfloat16.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES
from benchmarks.weights.update import configure

PROMPT_TOKENS, SWAPS = 64, 6
SCHEMES = {"bfloat16": None, "fp8_per_channel": "fp8_per_channel", "fp8_per_tensor": "fp8_per_tensor"}


def measured(folder: str, scheme: str, device: str, loads: list[int], tokens: int) -> dict[str, Any]:
    """Return the figures of one engine; in a process of its own."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM

    on_gpu = device == "cuda"
    more: dict[str, Any] = {"kv_cache_memory_bytes": 12 << 30} if on_gpu else {"enforce_eager": True}
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        quantization=SCHEMES[scheme],  # type: ignore[arg-type, unused-ignore]
        max_model_len=1024,
        max_num_seqs=max(loads),
        enable_prefix_caching=False,
        **more,
    )
    rate(llm, max(loads), 16)
    rates = {str(sequences): round(rate(llm, sequences, tokens)) for sequences in loads}
    worker: Any = llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined, unused-ignore]
    weights = sum(parameter.nbytes for parameter in worker.model_runner.get_model().parameters())
    swapped = swaps(folder, worker, device) if scheme != "fp8_per_tensor" else {}
    return {"tokens_per_s": rates, "weights_bytes": weights, **swapped}


def rate(llm: Any, sequences: int, tokens: int) -> float:
    """Return tokens/s of ``sequences`` completions of ``tokens`` tokens that are decoded together."""
    import torch
    from vllm import SamplingParams

    prompts = torch.randint(10, 4000, (sequences, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
    began_s = time.monotonic()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts.tolist()], sampling, use_tqdm=False)
    return sequences * tokens / (time.monotonic() - began_s)


def swaps(folder: str, worker: Any, device: str) -> dict[str, Any]:
    """Return the figures of swaps of a random version."""
    import torch

    from penstock.services.rollout.engines.checkpoint_form import CheckpointForm
    from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper

    def settled_s() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    place = torch.device(device)
    outline = CheckpointForm(folder).outlined(torch.bfloat16)
    version = {name: 0.02 * torch.randn_like(tensor, device=place) for name, tensor in outline.items()}
    swapper = WeightSwapper(worker.model_runner.get_model(), worker.vllm_config, place)
    swapper.prepare(version)
    times_ms = []
    for _ in range(SWAPS):
        began_s = settled_s()
        path, copied = swapper.swap()
        times_ms.append(1000 * (settled_s() - began_s))
    figures = {"path": path, "copied_bytes": copied, "swap_ms": round(statistics.median(times_ms), 2)}
    return {**figures, "swap_ms_max": round(max(times_ms), 2), "differences": swapper.differences()}


def main() -> None:
    """Run and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="")
    parser.add_argument("--sequences", type=int, nargs="+", default=[], help="256 and 32, or 8 on the CPU")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=["bfloat16", "fp8_per_channel"])
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    shape, loads = args.shape or ("7b" if on_gpu else "tiny"), args.sequences or ([256, 32] if on_gpu else [8])
    engines: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        configure(Path(folder), SHAPES[shape])
        for scheme in args.schemes:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                engines[scheme] = pool.apply(measured, (folder, scheme, args.device, loads, args.tokens))
            print(json.dumps({scheme: engines[scheme]}), flush=True)
    base = engines[args.schemes[0]]["tokens_per_s"]
    for figures in engines.values():
        figures["ratio"] = {load: round(value / base[load], 3) for load, value in figures["tokens_per_s"].items()}
    print(json.dumps({"device": args.device, "shape": shape, "engines": engines}))


if __name__ == "__main__":
    main()
