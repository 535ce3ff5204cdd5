"""Laws of a process's memory timeline."""

from pathlib import Path

from penstock.shared.process.memory_timeline import Held, MemoryTimeline, host_bytes, sample

PLACE = ("host GPU-1", 100.0)


def test_components_add_up_to_the_total_and_the_rest_is_named() -> None:
    made = sample(PLACE, "optimizer", 2.0, {"weights": 10.0, "gradients": 0.0}, 25.0, "gradients in float32")
    assert made.components == {"weights": 10.0, "gradients in float32": 15.0}
    assert (made.total_bytes, made.capacity_bytes, made.seconds) == (25.0, 100.0, 2.0)


def test_components_that_exceed_the_total_are_the_total() -> None:
    assert sample(PLACE, "wait", 1.0, {"weights": 10.0}, 8.0).total_bytes == 10.0


def test_a_report_has_the_largest_sample_of_each_phase_and_process() -> None:
    timeline = MemoryTimeline()
    for nbytes in (10.0, 30.0, 20.0):
        timeline.note(Held(PLACE, {"weights": nbytes}, nbytes).during("generate", 1.0))
    timeline.note(Held(PLACE, {"weights": 5.0}, 5.0).during("generate", 1.0), rank=1)
    reports = timeline.take("rollout-0")
    assert [(report.replica, [s.total_bytes for s in report.samples]) for report in reports] == [
        ("rollout-0", [30.0]),
        ("rollout-0.1", [5.0]),
    ]


def test_what_is_away_from_a_device_is_not_counted_there() -> None:
    held = Held(PLACE, {"weights": 10.0, "key-value cache": 5.0}, 18.0, "graphs")
    asleep = held.without(("key-value cache", "shadow")).during("train", 1.0)
    assert (asleep.components, asleep.total_bytes) == ({"weights": 10.0, "graphs": 3.0}, 13.0)
    assert held.without(()) == held


def test_reports_are_not_made_at_every_heartbeat() -> None:
    timeline = MemoryTimeline()
    noted = Held(PLACE, {"weights": 1.0}, 1.0).during("generate", 1.0)
    timeline.note(noted)
    assert timeline.take("rollout-0")
    timeline.note(noted)
    assert timeline.take("rollout-0") == []


def test_the_hosts_memory_is_that_of_its_container(tmp_path: Path) -> None:
    whole_bytes, _ = host_bytes(tmp_path)
    for name, text in (("current", "6000"), ("stat", "anon 2000\ninactive_file 3000\n"), ("max", "max\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_bytes(tmp_path)[0] == whole_bytes > 10_000
    (tmp_path / "memory.max").write_text("10000\n")
    assert host_bytes(tmp_path) == (10_000.0, 7000.0)
    (tmp_path / "memory.max").write_text("2000\n")
    assert host_bytes(tmp_path) == (2000.0, 0.0)
