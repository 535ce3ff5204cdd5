"""``python -m services.reward --config run.toml``: run one reward replica."""

from services.reward.service import run
from shared.process.service import leave, main

if __name__ == "__main__":
    leave(main("reward", run))
