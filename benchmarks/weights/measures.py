"""Sequence of measurements of ``benchmarks.weights.update``, and their evaluation."""

import argparse
import functools
import itertools
import multiprocessing
import socket
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.weights.players import environment, gpus
from benchmarks.weights.sender import raw_end

EVERY_S, WINDOW_S = 2.0, 4.0
START_S, ANSWER_S = 900.0, 120.0


class Player:
    """A process that answers (:func:`benchmarks.weights.play.play`)."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *arguments))
        self.process.start()
        other.close()

    def ask(self, name: str, **arguments: Any) -> None:
        """Send a request."""
        self._pipe.send((name, arguments))

    def answer(self, deadline_s: float = ANSWER_S) -> Any:
        """Return the answer, or raise RuntimeError."""
        if not self._pipe.poll(deadline_s):
            raise RuntimeError(f"expected an answer of process {self.process.pid} in {deadline_s:.0f} s, found none")
        try:
            ok, value = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"process {self.process.pid} died") from error
        if not ok:
            raise RuntimeError(value)
        return value

    def call(self, name: str, **arguments: Any) -> Any:
        """Send a request and return its answer."""
        self.ask(name, **arguments)
        return self.answer()

    def close(self) -> None:
        """Kill the process and its children."""
        descendants = psutil.Process(self.process.pid).children(recursive=True) if self.process.is_alive() else []
        self._pipe.close()
        self.process.join(30)
        for process in descendants:
            if process.is_running():
                process.kill()
        self.process.kill()


class Run:
    """One trainer and its replicas."""

    def __init__(self, trainer: Player, replicas: list[Player], args: argparse.Namespace, on_gpu: bool) -> None:
        self._trainer = trainer
        self._replicas = replicas
        self._args = args
        self._on_gpu = on_gpu
        self._version = 0
        self._peers: list[str] = []

    def figures(self) -> dict[str, Any]:
        """Measure everything."""
        for replica in self._replicas:
            replica.ask("describe")
        self._peers = [replica.answer(START_S)["peer"] for replica in self._replicas]
        first = self.update()[0]
        raw = self.raw(self._published["bytes"])
        for replica in self._replicas:
            replica.ask("load")
        for replica in self._replicas:
            replica.answer(START_S)
        self.update()
        measured, updates = self.windows(self._args.seconds, self.update)
        equal = self._replicas[0].call("compare")
        return {
            "bytes": self._published["bytes"],
            "transport": first["transport"],
            "path": first["path"],
            **raw,
            **_update_figures(updates, self._published["bytes"], raw["raw_gb_per_s"]),
            **measured,
            "errors": sorted({error for at in updates for error in at["errors"]}),
            "bytes_equal": None if None in equal else not any(equal),
            **self.spread(),
            **self.native(),
        }

    def update(self, only: int | None = None, changed: bool = True) -> list[dict[str, Any]]:
        """Publish weights, and return the answers of the replicas that pulled."""
        self._version += 1
        self._published = self._trainer.call("publish", version=self._version, changed=changed)
        pullers = self._replicas[:only]
        for number, replica in enumerate(pullers):
            replica.ask("pull", published=self._published, sources=self._sources(number))
        return [_since_offer(replica.answer(), self._published) for replica in pullers]

    def _sources(self, number: int) -> list[str]:
        parent = number // self._args.fan_out - 1
        peers = [self._peers[parent]] if parent >= 0 and self._peers[parent] else []
        return [*peers, self._published["address"]]

    def windows(
        self, seconds: float, update: Callable[[], list[dict[str, Any]]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Alternate windows without and with updates; return metrics and updates."""
        rates: list[float] = []
        updates: list[dict[str, Any]] = []
        plain: list[tuple[float, float]] = []
        for number in range(2 * max(1, round(seconds / WINDOW_S)) + 1):
            before = self._replicas[0].call("seen")
            if number % 2:
                updates += _every(EVERY_S, before["at_s"] + WINDOW_S, update)
            _sleep_until(before["at_s"] + WINDOW_S)
            after = self._replicas[0].call("seen")
            rates.append((after["tokens"] - before["tokens"]) / (after["at_s"] - before["at_s"]))
            if not number % 2:
                plain.append((before["at_s"] + 0.25, after["at_s"]))
        times_s = self._replicas[0].call("seen")["token_times_s"]
        usual_s = statistics.median(gap for window in plain for gap in _gaps(times_s, *window))
        stalls = [max(_gaps(times_s, at["accepted_s"], at["live_s"] + 0.25)) - usual_s for at in updates]
        ratios = [2 * rates[place] / (rates[place - 1] + rates[place + 1]) for place in range(1, len(rates), 2)]
        return {
            "tokens_per_s": statistics.median(rates[::2]),
            "usual_wait_ms": 1000 * usual_s,
            "throughput_ratio": statistics.median(ratios),
            **_middle_and_most("stall_ms", [1000 * stall for stall in stalls]),
        }, updates

    def raw(self, nbytes: int) -> dict[str, float]:
        """Measure a plain broadcast to the first replica's device."""
        port = _free_port()
        places = [environment(self._on_gpu, [0]), environment(self._on_gpu, gpus(0, 1))]
        ends = [Player(raw_end, places[rank], rank, self._args.device, nbytes, port) for rank in (0, 1)]
        try:
            answers = [end.answer() for end in ends]
        finally:
            for end in ends:
                end.close()
        return {"raw_gb_per_s": answers[1]["bytes"] / answers[1]["seconds"] / 1e9}

    def spread(self) -> dict[str, Any]:
        """Compare the time for all replicas with one alone."""
        if len(self._replicas) == 1:
            return {}
        alone = [max(at["offer_to_live_s"] for at in self.update(only=1)) for _ in range(5)]
        together = [max(at["offer_to_live_s"] for at in self.update()) for _ in range(5)]
        return {
            "one_live_s": statistics.median(alone),
            "all_live_s": statistics.median(together),
            "all_live_ratio": statistics.median(together) / statistics.median(alone),
            "trainer_ratio": self._trainer_ratio(),
        }

    def _trainer_ratio(self) -> float:
        self._trainer.call("steps")
        time.sleep(1.0)
        rates = []
        for number in range(7):
            before = self._trainer.call("steps")
            until_s = before["at_s"] + WINDOW_S
            if number % 2:
                _every(EVERY_S, until_s, lambda: self.update(changed=False))
            _sleep_until(until_s)
            after = self._trainer.call("steps")
            rates.append((after["steps"] - before["steps"]) / (after["at_s"] - before["at_s"]))
        ratios = [2 * rates[place] / (rates[place - 1] + rates[place + 1]) for place in range(1, len(rates), 2)]
        return float(statistics.median(ratios))

    def native(self) -> dict[str, Any]:
        """Measure vLLM's own transfer; null with a reason if impossible."""
        if not self._on_gpu or self._args.no_native or len(self._replicas) > 1:
            return {"native_throughput_ratio": None, "native_why_not": "needs two GPUs and one replica"}
        figures: dict[str, Any] = {}
        try:
            self._join()
            for name, clear_cache in (("native", False), ("native_recompute", True)):
                update = functools.partial(self._native_update, clear_cache)
                measured, updates = self.windows(self._args.seconds / 2, update)
                paused = [1000 * (at["live_s"] - at["began_s"]) for at in updates]
                figures |= _middle_and_most(f"{name}_paused_ms", paused)
                figures |= {
                    f"{name}_{key}": value for key, value in measured.items() if key.startswith(("stall", "throughput"))
                }
        except RuntimeError as error:
            traceback.print_exc()
            figures |= {"native_why_not": str(error).strip().splitlines()[-1]}
        return figures

    def _join(self) -> None:
        world = 1 + self._args.tensor_parallel
        port = _free_port()
        self._trainer.ask("join", port=port, world=world)
        self._replicas[0].call("join", port=port, world=world)
        self._trainer.answer()

    def _native_update(self, clear_cache: bool) -> list[dict[str, Any]]:
        self._trainer.ask("send")
        updated = self._replicas[0].call("update", clear_cache=clear_cache)
        self._trainer.answer()
        return [{**updated, "accepted_s": updated["began_s"]}]


