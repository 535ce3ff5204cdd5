"""Faults of a run whose policy plays episodes with an agent: its service, and the processes of the agent's code."""

import asyncio
import importlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
import torch

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from tests.chaos.run import Run
from tests.conftest import PATIENCE_S, until
from tests.support.guessing import KEYS
from tests.support.stormy_agent import living_hosts, played

CONFIG = "examples/guess/run.toml"
_AT_A_TIME = 12
_REDRAWN = 'penstock_episodes_redrawn_total{cause="left"} '
_HOSTILE, _HONEST = ("flood", "send_much", "try_keys", "set_reward", "fork"), 6
"""Rows of agents that work against the service, one of each; and how often each number is a row."""
_LEFT_S = 60.0


def flags(folder: Path, *, hostile: bool = False) -> Mapping[str, object]:
    """Write a policy of random weights, and rows; return the settings of a run in which an agent guesses numbers.

    ``hostile``: and of which some rows' agents flood the service, which takes much of a machine.
    """
    make = importlib.import_module("examples.guess.make")
    torch.manual_seed(0)
    tokenizer = make.build_tokenizer()
    make.build_policy(tokenizer).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    rows = [{"prompt": "?", "secret": number, "folder": str(folder), "do": ""} for number in make.NUMBERS]
    attacks = [{**rows[0], "do": order} for order in _HOSTILE if hostile]
    for name, content in (("train", rows * _HONEST + attacks), ("problems", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {
        "policy.model": folder / "policy",
        "data.path": folder / "train.jsonl",
        "episodes.environment": "",
        "episodes.agent": "tests.support.stormy_agent:agent",
        "episodes.replicas": 2,
        "episodes.max_episodes": _AT_A_TIME,
        "rollout.replicas": 2,
        "algorithm.groups_per_step": 8 if hostile else 4,
        "evaluation.path": folder / "problems.jsonl",
        "evaluation.every_steps": 10,
    }


def audit_evaluations(folder: Path) -> None:
    """Check that problems were played between faults, and that results say how."""
    results = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    whole = [result for result in results if not result["note"]]
    assert whole, f"no evaluation has all answers: {results}"
    for result in whole:
        assert 1 <= result["turns"] <= 4
        assert result["ended"] == {"agent": 1.0}


async def left(folder: Path) -> list[int]:
    """Return the processes of agents, and those that they left, which are there a minute after the run's end."""
    written = [path.read_text().split() for path in folder.glob("forked-*")]
    pids = [int(path.stem.rpartition("-")[2]) for path in folder.glob(KEYS.format("*"))]
    pids += [int(pid) for words in written for pid in words]
    end_s = time.monotonic() + _LEFT_S
    while (alive := [pid for pid in pids if _is_agents(pid, folder)]) and time.monotonic() < end_s:
        await asyncio.sleep(1.0)
    return alive


def _is_agents(pid: int, folder: Path) -> bool:
    try:
        process = psutil.Process(pid)
        words = " ".join(process.cmdline())
        ours = process.create_time() >= (folder / "train.jsonl").stat().st_mtime
        return ours and ("sleep 10000" in words or "drivers.child" in words)
    except psutil.Error:
        return False


def _is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


class EpisodeFaults:
    """Faults of ``run``, whose agent records its keys in ``folder``."""

    def __init__(self, run: Run, bus: Bus, folder: Path) -> None:
        self._run, self._bus, self._folder = run, bus, folder
        self.counts = Counter[str]()

    async def kill_gateway(self, name: str) -> None:
        """Kill a replica of the service: its processes and its keys end with it."""
        pid = await self._pid(name)
        keys: set[str] = set()
        while not keys:
            below = psutil.Process(pid).children(recursive=True)
            keys = {key for process in below for _, key in self._recorded(process.pid)}
        self._run.send(name, signal.SIGKILL)
        await self._run.until(lambda: not any(process.is_running() for process in below))
        await self._pid(name, other_than=pid)
        url = ""

        async def serves() -> bool:
            nonlocal url
            url = next((each for each, key in self._alive() if key not in keys), "")
            return bool(url)

        await self._run.until(serves)
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            for key in sorted(keys)[-50:]:
                answer = await client.get(f"{url}/models", headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == 401, f"a dead gateway's key is answered by {answer.status_code}"

    async def kill_host(self, name: str) -> None:
        """Kill a process of the agent's code."""
        hosts: list[psutil.Process] = []

        async def is_any() -> bool:
            hosts[:] = psutil.Process(await self._pid(name)).children()
            return bool(hosts)

        await self._run.until(is_any)
        hosts[0].kill()

    async def kill_replica(self, name: str) -> None:
        """Kill a replica; check that no more turns are drawn again than were in progress, by what agents record."""
        before, pid = await self._redrawn(), await self._pid(name)
        hosts, since_s = living_hosts(self._folder), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: _is_gone(pid))
        hosts, until_s = hosts | living_hosts(self._folder), time.monotonic()
        await self._run.more_steps(self._bus, 1)
        redrawn = int(await self._redrawn() - before)
        in_progress = sum(each.in_progress(since_s, until_s) for each in played(self._folder, hosts))
        self.counts.update(replica_kills=1, turns_redrawn=redrawn, turns_in_progress=in_progress)
        assert redrawn <= in_progress, f"{redrawn} turns were drawn again after a kill, of {in_progress} in progress"

    async def audit(self) -> Mapping[str, int]:
        """Check, after the run's end, that nothing of agents is left; return what was counted."""
        audit_evaluations(self._run.folder)
        remaining = await left(self._folder)
        assert not remaining, f"processes of agents are left: {remaining}"
        episodes = played(self._folder)
        killed = [episode for episode in episodes if episode.ended_s == float("inf")]
        turns = sum(episode.answered for episode in episodes)
        lost = sum(episode.answered for episode in killed)
        return {
            **self.counts,
            "episodes": len(episodes),
            "episodes_killed": len(killed),
            "turns": turns,
            "turns_of_killed": lost,
        }

    async def _redrawn(self) -> float:
        """Return how many turns were drawn again because a replica left, in the gateways that run."""
        total = 0.0
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            for beat in await heartbeats(self._bus):
                if beat.service == "episodes":
                    text = (await client.get(f"http://{beat.address}/metrics")).text
                    total += sum(
                        float(line.removeprefix(_REDRAWN)) for line in text.splitlines() if line.startswith(_REDRAWN)
                    )
        return total

    async def _pid(self, name: str, other_than: int | None = None) -> int:
        await self._run.until(lambda: self._run.pid(name) not in (None, other_than))
        pid = self._run.pid(name)
        assert pid is not None
        return pid

    def _recorded(self, pid: int) -> list[tuple[str, str]]:
        path = self._folder / KEYS.format(pid)
        lines = path.read_text().splitlines() if path.exists() else []
        return [(url, key) for url, _, key in (line.partition(" ") for line in lines) if key]

    def _alive(self) -> list[tuple[str, str]]:
        paths = self._folder.glob(KEYS.format("*"))
        pids = [int(path.stem.rpartition("-")[2]) for path in paths]
        return [pair for pid in pids if psutil.pid_exists(pid) for pair in self._recorded(pid)]
