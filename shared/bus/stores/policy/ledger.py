"""The run's state and the policy's history. Every change is one script.

::

    created ──▶ running ◀──▶ paused          published ──▶ live ──▶ retired
        └──────────┴──────────┴──▶ stopped                    └──────────┴──▶ revoked
                   └──▶ finished (and running again, if run.steps is raised)

A new trainer takes the next *epoch*; commits under older epochs are refused.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from pydantic import TypeAdapter

from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus, Delivery, EntryId, read_counts
from penstock.shared.bus.client.lua import Argument
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.keys import ASSEMBLY, COUNTS, GENERATING, NO_ENDINGS, RUN, key
from penstock.shared.bus.messages import (
    Experience,
    PolicyRecord,
    PolicyUpdate,
    PolicyVersion,
    Prompt,
    StepPlan,
    StepReport,
)
from penstock.shared.bus.stores.experience.signals import RATE, SignalChange
from penstock.shared.bus.stores.policy.policies import Policies
from penstock.shared.bus.stores.run.records import with_payloads
from penstock.shared.bus.streams import Row
from penstock.shared.errors import Fenced

TRAINED = key(
    "trained", "string", "the run's", "one bit per group id whose experience was committed: a copy of it is not trained"
)
TRYING = key(
    "trying", "string", "until the next batch", "entries of the batch that the trainer works on: suspects, if it dies"
)


class RunState(StrEnum):
    """State of a run."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    FINISHED = "finished"


ENDED = (RunState.STOPPED, RunState.FINISHED)
CANNOT_CONTINUE = "the run cannot continue: "
"""Start of the reason of a trainer's pause that the next trainer may undo."""
NOTED = ("reason", "changed_at_s", "paused_s", "paused_since_commit_s", "alive_s", "first_admission_s", "last_commit_s")
"""What a run whose bus was lost is created again with."""
_SELF_TEST = "self_test:"
_MISSING = "missing:"
POLICY, CHECKPOINT = "policy", "checkpoint"
"""What a run leaves."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rewound:
    """Acknowledged steps that the bus has lost and no checkpoint held, in all; they were trained again."""

    steps: int = 0
    groups: int = 0
    at_s: float = 0.0
    """Of the last loss, Unix seconds."""
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RunStatus:
    state: RunState = RunState.CREATED
    reason: str = ""
    created_at_s: float = 0.0
    changed_at_s: float = 0.0
    step: int = 0
    """Committed optimizer steps."""
    cursor: int = 0
    """Prompts admitted; the next group id."""
    shift: int = 0
    """The next prompt's dataset place is ``cursor - shift``; rollbacks move only that back."""
    head: PolicyVersion | None = None
    newest_version: PolicyVersion | None = None
    """Newest commit; to become the head."""
    tip: PolicyVersion | None = None
    """Parent of the next version: the newest, or a rollback's target."""
    trainer_epoch: int = 0
    first_admission_s: float | None = None
    last_commit_s: float | None = None
    paused_s: float = 0.0
    """Time that does not count as training: pauses, and gaps in which no process of the run was there."""
    paused_since_commit_s: float = 0.0
    """What of it came after the last commit."""
    bus_full: str = ""
    """Why admission waits for bus memory; or empty."""
    doing: str = ""
    """The leader's secondary activity."""
    closed: bool = False
    """The run has ended, with complete records."""
    released: str = ""
    """``internal.pod_template`` of the coordinators that have released the ended run's workloads; or empty."""
    self_tests: dict[str, str] = dataclasses.field(default_factory=dict)
    """By part (policy, critic): outcome of the newest self-test."""
    alive_s: float = 0.0
    """When the leader noted last that the run is alive, Unix seconds."""
    resumed_s: float = 0.0
    """When the processes were there again after the last gap."""
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    """By what the run is to leave (policy, checkpoint): why its newest one could not be written."""
    policy_step: int | None = None
    """Step of the policy that was written at an end of the run."""
    gpu_s: float = 0.0
    """GPU-seconds held by the run's processes."""
    gpu_until_s: float = 0.0
    """Until when they are counted, Unix seconds."""
    rewound: Rewound = Rewound()

    def is_over(self, steps: int) -> bool:
        """Whether the run has ended, with complete records, and will not be extended to ``steps``."""
        return self.closed and (self.state is RunState.STOPPED or self.step >= steps)


