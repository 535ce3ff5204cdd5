"""Laws of memory.jsonl: every report once, and a bounded size that loses no peak."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.records.memory import memory_line, memory_lines, thinned
from penstock.services.coordinator.records.recorder import Recorder
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import MemoryReport, MemorySample


def report(replica: str, total_bytes: float, at_s: float = 1.0, phase: str = "wait") -> MemoryReport:
    sample = MemorySample("host GPU-1", phase, at_s, 1.0, total_bytes, 100.0, {"weights": total_bytes})
    return MemoryReport(replica, (sample,))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]


async def test_each_report_is_one_line_also_after_a_restart(bus: Bus, tmp_path: Path) -> None:
    for replica in ("trainer-0", "rollout-0"):
        await bus.publish(streams.MEMORY, report(replica, 8.0))
    await Recorder(bus, tmp_path, 100).catch_up()
    await bus.publish(streams.MEMORY, report("trainer-0", 9.0))
    await Recorder(bus, tmp_path, 100).catch_up()
    await Recorder(bus, tmp_path, 100).catch_up()
    assert [line["replica"] for line in lines(tmp_path)] == ["trainer-0", "rollout-0", "trainer-0"]
    assert lines(tmp_path)[2]["samples"] == [
        {
            "device": "host GPU-1", "phase": "wait", "ended_at_s": 1.0, "seconds": 1.0, "total_bytes": 9.0,
            "capacity_bytes": 100.0, "components": {"weights": 9.0},
        }
    ]  # fmt: skip


def test_of_two_reports_of_a_process_the_larger_sample_of_each_phase_stays() -> None:
    reports = [("a", 5.0, "wait"), ("b", 1.0, "wait"), ("a", 3.0, "wait"), ("a", 7.0, "optimizer")]
    kept = thinned(
        memory_line(f"{at}-0", report(replica, nbytes, at, phase))
        for at, (replica, nbytes, phase) in enumerate(reports, 1)
    )
    assert [(line["entry"], line["replica"], line["samples"][0]["total_bytes"]) for line in kept] == [
        ("2-0", "b", 1.0),
        ("3-0", "a", 5.0),
        ("4-0", "a", 7.0),
    ]


@pytest.mark.parametrize("processes", [1, 3])
def test_the_file_stays_small_and_keeps_the_peak_and_the_newest_report(tmp_path: Path, processes: int) -> None:
    file = memory_lines(tmp_path / "memory.jsonl", most_bytes=20_000)
    for number in range(600):
        nbytes = 99.0 if number == 100 else 5.0
        file.append([memory_line(f"{number + 1}-0", report(f"rollout-{number % processes}", nbytes, number))])
    assert (tmp_path / "memory.jsonl").stat().st_size < 21_000
    assert max(line["samples"][0]["total_bytes"] for line in lines(tmp_path)) == 99.0
    assert lines(tmp_path)[-1]["entry"] == "600-0"
    assert memory_lines(tmp_path / "memory.jsonl").last == lines(tmp_path)[-1]


def test_reports_under_ever_new_names_fill_no_disk_and_the_newest_stay(tmp_path: Path) -> None:
    file = memory_lines(tmp_path / "memory.jsonl", most_bytes=20_000)
    for number in range(600):
        file.append([memory_line(f"{number + 1}-0", report(f"rollout-{number}", 5.0, number))])
    assert (tmp_path / "memory.jsonl").stat().st_size < 21_000
    assert lines(tmp_path)[-1]["entry"] == "600-0"
    assert memory_lines(tmp_path / "memory.jsonl").last == lines(tmp_path)[-1]
