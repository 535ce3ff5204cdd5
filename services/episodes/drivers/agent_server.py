"""An agent behind a URL, whose answers are not trusted: bounded in time and size, without redirects.

::

    POST <episodes.agent>            {"id", "task", "base_url", "api_key", "deadline_s", "row"}
                                     ──▶ {"reward": number, "metrics": {name: number}}   when the episode has ended
    DELETE <episodes.agent>/<id>         it is abandoned: its key is void, its answer not awaited any more

Without a finite reward, the episode is played again, never scored 0.
"""

import asyncio
import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any

from penstock.services.episodes.episode import Episode
from penstock.shared.errors import TemporaryError
from penstock.shared.http.answer import Answer, NoHttpAnswer
from penstock.shared.http.client import HttpClient
from penstock.shared.settings.rollout import EpisodesSettings

_ABORT_S = 5.0
_MOST_METRICS, _LONGEST_NAME = 64, 100
_SHOWN = 200


class AgentServer:
    """:meth:`close` it; on one event loop."""

    def __init__(self, settings: EpisodesSettings) -> None:
        self._url = settings.agent_url
        self._deadline_s = settings.deadline_s
        self._http = HttpClient(timeout_s=settings.deadline_s, concurrency=settings.max_episodes)
        self._aborting = HttpClient(timeout_s=_ABORT_S)

    async def close(self) -> None:
        await self._http.close()
        await self._aborting.close()

    async def run(self, episode: Episode, given: Mapping[str, Any]) -> float:
        """Return the episode's reward. Raises TemporaryError: it has no finite one."""
        name = secrets.token_hex(16)
        asked = {"id": name, **given, "deadline_s": episode.left_s}
        try:
            content = json.dumps(asked, default=str).encode()
            headers = {"content-type": "application/json"}
            answer = await self._http.ask("POST", self._url, content=content, headers=headers)
            value = read(answer)
        except (NoHttpAnswer, TemporaryError) as error:
            await self._abort(name)
            raise TemporaryError(f"the agent at {self._url} gave no reward: {error}") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(name))
            raise
        episode.metrics = _metrics(value.get("metrics"))
        return float(value["reward"])

    async def _abort(self, name: str) -> None:
        with contextlib.suppress(NoHttpAnswer):
            await self._aborting.ask("DELETE", f"{self._url.rstrip('/')}/{name}")


def read(answer: Answer) -> Mapping[str, Any]:
    """Return an answer with a finite reward. Raises TemporaryError: it is another."""
    shown = repr(answer.text()[:_SHOWN])
    if answer.status != 200:
        raise TemporaryError(f"expected HTTP 200, found {answer.status}: {shown}")
    try:
        value = answer.json()
    except ValueError as error:
        raise TemporaryError(f"expected JSON ({error}), found {shown}") from error
    reward = value.get("reward") if isinstance(value, dict) else None
    if not _is_finite(reward):
        raise TemporaryError(f"expected an object with a finite number as reward, found {shown}")
    return dict(value)


def _metrics(value: object) -> dict[str, float]:
    """Return those of an agent's metrics that are finite numbers, not more than are shown."""
    named = value.items() if isinstance(value, dict) else ()
    finite = {name[:_LONGEST_NAME]: float(number) for name, number in named if _is_finite(number)}
    return dict(list(finite.items())[:_MOST_METRICS])


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