@dataclasses.dataclass(frozen=True, slots=True)
class JournalEntry:
    """A group trained in a committed step."""

    entry: EntryId
    step: int
    settings_revision: int
    data: bytes
    plan: StepPlan | None = None
    """None if committed by an older Penstock."""


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """What the bus knows about a group."""

    admitted: bool
    """True for every id if the bus lost its data."""
    trained: bool
    newest_version: PolicyVersion | None


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """Progress; None if the bus lost its data."""

    cursor: int | None
    newest_version: PolicyVersion | None


@dataclasses.dataclass(frozen=True, slots=True)
class AdmissionState:
    """Inputs of admission, from one round trip."""

    state: RunState
    cursor: int
    shift: int
    newest_version: PolicyVersion | None
    head: PolicyVersion | None
    step: int
    in_flight: int


_MOST_BITS = (1 << 32) - 1
_TRIMMED_AT_ONCE = 32

IN_FLIGHT = (("HLEN", GENERATING), ("XLEN", streams.ROLLOUTS), ("XLEN", streams.EXPERIENCE))
"""Their answers add up to the groups in flight."""


class Ledger(Policies):
    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.term: int | None = None
        """Lease term; None: not checked."""

    def _term(self) -> Argument:
        return "" if self.term is None else self.term

    # ---------------------------------------------------------------- run

    async def create(self, lost: RunStatus | None = None) -> None:
        """Create the run in state ``created``, unless it exists; one that the bus ``lost``, in its state."""
        now_s = time.time()
        fields: dict[str, Argument] = {"state": RunState.CREATED.value}
        if lost is not None:
            fields = {name: value for name in NOTED if (value := getattr(lost, name))} | {"state": lost.state.value}
            if lost.closed:
                fields["closed_at_s"] = now_s
        for name, value in fields.items():
            await self._bus.write(RUN, "HSETNX", name, value)
        # last, as its absence says that the run must be created
        await self._bus.write(RUN, "HSETNX", "created_at_s", now_s if lost is None else lost.created_at_s)

    async def status(self) -> RunStatus:
        return read_status(await self._bus.hgetall(RUN))

    async def state(self) -> RunState:
        return RunState((await self._bus.hget(RUN, "state") or b"created").decode())

    async def is_known(self) -> bool:
        """Whether the bus knows a committed step; not if it lost its data."""
        return await self._bus.hget(RUN, "step") is not None

    async def extent(self) -> Extent:
        cursor, newest = await self._bus.hmget(RUN, "cursor", "newest_version")
        return Extent(None if cursor is None else int(cursor), _version(newest))

    async def account(self) -> tuple[RunStatus, dict[str, int]]:
        """Return status and endings of groups, of one moment."""
        run, ended = await self._bus.ask_all(("HGETALL", RUN), ("HGETALL", COUNTS), at_once=True)
        return read_status(run), read_counts(ended)

    async def close(self) -> None:
        """Note that the run has ended, with complete records."""
        await self._bus.write(RUN, "HSET", "closed_at_s", time.time())

    async def reopen(self) -> None:
        """Note that a finished run continues."""
        await self._bus.write(RUN, "HDEL", "closed_at_s", "released")

    async def note_released(self, pod_template: str) -> None:
        """Note that the ended run's workloads were scaled to zero, by a coordinator of ``pod_template``."""
        await self._bus.write(RUN, "HSET", "released", pod_template)

    async def transition(
        self, to: RunState, reason: str, allowed: Sequence[RunState], step: int | None = None
    ) -> tuple[bool, RunState]:
        """Change the state if in ``allowed``, and at ``step`` if given; return whether it did, and the previous state."""
        changed, state = await self._bus.script(
            "transition", to=to.value, reason=reason, now_s=time.time(), step="" if step is None else step,
            history_entries=streams.HISTORY.max_entries or 0, allowed=[state.value for state in allowed],
        )  # fmt: skip
        return bool(changed), RunState(state.decode() or "created")

    async def note(self, name: Literal["doing", "guards", "gpu_time", "alive_s"], said: str) -> None:
        """Publish the leader's activity; no effect from others."""
        await self._bus.script("note", term=self._term(), field=name, text=said)

    async def skip_time(self, status: RunStatus, since_s: float, until_s: float, now_s: float) -> None:
        """Count a gap, in which no process ran, as a pause; once for what was read in ``status``."""
        await self._bus.script(
            "skip_time", expected_alive_s=repr(status.alive_s), gap_s=until_s - since_s, until_s=repr(until_s),
            now_s=repr(now_s), gpu_time=f"{status.gpu_s!r} {max(now_s, status.gpu_until_s)!r}",
        )  # fmt: skip

    async def note_self_test(self, part: str, outcome: str) -> None:
        await self._bus.write(RUN, "HSET", f"{_SELF_TEST}{part}", outcome)

    async def note_missing(self, artifact: str, why: str) -> None:
        """Record why ``artifact`` could not be written; "" if it was."""
        name = f"{_MISSING}{artifact}"
        await (self._bus.write(RUN, "HSET", name, why) if why else self._bus.write(RUN, "HDEL", name))

    async def note_policy(self, step: int) -> None:
        """Record that the policy after ``step`` is written in Hugging Face form."""
        await self._bus.write(RUN, "HSET", "policy_step", step)

    async def admit(
        self,
        groups: Sequence[Prompt | Experience],
        slots: int,
        groups_per_step: int,
        steps: int,
        newest: PolicyVersion,
        *,
        whole: bool = False,
    ) -> int:
        """Admit ``groups``, in order, into free slots, never more than the remaining steps can use; group ids start
        at the cursor. Every sample of a prompt is an entry, of as many for each, unless the groups stay ``whole``;
        demonstrations, which are experience already, go to the trainer.

        Returns the number admitted; -1 if not running or not the leader; -2 if the cursor or newest version changed.
        """
        admitted = await self._bus.script(
            "admit", slots=slots, groups_per_step=groups_per_step, steps=steps, now_s=time.time(), term=self._term(),
            expected_cursor=groups[0].group_id if groups else 0, expected_newest=newest,
            samples=0 if whole else _entries(groups),
            kinds="".join(map(_kind, groups)),
            assemblies=[ASSEMBLY.of(str(group.group_id)) for group in groups],
            groups=[wire.encode(group) for group in groups],
        )  # fmt: skip
        return int(admitted)

    async def admission_state(self) -> AdmissionState:
        names = ("state", "cursor", "shift", "newest_version", "head", "step")
        fields, *in_flight = await self._bus.ask_all(("HMGET", RUN, *names), *IN_FLIGHT)
        state, cursor, shift, newest, head, step = fields
        return AdmissionState(
            RunState((state or b"created").decode()), int(cursor or 0), int(shift or 0), _version(newest), _version(head),
            int(step or 0), sum(in_flight),
        )  # fmt: skip

    async def set_bus_full(self, sentence: str) -> None:
        """Record why admission waits; or ""."""
        await self._bus.write(RUN, "HSET", "bus_full", sentence)

    async def in_flight(self) -> int:
        return sum(await self._bus.ask_all(*IN_FLIGHT))

    # ---------------------------------------------------------------- trainer

    async def take_epoch(self) -> int:
        """Become the run's only trainer: older ones' commits are refused."""
        return int(await self._bus.script("take_epoch"))

    async def epochs(self) -> tuple[int, int]:
        """Return the epochs of the trainer and of the newest rollback (0: none)."""
        trainer, rollback = await self._bus.hmget(RUN, "trainer_epoch", "rollback_epoch")
        return int(trainer or 0), int(rollback or 0)

    async def note_batch(self, entries: Sequence[EntryId]) -> None:
        """Record the batch about to be trained; empty: it is not trained."""
        await self._bus.write(TRYING, "SET", " ".join(entries))

    async def noted_batch(self) -> frozenset[str]:
        """Return the batch that is being trained, or that the previous trainer process died with."""
        return frozenset((await self._bus.get(TRYING) or b"").decode().split())

    async def is_in_step(self) -> bool:
        """Whether the noted batch is not committed yet, nor dropped."""
        noted = await self.noted_batch()
        return bool(noted and await self._bus.ask("XRANGE", streams.EXPERIENCE, min(noted), min(noted)))

    async def restore(
        self,
        step: int,
        cursor: int,
        position: int,
        newest: PolicyVersion,
        counts: Mapping[str, int],
        gpu_time: tuple[float, float],
        tip: PolicyVersion | None = None,
        journal_entry: str = "",
        *,
        is_known: bool = False,
    ) -> bool:
        """Restore the bus from the checkpoint of version ``tip``, after ``journal_entry``. False: it knows the run, and is
        not expected to (``is_known``: with an older step; what is in flight there is deleted, a rollback forgotten).

        Groups in flight at the checkpoint count as ``dropped:bus_lost``; their prompts are drawn again.
        """
        lost = cursor - sum(count for name, count in counts.items() if name not in NO_ENDINGS)
        fields: dict[str, Argument] = {
            "step": step, "cursor": cursor, "shift": cursor - position, "newest_version": newest,
            "gpu_time": "{!r} {!r}".format(*gpu_time),
        }  # fmt: skip
        if tip is not None:
            fields["tip"] = tip
        ended = {**counts, "dropped:bus_lost": counts.get("dropped:bus_lost", 0) + max(0, lost)}
        words: list[Argument] = [word for pair in (*fields.items(), *ended.items()) for word in pair]
        in_flight = await self._bus.ask("HKEYS", GENERATING) if is_known else ()
        restored = await self._bus.script(
            "restore", run_pairs=len(fields), journal_entry=journal_entry, fields=words, is_known=int(is_known),
            assemblies=[ASSEMBLY.of(group.decode()) for group in in_flight],
        )  # fmt: skip
        await self._bus.make_groups()
        return bool(restored)

    async def note_rewound(self, rewound: Rewound) -> None:
        """Record how much the bus has lost in all."""
        await self._bus.write(RUN, "HSET", "rewound", json.dumps(dataclasses.asdict(rewound)))

    async def skip_versions(self, newest: PolicyVersion, tip: PolicyVersion | None) -> None:
        """Have the next version follow ``newest``, a number that the bus lost, and descend from ``tip`` all the same."""
        if tip is not None:
            await self._bus.write(RUN, "HSETNX", "tip", int(tip))
        await self._bus.write(RUN, "HSET", "newest_version", int(newest))

    async def commit(
        self,
        epoch: int,
        record: PolicyRecord,
        deliveries: Sequence[Delivery[Experience]],
        report: StepReport | None,
        plan: StepPlan | None = None,
        change: SignalChange | None = None,
    ) -> None:
        """Atomically move ``deliveries`` and ``plan`` to the journal, publish ``record`` and ``change`` signals. Their
        payloads stay where they are, so that it takes the server no longer for large ones.

        Without deliveries, ``record`` is another version of the committed step.

        Raises:
            Fenced: another trainer took over, the ledger is at another step, or an entry is no longer ours.
        """
        answer = await self._bus.script(
            "commit", epoch=epoch, commit_id=uuid.uuid4().hex, step=record.step, version=record.version,
            parent="" if record.parent is None else record.parent, record=wire.encode(record),
            report=b"" if report is None else wire.encode(report), group=streams.EXPERIENCE.group or "",
            audit_entries=self._bus.audit_entries, report_entries=streams.STEPS.max_entries or 0, now_s=time.time(),
            revision=record.settings_revision, plan=b"" if plan is None else wire.encode(plan),
            change="" if change is None else change.encoded(), rate=RATE,
            entries=[delivery.entry_id for delivery in deliveries],
        )  # fmt: skip
        if answer != b"ok":
            raise Fenced(f"expected to commit step {record.step} as version {record.version}, found {answer.decode()}")

    async def standings(self, group_ids: Sequence[int]) -> list[Standing]:
        """Return what the bus knows about each group, in one round trip."""
        bits = (("GETBIT", TRAINED, min(group_id, _MOST_BITS)) for group_id in group_ids)
        (cursor, newest), *trained = await self._bus.ask_all(("HMGET", RUN, "cursor", "newest_version"), *bits)
        return [
            Standing(cursor is None or group_id < int(cursor), bool(bit), _version(newest))
            for group_id, bit in zip(group_ids, trained, strict=True)
        ]

    async def is_overtaken(self, group_id: int) -> bool:
        """Whether a group admitted before ``group_id`` is still generated or scored."""
        return bool(await self._bus.script("overtaken", group_id=group_id))

    async def ids_in_flight(self) -> list[frozenset[int]]:
        """Return the groups that are generated or scored, those with the trainer, and demonstrations with it."""
        return [frozenset(map(int, ids)) for ids in await self._bus.script("in_flight")]

    async def count_earlier(self, group_ids: Sequence[int]) -> list[int]:
        """Return, for each of ``group_ids``, how many groups admitted before it are still generated or scored."""
        return [int(count) for count in await self._bus.script("earlier", groups=list(group_ids))]

    async def journal(self, after: str) -> list[JournalEntry]:
        """Return the journal after an entry, in commit order, without steps of which a payload is lost."""
        rows = await with_payloads(self._bus, await self._bus.xrange(streams.JOURNAL, f"({after}" if after else "-"))
        lost = {-1, *(streams.count_in(fields, b"step") for _, fields in rows if b"data" not in fields)}
        return [_journal_entry(row) for row in rows if streams.count_in(row[1], b"step") not in lost]

    async def last_journal_entry(self) -> str:
        """Return the last entry, even if trimmed; "" if none."""
        return await self._bus.last_generated(streams.JOURNAL)

    async def trim_journal(self, through: str) -> None:
        while await self._bus.script("trim_journal", through=through, count=_TRIMMED_AT_ONCE) == _TRIMMED_AT_ONCE:
            pass

    # ---------------------------------------------------------------- promotion

    async def promote(
        self, delivery: Delivery[PolicyRecord], sources: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    ) -> bool:
        """Make a version the head and notify every replica; False if it, or a newer one, already was.

        ``sources``: by replica, addresses to pull from.
        """
        record = delivery.message()
        update = PolicyUpdate(record=record, promoted_at_s=time.time(), sources=dict(sources))
        promoted = await self._bus.script(
            "promote", group=streams.PUBLISHED.group or "", entry_id=delivery.entry_id, version=record.version,
            payload=wire.encode(update), policy_entries=streams.POLICY.max_entries or 0, term=self._term(),
            digest=record.manifest_digest,
        )  # fmt: skip
        if promoted:
            await self.drop_probe(record.version)
        return bool(promoted)

    async def knows(self, record: PolicyRecord) -> bool:
        """Whether a version is not newer than the newest, and has its weights; a small question if it is the head."""
        newest, head = await self._bus.hmget(RUN, "newest_version", "head_digest")
        if newest is not None and record.version > int(newest):
            return False
        if head == f"{record.version} {record.manifest_digest}".encode():
            return True
        known = await self.policy(record.version)
        return known is None or known.manifest_digest == record.manifest_digest


