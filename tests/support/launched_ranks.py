"""The trainer's launcher, with a module of the tests as its ranks; ``tests/support/forked.py`` forks them.

python -m tests.support.launched_ranks RANKS MODULE ARGUMENT…
"""

import sys
from pathlib import Path
from typing import Any

from penstock.services.trainer.launcher import launch
from penstock.shared.settings import TrainerSettings


def found_by(module: str, ranks: int, folder: Path, within_s: float) -> dict[str, Any]:
    """Return what ``ranks`` ranks of ``tests.support.<module>`` wrote to ``folder``/found.pt."""
    import torch

    from tests.support import forge

    output = folder / "output.txt"
    with output.open("w") as file:
        words = [ranks, f"tests.support.{module}", folder]
        launcher = forge.start("tests.support.launched_ranks", words, file, OMP_NUM_THREADS="1")
    try:
        assert launcher.wait(within_s) == 0, output.read_text()[-3000:]
    finally:
        launcher.kill()
    results: dict[str, Any] = torch.load(folder / "found.pt", weights_only=True)
    return results


if __name__ == "__main__":
    ranks, *words = sys.argv[1:]
    sys.exit(launch([sys.executable, "-m", *words], TrainerSettings(ranks=int(ranks)), drain_s=0.0))
