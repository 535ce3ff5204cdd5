"""Start a replica of the episodes service: ``python -m services.episodes --config run.toml --replica episodes-0``."""

from services.episodes.service import run
from shared.process import service

if __name__ == "__main__":
    service.leave(service.main("episodes", run))
