"""Start a replica of the episodes service: ``python -m penstock.services.episodes --config run.toml --replica episodes-0``."""

from penstock.shared.process.importing import importing

with importing():
    from penstock.services.episodes.service import run
    from penstock.shared.process import service

if __name__ == "__main__":
    service.leave(service.main("episodes", run))
