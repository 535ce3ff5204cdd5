"""Memory and event-loop stalls that hostile answers cost: of a judge, a teacher and the hub.

Each victim is the product's own client in a process of its own, each attack a server on loopback; the victim makes 16
requests at once where it can. ``memory_mb`` is the victim's peak above idle, ``stall_cpu_s`` the longest time of its own
CPU between two turns of its event loop; the hub's client is synchronous, so it has none.

    python -m benchmarks.foreign_answers
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

VICTIMS = ("judge", "teacher", "hub")
_AT_ONCE = 16
_TIMEOUT_S = 5.0


def _stacked() -> bytes:
    body = b"\0" * (1 << 20)
    layer = gzip.compress(body) * 256
    return gzip.compress(gzip.compress(layer))


def _json(content: bytes, more: bytes = b"") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n".encode()
    return head + more + b"\r\n" + content


def _endless() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    while True:
        yield b" " * 65_536


def _tiny() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\n \r\n" * 10_000


def _slow() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    while True:
        yield b" "


def attacks() -> dict[str, Any]:
    """Return the parts that each attack's server writes, as a function."""
    nearly = (1 << 20) - 100
    row = b'{"1":{"logprob":-1.0}},'
    return {
        "three encodings": lambda: [_json(_stacked(), b"Content-Encoding: gzip, gzip, gzip\r\n")],
        "one encoding": lambda: [_json(gzip.compress(b" " * (256 << 20)), b"Content-Encoding: gzip\r\n")],
        "endless": _endless,
        "tiny chunks": _tiny,
        "a byte a second": _slow,
        "largest of lists": lambda: [_json(b"[[]" + b",[]" * (nearly // 3) + b"]")],
        "largest of objects": lambda: [_json(b'[{"":0}' + b',{"":0}' * (nearly // 8) + b"]")],
        "largest text": lambda: [_json(b'"' + b"\\u0041" * (nearly // 6) + b'"')],
        "long number": lambda: [_json(b"0." + b"1" * nearly)],
        "nested": lambda: [_json(b"[" * nearly)],
        "nested objects": lambda: [_json(b'{"a":' * (99_000))],
        "rows of another size": lambda: [_json(b'{"prompt_logprobs": [' + row * (nearly // len(row)) + b"0]}")],
    }


@contextlib.asynccontextmanager
async def _serving(attack: str) -> AsyncIterator[str]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0))
            for part in attacks()[attack]():
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(1.0 if attack == "a byte a second" else 0.0)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _judge(url: str) -> Any:
    from penstock.services.reward.scorers.judge.chat import ChatClient
    from penstock.shared.settings.rewards.scorers import JudgeScorer

    scorer = JudgeScorer.model_validate({"kind": "judge", "url": url, "model": "m", "timeout_s": _TIMEOUT_S})
    client = ChatClient(scorer)

    async def read(text: str) -> str:
        return text

    return client.ask, ("q", read), client.close


async def _teacher(url: str) -> Any:
    import penstock.services.reward.teachers as teachers
    from penstock.services.reward.teachers import EndpointTeacher
    from penstock.shared.settings import Settings

    teachers.TIMEOUT_S = _TIMEOUT_S
    settings = Settings.model_validate(
        {
            "policy": {"model": "m"},
            "data": {"path": "a.jsonl"},
            "algorithm": {"distillation": 1.0},
            "reward": {"teachers": [{"name": "far", "url": url, "model": "m"}]},
        }
    )
    teacher = EndpointTeacher(settings, settings.reward.teachers[0])
    return teacher._ask, (list(range(500)), list(range(500))), teacher.close


async def _stall_cpu_s(longest: list[float]) -> None:
    before_s = time.process_time()
    while True:
        await asyncio.sleep(0.0)
        now_s = time.process_time()
        longest[0] = max(longest[0], now_s - before_s)
        before_s = now_s


def _peak_mb() -> float:
    """Return the peak of this program alone; ru_maxrss begins with that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def _endpoint_victim(victim: str, url: str) -> dict[str, Any]:
    from penstock.services.reward import endpoint

    endpoint.ATTEMPTS = 1
    call, arguments, close = await (_judge(url) if victim == "judge" else _teacher(url))
    _reset_peak()
    longest, idle_mb = [0.0], _peak_mb()
    watching = asyncio.create_task(_stall_cpu_s(longest))
    outcomes = await asyncio.gather(*(call(*arguments) for _ in range(_AT_ONCE)), return_exceptions=True)
    watching.cancel()
    await close()
    return {"memory_mb": _peak_mb() - idle_mb, "stall_cpu_s": longest[0], "said": repr(outcomes[0])[:160]}


def _hub_victim(url: str) -> dict[str, Any]:
    import os

    os.environ.update(HF_ENDPOINT=url, HF_HOME=tempfile.mkdtemp())
    import huggingface_hub  # noqa: F401 (idle has it)

    import penstock.shared.http.hub as hub
    from penstock.services.up.hub_revision import pinned
    from penstock.shared.errors import SettingsError

    hub.API_TIMEOUT_S = _TIMEOUT_S
    _reset_peak()
    idle_mb, said = _peak_mb(), ""
    try:
        said = pinned("hf://a/b:train", "data.path")
    except SettingsError as error:
        said = str(error)
    return {"memory_mb": _peak_mb() - idle_mb, "said": said[:160]}


def _victim(victim: str, url: str) -> None:
    logging.disable()
    done = _hub_victim(url) if victim == "hub" else asyncio.run(_endpoint_victim(victim, url))
    print(json.dumps(done))


async def _measure(victim: str, attack: str) -> dict[str, Any]:
    async with _serving(attack) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.foreign_answers", "--victim", victim, "--url", url),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        try:
            async with asyncio.timeout(300):
                written, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            return {"said": "no end within 300 s"}
        done: dict[str, Any] = json.loads(written.splitlines()[-1])
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in done.items()}


async def _all() -> None:
    results: dict[str, dict[str, Any]] = {}
    for victim in VICTIMS:
        for attack in attacks():
            results.setdefault(victim, {})[attack] = done = await _measure(victim, attack)
            print(victim, attack, done, file=sys.stderr, flush=True)
    each = [done for by_attack in results.values() for done in by_attack.values()]
    worst = {
        "memory_mb": max(done.get("memory_mb", 0.0) for done in each),
        "stall_cpu_s": max(done.get("stall_cpu_s", 0.0) for done in each),
        "unended": sum("memory_mb" not in done for done in each),
    }
    print(json.dumps({"at_once": _AT_ONCE, "worst": worst, "results": results}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=VICTIMS)
    parser.add_argument("--url", default="")
    asked = parser.parse_args()
    if asked.victim:
        _victim(asked.victim, asked.url)
    else:
        asyncio.run(_all())


if __name__ == "__main__":
    main()
