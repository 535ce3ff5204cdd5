"""``python -m penstock.services.trainer --config run.toml``."""

import os
import sys

from penstock.services.trainer.launcher import launch
from penstock.services.trainer.service import run
from penstock.shared.errors import SettingsError
from penstock.shared.process import log, service

if __name__ == "__main__":
    if "RANK" not in os.environ:
        try:
            settings, replica = service.parse("trainer", sys.argv[1:])
        except SettingsError as error:
            sys.exit(service.refuse("trainer", error, service.INVALID_SETTINGS))
        if settings.trainer.ranks * settings.trainer.nodes > 1:
            log.set_up(settings.telemetry.log_level, f"{replica}.launcher")
            sys.exit(
                launch(
                    [sys.executable, "-m", "penstock.services.trainer", *sys.argv[1:]],
                    settings.trainer,
                    settings.bus.drain_s,
                )
            )
    service.leave(service.main("trainer", run))
