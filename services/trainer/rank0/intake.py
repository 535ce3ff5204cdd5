"""Take experience off the bus: whole, fresh, unfenced, each group once. Rank 0 only.

Groups are used in the order of admission, and pending on the bus until their step's commit. Others leave untrained::

    stale       every sample is over ``max_lag``: dropped. If some are, these are not trained, or are generated again
                (``on_stale = "requeue"``), or their first tokens are not trained (``"mask"``). With ``"wait"`` a step
                waits for groups admitted before those of its batch
    fenced      a token of a revoked version: dropped
    too_long    no sample fits into a forward pass (where whole samples are compared: one does not): dropped. Others are
                trained without those that do not; if none of the groups in flight fits, the run is paused
    no_signal   equal rewards with algorithm.dynamic_sampling: dropped, and another is generated in its slot
                (Yu et al. 2025, DAPO, arXiv:2503.14476, §3.2)
    filtered    not kept by algorithm.filter: dropped, and another is generated in its slot; buried if it fails
    nonfinite   loss or gradient of its batch is not finite: dropped, by the driver
    duplicate   held already, or trained: dropped
    unreadable  malformed, of an unknown group or version, or unfit for the model: buried with the reason
    lost        a token of a version that the bus has lost and a replica kept: generated again
    unavailable no copy of its payload is left (``shared/shelf``): generated again

**Demonstrations** (``algorithm.imitation``) are here at once and would overtake all samples. They keep their places among the
groups in flight instead, while samples may overtake each other::

    admitted    0 sample   1 shown   2 sample   3 shown   4 sample       in flight, in a run with three groups a step
    arrived                shown                shown     sample         places 0–2: one demonstration; one sample is missing
    then        sample     shown                shown     sample         the batch is 1, 0, 4

**Suspects.** Groups in the batch at two deaths of the trainer are tried alone (:meth:`Intake.next_suspect`); only
deaths in such attempts bury a group.
"""

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence

import numpy as np

from penstock.services.trainer.algorithm.advantages import has_signal, shaped_rewards
from penstock.services.trainer.algorithm.group_filter import Filter
from penstock.services.trainer.batch.staleness import (
    Granularity,
    are_long,
    check_supports,
    find_contexts,
    is_fenced,
    without_long,
)
from penstock.services.trainer.metrics import LEFT
from penstock.services.trainer.rank0.mailbox.routes import fetch_all
from penstock.shared.bus.assembly import part_of_group
from penstock.shared.bus.branches import is_branched, longest_branch
from penstock.shared.bus.bus import Bus, Delivery, EntryId
from penstock.shared.bus.claims import regenerate
from penstock.shared.bus.messages import Experience, GroupId, PolicyVersion, Purpose
from penstock.shared.bus.stores.experience.signals import SignalChange, signal
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState, Standing
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.bus.streams import EXPERIENCE
from penstock.shared.errors import Fenced, MessageError, ShelfLost
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import RunKind, Settings

log = logging.getLogger(__name__)

CONSUMER = "trainer"  # shared by successive trainers, so that pending entries are taken up at once
MANY_FILTERED = 10
"""Batches of groups that a filter did not keep for one step after which it is reported."""
DYNAMIC_SAMPLING_ROUNDS = 10
"""Batches without signal for one step after which such groups are used."""
_PROMPT_READ_S = _LOOK_S = 0.2
_LOST_LOOK_S = 1.0
_MOST_PENDING = 1 << 20
_MOST_LOST = 5
"""Times that a group is generated again because its versions are lost."""
_ALONE_FROM = 2
_FETCHED_AT_ONCE = 8
"""Groups that are fetched together: they are large."""


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """A group held by the trainer."""

    delivery: Delivery[Experience]
    experience: Experience
    contexts: tuple[int, ...] = ()
    """How many first tokens of each sample are not trained, in a batch."""
    routes: Mapping[bytes, bytes] = dataclasses.field(default_factory=dict)


