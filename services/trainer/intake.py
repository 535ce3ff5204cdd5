"""Take experience off the bus: whole, fresh, unfenced, each group once. Rank 0 only.

Groups are held until a step has enough, and those admitted first are used first: one that was overtaken on its way does
not wait until it is stale. They stay pending on the bus until the step is committed, so a trainer that dies loses none of
them. A group leaves here without being trained when it is

    stale       its lag is over ``max_lag``: dropped, or sent back to the prompts (``on_stale``)
    fenced      a token was written under a revoked version: dropped
    too_long    a sample (with preferences: a pair) does not fit into a forward pass: dropped
    no_signal   its rewards are all equal and algorithm.dynamic_sampling is on: dropped, and admission has another
                generated in its slot (Yu et al. 2025, DAPO, arXiv:2503.14476, §3.2)
    nonfinite   its batch gave a loss or gradient that is not finite: dropped, by the loop
    duplicate   the group is held already: dropped
    unreadable  or its arrays do not fit together: buried with the reason
"""

import asyncio
import dataclasses
import logging
import time
from collections import Counter

import numpy as np

from services.trainer.advantages import has_signal
from services.trainer.credit import shaped_rewards
from services.trainer.measures import LEFT
from services.trainer.staleness import judge
from shared.bus import Bus, Delivery
from shared.errors import MessageError
from shared.ledger import Ledger
from shared.live import Live
from shared.messages import Experience, GroupId, PolicyVersion
from shared.settings import Settings
from shared.streams import EXPERIENCE

log = logging.getLogger(__name__)

CONSUMER = "trainer"  # one name for every trainer of a run: what a dead one left is taken up at once
_PROMPT_READ_S = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """A group in the trainer's hands."""

    delivery: Delivery[Experience]
    experience: Experience


