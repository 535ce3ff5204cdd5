"""``python -m services.reward --config run.toml``: run one reward replica."""

import sys

from services.reward.service import run
from shared.service import main

if __name__ == "__main__":
    sys.exit(main("reward", run))