class Intake:
    """Fills the next step's batch; on the event loop. ``steps_of_versions`` is the branch's own mapping."""

    def __init__(self, bus: Bus, live: Live, steps_of_versions: dict[PolicyVersion, int]) -> None:
        self._bus = bus
        self._ledger = Ledger(bus)
        self._live = live
        self._steps_of_versions = steps_of_versions
        self._held: dict[GroupId, Taken] = {}
        self._entries: set[EntryId] = set()
        """Of all groups here, those that are leaving included."""
        self._arrived = asyncio.Event()
        self.left: Counter[str] = Counter()
        self.vocabulary: int | None = None
        self.context_tokens = 0
        """Longest sequence of the model; 0: any."""
        self._suspects: list[Taken] = []
        self._tried: Taken | None = None
        self._retaken = asyncio.Event()
        self._useless = 0  # groups dropped without signal since the last batch
        self._filter: Filter | None = None
        self._filtered = 0  # groups that the user's filter did not keep since then
        self._unfit = 0  # groups of which nothing fits into a forward pass, since the last that does
        self._without_signal: list[tuple[GroupId, str, float]] = []
        self._full_at_s: float | None = None  # since when a batch waits for earlier groups

    @property
    def _settings(self) -> Settings:
        return self._live.settings

    async def fill(self) -> None:
        """Hold arriving groups, forever, in the background."""
        try:
            await self._fill()
        finally:
            if self._filter is not None:
                self._filter.close()
                self._filter = None

    async def _fill(self) -> None:
        suspects = await self._ledger.noted_batch()
        await self._retake(suspects)
        await self.note_batch([])
        self._retaken.set()
        looked_s = time.monotonic()
        while True:
            free_slots = self._settings.slots - len(self._held)
            deliveries = await self._bus.read(EXPERIENCE, Experience, CONSUMER, max(1, free_slots), _PROMPT_READ_S)
            await self._hold_all(deliveries)
            if not deliveries and time.monotonic() - looked_s >= _LOST_LOOK_S:
                await self._take_lost()
                looked_s = time.monotonic()

    async def _take_lost(self) -> None:
        """Take again what the bus has delivered and a broken connection has lost."""
        before = set(self._entries)
        pending = await self._bus.pending(EXPERIENCE, CONSUMER, _MOST_PENDING)
        if pending - before - self._entries:
            await self._retake()

    async def _retake(self, suspects: Container[str] = ()) -> None:
        """Hold what an earlier trainer held, or a broken connection has lost; note a crash on each of ``suspects``."""
        own = self._bus.own(EXPERIENCE, Experience, CONSUMER)
        new = [delivery async for delivery in own if delivery.entry_id not in self._entries]
        await self._hold_all([await self._bus.note_crash(each) if each.entry_id in suspects else each for each in new])

    def forget(self) -> None:
        """Let go of what is held, as the bus lost it; :meth:`fill` may begin again."""
        self._held.clear()
        self._entries.clear()
        self._suspects.clear()
        self._without_signal.clear()
        self._retaken.clear()

    async def next_suspect(self) -> Taken | None:
        """Return a group to try alone, its attempt counted, or None."""
        await self._retaken.wait()
        while self._suspects:
            suspect = self._suspects.pop()
            if await self._bus.try_alone(suspect.delivery, CONSUMER):
                self._tried = suspect
                return suspect
        return None

    async def note_tried(self, cause: str = "") -> None:
        """Hold the tried suspect; with a ``cause``, record that it ends the trainer."""
        suspect, self._tried = self._tried, None
        assert suspect is not None
        if cause:
            await self._bus.note_cause(suspect.delivery, cause)
            return
        await self._bus.try_alone(suspect.delivery, CONSUMER, passed=True)
        self._take(suspect)

    async def note_batch(self, batch: list[Taken]) -> None:
        """Record the batch about to be trained, for a successor."""
        await self._ledger.note_batch([taken.delivery.entry_id for taken in batch])

    def _take(self, taken: Taken) -> None:
        self._held[taken.experience.group_id] = taken
        self._arrived.set()

    async def _hold_all(self, deliveries: Sequence[Delivery[Experience]]) -> None:
        """Fetch and look at a few groups at a time, and hold those that stay in their order."""
        for start in range(0, len(deliveries), _FETCHED_AT_ONCE):
            read_now = deliveries[start : start + _FETCHED_AT_ONCE]
            # of an entry that is known the bus has lost that it delivered it
            some = {each.entry_id: each for each in read_now if each.entry_id not in self._entries}
            self._entries.update(some)
            payloads = await asyncio.gather(*map(self._payload, some.values()), return_exceptions=True)
            read = [await self._read(*pair) for pair in zip(some.values(), payloads, strict=True)]
            groups = [taken for taken in read if taken is not None]
            standings = await self._ledger.standings([taken.experience.group_id for taken in groups])
            known = self._known()  # at once: groups are released once they are trained
            staying = [each for each, of in zip(groups, standings, strict=True) if await self._stays(each, of, known)]
            routes = await fetch_all(self._bus, [taken.experience for taken in staying], self._settings.trainer)
            for taken, its in zip(staying, routes, strict=True):
                hold = self._suspects.append if taken.delivery.crashes >= _ALONE_FROM else self._take
                hold(dataclasses.replace(taken, routes=its))

    async def _payload(self, delivery: Delivery[Experience]) -> bytes:
        """Fetch it, unless it has ended the trainer too often."""
        return b"" if self._is_deadly(delivery) else await self._bus.whole(delivery.data)

    def _is_deadly(self, delivery: Delivery[Experience]) -> bool:
        return delivery.attempts > self._settings.internal.max_attempts

    async def _read(self, delivery: Delivery[Experience], payload: bytes | BaseException) -> Taken | None:
        """Return the group, if it can be read and its like is trained by this run."""
        try:
            if self._is_deadly(delivery):
                times, cause = delivery.attempts - 1, await self._bus.cause(delivery) or "it left no message"
                raise MessageError(f"ended the trainer {times} times when it was tried alone: {cause}")
            if isinstance(payload, BaseException):
                raise payload
            whole = dataclasses.replace(delivery, data=payload)
            experience = whole.message()
            self._check(experience)
            return Taken(whole, experience)
        except ShelfLost as error:
            self._count("unavailable")
            await regenerate(self._bus, delivery, error)
            self._entries.discard(delivery.entry_id)
        except MessageError as error:
            await self._bury(delivery, str(error))
        return None

    async def _stays(self, taken: Taken, standing: Standing, known: set[GroupId]) -> bool:
        """Whether the group can be trained, and is one of the ``known`` then; else it leaves."""
        experience, leaves = taken.experience, ("", "")
        try:
            _check_standing(experience, standing, self._steps_of_versions)
            fits = self._fits(experience)
            if fits and not _is_shown(experience):
                self._unfit = 0
            if experience.group_id in known or standing.trained:
                leaves = "duplicate", "a group with this id is held, or was trained"
            elif not fits:
                most = self._settings.trainer.row_setting
                leaves = "too_long", f"{self._tokens(experience)} tokens > {most}"
                await self._note_unfit(experience)
            elif self._is_useless(experience):
                leaves = "no_signal", f"all rewards are {float(experience.rewards[0]):g}"
                self._without_signal.append((experience.group_id, experience.group.prompt.stable_id, 0.0))
                self._useless += 1
            elif not await self._is_kept(experience):
                leaves = "filtered", f"by {self._settings.algorithm.filter}"
                await self._note_filtered()
        except MessageError as error:
            await self._bury(taken.delivery, str(error))
            return False
        if leaves[0]:
            await self._drop(taken.delivery, *leaves)
            return False
        known.add(experience.group_id)
        return True

    def _known(self) -> set[GroupId]:
        return {taken.experience.group_id for taken in self._taken()}

    def _taken(self) -> list[Taken]:
        return [*self._held.values(), *self._suspects, *([self._tried] if self._tried is not None else [])]

    def _check(self, experience: Experience) -> None:
        group = experience.group
        algorithm, is_shown = self._settings.algorithm, _is_shown(experience)
        purposes = self._settings.kind.purposes
        has_prompt = len(group.prompt_token_ids) or all(len(sample.segments) for sample in group.samples)
        if group.prompt.purpose.value not in purposes or not has_prompt:
            raise MessageError(
                f'expected a group to {" or ".join(purposes)}, with a prompt, with algorithm.loss = "{algorithm.loss}", found one to '
                f"{group.prompt.purpose.value}, or without prompt tokens"
            )
        longest = len(group.prompt_token_ids) + max(len(longest_branch(sample)) for sample in group.samples)
        if self.context_tokens and longest > self.context_tokens:
            raise MessageError(f"expected sequences within the model's {self.context_tokens} tokens, found {longest}")
        samples = group.samples
        ids = [group.prompt_token_ids, *(s.token_ids for s in samples), *(s.support_ids for s in samples)]
        ids += [s.teacher_top_ids for s in samples if s.teacher_top_ids is not None]
        largest = int(np.concatenate([part.ravel() for part in ids]).max(initial=0))
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise MessageError(f"expected token ids below the model's {self.vocabulary}, found {largest}")
        check_supports(group)
        needs_order = algorithm.needs_critic or algorithm.credit == "turns"
        if needs_order and any(is_branched(sample) for sample in samples):
            raise MessageError(
                'expected episodes of one branch with algorithm.advantage = "gae" or credit = "turns", which credit what follows in '
                f"time, found several branches for {group.prompt.problem}: change algorithm.advantage or algorithm.credit"
            )
        if algorithm.distillation and not is_shown and any(sample.teacher_logprobs is None for sample in samples):
            raise MessageError(
                f"expected teacher logprobs of every sample with algorithm.distillation > 0, found none for {group.prompt.problem}: name "
                "its teacher in the reward service, or set algorithm.distillation = 0"
            )
        top_k = algorithm.distillation_top_k
        if top_k and not is_shown and (number := group.teacher_top_k) != top_k:
            raise MessageError(
                f"expected the teacher's {top_k} most probable tokens at every position with algorithm.distillation_top_k = {top_k}, found "
                f"{number} for {group.prompt.problem}: start the reward service with the same settings"
            )
        if algorithm.advantage == "maxrl" and not is_shown and (least := float(experience.rewards.min())) < 0:
            raise MessageError(
                'expected rewards of at least 0 with algorithm.advantage = "maxrl", which divides by their mean, found '
                f"{least:g} for {group.prompt.problem}: change reward.expression, or algorithm.advantage"
            )
        if algorithm.reference_travels and not is_shown and experience.reference_logprobs is None:
            raise MessageError(
                'expected reference logprobs with algorithm.reference = "reward", found none: start the reward service with '
                'the same settings, or set algorithm.reference = "trainer"'
            )

    def _is_useless(self, experience: Experience) -> bool:
        """Whether to drop the group for lack of signal; bounded per step."""
        algorithm = self._settings.algorithm
        if not algorithm.dynamic_sampling or _is_shown(experience):
            return False
        if self._useless >= DYNAMIC_SAMPLING_ROUNDS * algorithm.groups_per_step:
            return False
        if algorithm.credit == "turns" and any(sample.turn_rewards.any() for sample in experience.group.samples):
            return False
        return not has_signal(shaped_rewards(experience, algorithm))

    async def _is_kept(self, experience: Experience) -> bool:
        """Whether the user's filter keeps the group, asked in its process. Raises MessageError: it failed."""
        name = self._settings.algorithm.filter
        if not name or _is_shown(experience):
            return True
        if self._filter is None or self._filter.name != name:
            self._filter = Filter(name)
        return await asyncio.to_thread(self._filter.keeps, experience)

    async def _note_filtered(self) -> None:
        """Report a filter that keeps hardly anything: the step waits, and nothing else says why."""
        self._filtered += 1
        algorithm = self._settings.algorithm
        if self._filtered == MANY_FILTERED * algorithm.groups_per_step:
            detail = f"{algorithm.filter} has not kept {self._filtered} groups since the last batch: correct it, or change algorithm.filter"
            await tell(self._bus, "trainer", "filter keeps little", detail, groups=self._filtered)

    def _fits(self, experience: Experience) -> bool:
        """Whether a sample fits into a forward pass; where whole samples are compared, whether all that are do."""
        most = self._settings.trainer.row_tokens
        if self._settings.algorithm.compares_whole_samples:
            return self._tokens(experience) <= most
        return not all(are_long(experience.group, most))

    def _tokens(self, experience: Experience) -> int:
        """Return the most tokens that a forward pass must have room for."""
        together = 2 if self._settings.algorithm.loss == "dpo" else 1
        lengths = sorted(len(sample.token_ids) for sample in experience.group.samples)
        return len(experience.group.prompt_token_ids) + sum(lengths[-together:])

    async def _note_unfit(self, experience: Experience) -> None:
        """Pause a run of which no group fits into a forward pass: no step would ever be made."""
        self._unfit += 1
        if self._unfit < self._settings.slots:
            return
        self._unfit = 0
        reason = (
            f"nothing can be trained: none of the last {self._settings.slots} groups fits {self._settings.trainer.row_setting} = "
            f"{self._settings.trainer.row_tokens}, the newest has {self._tokens(experience)} tokens: raise it, or lower "
            "sampling.max_new_tokens"
        )
        paused, _ = await self._ledger.transition(RunState.PAUSED, reason, [RunState.RUNNING])
        if paused:
            log.error("run paused", extra={"reason": reason})
            await tell(self._bus, "trainer", "nothing can be trained", reason)

    async def next_batch(self, step: int, wait_s: float) -> list[Taken] | None:
        """Return the groups of the step after ``step``, or None if too few arrive within ``wait_s``."""
        deadline_s = time.monotonic() + wait_s
        while True:
            self._arrived.clear()
            needed = self._settings.algorithm.groups_per_step
            fresh = await self._sort_out(step) if len(self._held) >= needed else {}
            batch = await self._choose(sorted(fresh), needed)
            if batch and not await self._must_wait(max(batch)):
                self._full_at_s = None
                return [dataclasses.replace(self._held[group_id], contexts=fresh[group_id]) for group_id in batch]
            left_s = deadline_s - time.monotonic()
            try:
                async with asyncio.timeout(min(left_s, _LOOK_S) if batch else left_s):
                    await self._arrived.wait()
            except TimeoutError:
                if time.monotonic() >= deadline_s:
                    return None

    async def _choose(self, fresh: list[GroupId], needed: int) -> list[GroupId]:
        """Return the groups of the next batch, demonstrations first; none: some are missing."""
        shown = [group_id for group_id in fresh if _is_shown(self._held[group_id].experience)]
        if self._settings.kind is not RunKind.MIXTURE or not shown or len(fresh) < needed:
            return fresh[:needed] if len(fresh) >= needed else []
        drawn = sorted(set(fresh) - set(shown))
        due = await self._count_due(shown[:needed], needed)
        return [*shown[:due], *drawn[: needed - due]] if len(drawn) >= needed - due else []

    async def _count_due(self, shown: list[GroupId], needed: int) -> int:
        """Return how many of these demonstrations are among the first ``needed`` groups in flight."""
        arrived = [taken.experience.group_id for taken in self._taken() if not _is_shown(taken.experience)]
        coming = await self._ledger.count_earlier(shown)
        places = (
            place + earlier + sum(group_id < own for group_id in arrived)
            for place, (own, earlier) in enumerate(zip(shown, coming, strict=True))
        )
        return sum(place < needed for place in places)

    async def _must_wait(self, last: GroupId) -> bool:
        """Whether a batch that ends with ``last`` waits for earlier groups."""
        algorithm = self._settings.algorithm
        if algorithm.on_stale != "wait":
            return self._settings.kind is RunKind.MIXTURE and await self._is_behind()
        now_s = time.monotonic()
        self._full_at_s = self._full_at_s or now_s
        if now_s - self._full_at_s >= self._settings.internal.stale_wait_s:
            return False
        if await self._ledger.is_overtaken(last):
            return True
        return await self._is_behind()

    async def _is_behind(self) -> bool:
        """Whether groups have arrived since a batch was chosen; asked last, as groups only move on to there."""
        return await self._bus.length(EXPERIENCE) > len(self._known()) or self._arrived.is_set()

    def release(self, batch: list[Taken]) -> None:
        """Forget a committed batch."""
        for taken in batch:
            del self._held[taken.experience.group_id]
            self._entries.discard(taken.delivery.entry_id)
        self._useless = self._filtered = 0

    def take_signals(self, batch: list[Taken]) -> SignalChange | None:
        """Return the signals of ``batch`` and of the groups dropped without signal since the last call, by group."""
        dropped, self._without_signal = self._without_signal, []
        if not self._settings.data.curriculum:
            return None
        groups = [taken.experience for taken in batch if not _is_shown(taken.experience)]
        made = [
            (e.group_id, e.group.prompt.stable_id, signal(shaped_rewards(e, self._settings.algorithm))) for e in groups
        ]
        return SignalChange([(problem, value) for _, problem, value in sorted(dropped + made)])

    async def discard(self, batch: list[Taken], reason: str, detail: str) -> None:
        """Drop a batch untrained, group by group, so that a crash loses none."""
        for taken in batch:
            await self._drop(taken.delivery, reason, detail)
        self.release(batch)

    async def take_left(self) -> Counter[str]:
        """Return the groups left untrained since the last call, by reason."""
        left, self.left = self.left, Counter()
        return left

    async def _sort_out(self, step: int) -> dict[GroupId, tuple[int, ...]]:
        """Return the contexts of the groups that can be trained; the others leave."""
        revoked, algorithm = await self._ledger.revoked(), self._settings.algorithm
        whole: Granularity = "group" if algorithm.compares_whole_samples else "sample"
        how: Granularity = "mask" if algorithm.on_stale == "mask" else whole
        fresh: dict[GroupId, tuple[int, ...]] = {}
        for group_id, taken in list(self._held.items()):
            group, detail = taken.experience.group, f"oldest version {taken.experience.group.oldest_version}"
            contexts: tuple[int, ...] = (0,) * len(group.samples)  # no policy drew demonstrations: they are never stale
            if not _is_shown(taken.experience):
                contexts = find_contexts(group, step, self._steps_of_versions, algorithm.max_lag, how)
            trained = without_long(group, contexts, self._settings.trainer.row_tokens)
            if is_fenced(group, revoked):
                leave = self._drop(taken.delivery, "fenced", f"{detail} at step {step}")
            elif self._is_of_lost_versions(taken.experience) or (any(contexts) and algorithm.on_stale == "requeue"):
                leave = self._requeue(taken, step)
            elif trained == tuple(sample.sampled_tokens for sample in group.samples):
                leave = self._drop(taken.delivery, "stale", f"{detail} at step {step}")
            else:
                fresh[group_id] = trained
                continue
            del self._held[group_id]
            await leave
        return fresh

    def _is_of_lost_versions(self, experience: Experience) -> bool:
        """Whether to generate a group again because the bus lost a version of it, which replicas kept; a few times only."""
        group, known = experience.group, self._steps_of_versions
        may_try = bool(known) and group.prompt.requeues < _MOST_LOST and not _is_shown(experience)
        return may_try and any(version not in known for version in group.versions)

    async def _requeue(self, taken: Taken, step: int) -> None:
        """Have the stale samples generated again while the others wait; a second time, the whole group.

        Otherwise samples could wait for each other in turn: those that waited are stale when the others return.
        """
        group, max_lag = taken.experience.group, self._settings.algorithm.max_lag
        newest = max(self._steps_of_versions, default=PolicyVersion(0))
        prompt = dataclasses.replace(group.prompt, requeues=group.prompt.requeues + 1, min_version=newest)
        stale = [
            tokens or not sample.versions <= self._steps_of_versions.keys()
            for tokens, sample in zip(
                find_contexts(group, step, self._steps_of_versions, max_lag, "sample"), group.samples, strict=True
            )
        ]
        keeps = group.prompt.requeues == 0 and len(group.samples) == prompt.sampling.samples
        kept = [part_of_group(group, place) if keeps and not tokens else b"" for place, tokens in enumerate(stale)]
        self._count("requeued")
        await self._bus.requeue(taken.delivery, prompt, kept)
        self._entries.discard(taken.delivery.entry_id)

    async def _drop(self, delivery: Delivery[Experience], reason: str, detail: str) -> None:
        self._count(reason)
        log.info("group dropped", extra={"group": delivery.group_id, "reason": reason, "detail": detail})
        await self._bus.drop(delivery, reason, detail)
        self._entries.discard(delivery.entry_id)

    def _count(self, reason: str) -> None:
        self.left[reason] += 1
        LEFT.labels(reason).inc()

    async def _bury(self, delivery: Delivery[Experience], reason: str) -> None:
        self._count("buried")
        log.error("group buried", extra={"group": delivery.group_id, "reason": reason})
        await self._bus.bury(delivery, reason)
        self._entries.discard(delivery.entry_id)


def _is_shown(experience: Experience) -> bool:
    return experience.group.prompt.purpose is Purpose.DEMONSTRATE


def _check_standing(experience: Experience, standing: Standing, ours: Container[PolicyVersion]) -> None:
    """Raise MessageError, or Fenced if the group, or its version, is of ``ours`` and the bus does not know it any more."""
    if not standing.admitted:
        raise MessageError(f"expected a group that was admitted, found one of the id {experience.group_id}")
    newest = experience.group.newest_version
    if standing.newest_version is not None and newest > standing.newest_version:
        if newest in ours:
            raise Fenced(
                f"expected the bus to know version {newest}, found none after {standing.newest_version}: it has older data"
            )
        raise MessageError(f"expected versions up to {standing.newest_version}, the newest, found samples of {newest}")
