"""``python -m penstock.services.tracking --config run.toml``: copy one run's records to its trackers."""

from penstock.services.tracking.service import run
from penstock.shared.process.service import leave, main

if __name__ == "__main__":
    leave(main("tracking", run))
