"""``python -m services.trainer --config run.toml``."""

import os
import sys

from services.trainer.service import become_torchrun, run
from shared import service
from shared.errors import SettingsError

if __name__ == "__main__":
    if "RANK" not in os.environ:
        try:
            settings, _ = service.parse("trainer", sys.argv[1:])
        except SettingsError as error:
            sys.exit(service.refuse("trainer", error))
        if settings.trainer.ranks * settings.trainer.nodes > 1:
            become_torchrun(settings.trainer, sys.argv[1:])
    service.leave(service.main("trainer", run))
