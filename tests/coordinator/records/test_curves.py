"""Laws of curves: whatever the length, nothing extreme is lost, and a step that was made again counts once."""

import json
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.services.coordinator.records import curves as module
from penstock.services.coordinator.records.curves import Curves
from penstock.services.coordinator.records.report import write_report

METRICS = [f"metric_{number}" for number in range(12)]


def write(folder: Path, steps: Iterable[int], value: Callable[[int, int], float], mode: str = "w") -> None:
    with (folder / "metrics.jsonl").open(mode) as file:
        for step in steps:
            file.write(json.dumps({"step": step, **{name: value(step, n) for n, name in enumerate(METRICS)}}) + "\n")


def whole(folder: Path) -> Curves:
    curves = Curves(folder)
    while not curves.catch_up():
        pass
    return curves


def extremes(view: dict[str, Any], name: str) -> tuple[float, float]:
    metric = view["metrics"][name]
    return min(metric["low"] or metric["last"]), max(metric["high"] or metric["last"])


@pytest.mark.parametrize("count", [200, 3000, 10_000, 100_000])
def test_extremes_of_a_single_step_are_seen_at_any_length_and_in_the_report(tmp_path: Path, count: int) -> None:
    peaks, dips = {n: count * (n + 1) // 14 for n in range(12)}, {n: count * (n + 1) // 14 + 7 for n in range(12)}
    write(tmp_path, range(1, count + 1), lambda step, n: 50.0 if step == peaks[n] else -9.0 if step == dips[n] else 2.0)
    view = whole(tmp_path).view(240)
    assert len(view["step"]) <= 240
    assert (view["first_step"], view["last_step"], view["step"][-1]) == (1, count, count)
    assert {extremes(view, name) for name in METRICS} == {(-9.0, 50.0)}
    for n, name in enumerate(METRICS):
        peak = (view["metrics"][name]["high"] or view["metrics"][name]["last"]).index(50.0)
        assert view["step"][peak] - view["width"] < peaks[n] <= view["step"][peak], "in the bucket of its step"
    report = write_report(tmp_path).read_text(encoding="utf-8")
    data = json.loads(report.split('type="application/json">')[1].split("</script>")[0])
    assert data["curves"] == view
    assert len(report) < 250_000


def test_a_range_is_sampled_anew_down_to_single_steps(tmp_path: Path) -> None:
    write(tmp_path, range(1, 20_001), lambda step, n: float(step))
    curves = whole(tmp_path)
    near = curves.view(240, 7001, 7100)
    assert (near["step"], near["width"]) == (list(range(7001, 7101)), 1)
    assert near["metrics"]["metric_3"] == {"last": [float(step) for step in near["step"]], "low": None, "high": None}
    middle = curves.view(100, 7001, 8000)
    assert (middle["width"], extremes(middle, "metric_0")) == (10, (7001.0, 8000.0))
    wide = curves.view(240, 1001, 19_000)
    assert (wide["step"][0] - wide["width"] < 1001, wide["step"][-1] >= 19_000, len(wide["step"]) <= 240) == (True,) * 3


@pytest.mark.parametrize("back_to", [999, 981, 500, 17, 1])
def test_steps_that_are_made_again_replace_those_from_them_on(tmp_path: Path, back_to: int) -> None:
    write(tmp_path, range(1, 1001), lambda step, n: 1000.0 + step)
    curves = whole(tmp_path)
    write(tmp_path, range(back_to, 1101), lambda step, n: float(step), "a")
    for reader in (curves, Curves(tmp_path)):
        assert reader.catch_up()
        view = reader.view(1000, 101, 1100)
        assert view["step"] == list(range(101, 1101))
        assert view["metrics"]["metric_0"]["last"] == [
            step + (1000.0 if step < back_to else 0.0) for step in view["step"]
        ]
        assert [mark["kind"] for mark in reader.view(240)["marks"]] == ["rollback"]
        assert extremes(reader.view(10), "metric_1") == (
            float(back_to) if back_to == 1 else min(back_to, 1001.0),
            max(1100.0, back_to + 999.0),
        )


def test_memory_is_bounded_and_chunks_that_are_joined_lose_no_extreme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CHUNKS", 64)
    monkeypatch.setattr(module, "_MOST_LINES", 100)
    write(tmp_path, range(1, 20_001), lambda step, n: 50.0 if step == 7777 else float("nan") if step < 500 else 2.0)
    tracemalloc.start()
    curves = whole(tmp_path)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 2 << 20, "16 bytes a step, and at most 64 chunks"
    view = curves.view(240)
    assert extremes(
        {"metrics": {"m": {k: [x for x in v if x is not None] for k, v in view["metrics"]["metric_5"].items()}}}, "m"
    ) == (2.0, 50.0)
    assert view["metrics"]["metric_5"]["last"][0] is None or view["width"] > 499


def test_a_file_that_another_replaced_is_read_from_its_start_and_a_torn_line_later(tmp_path: Path) -> None:
    write(tmp_path, range(1, 50), lambda step, n: 1.0)
    curves = whole(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "metric_0"')
        file.flush()
        assert curves.catch_up()
        assert curves.view(240)["last_step"] == 49
        file.write(": 4.0}\n")
    assert curves.catch_up()
    assert curves.view(240)["metrics"]["metric_0"]["last"][-1] == 4.0
    write(tmp_path, range(1, 10), lambda step, n: 3.0)
    assert curves.catch_up()
    assert curves.view(240)["metrics"]["metric_0"]["last"] == [3.0] * 9


def test_events_mark_the_steps_at_which_they_happened(tmp_path: Path) -> None:
    write(tmp_path, range(1, 10), lambda step, n: 1.0)
    events = [
        {"name": "settings changed", "detail": "revision 1", "fields": {"step": 4}},
        {"name": "run restored", "detail": "from a checkpoint", "fields": {"step": 6}},
        {"name": "self-test passed", "detail": "", "fields": {"step": 6}},
        {"name": "settings changed", "detail": "before steps were told", "fields": {}},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert whole(tmp_path).view(240)["marks"] == [
        {"step": 4, "kind": "settings", "text": "settings changed: revision 1"},
        {"step": 6, "kind": "restart", "text": "run restored: from a checkpoint"},
    ]


def test_no_record_is_no_curve(tmp_path: Path) -> None:
    assert whole(tmp_path).view(240) == {
        "first_step": 0, "last_step": 0, "steps": 0, "width": 1, "step": [], "metrics": {}, "marks": []
    }  # fmt: skip
