"""Run the code executor, configured by a settings file or by flags.

::

    python -m penstock.services.reward.executor --config run.toml
    python -m penstock.services.reward.executor --reward.executor.address unix:/run/executor.sock --reward.executor.isolation namespace
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.services.reward.executor.service import run
from penstock.shared.errors import SettingsError
from penstock.shared.process import log
from penstock.shared.process.service import leave, refuse
from penstock.shared.settings import Settings, load


def parse(arguments: Sequence[str]) -> Settings:
    """Return the settings of a command line. Raises SettingsError."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.services.reward.executor",
        description="Run model-written programs, isolated. Any setting can be given as a flag: --reward.executor.slots 4",
    )
    parser.add_argument("--config", type=Path, help="the run's TOML file; none: every setting has its default")
    known, flags = parser.parse_known_args(arguments)
    return load(known.config, flags)


def main() -> int:
    """Return the exit code: 0 after an orderly stop, 2 for wrong settings or no isolation."""
    try:
        settings = parse(sys.argv[1:])
        log.set_up(settings.telemetry.log_level, "executor")
        asyncio.run(run(settings))
    except SettingsError as error:
        return refuse("executor", error)
    return 0


if __name__ == "__main__":
    leave(main())
