"""What an engine is opened with, and what each engine's entry offers (:mod:`penstock.services.rollout.engines.registry`)."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.services.rollout.engines.engine import Engine
from penstock.services.rollout.engines.prompts import Codec
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.settings import Settings

Explain = Callable[[int, str, str], Awaitable[None]]
"""Called with the number of engines, the reason, and what the engine's release makes slower, or ""."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opening:
    """The replica that opens an engine."""

    settings: Settings
    replica: str
    host: str
    secret: RunSecret
    explain: Explain


class Entry(Protocol):
    """An engine's package."""

    async def load(self) -> None:
        """Import the engine on another thread, so that heartbeats continue, and before its device is held: others use it
        meanwhile.
        """

    async def open_engine(self, opening: Opening) -> tuple[Engine, Codec]:
        """Return engine and codec; heartbeats continue while a model loads. Raises SettingsError if unsupported."""


def has_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()
