"""Processes that give up only what hangs."""

import base64
from collections.abc import Mapping

import pytest

from penstock.services.reward.subprocess_pool.pool import Processes, Share
from penstock.shared.bus.messages import Json
from tests.conftest import PATIENCE_S


def hang_up(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 2 s for answers about the completion "hang", and long for others: on a busy machine they may take a while."""
    ask = processes.ask

    async def asked(question: dict[str, Json], timeout_s: float, share: Share | None = None) -> Mapping[str, Json]:
        hangs = b"hang" in base64.b64decode(str(question["group"]))
        return await ask(question, 2.0 if hangs else PATIENCE_S, share)

    monkeypatch.setattr(processes, "ask", asked)
