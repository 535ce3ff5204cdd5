"""Laws of report.html: one self-contained file, whatever records there are, and nothing of a run is taken for HTML."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

from services.coordinator.records.charts import Band, Series, curves, figure, stack, ticks
from services.coordinator.records.report import write_report

STEPS = 250


def line(step: int) -> dict[str, object]:
    reward = 0.45 + 0.5 * (1 - math.exp(-step / 80)) + 0.02 * math.sin(step * 1.7)
    return {
        "entry": f"{step}-0",
        "step": step,
        "version": step,
        "finished_at_s": 1_800_000_000.0 + step * 0.5,
        "samples": 512,
        "lag_counts": {"0": 128, "1": 384},
        "reward_mean": reward,
        "reward_std": 0.4,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "kl_mean": 0.002 + 0.001 * math.sin(step / 9),
        "entropy": 0.9 * math.exp(-step / 90) + 0.1,
        "lag_mean": 0.75,
        "lag_max": 1.0,
        "clip_fraction": 0.01,
        "grad_norm": 0.6,
        "learning_rate": 1e-3,
        "scorer_mean_answer": 0.5,
        "scorer_mean_format": 0.75,
        "tokens_per_s": 3200.0 + 200 * math.cos(step / 5),
        "samples_per_s": 1000.0,
        "zero_std_groups": 4.0 + step / 20,
        "response_tokens_mean": 3.1,
        "step_s": 0.5,
        "phase_wait_s": 0.1 + 0.03 * math.sin(step),
        "phase_forward_backward_s": 0.3,
        "phase_optimizer_s": 0.02,
        "phase_snapshot_s": 0.03,
        "phase_commit_s": 0.01,
        "phase_checkpoint_s": 0.2 if step % 50 == 0 else 0.0,
        "generate_s_mean": 0.2,
        "score_s_mean": 0.001,
    }


def whole_run(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    evaluations: list[dict[str, object]] = [
        {"step": step, "version": step, "accuracy": 0.364 + 0.55 * (1 - math.exp(-step / 80)), "problems": 500}
        for step in range(0, STEPS + 1, 25)
    ]
    completions = [{"text": text, "reward": float(text == "46"), "versions": [3]} for text in ("46", "36", "<b>46</b>")]
    rollouts: list[dict[str, object]] = [
        {"step": step, "prompt": "12+34=", "answer": "46", "completions": completions} for step in range(5, STEPS, 5)
    ]
    events: list[dict[str, object]] = [
        {"at_s": 1_800_000_000.0, "source": "coordinator", "name": "run started", "detail": "by itself"},
        {"at_s": 1.8e9, "source": "data", "name": "held-out data heldout", "detail": "23 of the 30 <problems>"},
    ]
    records: dict[str, list[dict[str, object]]] = {
        "metrics.jsonl": [line(step) for step in range(1, STEPS + 1)],
        "evaluations.jsonl": evaluations,
        "rollouts.jsonl": rollouts,
        "events.jsonl": events,
    }
    for name, lines in records.items():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in lines))
    summary = {
        "run_id": "arithmetic-20261121-101500-3f9c",
        "state": "finished",
        "reason": "all steps are made",
        "accuracy_before": 0.364,
        "accuracy_after": 0.89,
        "training_s": 126.4,
        "steps": STEPS,
        "samples_per_s": 1012.7,
        "groups_admitted": 8000,
        "counts": {"trained": 7990, "dropped:run_ended": 10},
        "finished_at_s": 1_800_000_200.0,
        "versions": {"python": "3.11", "torch": "2.13.0"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "settings.toml").write_text("[run]\nsteps = 250\n")
    return folder


class Balanced(HTMLParser):
    """Every tag that is opened is closed, in order."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> None:
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    assert "<script" not in html
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "nan" not in re.findall(r'points="([^"]*)"', html)