_STATUS = TypeAdapter(RunStatus)


def read_status(raw: Mapping[bytes, bytes]) -> RunStatus:
    fields = {name.decode(): value.decode() for name, value in raw.items()}
    gpu_s, gpu_until_s = fields.get("gpu_time", "0 0").split()
    derived = {
        "tip": fields.get("tip", fields.get("newest_version")),
        "closed": "closed_at_s" in fields,
        "self_tests": _of_kind(_SELF_TEST, fields),
        "missing": _of_kind(_MISSING, fields),
        "gpu_s": gpu_s,
        "gpu_until_s": gpu_until_s,
        "rewound": json.loads(fields.get("rewound", "{}")),
    }
    return _STATUS.validate_python(fields | derived)


def _of_kind(prefix: str, fields: Mapping[str, str]) -> dict[str, str]:
    return {name.removeprefix(prefix): said for name, said in sorted(fields.items()) if name.startswith(prefix)}


def _kind(group: Prompt | Experience) -> str:
    if isinstance(group, Experience):
        return "d"
    return "e" if group.environment else "p"


def _entries(groups: Sequence[Prompt | Experience]) -> int:
    return next((group.sampling.samples for group in groups if isinstance(group, Prompt)), 0)


def _journal_entry(row: Row) -> JournalEntry:
    entry, fields = row
    plan = fields.get(b"plan")
    return JournalEntry(
        entry=EntryId(entry),
        step=streams.count_in(fields, b"step"),
        settings_revision=max(0, streams.count_in(fields, b"revision")),
        data=fields[b"data"],
        plan=wire.decode(plan, StepPlan) if plan else None,
    )


def _version(number: str | bytes | None) -> PolicyVersion | None:
    return None if number is None else PolicyVersion(int(number))
