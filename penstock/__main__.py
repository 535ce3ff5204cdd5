"""``python -m penstock`` is the command ``penstock``."""

from services.cli.__main__ import command_line

if __name__ == "__main__":
    command_line()
