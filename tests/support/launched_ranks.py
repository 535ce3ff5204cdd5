"""The trainer's launcher, with a module of the tests as its ranks; ``tests/support/forked.py`` forks them.

python -m tests.support.launched_ranks RANKS MODULE ARGUMENT…
"""

import sys

from penstock.services.trainer.launcher import launch
from penstock.shared.settings import TrainerSettings

if __name__ == "__main__":
    ranks, *words = sys.argv[1:]
    sys.exit(launch([sys.executable, "-m", *words], TrainerSettings(ranks=int(ranks)), drain_s=0.0))
