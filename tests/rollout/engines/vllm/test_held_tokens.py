"""Tokens that are held arrive complete, in order, and nothing else is held."""

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.services.rollout.engines.vllm.scheduling import held_tokens
from penstock.services.rollout.engines.vllm.scheduling.held_tokens import HeldTokens, Holding

FINAL, OTHER = "final", "cumulative"


class Output(msgspec.Struct):
    """Like vLLM's ``EngineCoreOutput``."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    events: list[str] | None = None
    nans: int = 0


class Scheduler:
    """Like vLLM's: a step's tokens by client."""

    def __init__(self, steps: list[dict[int, Any]]) -> None:
        self.requests: dict[str, Any] = {"r": request()}
        self.running: list[Any] = [1]
        self._steps = steps

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        return self._steps.pop(0)

    def make_stats(self, *of_this_step: Any, **named: Any) -> Any:
        return "statistics", of_this_step, named


class Mixed(Holding, Scheduler):
    output_class, waits_for = Output, "final"


def request(kind: str = FINAL) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(output_kind=kind))


@pytest.mark.parametrize("seed", range(20))
def test_every_token_arrives_once_and_in_order(seed: int) -> None:
    lot, held = random.Random(seed), HeldTokens(Output)
    running = {f"r{number}": (request(lot.choice([FINAL, FINAL, OTHER])), lot.randint(1, 150)) for number in range(12)}
    expected_ids = {name: list(range(length)) for name, (_, length) in running.items()}
    produced, arrived, messages = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list), 0
    while running:
        outputs = []
        for name, (_, length) in list(running.items()):
            if lot.random() < 0.2:
                continue  # not scheduled in this step
            start = len(produced[name])
            tokens = list(range(start, min(length, start + lot.choice([1, 1, 1, 3]))))
            produced[name] += tokens
            ended = "stop" if len(produced[name]) == length else None
            outputs.append(Output(name, tokens, ended, ["preempted"] if lot.random() < 0.02 else None))
            if ended:
                del running[name]
        sent = held.sent(outputs, {name: of for name, (of, _) in running.items()}, FINAL)
        messages += len(sent)
        for output in sent:
            arrived[output.request_id] += output.new_token_ids
        assert {o.request_id for o in outputs if o.events or o.finish_reason} <= {o.request_id for o in sent}
    assert arrived == expected_ids
    assert messages < sum(len(tokens) for tokens in produced.values())
    assert not held._held


def test_other_requests_and_everything_but_tokens_are_sent_at_once() -> None:
    held, requests = HeldTokens(Output), {"final": request(), "other": request(OTHER)}
    assert held.sent([Output("final", [1]), Output("other", [1])], requests, FINAL) == [Output("other", [1])]
    assert held.sent([Output("final", [2], nans=1)], requests, FINAL) == [Output("final", [1, 2], nans=1)]
    assert held.sent([Output("final", [3])], requests, FINAL) == []
    assert held.sent([Output("final", [], "error")], {}, FINAL) == [Output("final", [3], "error")]
    assert held.sent([Output("unknown", [4])], requests, FINAL) == [Output("unknown", [4])]


def test_tokens_of_requests_that_were_taken_back_are_dropped() -> None:
    held = HeldTokens(Output)
    for number in range(10):
        held.sent([Output(f"r{number}", [1])], {f"r{number}": request()}, FINAL)
    assert len(held._held) <= 2
    assert held.sent([Output("r0", [7], "stop")], {}, FINAL) == [Output("r0", [7], "stop")]


def test_a_scheduler_sends_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(held_tokens, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    scheduler = Mixed(
        [{0: SimpleNamespace(outputs=[Output("r", [token], end)])} for token, end in ((1, None), (2, "stop"))]
    )
    assert scheduler.update_from_output(None, None)[0].outputs == []
    assert scheduler.update_from_output(None, None)[0].outputs == [Output("r", [1, 2], "stop")]
    assert scheduler.make_stats(None, named=None) == ("statistics", (None,), {"named": None})
    now_s[0] += 0.09
    assert scheduler.make_stats(None) is None
    assert scheduler.make_stats(None, more="of this step alone") is not None
    now_s[0] += 0.09
    assert scheduler.make_stats() is None
    scheduler.running = []
    assert scheduler.make_stats() is not None
    scheduler.running = [1]
    now_s[0] += 0.11
    assert scheduler.make_stats() is not None
