"""Whether each preset learns the arithmetic example.

    python -m benchmarks.presets --presets grpo,gspo --steps 200

Prints a Markdown table row per preset (docs/algorithms.md), and accuracies before and after, seconds and last metrics.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from benchmarks.learning import Learned, learn
from penstock.shared.settings.algorithm import Preset

TUNED: Mapping[str, Mapping[str, Any]] = {
    "gspo": {"clip": (0.2, 0.28)},
    "dapo": {"overlong": (0.0, 1.0)},
    "ppo": {"critic": {"learning_rate": 1e-3}},
}
"""Overrides for a small model; GSPO's bounds assume steps a thousand times smaller, and DAPO's buffer, a fifth
of 4 tokens, has no token."""
LEARNING_RATES: Mapping[str, float] = {}
"""Overrides."""
LORA = "lora_grpo"
"""GRPO with adapters."""


def run(folder: Path, preset: str, steps: int) -> Learned:
    """Run one preset."""
    trainer = {"learning_rate": LEARNING_RATES[preset]} if preset in LEARNING_RATES else {}
    changes: dict[str, dict[str, Any]] = {"trainer": trainer}
    if preset == LORA:
        changes = {"trainer": {"learning_rate": 2e-3}, "policy": {"lora": {"rank": 16, "alpha": 32.0}}}
    algorithm = {"preset": "grpo" if preset == LORA else preset, **TUNED.get(preset, {})}
    return learn(folder, preset, algorithm, changes, steps)


def row(preset: str, learned: Learned) -> str:
    """Return the preset's row of the table."""
    return (
        f"| `{preset}` | {learned.accuracy_before:.3f} | {learned.accuracy_after:.3f} | {learned.steps} | {learned.seconds:.0f} | "
        f"{learned.figures['kl_mean']:.4f} | {learned.figures['clip_fraction']:.3f} | {learned.figures['ess']:.3f} |"
    )


def main() -> None:
    """Run the presets in turn and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join([*get_args(Preset), LORA]))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    results: dict[str, Learned] = {}
    print("| preset | accuracy before | after | steps | seconds | KL | clipped | ESS |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="penstock-presets-") as name:
        for preset in arguments.presets.split(","):
            results[preset] = run(Path(name), preset, arguments.steps)
            print(row(preset, results[preset]), flush=True)
    print(json.dumps({preset: dataclasses.asdict(learned) for preset, learned in results.items()}))


if __name__ == "__main__":
    main()