class Intake:
    """Fills the batch of the next step.

    It belongs to the event loop: all of its methods are coroutines, which the training thread runs there.
    ``steps_of_versions`` is shared with the publisher: it grows with every version.
    """

    def __init__(self, bus: Bus, live: Live, steps_of_versions: dict[PolicyVersion, int]) -> None:
        self._bus = bus
        self._ledger = Ledger(bus)
        self._live = live
        self._steps_of_versions = steps_of_versions
        self._held: dict[GroupId, Taken] = {}
        self._arrived = asyncio.Event()
        self.left: Counter[str] = Counter()
        """Numbers of groups that left untrained since :meth:`take_left`, by reason."""
        self._useless = 0  # groups without signal that were dropped since the last batch

    @property
    def _settings(self) -> Settings:
        """As they are now: ``max_lag`` may change while the run goes on."""
        return self._live.settings

    async def fill(self) -> None:
        """Hold whatever arrives, for ever; run it in the background."""
        async for delivery in self._bus.own(EXPERIENCE, Experience, CONSUMER):
            await self._hold(delivery)
        while True:
            wanted = self._settings.slots - len(self._held)
            for delivery in await self._bus.read(EXPERIENCE, Experience, CONSUMER, max(1, wanted), _PROMPT_READ_S):
                await self._hold(delivery)

    async def _hold(self, delivery: Delivery[Experience]) -> None:
        if delivery.attempts > self._settings.bus.max_attempts:
            await self._bury(delivery, f"was in the trainer's hands {delivery.attempts - 1} times when it died")
            return
        try:
            experience = delivery.message()
            _check(experience)
            if self._settings.algorithm.reference_travels:
                _check_reference(experience)
        except MessageError as error:
            await self._bury(delivery, str(error))
            return
        group_id = experience.group.prompt.group_id
        if group_id in self._held:
            await self._drop(delivery, "duplicate", "a group of this id is held already")
            return
        if (tokens := self._longest_tokens(experience)) > self._settings.trainer.micro_batch_tokens:
            await self._drop(delivery, "too_long", f"{tokens} tokens > trainer.micro_batch_tokens")
            return
        if self._is_useless(experience):
            self._useless += 1
            await self._drop(delivery, "no_signal", f"all rewards are {float(experience.rewards[0]):g}")
            return
        self._held[group_id] = Taken(delivery, experience)
        self._arrived.set()

    def _is_useless(self, experience: Experience) -> bool:
        """Whether the group teaches nothing and is left out; after so many for one step, none is, so that a run ends."""
        algorithm = self._settings.algorithm
        if not algorithm.dynamic_sampling:
            return False
        if self._useless >= algorithm.dynamic_sampling_rounds * algorithm.groups_per_step:
            return False
        return not has_signal(shaped_rewards(experience, algorithm, self._settings.sampling.max_new_tokens))

    def _longest_tokens(self, experience: Experience) -> int:
        """Return the longest row that cannot be split: the prompt with its longest sample, or with its longest pair."""
        together = 2 if self._settings.algorithm.loss == "dpo" else 1
        lengths = sorted(len(sample.token_ids) for sample in experience.group.samples)
        return len(experience.group.prompt_token_ids) + sum(lengths[-together:])

    async def next_batch(self, step: int, wait_s: float) -> list[Taken] | None:
        """Return the groups of the step after ``step``, or None when there were not enough within ``wait_s``."""
        deadline_s = time.monotonic() + wait_s
        while True:
            self._arrived.clear()
            wanted = self._settings.algorithm.groups_per_step
            fresh = await self._sort_out(step) if len(self._held) >= wanted else []
            if len(fresh) >= wanted:
                return [self._held[group_id] for group_id in sorted(fresh)[:wanted]]
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._arrived.wait()
            except TimeoutError:
                return None

    async def release(self, batch: list[Taken]) -> None:
        """Forget a batch that was committed."""
        for taken in batch:
            del self._held[taken.experience.group.prompt.group_id]
        self._useless = 0

    async def discard(self, batch: list[Taken], reason: str, detail: str) -> None:
        """Let a batch leave untrained: each of its groups by itself, so a crash in the middle loses none of the others."""
        for taken in batch:
            await self._drop(taken.delivery, reason, detail)
        await self.release(batch)

    async def take_left(self) -> Counter[str]:
        """Return the numbers of groups that left untrained since the last call, by reason."""
        left, self.left = self.left, Counter()
        return left

    async def _sort_out(self, step: int) -> list[GroupId]:
        """Let go what is stale or fenced; return what is fresh. What arrives meanwhile is not looked at, so it is neither."""
        revoked = await self._ledger.revoked()
        max_lag = self._settings.algorithm.max_lag
        fresh: list[GroupId] = []
        for group_id, taken in list(self._held.items()):
            group = taken.experience.group
            verdict = judge(group, step, self._steps_of_versions, revoked, max_lag)
            if verdict == "fresh":
                fresh.append(group_id)
                continue
            del self._held[group_id]
            if verdict == "stale" and self._settings.algorithm.on_stale == "requeue":
                await self._requeue(taken)
            else:
                await self._drop(taken.delivery, verdict, f"oldest version {group.oldest_version} at step {step}")
        return fresh

    async def _requeue(self, taken: Taken) -> None:
        prompt = taken.experience.group.prompt
        newest = max(self._steps_of_versions, default=PolicyVersion(0))
        again = dataclasses.replace(prompt, requeues=prompt.requeues + 1, min_version=newest)
        self._count("requeued")
        await self._bus.requeue(taken.delivery, again)

    async def _drop(self, delivery: Delivery[Experience], reason: str, detail: str) -> None:
        self._count(reason)
        log.info("group dropped", extra={"group": delivery.group_id, "reason": reason, "detail": detail})
        await self._bus.drop(delivery, reason, detail)

    def _count(self, reason: str) -> None:
        self.left[reason] += 1
        LEFT.labels(reason).inc()

    async def _bury(self, delivery: Delivery[Experience], reason: str) -> None:
        self._count("buried")
        log.error("group buried", extra={"group": delivery.group_id, "reason": reason})
        await self._bus.bury(delivery, reason)


def _check(experience: Experience) -> None:
    """Raise MessageError where the parts of a group do not fit together."""
    group, rewards = experience.group, experience.rewards
    if len(group.prompt_token_ids) == 0 or not group.samples or len(rewards) != len(group.samples):
        raise MessageError(
            f"expected a prompt and one reward a sample, found {len(group.prompt_token_ids)} prompt tokens, "
            f"{len(group.samples)} samples and {len(rewards)} rewards"
        )
    if not np.isfinite(rewards).all():
        raise MessageError(f"expected finite rewards, found {rewards.tolist()}")
    for sample in group.samples:
        if len(sample.token_ids) == 0 or len(sample.token_ids) != len(sample.behavior_logprobs):
            raise MessageError(
                f"expected one behavior logprob a token, found {len(sample.behavior_logprobs)} for "
                f"{len(sample.token_ids)} tokens"
            )
        if not np.isfinite(sample.behavior_logprobs).all() or len(sample.version_spans) == 0:
            raise MessageError("expected finite behavior logprobs and at least one version span")


def _check_reference(experience: Experience) -> None:
    """Raise MessageError where the reference logprobs that the reward service owes are missing, or not of these tokens."""
    found = experience.reference_logprobs
    if found is None:
        raise MessageError(
            'expected reference logprobs with algorithm.reference = "reward", found none: start the reward service with '
            'the same settings, or set algorithm.reference = "trainer"'
        )
    tokens = sum(len(sample.token_ids) for sample in experience.group.samples)
    if found.shape != (tokens,) or not np.isfinite(found).all():
        raise MessageError(f"expected {tokens} finite reference logprobs, found an array of shape {found.shape}")
