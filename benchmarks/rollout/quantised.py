"""FP8 rollouts beside bfloat16 on one GPU: tokens/s, and how long a swap of all weights stops decoding.

    python -m benchmarks.rollout.quantised                    one GPU, the 7B shape
    python -m benchmarks.rollout.quantised --device cpu       a small shape; weights are reloaded layer by layer there
    python -m benchmarks.rollout.quantised --shape 30b-a3b --layers 8 --schemes bfloat16    a mixture's swap

vLLM with random weights, prompts of 64 tokens, and the replica's :class:`WeightSwapper`; each engine in a process of its
own, one after the other. ``swap_ms`` ends when the device has finished; ``differences`` counts copies that differ from the
version (null without a plan); ``layerwise_ms`` is of vLLM's layerwise reload of the same version. Prints a JSON object
for each engine, then one for all; ``ratio`` is against bfloat16.
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

from benchmarks.shapes import ALL_SHAPES, MIXTURES
from benchmarks.weights.update import configure
from penstock.services.rollout.engines.vllm.swap.copy_plan import CopyPlanRefused
from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper

PROMPT_TOKENS, SWAPS = 64, 6
_MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
SCHEMES = {"bfloat16": None, "fp8_per_channel": "fp8_per_channel", "fp8_per_tensor": "fp8_per_tensor"}


class Layerwise(WeightSwapper):
    """Swaps by vLLM's layerwise reload alone."""

    def _traced(self, tensors: Any) -> Any:
        raise CopyPlanRefused("the layerwise reload is measured")


def measured(folder: str, scheme: str, device: str, loads: list[int], tokens: int, eager: bool) -> dict[str, Any]:
    """Return the figures of one engine; in a process of its own."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM

    on_gpu = device == "cuda"
    more: dict[str, Any] = {"kv_cache_memory_bytes": 12 << 30 if not eager else 1 << 30} if on_gpu else {}
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        quantization=SCHEMES[scheme],  # type: ignore[arg-type, unused-ignore]
        max_model_len=1024,
        max_num_seqs=max(loads),
        enable_prefix_caching=False,
        enforce_eager=eager or not on_gpu,
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

    def settled_s() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    place = torch.device(device)
    outline = CheckpointForm(folder).outlined(torch.bfloat16)
    version = {name: 0.02 * torch.randn_like(tensor, device=place) for name, tensor in outline.items()}
    live = worker.model_runner.get_model()
    swapper = WeightSwapper(live, worker.vllm_config, place)
    swapper.prepare(version)

    def timed_ms(of: Any) -> tuple[list[float], tuple[str, int]]:
        times_ms = []
        for _ in range(SWAPS):
            began_s = settled_s()
            swapped = of.swap()
            times_ms.append(round(1000 * (settled_s() - began_s), 2))
        return times_ms, swapped

    times_ms, (path, copied) = timed_ms(swapper)
    figures = {"path": path, "copied_bytes": copied, "swap_ms": round(statistics.median(times_ms), 2)}
    figures |= {"swap_ms_max": max(times_ms), "differences": swapper.differences()}
    print(json.dumps(figures), flush=True)
    if path == "plan":
        layerwise = Layerwise(live, worker.vllm_config, place)
        layerwise.prepare(version)
        figures["layerwise_ms"] = round(statistics.median(timed_ms(layerwise)[0]), 2)
    return figures


def main() -> None:
    """Run and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(ALL_SHAPES), default="")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's")
    parser.add_argument("--sequences", type=int, nargs="+", default=[], help="256 and 32, or 8 on the CPU")
    parser.add_argument(
        "--eager", action="store_true", help="without CUDA graphs and with 1 GiB of KV cache, to measure swaps"
    )
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=["bfloat16", "fp8_per_channel"])
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    shape, loads = args.shape or ("7b" if on_gpu else "tiny"), args.sequences or ([256, 32] if on_gpu else [8])
    engines: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        changes = {"num_hidden_layers": args.layers} if args.layers else {}
        configure(Path(folder), {**ALL_SHAPES[shape], **(_MIXTURE if shape in MIXTURES else {}), **changes})
        for scheme in args.schemes:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                engines[scheme] = pool.apply(measured, (folder, scheme, args.device, loads, args.tokens, args.eager))
            print(json.dumps({scheme: engines[scheme]}), flush=True)
    base = engines[args.schemes[0]]["tokens_per_s"]
    for figures in engines.values():
        figures["ratio"] = {load: round(value / base[load], 3) for load, value in figures["tokens_per_s"].items()}
    print(json.dumps({"device": args.device, "shape": shape, "layers": args.layers, "engines": engines}))


if __name__ == "__main__":
    main()
