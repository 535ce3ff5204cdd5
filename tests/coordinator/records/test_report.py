"""Laws of report.html: one self-contained file, safe against HTML in texts."""

import base64
import contextlib
import hashlib
import json
import math
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.services.coordinator.records.report import write_report
from tests.support.browser import opened, shows

if TYPE_CHECKING:
    from playwright.async_api import Page

STEPS = 250
ATTACK = "</pre></script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


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


def rollout(step: int, prompt: str, answer: str, texts: Sequence[str]) -> dict[str, object]:
    completions = [
        {
            "text": text,
            "reward": float(text == answer),
            "scores": {"answer": {"status": "ok", "value": float(text == answer), "detail": ""}},
            "tokens": len(text),
            "finish_reason": "stop",
            "versions": [3],
        }
        for text in texts
    ]
    about = {"entry": f"{step}-0", "step": step, "group": step, "problem": "train.jsonl:1", "row_id": "a"}
    return {**about, "replica": "rollout-0", "prompt": prompt, "answer": answer, "completions": completions}


def whole_run(folder: Path, steps: int = STEPS) -> Path:
    folder.mkdir(exist_ok=True)
    evaluations: list[dict[str, object]] = [
        {"step": step, "version": step, "accuracy": 0.364 + 0.55 * (1 - math.exp(-step / 80)), "problems": 500}
        for step in range(0, steps + 1, 25)
    ]
    rollouts = [rollout(step, "12+34=", "46", ("46", "36", "<b>46</b>")) for step in range(5, steps, 5)]
    events: list[dict[str, object]] = [
        {"at_s": 1_800_000_000.0, "source": "coordinator", "name": "run started", "detail": "by itself"},
        {"at_s": 1.8e9, "source": "data", "name": "held-out data heldout", "detail": "23 of the 30 <problems>"},
    ]
    records: dict[str, list[dict[str, object]]] = {
        "metrics.jsonl": [line(step) for step in range(1, steps + 1)],
        "evaluations.jsonl": evaluations,
        "rollouts.jsonl": rollouts,
        "events.jsonl": events,
    }
    for name, lines in records.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in lines))
    summary = {
        "run_id": "arithmetic-20261121-101500-3f9c",
        "state": "finished",
        "reason": "all steps are made",
        "accuracy_before": 0.364,
        "accuracy_after": 0.89,
        "training_s": 126.4,
        "steps": steps,
        "samples_per_s": 1012.7,
        "groups_admitted": 8000,
        "counts": {"trained": 7990, "dropped:run_ended": 10},
        "finished_at_s": 1_800_000_200.0,
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "functions": {
            "algorithm.loss = mine:loss": [
                {"sha256": "a" * 64, "after_version": None},
                {"sha256": "b" * 64, "after_version": 40},
            ]
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "settings.toml").write_text(f"[run]\nsteps = {steps}\n")
    write_lines(folder / "memory.jsonl", [memory_line(number) for number in range(400)])
    return folder


def memory_line(number: int) -> dict[str, object]:
    begin_s = 1_800_000_000.0 + 10 * number
    held = {"device": "host GPU-1", "capacity_bytes": 140 * 2**30, "total_bytes": 3 * 2**30}
    phases = {"wait": {"weights": 3 * 2**30}, "forward and backward": {"weights": 2**30, "activations": 2 * 2**30}}
    samples = [
        {**held, "phase": phase, "ended_at_s": begin_s + 5 * place, "seconds": 5.0, "components": components}
        for place, (phase, components) in enumerate(phases.items(), 1)
    ]
    return {"entry": f"{number + 1}-0", "replica": "trainer-0", "samples": samples}


def write_lines(file: Path, lines: Sequence[Mapping[str, object]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def checked(report: Path) -> dict[str, Any]:
    """Return a report's records; check that it uses no other file and only the script that its policy names."""
    html = report.read_text()
    assert not re.search(r"<[^>]*\\b(src|href)=", html)
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL)
    assert [attributes for attributes, _ in scripts] == [' id="data" type="application/json"', ' type="module"']
    digest = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    assert "default-src 'none'; style-src 'sha256-" in html
    assert f"; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'\"" in html
    data: dict[str, Any] = json.loads(scripts[0][1])
    return data


@contextlib.asynccontextmanager
async def shown(folder: Path, lines: Sequence[Mapping[str, object]] = ()) -> AsyncIterator["Page"]:
    if lines:
        write_lines(folder / "metrics.jsonl", lines)
    async with opened(write_report(folder).as_uri()) as page:
        yield page


async def test_a_whole_run_becomes_one_page_with_its_curves(tmp_path: Path) -> None:
    data = checked(write_report(whole_run(tmp_path)))
    assert (data["curves"]["first_step"], data["curves"]["last_step"], data["curves"]["width"]) == (1, 250, 2)
    assert data["lags"] == {"0": 32_000, "1": 96_000}
    assert [group["step"] for group in data["rollouts"]] == [245, 210, 175, 140, 110, 75, 40, 5]
    assert data["settings"].endswith("\n[run]\nsteps = 250\n")
    assert len(data["memory"]) == 200, "thinned out"
    async with shown(tmp_path) as page:
        for text in ("0.364 → 0.89", "2 min 6 s"):
            await shows(page, ".tile b", text)
        charts = page.locator("[data-curve]:visible:has(svg)")
        titles = [text.split(" ", 1)[0] for text in await charts.locator("h3").all_text_contents()]
        expected = (
            "Reward Reward Held-out KL Lag Clipped Zero-variance Entropy Throughput Time Response Gradient Learning"
        )
        assert titles == expected.split()
        assert await page.locator('[data-curve="Critic"]').count() == 0
        await page.locator(
            '[data-curve="Reward by scorer"] svg[aria-label="answer 0.5, format 0.75 at step 250"]'
        ).wait_for()
        await shows(page, "#tables tr", "dropped:run_ended10")
        await shows(page, "#tables tr", "196,00075.0%")
        await shows(page, "#tables tr", "whole step0.500")
        folded = await page.locator("#records tr").all_text_contents()
        assert f"algorithm.loss = mine:lossfrom the start{'a' * 64}" in folded
        assert f"algorithm.loss = mine:loss40{'b' * 64}" in folded
        bands = page.locator('#memory [data-device="host GPU-1"] svg rect.phase title')
        assert {*await bands.all_text_contents()} == {"wait", "forward and backward"}
        await page.locator('#memory svg[aria-label^="weights "]').wait_for()
        await shows(page, "#head .bad", "23 of the 30 <problems>")
        await shows(page, "#rollouts .text", "<b>46</b>")
        assert await page.title() == "Penstock: arithmetic-20261121-101500-3f9c"


@pytest.mark.parametrize("pairs", [False, True], ids=["demonstrations", "pairs"])
async def test_a_supervised_run_shows_its_loss_and_no_rewards(tmp_path: Path, pairs: bool) -> None:
    more = (
        {"preference_accuracy": 0.75, "evaluation_accuracy": 0.5, "preference_margin": 0.25}
        if pairs
        else {"ce_loss": 1.0}
    )
    same = {"kl_mean": 0.0, "clip_fraction": 0.0, "ess": 1.0, "lag_mean": 1.0, "lag_max": 1.0, "reference_kl": 0.0}
    lines = [
        {"step": step, "loss": 10.0 - step, "entropy": 0.5, "tokens_per_s": 9.0, **same, **more} for step in range(1, 7)
    ]
    lines[0]["evaluation_loss"], lines[5]["evaluation_loss"] = 8.0, 3.0
    (tmp_path / "summary.json").write_text(json.dumps({"state": "finished", "missing": {"policy": "a full disk"}}))
    shown_rows = rollout(3, "12+34=", "46", ("46", "47") if pairs else ("46",))
    completions = [{**completion, "scores": {}} for completion in shown_rows["completions"]]  # type: ignore[attr-defined]
    if not pairs:
        completions[0]["reward"] = 0.0
    write_lines(tmp_path / "rollouts.jsonl", [{**shown_rows, "replica": "demonstrations", "completions": completions}])
    async with shown(tmp_path, lines) as page:
        titles = await page.locator("[data-curve]:visible h3").all_text_contents()
        assert [title.split(" ", 1)[0] for title in titles][:1] == ["Loss"]
        assert not {title.split(" ", 1)[0] for title in titles} & {
            "Reward",
            "Held-out",
            "KL",
            "Lag",
            "Clipped",
            "Effective",
        }
        assert any(title.startswith("Preferences") for title in titles) == pairs
        assert any(title.startswith("Margin") for title in titles) == pairs
        await page.locator('[data-curve="Loss"] svg[aria-label*="loss 4"]').wait_for()
        await shows(page, ".tile b", "8 → 5")  # means of 9, 8, 7 and of 6, 5, 4
        await shows(page, ".tile b", "8 → 3")
        await shows(page, "#head .bad", "without its policy: a full disk")
        cells = await page.locator("#rollouts td:nth-child(3)").all_text_contents()
        assert cells == (["chosen", "rejected"] if pairs else ["demonstration"])
        assert "mean reward" not in await page.locator("#rollouts .group").first.inner_text()


async def test_no_record_at_all_is_still_a_page(tmp_path: Path) -> None:
    assert checked(write_report(tmp_path))["curves"]["step"] == []
    async with shown(tmp_path) as page:
        await shows(page, ".state", "no step yet")


async def test_any_record_may_be_missing_or_torn(tmp_path: Path) -> None:
    names = ("metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "events.jsonl", "summary.json", "settings.toml")
    whole, blank = whole_run(tmp_path / "whole"), tmp_path / "run"
    blank.write_text("")
    async with opened(blank.as_uri()) as page:  # one browser: the page may ask for what begins with this name
        for name in names:
            torn, without = (shutil.copytree(whole, f"{blank} {fault} {name}") for fault in ("torn", "without"))
            (Path(torn) / name).write_bytes((whole / name).read_bytes()[:-9] + b"\xff{")
            (Path(without) / name).unlink()
            for folder in (torn, without):
                report = write_report(Path(folder))
                checked(report)
                await page.goto(report.as_uri())
                await page.locator("#records details").first.wait_for(state="attached")  # drawn last


async def test_what_a_model_wrote_is_never_html(tmp_path: Path) -> None:
    write_lines(tmp_path / "rollouts.jsonl", [rollout(5, ATTACK, ATTACK, [ATTACK, "\ud800"])])
    write_lines(tmp_path / "events.jsonl", [{"at_s": 1.0, "source": "data", "name": ATTACK, "detail": ATTACK}])
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": ATTACK, "counts": {ATTACK: 1}, "reason": ATTACK}))
    assert checked(write_report(tmp_path))["rollouts"][0]["completions"][0]["text"] == ATTACK
    async with shown(tmp_path) as page:
        for place in ("h1", ".bad", "#tables td", "#rollouts .group", "#rollouts .text", "#records td"):
            await page.locator(place).filter(has_text=ATTACK).first.wait_for(state="attached")
        assert await page.locator("img").count() == 0
        assert await page.locator("script").count() == 2


async def test_a_step_that_was_made_again_counts_once(tmp_path: Path) -> None:
    lines = [
        {"step": step, "reward_mean": reward, "lag_counts": {"0": 1}} for step, reward in ((1, 0.1), (2, 0.9), (2, 0.3))
    ]
    async with shown(tmp_path, lines) as page:
        await shows(page, ".tile b", "0.1 → 0.3")
        await shows(page, "#tables tr", "02100.0%")


async def test_ticks_are_round_and_hold_the_values(tmp_path: Path) -> None:
    lows = {"grad_norm": 3400.0, "response_tokens_mean": 0.0, "tokens_per_s": 50_000.0, "scorer_mean_a": 0.1}
    highs = {"grad_norm": 3400.0, "response_tokens_mean": 0.0, "tokens_per_s": 50_000.0, "scorer_mean_a": 0.93}
    expected = {
        "Gradient norm": ["0", "1000", "2000", "3000", "4000"],
        "Response length": ["-0.5", "-0.25", "0", "0.25", "0.5"],
        "Throughput": ["0k", "20k", "40k", "60k"],
        "Reward by scorer": ["0", "0.25", "0.5", "0.75", "1"],
    }
    async with shown(tmp_path, [{"step": 1, **lows}, {"step": 2, **highs}]) as page:
        for title, ticks in expected.items():
            assert await page.locator(f'[data-curve="{title}"] text[text-anchor=end]').all_text_contents() == ticks


async def test_a_missing_value_leaves_a_gap_and_a_card_without_values_is_absent(tmp_path: Path) -> None:
    values = enumerate((1.0, None, float("nan"), 2.0), 1)
    async with shown(tmp_path, [{"step": step, "kl_mean": value} for step, value in values]) as page:
        assert await page.locator("[data-curve=KL] polyline").count() == 2
        assert await page.locator("[data-curve]").count() == 1


async def test_stacked_areas_stand_on_one_another(tmp_path: Path) -> None:
    lines = [{"step": step, "phase_wait_s": 1.0, "phase_commit_s": top} for step, top in ((0, 1.0), (1, 3.0))]
    async with shown(tmp_path, lines) as page:
        areas = await page.locator("polygon.stack").all()
        lower, upper = [
            [
                [float(number) for number in point.split(",")]
                for point in (await area.get_attribute("points") or "").split()
            ]
            for area in areas
        ]
        assert [point[1] for point in lower] == [132.5, 132.5, 174.0, 174.0]
        assert [point[1] for point in upper] == [91.0, 8.0, 132.5, 132.5]


async def test_a_peak_of_one_step_in_ten_thousand_is_drawn_and_told(tmp_path: Path) -> None:
    lines = [{"step": step, "grad_norm": 50.0 if step == 7000 else 2.0} for step in range(1, 10_001)]
    async with shown(tmp_path, lines) as page:
        ticks = page.locator('[data-curve="Gradient norm"] text[text-anchor=end]')
        assert (await ticks.all_text_contents())[-1] == "60"
        highest = [
            float(y)
            for y in re.findall(r",([\d.]+)", await page.locator("polygon.range").get_attribute("points") or "")
        ]
        assert min(highest) == pytest.approx(8 + 166 * (60 - 50) / 60, abs=0.1), "50 of 60"
        await shows(page, "#range", "Steps 1 to 10,000; a point is 48 steps")
        await page.locator("#curves").focus()
        for key in ("Home", *["PageDown"] * 14, *["ArrowRight"] * 5):
            await page.keyboard.press(key)
        await shows(page, ".legend", "grad norm 2 (2 to 50)")
        await page.keyboard.press("+")
        await shows(page, "#range", "of 10,000")
        await page.keyboard.press("Escape")
        await shows(page, "#range", "Steps 1 to 10,000;")


async def test_figures_are_short(tmp_path: Path) -> None:
    async with shown(tmp_path, [{"step": 1, "lag_mean": 0.012345, "lag_max": 12345.6, "kl_mean": 2.0}]) as page:
        await page.locator('[aria-label="lag mean 0.0123, lag max 12,346 at step 1"]').wait_for()
        await page.locator('[aria-label="kl mean 2 at step 1"]').wait_for()
