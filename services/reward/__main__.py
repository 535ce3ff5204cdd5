"""``python -m penstock.services.reward --config run.toml``: run one reward replica."""

from penstock.shared.process.importing import importing

with importing():
    from penstock.services.reward.service import run
    from penstock.shared.process.service import leave, main

if __name__ == "__main__":
    leave(main("reward", run))
