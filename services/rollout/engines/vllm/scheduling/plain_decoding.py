"""A shorter way to the same state for requests in the middle of their completions.

At 256 sequences of a small model vLLM's scheduler takes longer to think about a step than the GPU to compute it. Between
its first and its last token nearly every step of a request is *plain*: one more token, which does not end it, in a
block of KV cache that it has. Then three things are shorter here, with the same result as vLLM's own code:

::

    schedule             all running requests are plain, none waits: added here to vLLM's step without requests
      allocate_slots     nothing to allocate or to cache: vLLM's empty answer
    update_from_output   tokens of plain requests are appended here, vLLM's loop sees only the others

Where Python is slower than the device nevertheless, a step of plain requests has several tokens of each, which
``decoding/several_steps.py`` draws one after another; those after a request's end are discarded.

Whatever is not plain goes to vLLM. Used for one group of full attention, with the releases in ``COMPARED``, of which
tests compare every state with vLLM's own; other releases and models are scheduled by vLLM alone.

Legend: cache means vLLM's ``KVCacheManager``, request its ``Request``.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.services.rollout.engines.vllm.scheduling.guessing import GUESSED, PASS_TOKENS, Guessing

TOKENS_EACH, UNWAITED = "penstock_tokens_each", "penstock_unwaited"
"""Attributes of a step (the tokens of each request, if several) and of its output (whether it was ready before Python
asked for it)."""
MOST_EACH = 8
"""Maximum tokens of a request in a step; a request that ends wastes up to twice as many, and updates wait as long."""
_PATIENCE = 32
"""Steps in a row whose outputs were ready, after which steps get more tokens."""
COMPARED = {(0, 26): "async_tokens_to_discard", (0, 32): "num_stale_output_tokens"}
"""Releases of vLLM, and what a request of each calls its tokens that were drawn before it was preempted."""

_RUNNING_CALL = {"num_lookahead_tokens": 0}
"""What vLLM's scheduler tells of running requests beside the number of their tokens, without speculative decoding."""
_MORE_OF_A_STEP = (
    "connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask",
    "is_mm_encoder_only", "is_encoder_decoder", "num_spec_tokens", "dynamic_sd_lookup", "use_pp",
)  # fmt: skip
"""Of a scheduler: whatever looks at each token beside it."""
_WAITING = ("waiting", "skipped_waiting", "kv_holding_waiting", "deferred_waiting")
"""A scheduler's queues; a release has some of them."""
_TOKENS_ONLY = frozenset({"req_ids", "req_id_to_index", "sampled_token_ids", "cudagraph_stats", UNWAITED})
"""Of vLLM's ``ModelRunnerOutput``."""


