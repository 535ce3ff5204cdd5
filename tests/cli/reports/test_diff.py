"""`penstock report --against`: runs by their settings and records."""

import asyncio
import json
from pathlib import Path

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.cli.reports.diff import Curve, Group, curves, same_prompts, settings_differences
from penstock.shared.settings import load_run
from tests.support.browser import opened, shows


def run(folder: Path, rate: str, rewards: list[float], accuracies: list[float]) -> Path:
    folder.mkdir()
    (folder / "settings.toml").write_text(
        f'[run]\nid = "{folder.name}"\n[trainer]\nlearning_rate = {rate}\n[data]\npath = "train.jsonl"\n'
    )
    steps = [{"step": step, "reward_mean": reward, "scorer_mean_answer": 1} for step, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    lines = [{"set": "heldout", "step": step, "accuracy": value} for step, value in enumerate(accuracies)]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    first = run(tmp_path / "first", "1e-6", [0.1, 0.2, 0.3], [0.25, 0.5])
    return first, run(tmp_path / "second", "2e-6", [0.1, 0.4, 0.4, 0.9], [0.25, 0.75])


def test_settings_that_differ_are_shown_without_names_and_places(runs: tuple[Path, Path]) -> None:
    assert settings_differences(list(map(load_run, runs))) == {"trainer.learning_rate": [1e-6, 2e-6]}


def test_curves_are_compared_over_the_steps_that_both_runs_have(runs: tuple[Path, Path]) -> None:
    steps, drawn = curves(runs)
    assert steps == 3
    assert drawn == [
        Curve("reward_mean", [[0.1, 0.2, 0.3], [0.1, 0.4, 0.4]]),
        Curve("scorer_mean_answer", [[1, 1, 1], [1, 1, 1]]),
        Curve("accuracy heldout", [[0.25, 0.5], [0.25, 0.75]], last=1),
    ]
    assert drawn[2].ends == [0.5, 0.75]


def test_supervised_runs_are_compared_by_their_loss(runs: tuple[Path, Path]) -> None:
    for folder, losses in zip(runs, ([0.5, 0.25], [0.5, 0.125]), strict=True):
        steps = [{"step": step, "loss": loss, "preference_margin": 1.0} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    assert curves(runs)[1][:2] == [
        Curve("loss", [[0.5, 0.25], [0.5, 0.125]]),
        Curve("preference_margin", [[1.0, 1.0], [1.0, 1.0]]),
    ]


def test_the_comparison_is_printed(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs[0]), "--against", str(runs[1])]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trainer.learning_rate", "1e-06", "2e-06"] in rows
    assert ["reward_mean", "0.2", "▁▅█", "0.3", "▁██"] in rows
    assert ["accuracy", "heldout", "0.5", "▁█", "0.75", "▁█"] in rows


def test_rollouts_for_the_same_prompts_are_compared_those_that_differ_most_first(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first: list[tuple[str, list[float]]] = [("a", [0, 1]), ("b", [1, 1]), ("a", [0, 0.5])]
    second: list[tuple[str, list[float]]] = [("a", [0, 0.5]), ("b", [0, 0])]
    for folder, rewards in zip(runs, (first, second), strict=True):
        lines = [
            {
                "step": step,
                "problem": name,
                "row_id": name,
                "completions": [{"text": f"{r}", "reward": r} for r in both],
            }
            for step, (name, both) in enumerate(rewards, 1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "rollouts.jsonl").write_text('{"from": "another version"}\n' + text)
    assert list(same_prompts(runs).items()) == [
        ("b", [Group("b", 2, 1.0, "1"), Group("b", 2, 0.0, "0")]),
        ("a", [Group("a", 3, 0.25, "0.5"), Group("a", 1, 0.25, "0.5")]),
    ]
    assert main(["report", str(runs[0]), "--against", str(runs[1])]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert ['step 2: reward 1, "1"', 'step 2: reward 0, "0"'] in [
        [cell.strip() for cell in row if cell][1:] for row in rows
    ]


def test_prompts_are_the_same_wherever_their_rows_are(runs: tuple[Path, Path]) -> None:
    rows = {"of 1+1": "2", "of 2+2": "4"}
    for folder, order in zip(runs, (list(rows), list(reversed(rows))), strict=True):
        lines = [
            {"step": 1, "problem": f"a.jsonl:{n}", "row_id": row, "completions": [{"text": rows[row], "reward": 1}]}
            for n, row in enumerate(order, 1)
        ]
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    both = same_prompts(runs)
    assert {row: (first.best, second.best) for row, (first, second) in both.items()} == {
        row: (best, best) for row, best in rows.items()
    }
    assert (both["of 1+1"][0].problem, both["of 1+1"][1].problem) == ("a.jsonl:1", "a.jsonl:2")


def test_runs_of_one_name_are_shown_by_their_folders_and_an_overlay_that_cannot_be_written_is_an_error(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "elsewhere" / "first"
    other.parent.mkdir()
    run(other, "3e-6", [0.5], [0.5])
    assert main(["report", str(runs[0]), "--against", str(other)]) == 0
    assert f'"name": "{other}"' in (runs[0] / "overlay.html").read_text(), "not first and first"
    (runs[0] / "overlay.html").unlink()
    (runs[0] / "overlay.html").mkdir()
    assert main(["report", str(runs[0]), "--against", str(runs[1])]) == 1
    assert "could not write the curves over one another in" in capsys.readouterr().err


def test_equal_runs_have_no_difference(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs[0]), "--against", str(runs[0]), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["settings"], shown["steps"]) == ({}, 3)
    assert shown["last"]["accuracy heldout"] == [0.5, 0.5]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "a"), "--against", str(tmp_path / "b")]) == 2
    assert "no run's folder or settings file at" in capsys.readouterr().err


async def test_curves_of_three_runs_are_drawn_over_one_another_in_one_file(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "<img src=x onerror=alert(1)>"
    third = run(tmp_path / name, "3e-6", [0.2, 0.3], [0.75])
    words = [str(runs[0]), "--against", str(runs[1]), "--against", str(third)]
    assert await asyncio.to_thread(main, ["report", *words]) == 0
    printed = capsys.readouterr().out
    assert ["trainer.learning_rate", "1e-06", "2e-06", "3e-06"] in [line.split() for line in printed.splitlines()]
    overlay = runs[0] / "overlay.html"
    assert printed.splitlines()[-1] == str(overlay)
    async with opened(overlay.as_uri()) as page:
        reward = page.locator('[data-curve="reward mean"]')
        for shown in ("first 0.3", "second 0.9", f"{name} 0.3"):
            await shows(page, '[data-curve="reward mean"] .key', shown)
        assert await reward.locator("polyline").count() == 3, "the longest run's curve is longer"
        await shows(page, '[data-curve="held-out accuracy: heldout"] .key', "second 0.75")
        await reward.get_by_text("Values").click()
        assert "–" in await reward.locator("tbody tr").first.inner_text(), "step 4: of the second run alone"
