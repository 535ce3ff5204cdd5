"""``python -m penstock`` is the command ``penstock``."""

import sys
from typing import NoReturn


def command_line() -> NoReturn:
    """Run the command; Ctrl-C ends it without a traceback, also while it is imported."""
    try:
        from penstock.services.cli.__main__ import command_line as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command_line()
