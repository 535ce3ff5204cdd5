"""Start a replica of the episodes service: ``python -m services.episodes --config run.toml --replica episodes-0``."""

import os

from shared.process import service

os.environ.setdefault("USE_TORCH", "0")  # tokenizers need none, and it takes seconds to import

from services.episodes.service import run

if __name__ == "__main__":
    service.leave(service.main("episodes", run))
