"""Agents that work against their episode, the service, or other episodes; by the column `do` of their row."""

import asyncio
import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

MANY = 200
_OLD = 20


async def hostile(task: str, base_url: str, api_key: str, do: str, folder: str, hooks: Any = None) -> float:
    """Do what the row says; return a reward. ``hooks``: of the client's requests and answers."""
    async with httpx.AsyncClient(base_url=base_url, timeout=600.0, trust_env=False, event_hooks=hooks) as client:
        client.headers["x-api-key"] = api_key
        result: float = await globals()[f"_{do}"](
            client, {"messages": [{"role": "user", "content": task}]}, Path(folder)
        )
    return result


async def _behave(client: httpx.AsyncClient, asked: Any, folder: Path) -> float:
    return float((await client.post("/chat/completions", json=asked)).status_code == 200)


async def _hang(client: httpx.AsyncClient, asked: Any, folder: Path) -> float:
    await _behave(client, asked, folder)
    time.sleep(10_000)
    return 1.0


async def _flood(client: httpx.AsyncClient, asked: Any, folder: Path) -> float:
    """Return the share of requests at a time that were answered or refused as too many."""
    headers = {"x-answers": "8"}
    asking = [client.post("/chat/completions", json={**asked, "n": 8}, headers=headers) for _ in range(MANY)]
    statuses = [answer.status_code for answer in await asyncio.gather(*asking)]
    return sum(status in (200, 429) for status in statuses) / MANY


async def _send_much(client: httpx.AsyncClient, asked: Any, folder: Path) -> float:
    """Return 1 if huge, deep, broken and endless bodies were refused."""
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bodies = (b"x" * (17 << 20), deep, b"\xff\xfe", b"[]", b"{", b'{"messages": [{"role": "user", "content": NaN}]}')
    statuses = [(await client.post("/chat/completions", content=body)).status_code for body in bodies]

    async def endless() -> Any:
        while True:
            yield b" " * (1 << 20)

    with contextlib.suppress(httpx.HTTPError, TimeoutError):  # its end is not awaited: the rest is never read
        async with asyncio.timeout(2.0):
            statuses.append((await client.post("/chat/completions", content=endless())).status_code)
    return await _behave(client, asked, folder) * float(set(statuses) == {400})


async def _fork(client: httpx.AsyncClient, asked: Any, folder: Path) -> float:
    """Leave a process in a session of its own, one whose parent is gone, and a copy of this process; then die."""
    await _behave(client, asked, folder)
    commands = (["sleep", "10000"], ["sh", "-c", "setsid sleep 10000 & echo"])
    processes = [subprocess.Popen(command, start_new_session=True) for command in commands]
    processes[1].wait()
    copy = os.fork()
    if not copy:
        time.sleep(10_000)
    (folder / f"forked-{os.getpid()}").write_text(f"{processes[0].pid} {copy}")
    os._exit(1)


async def _try_keys(client: httpx.AsyncClient, asked: Any, folder: Path) -> float:
    """Return 1 if no other key, and no key of an episode that has ended, is taken."""
    own, statuses = client.headers["x-api-key"], list[int]()
    for key in (own[:-1], own.upper(), f"{own}x", "ep-" + "0" * 64, "Bearer", "\xe9", own[::-1], *_old(folder)):
        for name, value in (("x-api-key", key), ("authorization", f"Bearer {key}")):
            headers = {b"x-api-key": b"none", name.encode(): value.encode("latin-1")}
            answer = await client.post("/chat/completions", json=asked, headers=headers)
            statuses.append(answer.status_code)
    (folder / f"key-{os.getpid()}-{time.monotonic_ns()}").write_text(own)
    return await _behave(client, asked, folder) * float(set(statuses) == {401})


async def _set_reward(client: httpx.AsyncClient, asked: Any, folder: Path) -> float:
    """Try to set a reward of 1 by the key of its turns; return 0.25."""
    told = {"reward": 1.0, "score": 1.0, "environment_reward": 1.0, "metadata": {"reward": 1.0}}
    for path in (
        "/reward",
        "/episodes",
        "/episode/reward",
        "/rewards",
        "/feedback",
        "/finish",
        "/../reward",
        "/models",
    ):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await client.request(method, path, json=told)
            if answer.status_code not in (404, 405):
                return 1.0
    await client.post("/chat/completions", json={**asked, **told}, headers={"x-reward": "1.0"})
    return 0.25


def _old(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("key-*"))[-_OLD:]]
