"""Raw access to the server behind a bus, for tests that inspect or break keys; all other code uses ``penstock.shared.bus``."""

from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.client.connection import _OPTIONS
from penstock.shared.bus.client.lua import SCRIPTS


def raw(bus: Bus) -> Any:
    return bus._client


def redis_py(url: str) -> Any:
    """Return redis-py's own client, with the options of a bus."""
    pool = redis.BlockingConnectionPool.from_url(url, timeout=None, retry=Retry(NoBackoff(), 0), **_OPTIONS)
    return redis.Redis.from_pool(pool)


async def empty(bus: Bus) -> None:
    """Delete all that the server has of the run, as one that comes back without its data."""
    await raw(bus).delete(*await raw(bus).keys(bus.keys.named("*")))


def script_text(name: str) -> str:
    return SCRIPTS[name].text