# ---------------------------------------------------------------- figures


def _since_offer(answer: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    return {
        **answer,
        "publish_began_s": published["began_s"],
        "offered_s": published["offered_s"],
        "offer_to_live_s": answer["live_s"] - published["offered_s"],
    }


def _update_figures(updates: list[dict[str, Any]], nbytes: int, raw_gb_per_s: float) -> dict[str, Any]:
    rates = [nbytes / (at["verified_s"] - at["accepted_s"]) / 1e9 for at in updates]
    return {
        "updates": len(updates),
        "receive_gb_per_s": statistics.median(rates),
        "wire_ratio": statistics.median(rates) / raw_gb_per_s,
        **_middle_and_most("receive_ms", [1000 * (at["verified_s"] - at["accepted_s"]) for at in updates]),
        **_middle_and_most("worker_receive_ms", [1000 * at["worker_s"] for at in updates]),
        **_middle_and_most("ask_ms", [1000 * (at["accepted_s"] - at["began_s"]) for at in updates]),
        **_middle_and_most("fill_ms", [1000 * (at["offered_s"] - at["publish_began_s"]) for at in updates]),
        **_middle_and_most("swap_ms", [1000 * at["swap_s"] for at in updates]),
        **_middle_and_most("publish_to_live_s", [at["live_s"] - at["publish_began_s"] for at in updates]),
    }


def _middle_and_most(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_max": max(values)}


def _gaps(times_s: list[float], began_s: float, ended_s: float) -> list[float]:
    pairs = itertools.pairwise(times_s)
    return [after - before for before, after in pairs if before < ended_s and after > began_s]


def _every(every_s: float, until_s: float, update: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    times_s = []
    due_s = time.monotonic()
    while due_s < until_s - every_s / 2:
        times_s.append(update()[0])
        due_s += every_s
        _sleep_until(due_s)
    return times_s


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
