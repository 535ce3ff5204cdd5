"""How fast a browser shows a long run: the page over the records of an ended run, in Chromium without a screen.

Writes a run's folder of ``--steps`` steps with 60 metrics, and groups of 16 completions of 20,000 characters with their
tokens. Of each opening: ``picture_ms``, from the navigation to tiles and curves with data; ``longest_task_ms`` until then,
and of unfolding a completion and colouring its tokens; ``tokens_ms`` of the latter; ``heap_bytes`` after garbage
collection; ``received_bytes``.

    python -m benchmarks.runs.page --steps 10000
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.shared.files.token_records import TokenValues, write_record
from tests.support.browser import opened

METRICS = ["reward_mean", "reward_std", "kl_mean", "grad_norm", "lag_mean", "lag_max", "entropy", "tokens_per_s"]
METRICS += [f"metric_{number}" for number in range(52)]
COMPLETIONS, CHARACTERS, GROUPS = 16, 20_000, 5
WORDS = [
    "so",
    "it",
    "must",
    "be",
    "that",
    "the",
    "sum",
    "of",
    "these",
    "two",
    "numbers",
    "is",
    "larger",
    ",",
    "and",
    "we",
    "carry",
    "one",
    "over",
    "because",
    "7",
    "+",
    "8",
    "=",
    "15",
]
WATCH = """window.tasks = []; new PerformanceObserver((list) => list.getEntries().forEach((one) => window.tasks.push(one.duration)))
.observe({ type: "longtask", buffered: true });"""
PICTURE = """() => document.querySelectorAll("#curves svg polyline").length > 4 && document.querySelector("#tiles b")
&& document.querySelector("#rollouts .tail") ? performance.now() : 0"""


def write_run(folder: Path, steps: int) -> None:
    """Write an ended run's records."""
    draw = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            about = {"step": step, "version": step, "finished_at_s": 1.8e9 + step, "samples": 512}
            values = {name: draw.random() for name in METRICS}
            file.write(json.dumps({"entry": f"{step}-0", **about, "lag_counts": {"0": 512}, **values}) + "\n")
    (folder / "settings.toml").write_text(f"run.steps = {steps}\n")
    (folder / "summary.json").write_text(json.dumps({"run_id": "long", "state": "finished", "steps": steps}))
    with (folder / "rollouts.jsonl").open("w") as file:
        for step in range(steps - 5 * GROUPS + 5, steps + 1, 5):
            recorded = [completion(draw) for _ in range(COMPLETIONS)]
            write_record(folder, step, step, recorded)
            completions = [
                {
                    "text": "".join(each["texts"] or ()), "reward": draw.random(), "tokens": len(each["ids"]),
                    "scores": {"answer": {"status": "ok", "value": draw.random(), "detail": ""}},
                    "finish_reason": "stop", "versions": [step - 1],
                }
                for each in recorded
            ]  # fmt: skip
            place: dict[str, Any] = {
                "step": step,
                "version": step,
                "group": step,
                "problem": "train.jsonl:1",
                "row_id": "a",
            }
            line: dict[str, Any] = {
                "entry": f"{step}-0",
                **place,
                "prompt": "7+8=",
                "answer": "15",
                "replica": "rollout-0",
            }
            file.write(json.dumps({**line, "completions": completions}) + "\n")


def completion(draw: random.Random) -> TokenValues:
    """Return the tokens of a completion."""
    texts: list[str] = []
    while sum(map(len, texts)) < CHARACTERS:
        texts += [f" {draw.choice(WORDS)}" for _ in range(100)]
    logprobs: list[float | None] = [round(-(draw.expovariate(1.2) ** 2), 4) for _ in texts]
    trainers: list[float | None] = [round((value or 0.0) + draw.gauss(0, 0.05), 4) for value in logprobs]
    ids, versions = [draw.randrange(50_000) for _ in texts], [7] * len(texts)
    return {"ids": ids, "texts": texts, "logprobs": logprobs, "trainer_logprobs": trainers, "versions": versions}


async def look(url: str, token: str) -> dict[str, float]:
    """Open the page once; return its figures."""
    async with opened(url, before=f"{WATCH} sessionStorage.setItem('penstock token', {json.dumps(token)});") as page:
        browser = await page.context.new_cdp_session(page)
        picture_ms = await (await page.wait_for_function(PICTURE)).json_value()
        tasks = await page.evaluate("window.tasks.splice(0)")
        await page.get_by_role("button", name="Unfold").first.click()
        await page.get_by_role("button", name="Mismatch", exact=True).wait_for()
        began = time.perf_counter()
        await page.get_by_role("button", name="Mismatch", exact=True).click()
        await page.locator(".tokens .token").nth(999).wait_for(state="attached")
        tokens_ms = 1000 * (time.perf_counter() - began)
        await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
        reading = await page.evaluate("window.tasks.splice(0)")
        received = await page.evaluate(
            "performance.getEntries().reduce((sum, one) => sum + (one.transferSize ?? 0), 0)"
        )
        await browser.send("HeapProfiler.enable")
        await browser.send("HeapProfiler.collectGarbage")
        heap_bytes = (await browser.send("Runtime.getHeapUsage"))["usedSize"]
    longest = {"longest_task_ms": max(tasks, default=0.0), "longest_task_of_reading_ms": max(reading, default=0.0)}
    return {
        "picture_ms": picture_ms,
        **longest,
        "tokens_ms": tokens_ms,
        "heap_bytes": heap_bytes,
        "received_bytes": received,
    }


async def measure(steps: int, openings: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        write_run(Path(place), steps)
        words = [sys.executable, "-m", "penstock.services.coordinator.page", place]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdin is not None
            said = json.loads(server.stdout.readline())
            looks = [await look(said["url"], said["token"]) for _ in range(openings + 1)][
                1:
            ]  # the first reads the records
            server.stdin.close()
    return {name: [round(each[name], 1) for each in looks] for name in looks[0]} | {
        "median": {name: round(statistics.median(each[name] for each in looks), 1) for name in looks[0]}
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--openings", type=int, default=7)
    given = parser.parse_args()
    actual = asyncio.run(measure(given.steps, given.openings))
    about = {"benchmark": "page", "steps": given.steps, "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**about, **actual}))


if __name__ == "__main__":
    main()
