"""vLLM's scheduler with the shorter way and without it, side by side: the same steps, tokens and state."""

import copy
import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.rollout.scheduling import BLOCK_SIZE, output, request, scheduler, scheduler_config
from penstock.services.rollout.engines.vllm.decoding.several_steps import SeveralSteps
from penstock.services.rollout.engines.vllm.scheduling.guessing import PASS_TOKENS, Guessing
from penstock.services.rollout.engines.vllm.scheduling.plain_decoding import (
    _MORE_OF_A_STEP,
    MOST_EACH,
    TOKENS_EACH,
    plain_decoding,
    slower_decoder,
)
from tests.conftest import need_module

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn

VOCABULARY, LONGEST, END = 50, 192, 1
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "eos_token_id": END,
}  # fmt: skip


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    need_module("vllm", "vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        folder = tmp_path_factory.mktemp("policy")
        yield scheduler_config(folder, SHAPE, sequences=24, context=LONGEST, tokens=256)


class Side:
    """One scheduler, two of whose steps are under way, and the tokens that it has sent."""

    def __init__(self, kind: Any, config: Any, blocks: int) -> None:
        self.scheduler = scheduler(kind, config, blocks)
        self.sent: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self._under_way: list[Any] = []
        self.looked_at = self.allocations = 0
        """By vLLM's own code: tokens drawn, and calls for slots."""
        self.scheduler._update_request_with_output = self._counted(
            "looked_at", self.scheduler._update_request_with_output
        )
        coordinator = self.scheduler.kv_cache_manager.coordinator
        coordinator.allocate_new_blocks = self._counted("allocations", coordinator.allocate_new_blocks)

    def _counted(self, count: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            setattr(self, count, getattr(self, count) + 1)
            return call(*given, **named)

        return counted

    def add(self, name: str, prompt: list[int], sampling: dict[str, Any]) -> None:
        added = request(name, prompt, **sampling)
        added.sampling_params.update_from_generation_config({}, END)
        self.scheduler.add_request(added)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        step = self.scheduler.schedule()
        self._under_way.append(
            (step, {name: self._draws(name, count) for name, count in step.num_scheduled_tokens.items()})
        )
        return step

    def _draws(self, name: str, count: int) -> bool:
        """Whether the worker would draw a token after ``count`` more, which the scheduler has counted already."""
        request = self.scheduler.requests[name]
        return bool(count) and not request.is_prefill_chunk

    def finish_step(self, lot: random.Random) -> None:
        """Let the worker's answer to the older of two steps arrive."""
        if len(self._under_way) < 2:
            return
        step, draws = self._under_way.pop(0)
        tokens = {name: [lot.randrange(VOCABULARY)] if draws[name] else [] for name in sorted(draws)}
        self.take(self.scheduler.update_from_output(step, output(step, tokens)))

    def take(self, outputs: dict[int, Any]) -> None:
        for client in outputs.values():
            for made in client.outputs:
                self.sent[made.request_id] += made.new_token_ids
                if made.finish_reason is not None:
                    self.ends[made.request_id] = f"{made.finish_reason} {made.stop_reason}"

    def state(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        scheduler = self.scheduler
        cache = scheduler.kv_cache_manager
        group = cache.coordinator.single_type_managers[0]
        return {
            "requests": {name: _plainly(request) for name, request in scheduler.requests.items()},
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "blocks": {
                name: [block.block_id for block in blocks] for name, blocks in group.req_to_blocks.items() if blocks
            },
            "cached": dict(group.num_cached_block),
            "redirected": list(group._partial_hit_reqs),
            "references": [(block.block_id, block.ref_cnt, block.block_hash) for block in cache.block_pool.blocks],
            "free": [block.block_id for block in cache.block_pool.free_block_queue.get_all_free_blocks()],
        }


def _noting_plans(plain: Any) -> list[bool]:
    """Return whether each later step was planned as a whole."""
    planned: list[bool] = []
    plan = plain._planned

    def noted(scheduler: Any) -> Any:
        of_step = plan(scheduler)
        planned.append(of_step is not None)
        return of_step

    plain._planned = noted
    return planned


def _plainly(request: Any) -> dict[str, Any]:
    left_out = {"sampling_params", "_block_hasher", "output_token_ids", "all_token_ids", "events", "prefill_stats"}
    values = {name: copy.copy(value) for name, value in vars(request).items() if name not in left_out}
    return {**values, "events": len(request.events), "prefilled": request.prefill_stats is None}


def _step_plainly(step: Any) -> dict[str, Any]:
    begun = [(new.req_id, new.prompt_token_ids, new.block_ids) for new in step.scheduled_new_reqs]
    others = {name: value for name, value in vars(step).items() if name != "scheduled_new_reqs"}
    return {**others, "scheduled_cached_reqs": dataclasses.asdict(step.scheduled_cached_reqs), "begun": begun}


def _work(lot: random.Random, stems: list[list[int]], number: int) -> tuple[str, list[int], dict[str, Any]]:
    prompt = [*lot.choice(stems), *(lot.randrange(2, VOCABULARY) for _ in range(lot.randint(0, 9)))]
    sampling: dict[str, Any] = {"max_tokens": lot.choice([1, 2, 20, 70, 500]), "ignore_eos": lot.random() < 0.7}
    if lot.random() < 0.3:
        sampling["stop_token_ids"] = [lot.randrange(2, VOCABULARY)]
    if lot.random() < 0.2:
        sampling["min_tokens"] = min(10, sampling["max_tokens"])
    return f"r{number}", prompt, sampling


@pytest.mark.parametrize(("blocks", "newer_runner"), [(2000, True), (2000, False), (40, True)])
@pytest.mark.parametrize("seed", range(3))
def test_steps_tokens_and_state_are_vllms(vllm_config: Any, blocks: int, newer_runner: bool, seed: int) -> None:
    """With prefixes in common, stop tokens, requests that are taken back, and too few blocks for all."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from penstock.services.rollout.engines.vllm.scheduling.schedulers import HoldingAsyncScheduler

    ours, theirs = (Side(kind, vllm_config, blocks) for kind in (HoldingAsyncScheduler, AsyncScheduler))
    for side in (ours, theirs):
        side.scheduler.use_v2_model_runner = newer_runner
    lot, planned = random.Random(seed), _noting_plans(ours.scheduler._plain)
    stems = [[lot.randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 16, 31, 40, 100)]
    preempted, number = False, 0
    while number < 400 or theirs.scheduler.requests:
        number += 1
        if number < 400 and lot.random() < 0.12:
            name, prompt, sampling = _work(lot, stems, number)
            for sample in range(lot.choice([1, 4])):
                for side in (ours, theirs):
                    side.add(f"{name}-{sample}", prompt, sampling)
        if lot.random() < 0.02 and theirs.scheduler.requests:
            name = lot.choice(list(theirs.scheduler.requests))
            for side in (ours, theirs):
                side.abort(name)
        assert _step_plainly(ours.schedule()) == _step_plainly(theirs.schedule())
        answer = lot.randrange(1 << 30)
        for side in (ours, theirs):
            side.finish_step(random.Random(answer))
        assert ours.state() == theirs.state()
        preempted |= any(request.num_preemptions for request in theirs.scheduler.requests.values())
    assert not theirs.scheduler.requests
    assert ours.ends == theirs.ends
    assert {name: ours.sent[name] for name in ours.ends} == {name: theirs.sent[name] for name in theirs.ends}
    assert preempted == (blocks == 40)
    assert planned.count(True) > len(planned) / 10
    assert ours.looked_at < theirs.looked_at / 2
    assert ours.allocations < theirs.allocations / 2


class Device:
    """A model runner whose tokens depend on their request and place alone, and a scheduler with two steps under way."""

    def __init__(self, kind: Any, config: Any, blocks: int, guessing_up_to: int = 0) -> None:
        self.side = Side(kind, config, blocks)
        self.side.scheduler.use_v2_model_runner = True
        if guessing_up_to:
            self.side.scheduler._plain._guessing = Guessing(guessing_up_to)
        self._prompts: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        """Of each request, prompt included, as the device counts them."""
        self._under_way: list[tuple[Any, Any]] = []
        self.tokens_of_steps: list[int] = []
        SeveralSteps(self)

    def add(self, name: str, prompt: list[int], sampling: dict[str, Any]) -> None:
        self._prompts[name] = len(prompt)
        self.side.add(name, prompt, sampling)

    def step(self) -> None:
        step = self.side.scheduler.schedule()
        self.execute_model(step)
        self._under_way.append((step, self.sample_tokens(None)))
        self.tokens_of_steps.append(getattr(step, TOKENS_EACH, 1))
        if len(self._under_way) == 2:
            step, drawn = self._under_way.pop(0)
            self.side.take(self.side.scheduler.update_from_output(step, drawn.get_output()))

    def execute_model(self, step: Any) -> None:
        cached = step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._step, self._places = step, {}
        for new in step.scheduled_new_reqs:
            self._tokens[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
        for name, count in step.num_scheduled_tokens.items():
            last = computed[name] + count
            blocks = self.side.scheduler.kv_cache_manager.get_block_ids(name)[0]
            assert last <= min(LONGEST, len(blocks) * BLOCK_SIZE)
            assert self._tokens[name] <= last or self.side.scheduler.requests[name].is_prefill_chunk
            self._places[name] = self._tokens[name]

    def sample_tokens(self, _: Any) -> Any:
        guesses = self._step.scheduled_spec_decode_tokens
        tokens: dict[str, list[int]] = {}
        for name, place in self._places.items():
            is_chunk = self.side.scheduler.requests[name].is_prefill_chunk
            count = 0 if is_chunk else 1 + random.Random(f"{name} {place}").randint(0, len(guesses.get(name, ())))
            first = place - self._prompts[name]
            tokens[name] = [
                random.Random(f"{name} {number}").randrange(VOCABULARY) for number in range(first, first + count)
            ]
            self._tokens[name] += count
        made, device_is_done = output(self._step, tokens), SimpleNamespace(query=lambda: True, synchronize=lambda: None)
        width = PASS_TOKENS if guesses else 1
        array = np.array([(*drawn, *[-1 if guesses else 0] * width)[:width] for drawn in tokens.values()])
        array = array.reshape(-1, width)
        return SimpleNamespace(sampled_token_ids=array, copy_event=device_is_done, get_output=lambda: made)


@pytest.mark.parametrize("guessing_up_to", [0, 6])
@pytest.mark.parametrize("blocks", [2000, 40])
@pytest.mark.parametrize("seed", range(3))
def test_several_tokens_in_a_step_give_the_same_completions(
    vllm_config: Any, blocks: int, seed: int, guessing_up_to: int
) -> None:
    """With requests that are taken back, preempted ones, and a reset of the cache that discards what is under way."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from penstock.services.rollout.engines.vllm.scheduling.schedulers import HoldingAsyncScheduler

    ours = Device(HoldingAsyncScheduler, vllm_config, blocks, guessing_up_to)
    theirs = Device(AsyncScheduler, vllm_config, blocks)
    lot, number, aborted = random.Random(seed), 0, set()
    stems = [[lot.randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 16, 31, 40, 100)]
    while number < 400 or ours.side.scheduler.requests or theirs.side.scheduler.requests:
        number += 1
        assert number < 10_000, "requests do not end"
        if number < 400 and lot.random() < 0.06:
            name, prompt, sampling = _work(lot, stems, number)
            for sample in range(lot.choice([1, 4])):
                for device in (ours, theirs):
                    device.add(f"{name}-{sample}", prompt, sampling)
        if lot.random() < 0.02 and theirs.side.scheduler.requests:
            aborted.add(name := lot.choice(list(theirs.side.scheduler.requests)))
            for device in (ours, theirs):
                device.side.abort(name)
        for device in (ours, theirs):
            if number % 97 == 0:
                device.side.scheduler.reset_prefix_cache(reset_running_requests=True)
            device.step()
    assert set(ours.side.ends) >= theirs.side.ends.keys() - aborted
    for name in theirs.side.ends.keys() - aborted:
        assert (ours.side.ends[name], ours.side.sent[name]) == (theirs.side.ends[name], theirs.side.sent[name])
    assert sum(tokens >= MOST_EACH for tokens in ours.tokens_of_steps) > 20
    assert (max(ours.tokens_of_steps) > 4 * PASS_TOKENS) == bool(guessing_up_to)
    free = ours.side.state()["free"]
    assert len(free) == len(theirs.side.state()["free"])


def test_steps_have_more_tokens_only_where_python_is_slower_than_the_device(vllm_config: Any) -> None:
    from penstock.services.rollout.engines.vllm.scheduling.schedulers import HoldingAsyncScheduler

    plain = scheduler(HoldingAsyncScheduler, vllm_config, 100)._plain
    for unwaited, tokens in ((None, 1), (False, 1), (True, MOST_EACH)):
        for _ in range(500):
            plain._adapt(unwaited)
        assert plain.tokens_each == tokens


@pytest.mark.parametrize("name", [*_MORE_OF_A_STEP, "num_lookahead_tokens"])
def test_a_scheduler_that_looks_at_more_than_tokens_is_vllms_alone(vllm_config: Any, name: str) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    theirs = scheduler(AsyncScheduler, vllm_config, 100)
    setattr(theirs, name, 1)
    assert plain_decoding(theirs, None, (0, 32), 31) is None
    assert "allocate_slots" not in vars(theirs.kv_cache_manager)


def test_other_releases_and_other_attention_are_vllms_alone(vllm_config: Any) -> None:
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    assert plain_decoding(scheduler(AsyncScheduler, vllm_config, 100), None, (0, 30), 31) is None
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    full, window = FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=32)
    for specs, shortened in (((full,), True), ((window,), False), ((full, window), False)):
        theirs = scheduler(AsyncScheduler, vllm_config, 100, specs)
        assert (plain_decoding(theirs, None, (0, 32), 31) is not None) == shortened
        assert ("allocate_slots" in vars(theirs.kv_cache_manager)) == shortened


@pytest.mark.parametrize(("release", "sentence"), [((0, 26), ""), ((0, 30), "vLLM 0.30 schedules"), ((0, 32), "")])
def test_a_release_whose_steps_are_vllms_own_is_named(release: tuple[int, int], sentence: str) -> None:
    assert slower_decoder(release).startswith(sentence)
    assert bool(slower_decoder(release)) is bool(sentence)