def test_a_whole_run_becomes_one_page_with_its_curves(tmp_path: Path) -> None:
    html = write_report(whole_run(tmp_path)).read_text()
    check(html)
    assert "0.364 → 0.89" in html
    assert "2 min 6 s" in html
    for title in ("Reward", "Held-out accuracy", "Lag", "KL", "Entropy", "Throughput", "phases"):
        assert title in html
    assert "<td>dropped:run_ended</td>" in html.replace(' class=""', "")
    assert "75.0%" in html
    assert html.count("<svg") == 13
    assert "Reward by scorer" in html
    assert "Learning rate" in html
    assert '<p class="bad">23 of the 30 &lt;problems&gt;</p>' in html


def test_no_record_at_all_is_still_a_page(tmp_path: Path) -> None:
    html = write_report(tmp_path).read_text()
    check(html)
    assert "no step yet" in html


def test_any_record_may_be_missing_or_torn(tmp_path: Path) -> None:
    names = ("metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "events.jsonl", "summary.json", "settings.toml")
    for name in names:
        folder = whole_run(tmp_path / f"without {name}")
        (folder / name).unlink()
        check(write_report(folder).read_text())
        folder = whole_run(tmp_path / f"torn {name}")
        (folder / name).write_bytes((folder / name).read_bytes()[:-9] + b"\xff{")
        check(write_report(folder).read_text())


def test_what_a_model_wrote_is_never_html(tmp_path: Path) -> None:
    attack = '</pre><script>alert("x")</script>'
    (tmp_path / "rollouts.jsonl").write_text(
        json.dumps({"step": 5, "prompt": attack, "answer": attack, "completions": [{"text": attack, "reward": 1}]})
    )
    (tmp_path / "events.jsonl").write_text(json.dumps({"at_s": 1.0, "name": attack, "detail": attack}))
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": attack, "counts": {attack: 1}, "reason": attack}))
    (tmp_path / "settings.toml").write_text(attack)
    html = write_report(tmp_path).read_text()
    check(html)
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in html


def test_a_step_that_was_made_again_counts_once(tmp_path: Path) -> None:
    lines = [
        {"step": step, "reward_mean": reward, "lag_counts": {"0": 1}} for step, reward in ((1, 0.1), (2, 0.9), (2, 0.3))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    html = write_report(tmp_path).read_text()
    assert "0.1 → 0.3" in html
    assert "100.0%" in html


def test_ticks_are_round_and_hold_the_values() -> None:
    assert ticks(0.1, 0.93) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0.0, 3400.0) == [0.0, 1000.0, 2000.0, 3000.0, 4000.0]
    assert ticks(5.0, 5.0) == [2.0, 4.0, 6.0, 8.0]
    assert ticks(0.0, 0.0) == [-0.5, -0.25, 0.0, 0.25, 0.5]


def test_a_missing_value_leaves_a_gap() -> None:
    svg = curves([1, 2, 3, 4], [Series("x", [1.0, None, float("nan"), 2.0])])
    assert svg.count("<polyline") == 2
    assert curves([1, 2], [Series("x", [None, None])]) == ""
    assert curves([], []) == ""


def test_stacked_areas_stand_on_one_another() -> None:
    svg = stack([0, 1], [Series("a", [1.0, 1.0]), Series("b", [1.0, 3.0])])
    points = re.findall(r'<polygon class="stack s\d" points="([^"]*)"', svg)
    assert points == ["48.0,134.0 430.0,134.0 430.0,176.0 48.0,176.0", "48.0,92.0 430.0,8.0 430.0,134.0 48.0,134.0"]


def test_a_long_run_stays_a_small_file() -> None:
    values = [float(step) for step in range(10_000)]
    svg = curves(values, [Series("x", values)], [Band("band", values, values)])
    assert len(svg) < 60_000


def test_figures_are_short() -> None:
    assert [figure(value) for value in (12345.6, 0.01234, 2.0, None)] == ["12,346", "0.0123", "2", "–"]
