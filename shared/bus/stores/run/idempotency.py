"""Stored answers to POST requests with an Idempotency-Key."""

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import key

IDEMPOTENCY = key("idempotency:<digest>", "string", "a minute, then a day", "a POST under way, then its answer (JSON)")
_UNDER_WAY_S, _KEPT_S = 60, 86_400


async def begin_answer(bus: Bus, digest: str, text: str) -> bytes | None:
    """Begin a request; return what is stored for its digest."""
    name = IDEMPOTENCY.of(digest)
    return None if await bus.write(name, "SET", text, "NX", "EX", _UNDER_WAY_S) else await bus.get(name) or b""


async def use_once(bus: Bus, digest: str, seconds: int) -> bool:
    """Mark a digest as used for ``seconds``; False if already used."""
    return bool(await bus.write(IDEMPOTENCY.of(digest), "SET", "used", "NX", "EX", seconds))


async def keep_answer(bus: Bus, digest: str, text: str) -> None:
    """Keep an answer for a day."""
    await bus.write(IDEMPOTENCY.of(digest), "SET", text, "EX", _KEPT_S)


async def forget_answer(bus: Bus, digest: str) -> None:
    """Allow the request again."""
    await bus.write(IDEMPOTENCY.of(digest), "DEL")
