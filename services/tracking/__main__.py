"""``python -m services.tracking --config run.toml``: copy one run's records to its trackers."""

from services.tracking.service import run
from shared.process.service import leave, main

if __name__ == "__main__":
    leave(main("tracking", run))
