r"""Real runs of many layouts of the same GPUs beside the one that the plan recommends, and its rates.

    python -m benchmarks.runs.splits --work four --out /tmp/four.jsonl           # four GPUs, 0.5B, about 15 minutes
    python -m benchmarks.runs.splits --work two-tail --out /tmp/two.jsonl        # two GPUs, completions of very different lengths
    python -m benchmarks.runs.splits --work two-7b --out /tmp/7b.jsonl           # two GPUs of 141 GB, 7B
    python -m benchmarks.runs.splits --work four-7b --only turns,separate-2-2 --out /tmp/7b.jsonl    # some, in several calls
    python -m benchmarks.runs.splits --work four --compare /tmp/four.jsonl       # needs no GPU

A layout is a run of ``penstock up`` (``benchmarks.runs.plan_rates``) with the same groups, lengths and lag. The plan knows
the rates of the layout in ``calibrating`` alone; ``recommended`` is the fastest of the layouts that it would then
choose from among those measured, ``best`` the fastest measured one, and ``ratio`` the rate of the best over the
recommended one's; the bar is 1.05. ``planned`` are rates with the settings that the plan would choose, and
``deviation`` is the prediction for a run's own settings over its measured rate, minus 1; the bar is 0.15. Failed runs,
such as one without memory that the plan says fits, are in ``failed``. Prints one JSON object.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.pipeline import heed_sigterm
from benchmarks.runs import plan_rates
from benchmarks.runs.plan_rates import Configuration, Runs, rows_of
from services.cli.plan import layout_of
from services.plan.layouts import Candidate, GpuLayout
from services.plan.measured import Corrections
from shared.errors import SettingsError

BAR = 1.05
_FOUR: Mapping[str, Any] = {"groups": 48, "steps": 13}
_TAIL: Mapping[str, Any] = {"mean_tokens": 800, "tokens": 2048, "max_lag": 2, "steps": 14}
_LARGE: Mapping[str, Any] = {
    "shape": "7b", "steps": 8, "micro_batch_tokens": 8192,
    "more": {"trainer.zero_stage": 3, "trainer.optimizer": "adamw_8bit", "trainer.gradient_checkpointing": "true",
             "weights.snapshots": "sharded"},
}  # fmt: skip
_LARGE_IN_TURN = {
    **_LARGE,
    "more": {
        **_LARGE["more"],
        "trainer.zero_stage": 1,
        "weights.snapshots": "whole",
        "rollout.vllm.gpu_memory_utilization": 0.5,
    },
}
_ALONE = {**_LARGE, "more": {**_LARGE["more"], "trainer.zero_stage": 1, "weights.snapshots": "whole"}}


WORKS: Mapping[str, Mapping[str, Configuration]] = {
    "four": {
        "separate-2-2": Configuration(mode="separate", ranks=2, replicas=2, engines=2, mps=True, **_FOUR),
        "at-once-2-engines": Configuration(
            mode="at once", ranks=4, engines=2, mps=True, micro_batch_tokens=16_384, **_FOUR
        ),
        "turns": Configuration(ranks=4, **_FOUR),
        "separate-1-3": Configuration(mode="separate", ranks=1, replicas=3, engines=2, mps=True, **_FOUR),
        "at-once": Configuration(mode="at once", ranks=4, mps=True, micro_batch_tokens=16_384, **_FOUR),
        "separate-3-1": Configuration(mode="separate", ranks=3, replicas=1, engines=2, mps=True, **_FOUR),
        "turns-2-engines": Configuration(ranks=4, engines=2, mps=True, **_FOUR),
        "separate-2-2-1-engine": Configuration(mode="separate", ranks=2, replicas=2, **_FOUR),
    },
    "two-tail": {
        "separate-1-1": Configuration(mode="separate", replicas=1, **_TAIL),
        "turns": Configuration(ranks=2, **_TAIL),
        "at-once-2-engines": Configuration(
            mode="at once", ranks=2, engines=2, mps=True, micro_batch_tokens=16_384, **_TAIL
        ),
        "separate-1-1-2-engines": Configuration(mode="separate", replicas=1, engines=2, mps=True, **_TAIL),
    },
    "two-7b": {
        "separate-1-1": Configuration(mode="separate", replicas=1, **_ALONE),
        "turns": Configuration(ranks=2, **_LARGE_IN_TURN),
    },
    "four-7b": {
        "separate-2-2": Configuration(mode="separate", ranks=2, replicas=2, **_LARGE),
        "turns": Configuration(ranks=4, **_LARGE_IN_TURN),
        "turns-of-2": Configuration(ranks=4, tensor_parallel=2, **_LARGE_IN_TURN),
    },
}
"""The first of each calibrates."""


def compared(rows: Sequence[Mapping[str, Any]], layouts: Mapping[str, Configuration]) -> dict[str, Any]:
    """Return what was measured, and what the plan recommends with the rates of the first of ``layouts``; rows of others,
    such as ``placement.mode = "lend"`` of earlier versions, are skipped.
    """
    calibrating, rows = next(iter(layouts)), [row for row in rows if row["name"] in layouts]
    done = {row["name"]: row for row in rows if "error" not in row}
    rates = {name: plan_rates.samples_per_s(row) for name, row in done.items()}
    figures: dict[str, Any] = {
        "calibrating": calibrating,
        "samples_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "failed": {row["name"]: row["error"][-600:] for row in rows if row["name"] not in done},
    }
    if calibrating not in done:
        return figures
    try:
        corrected = plan_rates.corrections_of(done[calibrating])
        choices = _choices(done[calibrating], corrected)
    except SettingsError as error:
        return {**figures, "refused": str(error)}
    keys = {name: _key(layout_of(plan_rates.settings_of(row), mps=row["mps"])) for name, row in done.items()}
    fastest = {_key(candidate.layout): candidate for candidate in reversed(choices)}
    told = {name: fastest[key] for name, key in keys.items() if key in fastest}
    recommended = min(told, key=lambda name: told[name].step_s, default=None)
    figures["plan"] = [
        {"layout": f"{each.layout.placement}: {each.layout.words}", "samples_per_s": round(_rate(each), 1)}
        for each in choices[:5]
    ]
    figures["deviation"] = {
        name: round(plan_rates.predict(row, corrected) / rates[name] - 1, 3)
        for name, row in done.items()
        if name != calibrating
    }
    figures["planned"] = {name: round(_rate(candidate), 1) for name, candidate in told.items()}
    if recommended is None:
        return figures
    best = max(rates, key=lambda name: rates[name])
    ratio = rates[best] / rates[recommended]
    return {**figures, "recommended": recommended, "best": best, "ratio": round(ratio, 3), "bar_met": ratio <= BAR}


def _choices(row: Mapping[str, Any], corrected: Corrections) -> list[Candidate]:
    """Return all layouts of the plan for the work of ``row``, fastest first."""
    return dataclasses.replace(plan_rates.planner_of(row, corrected), exhaustive=True).compare()[0]


def _rate(candidate: Candidate) -> float:
    assert candidate.outcome is not None
    return candidate.outcome.samples_per_s


def _key(layout: GpuLayout) -> tuple[object, ...]:
    return layout.placement, layout.trainer.ranks, layout.all_replicas, layout.tensor_parallel, layout.engines


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=tuple(WORKS), default="four")
    parser.add_argument("--only", default="", help="some layouts, separated by commas")
    parser.add_argument("--out", type=Path, help="results are appended here at once")
    parser.add_argument("--compare", type=Path, help="compare the results in this file again, without a GPU")
    parser.add_argument("--limit-s", type=float, default=420.0, help="for one run, its start included")
    parser.add_argument("--cold-s", type=float, default=60.0, help="more, for the first run of a call")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "penstock-splits")
    arguments = parser.parse_args()
    heed_sigterm()
    layouts = WORKS[arguments.work]
    if arguments.compare:
        print(json.dumps(compared(rows_of(arguments.compare), layouts)))
        return
    names = arguments.only.split(",") if arguments.only else list(layouts)
    if unknown := set(names) - set(layouts):
        raise SystemExit(f"expected some of {', '.join(layouts)}, found {', '.join(sorted(unknown))}: change --only")
    runs = Runs(arguments.folder, toy=False, limit_s=arguments.limit_s, cold_s=arguments.cold_s)
    rows = rows_of(arguments.out) if arguments.out and arguments.out.exists() else []
    for name in names:
        rows.append(runs.row(name, layouts[name]))
        rate = rows[-1].get("error", "")[:300] or f"{plan_rates.samples_per_s(rows[-1]):.1f} samples/s"
        print(f"{name}: {rate}", file=sys.stderr, flush=True)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(json.dumps({"work": arguments.work, **compared(rows, layouts)}))


if __name__ == "__main__":
    main()
