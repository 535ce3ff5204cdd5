"""Processor time of decoding a message, by type, in microseconds.

``median_us`` and ``least_us`` are over rounds. ``--before FOLDER`` alternates with another checkout; ``speed`` is the
median of its time / this checkout's.

    python -m benchmarks.bus.wire --rounds 200 --before ../earlier
"""

import argparse
import functools
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.shared.bus import messages
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import (
    ChatMessage,
    Event,
    Experience,
    FinishReason,
    GroupId,
    Misfit,
    PolicyRecord,
    PolicyUpdate,
    PolicyVersion,
    Probe,
    Prompt,
    RolloutGroup,
    Sample,
    SampleScores,
    Sampling,
    Score,
    ScoreStatus,
    StepPlan,
    StepReport,
)

SHAPES = ((2, 4), (8, 128), (16, 128), (8, 1024), (16, 1024), (16, 2048))
"""Samples and tokens per sample of a group."""
ROUND_NS = 2_000_000

Decode = Callable[[bytes], object]


def make_prompt(samples: int, tokens: int) -> Prompt:
    """Return a prompt like a mathematics dataset's."""
    return Prompt(
        group_id=GroupId(7),
        problem="train.jsonl:8",
        sampling=Sampling(samples=samples, max_new_tokens=tokens, temperature=1.0),
        messages=(ChatMessage("system", "Reason step by step."), ChatMessage("user", "x" * 400)),
        answer="42",
        extra={"level": 3, "subject": "algebra", "source": "train"},
        admitted_at_s=1.5e9,
    )


def make_group(samples: int, tokens: int) -> RolloutGroup:
    """Return a group of two policies' samples, four characters per token."""
    generator = np.random.default_rng(0)
    completions = tuple(
        Sample(
            token_ids=generator.integers(0, 152_000, tokens).astype(np.int32),
            behavior_logprobs=-generator.random(tokens, dtype=np.float32),
            version_spans=np.array([[0, 7], [tokens // 2, 8]], dtype=np.int32),
            finish_reason=FinishReason.STOP,
            text="abcd" * tokens,
        )
        for _ in range(samples)
    )
    prompt_token_ids = np.arange(100, dtype=np.int32)
    return RolloutGroup(make_prompt(samples, tokens), prompt_token_ids, completions, "rollout-0", 1.5e9, 1.5e9)


def make_experience(group: RolloutGroup) -> Experience:
    """Return ``group`` as handed over by the reward service."""
    scores = tuple(SampleScores((Score("answer", ScoreStatus.OK, 1.0),)) for _ in group.samples)
    return Experience(group, np.ones(len(group.samples), dtype=np.float32), scores, 1.5e9, 0.1)


def make_messages() -> dict[str, object]:
    """Return messages to decode, by name."""
    made: dict[str, object] = {"prompt": make_prompt(16, 1024)}
    for samples, tokens in SHAPES:
        group = make_group(samples, tokens)
        made[f"rollout_group_{samples}x{tokens}"] = group
        made[f"experience_{samples}x{tokens}"] = make_experience(group)
    logprobs = np.full(254, -1.0, np.float32)
    probe = Probe(np.arange(256, dtype=np.int32), np.array([128, 128], np.int32), logprobs, noise=-logprobs)
    metrics = {f"metric_{number}": number / 7 for number in range(40)}
    record = PolicyRecord(PolicyVersion(8), PolicyVersion(7), 8, 1.5e9, "ab" * 32, "", metrics, "host:1", probe)
    return {
        **made,
        "policy_record": record,
        "policy_update": PolicyUpdate(
            record, 1.5e9, {f"rollout-{number}": ("host:1", "host:2") for number in range(8)}
        ),
        "step_plan": StepPlan(16_384, "ab" * 32, (Misfit(0, (0, 1)),)),
        "step_report": StepReport(8, PolicyVersion(8), 1.5e9, 512, metrics, {"0": 480, "1": 32}),
        "event": Event(1.5e9, "trainer", "step", "a detail of some words", {"step": 3, "loss": 0.5}),
    }


def decoders(wire_module: Any, messages_module: Any, sent: Mapping[str, object]) -> dict[str, Decode]:
    """Return a checkout's decoders, each run once."""
    kinds = {name: getattr(messages_module, type(message).__name__) for name, message in sent.items()}
    for name, message in sent.items():
        wire_module.decode(wire.encode(message), kinds[name])
    return {name: functools.partial(wire_module.decode, expected=kind) for name, kind in kinds.items()}


def decoders_of(folder: Path, sent: Mapping[str, object]) -> dict[str, Decode]:
    """Return the decoders of the checkout in ``folder``."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "shared"}
    sys.path.insert(0, str(folder.resolve()))
    try:
        package = "shared.bus" if (folder / "shared" / "bus" / "wire.py").exists() else "shared"
        theirs = importlib.import_module(f"{package}.wire")
        if folder.resolve() not in Path(str(theirs.__file__)).parents:
            sys.exit(f"expected a checkout of Penstock in {folder}: change --before")
        return decoders(theirs, importlib.import_module(f"{package}.messages"), sent)
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] == "shared"]:
            del sys.modules[name]
        sys.modules.update(ours)


def spent_ns(decode: Decode, data: bytes, times: int) -> float:
    """Return the processor time of one decode."""
    started_ns = time.process_time_ns()
    for _ in range(times):
        decode(data)
    return (time.process_time_ns() - started_ns) / times


def measure(data: bytes, ways: Mapping[str, Decode], rounds: int) -> dict[str, float]:
    """Return one message's metrics."""
    times = max(1, round(ROUND_NS / max(spent_ns(way, data, 20) for way in ways.values())))
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            gc.collect()
            spent[name].append(spent_ns(ways[name], data, times))
    figures: dict[str, float] = {"bytes": len(data)}
    for name, values_ns in spent.items():
        figures[f"{name}median_us"] = round(statistics.median(values_ns) / 1e3, 2)
        figures[f"{name}least_us"] = round(min(values_ns) / 1e3, 2)
    if "before_" in spent:
        pairs = zip(spent["before_"], spent[""], strict=True)
        figures["speed"] = round(statistics.median(before / now for before, now in pairs), 3)
        figures["speed_of_least"] = round(min(spent["before_"]) / min(spent[""]), 3)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--before", type=Path, help="folder of another checkout, which decodes the same bytes in turn")
    arguments = parser.parse_args()
    sent = make_messages()
    ways = {"": decoders(wire, messages, sent)}
    if arguments.before is not None:
        ways["before_"] = decoders_of(arguments.before, sent)
    figures = {
        name: measure(wire.encode(message), {way: decode[name] for way, decode in ways.items()}, arguments.rounds)
        for name, message in sent.items()
    }
    print(json.dumps({"benchmark": "wire", "rounds": arguments.rounds, "messages": figures}))


if __name__ == "__main__":
    main()
