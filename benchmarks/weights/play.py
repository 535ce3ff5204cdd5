"""Start a player in its process: its environment is set before torch is imported."""

import asyncio
import os
from multiprocessing.connection import Connection

from benchmarks.weights.players import Options


def play(connection: Connection, surroundings: dict[str, str], player: str, options: Options) -> None:
    """Run ``player`` until the pipe closes."""
    os.environ |= surroundings
    from benchmarks.weights.replica import replica
    from benchmarks.weights.sender import trainer

    asyncio.run({"trainer": trainer, "replica": replica}[player](connection, options))