class Cache(NamedTuple):
    """What is read of vLLM's cache of one group of full attention."""

    manager: Any
    blocks: Mapping[str, list[Any]]
    cached_blocks: Mapping[str, int]
    redirected: Mapping[str, Any]
    """Requests whose last block must become their own before it is written."""
    block_size: int

    @classmethod
    def of(cls, manager: Any) -> "Cache | None":
        """Return that of vLLM's ``manager``, or None if it has more groups or another kind of attention."""
        groups = manager.coordinator.single_type_managers
        if len(groups) != 1 or type(groups[0]).__name__ != "FullAttentionManager" or not manager.enable_caching:
            return None
        group = groups[0]
        if manager.block_pool.hash_block_size != group.block_size:
            return None
        return cls(manager, group.req_to_blocks, group.num_cached_block, group._partial_hit_reqs, group.block_size)

    def is_ready(self, name: str, place: int, tokens: int) -> bool:
        """Whether a running request can compute its token at ``place``, from 1, without a change of the cache: there is
        a block for it, and no full one of its ``tokens`` is to be cached."""
        cached, size = self.cached_blocks.get(name), self.block_size
        return (
            cached is not None
            and place <= size * len(self.blocks[name])
            and (place // size <= cached or tokens // size <= cached)
            and name not in self.redirected
        )


def quick_slots(cache: Cache) -> Callable[..., Any]:
    """Return ``allocate_slots`` of ``cache`` with a quick answer where a token needs no block and completes none."""
    allocate, nothing = cache.manager.allocate_slots, cache.manager.empty_kv_cache_blocks
    longest = cache.manager.max_model_len

    def allocate_slots(request: Any, num_new_tokens: int, *more: Any, **named: Any) -> Any:
        if num_new_tokens == 1 and not more and named == _RUNNING_CALL:
            place = request.num_computed_tokens + 1
            if place <= longest and cache.is_ready(request.request_id, place, request.num_tokens):
                return nothing
        return allocate(request, num_new_tokens, *more, **named)

    return allocate_slots


class _Request(NamedTuple):
    """A request that can be plain, and what its next token is compared with."""

    request: Any
    output_token_ids: list[int]
    token_ids: list[int]
    stops: frozenset[int | None]
    last: int
    """Output tokens from which on vLLM looks whether the request is too long."""
    is_whole: bool
    """Whether it draws from all tokens."""


class PlainDecoding:
    """Schedules plain requests of an asynchronous scheduler, and appends their tokens."""

    def __init__(self, cache: Cache, running: Any, stale: str, most_held: int, guessing: Guessing) -> None:
        self._cache = cache
        self._guessing = guessing
        self._running = running
        self._stale = stale
        self._most_held = most_held
        self._known: dict[str, _Request] = {}
        self._unwaited = 0
        self.tokens_each = 1
        """Tokens of a request in a step."""

    def schedule(self, scheduler: Any, theirs: Callable[[], Any]) -> Any:
        """Return the next step, by ``theirs``, vLLM's ``schedule``, unless all is plain."""
        planned = self._planned(scheduler)
        if planned is None:
            return theirs()
        requests, changed, tokens, guessed = planned
        allocate, nothing = self._cache.manager.allocate_slots, self._cache.manager.empty_kv_cache_blocks
        blocks = [
            allocate(request, tokens, **_RUNNING_CALL) if request.request_id in changed else nothing
            for request in requests
        ]
        running, scheduler.running = scheduler.running, []
        try:
            step = theirs()
        finally:
            scheduler.running = running
        names = [request.request_id for request in requests]
        step.num_scheduled_tokens = dict.fromkeys(names, tokens)
        step.total_num_scheduled_tokens = tokens * len(names)
        cached = step.scheduled_cached_reqs
        cached.req_ids = names
        cached.new_block_ids = [None if new is nothing else new.get_block_ids(allow_none=True) for new in blocks]
        cached.num_computed_tokens = [request.num_computed_tokens for request in requests]
        cached.num_output_tokens = [
            len(request._output_token_ids) + request.num_output_placeholders for request in requests
        ]
        if step.num_common_prefix_blocks:
            step.num_common_prefix_blocks = self._cache.manager.get_num_common_prefix_blocks(running[0].request_id)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(names)
        if scheduler.defer_block_free:
            scheduler.sched_step_seq += 1
        scheduler._update_after_schedule(step)
        if tokens > 1:
            setattr(step, TOKENS_EACH, tokens)
            setattr(step, GUESSED, guessed)
            for request in requests:
                request.num_output_placeholders += tokens - 1  # vLLM has added one
        return step

    def _planned(self, scheduler: Any) -> tuple[list[Any], set[str], int, bool] | None:
        """Return a step's requests, those of which the cache has to change, the tokens of each, and whether they are
        guessed, or None if anything is not plain."""
        running = scheduler.running
        if (
            not 0 < len(running) <= scheduler.max_num_scheduled_tokens
            or scheduler._pause_state.name != "UNPAUSED"
            or any(getattr(scheduler, queue, None) for queue in _WAITING)
        ):
            return None
        known_of, requests, cache = self._known, scheduler.requests, self._cache
        before = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        most = cache.manager.max_model_len - 2
        planned: list[Any] = []
        longest = left = 0
        for request in running:
            name, computed = request.request_id, request.num_computed_tokens
            placeholders, tokens = request.num_output_placeholders, len(request._all_token_ids)
            to_come = request.num_prompt_tokens + request.max_tokens - tokens - placeholders
            if placeholders > 0 and to_come <= 0:
                continue  # its last token is under way
            if (
                name not in known_of
                or requests.get(name) is not request
                or tokens + placeholders - computed != 1
                or computed > most
                or request.is_prefill_chunk
                or request.spec_token_ids
                or (before is not None and name not in before)
            ):
                return None
            longest, left = max(longest, computed), max(left, to_come)
            planned.append(request)
        if not planned:
            return None
        room = most + 1 - longest
        passes = self._guessing.passes(len(planned), self.tokens_each, left, room)
        guessed = passes > 0 and all(known_of[request.request_id].is_whole for request in planned)
        tokens = passes * PASS_TOKENS if guessed else min(self.tokens_each, room, max(left, 1))
        changed = {
            request.request_id
            for request in planned
            if not cache.is_ready(request.request_id, request.num_computed_tokens + tokens, len(request._all_token_ids))
        }
        redirected = sum(request.request_id in cache.redirected for request in planned) if cache.redirected else 0
        most_blocks = len(changed) * -(-tokens // cache.block_size)
        if most_blocks + redirected > cache.manager.block_pool.get_num_free_blocks():
            return None
        return planned, changed, tokens, guessed

    def others(self, step: Any, output: Any, held: Mapping[str, list[int]], requests: Mapping[str, Any]) -> Any:
        """Append tokens of plain requests to them and to ``held``; return ``step`` with the other requests.

        Args:
            step: vLLM's ``SchedulerOutput``.
            output: vLLM's ``ModelRunnerOutput`` of it.
            held: tokens that are not sent yet, of requests whose outputs can be held.
            requests: the scheduler's, by id.
        """
        if step.scheduled_spec_decode_tokens or not has_only_tokens(output):
            return step
        self._adapt(getattr(output, UNWAITED, None))
        self._discount(step, requests)
        if getattr(step, GUESSED, False):
            self._take_back(step.num_scheduled_tokens, output, requests)
        others = self._others(step, output, held, requests)
        if len(self._known) > len(requests):  # some ended
            self._known = {name: known for name, known in self._known.items() if name in requests}
        rest = copy.copy(step)
        rest.num_scheduled_tokens = others
        return rest

    def _adapt(self, unwaited: bool | None) -> None:
        """Double the tokens of a step where the device is faster than Python."""
        self._unwaited = self._unwaited + 1 if unwaited else 0
        if self._unwaited >= _PATIENCE:
            self.tokens_each, self._unwaited = min(2 * self.tokens_each, MOST_EACH, self._cache.block_size), 0

    def _discount(self, step: Any, requests: Mapping[str, Any]) -> None:
        """Count the tokens of a step as the one output that vLLM 0.26 discards after a reset of the cache."""
        several = getattr(step, TOKENS_EACH, 1) - 1
        if several and self._stale == COMPARED[0, 26]:
            for name in step.num_scheduled_tokens:
                request = requests.get(name)
                if request is not None and request.async_tokens_to_discard:
                    request.async_tokens_to_discard -= several

    def _take_back(self, scheduled: Mapping[str, int], output: Any, requests: Mapping[str, Any]) -> None:
        """Take the tokens that were guessed wrong back from the requests, as vLLM does."""
        tokens = 0
        for name, count in scheduled.items():
            request, drawn = requests.get(name), len(output.sampled_token_ids[output.req_id_to_index[name]])
            tokens += drawn
            if request is None or request.is_finished() or getattr(request, self._stale):
                continue
            if request.num_computed_tokens:  # else it was preempted
                request.num_computed_tokens -= count - drawn
            if request.num_output_placeholders:
                request.num_output_placeholders -= count - drawn
        self._guessing.learn(tokens, sum(scheduled.values()) // PASS_TOKENS)

    def _others(
        self, step: Any, output: Any, held_of: Mapping[str, list[int]], requests: Mapping[str, Any]
    ) -> dict[str, int]:
        others: dict[str, int] = {}
        guessed = getattr(step, GUESSED, False)
        sampled, places, known_of, stale = output.sampled_token_ids, output.req_id_to_index, self._known, self._stale
        size, cached_blocks, most_held, running = (
            self._cache.block_size, self._cache.cached_blocks, self._most_held, self._running,
        )  # fmt: skip
        for name, scheduled in step.num_scheduled_tokens.items():
            held = held_of.get(name)
            known = known_of.get(name)
            if known is None and held is not None:
                known = self._know(name, requests.get(name))
            if known is None or held is None or len(held) >= most_held or requests.get(name) is not known.request:
                others[name] = scheduled
                continue
            request, output_token_ids, token_ids, stops, last, _ = known
            drawn = sampled[places[name]]
            count = len(drawn) if guessed else scheduled
            if (
                len(drawn) != count
                or not stops.isdisjoint(drawn)
                or len(output_token_ids) + count > last
                or request.status is not running
                or request.num_output_placeholders < count
                or request.events
                or request.prefill_stats is not None
                or getattr(request, stale)
            ):
                others[name] = scheduled
                continue
            output_token_ids += drawn
            token_ids += drawn
            held += drawn
            request.num_in_flight_tokens -= scheduled
            request.num_output_placeholders -= count
            if len(token_ids) % size < count:
                request.update_block_hashes()
            ready = request.num_computed_tokens - request.num_output_placeholders
            if ready // size > cached_blocks.get(name, 0):
                self._cache.manager.cache_blocks(request, ready)
        return others

    def _know(self, name: str, request: Any) -> _Request | None:
        parameters = getattr(request, "sampling_params", None)
        if parameters is None or has_more_than_tokens(request):
            return None
        last = min(request.max_tokens, self._cache.manager.max_model_len - request.num_prompt_tokens) - 1
        stops = frozenset({parameters.eos_token_id, *(parameters.stop_token_ids or ()), *parameters.all_stop_token_ids})
        is_whole = parameters.top_p == 1 and parameters.top_k < 1
        known = _Request(request, request._output_token_ids, request._all_token_ids, stops, last, is_whole)
        self._known[name] = known
        return known


def has_only_tokens(output: Any) -> bool:
    """Whether vLLM's ``ModelRunnerOutput`` has nothing but tokens."""
    return not any(value for name, value in vars(output).items() if name not in _TOKENS_ONLY)


def has_more_than_tokens(request: Any) -> bool:
    """Whether vLLM's scheduler looks at a request's tokens for more than their end."""
    parameters = request.sampling_params
    return bool(
        request.pooling_params is not None
        or request.structured_output_request is not None
        or request.mm_features
        or request.resumable
        or request.trace_headers
        or parameters.num_logprobs is not None
        or parameters.prompt_logprobs is not None
        or parameters.repetition_detection is not None
    )


def slower_decoder(release: tuple[int, int]) -> str:
    """Return the sentence about a release whose steps are not shortened, or ""."""
    if release in COMPARED:
        return ""
    compared = " and ".join(f"{major}.{minor}" for major, minor in COMPARED)
    return (
        f"vLLM {release[0]}.{release[1]} schedules every step itself; with {compared} steps of small models are shorter "
        "(docs/performance.md)"
    )


def plain_decoding(
    scheduler: Any, running: Any, release: tuple[int, int], most_held: int, guessing_up_to: int = 0
) -> PlainDecoding | None:
    """Shorten steps of vLLM's asynchronous ``scheduler`` if that is known to change nothing; else return None.

    Args:
        running: vLLM's ``RequestStatus.RUNNING``.
        release: of vLLM, as two numbers.
        most_held: tokens of a request from which on the next is vLLM's, so that it sends them.
        guessing_up_to: requests; the runner can guess their tokens.
    """
    metrics = getattr(scheduler, "perf_metrics", None)
    if (
        release not in COMPARED
        or any(getattr(scheduler, name, None) for name in _MORE_OF_A_STEP)
        or scheduler.num_lookahead_tokens
        or scheduler.pp_size > 1
        or (metrics is not None and metrics.is_enabled())
    ):
        return None
    cache = Cache.of(scheduler.kv_cache_manager)
    if cache is None:
        return None
    scheduler.kv_cache_manager.allocate_slots = quick_slots(cache)
    return PlainDecoding(cache, running, COMPARED[release], most_held, Guessing(guessing_up_to))
