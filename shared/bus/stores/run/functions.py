"""Functions of the user's own, by import path: with which source files the run's versions were made.

::

    0:algorithm.loss = mine:loss     SHA-256, no version       noted when the run started
    1:algorithm.loss = mine:loss     another one, version 47   noted by a process that started after version 47
    -1:algorithm.loss = mine:loss    of the checkpoint that the run continues from, if the bus did not know it

A process notes the source files of its functions when it starts, as it loads their code only then.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.keys import RUN, key
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.scorers import PythonScorer, TrlScorer

FUNCTIONS = key("functions", "hash", "the run's", "number:function → SHA-256 of its source file, newest version then")
_OF_CHECKPOINT = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A function's source file, from when on it was used."""

    sha256: str
    version: PolicyVersion | None
    """The newest version when it was noted; None: before the first. Of a checkpoint: the checkpoint's."""
    of_checkpoint: bool = False


History = Mapping[str, Sequence[Source]]
"""By function, oldest first, each with another digest than the one before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """The code of a function became another after a version."""

    function: str
    version: PolicyVersion
    since_checkpoint: bool = False

    @property
    def sentence(self) -> str:
        """What changed, and what to do."""
        when = f"changed after version {self.version}"
        if self.since_checkpoint:
            when = f"has changed since the checkpoint of version {self.version}, from which the run continues"
        return (
            f"the source file of {self.function} {when}: later figures are of other code than earlier ones; give a changed function "
            "another name to keep them apart"
        )


def trainer_functions(settings: Settings) -> dict[str, str]:
    """Return the functions that the trainer calls: name → ``package.module:function``."""
    algorithm = settings.algorithm
    return {
        f"algorithm.{name} = {reference}": reference
        for name, reference in (
            ("loss", algorithm.loss),
            ("advantage", algorithm.advantage),
            ("filter", algorithm.filter),
        )
        if ":" in reference
    }


def episode_functions(settings: Settings) -> dict[str, str]:
    """Return what episodes run of the user's own: name → ``package.module:object``."""
    of = settings.episodes
    named = {"environment": (of.environment,), "agent": (of.agent,), "tools": of.tools}
    return {
        f"episodes.{name} = {reference}": reference
        for name, each in named.items()
        for reference in each
        if reference and "://" not in reference
    }


def reward_functions(settings: Settings) -> dict[str, str]:
    """Return the functions of scorers: name → ``package.module:function``, or an entry point's name."""
    named: dict[str, str] = {}
    for scorer in settings.reward.scorers:
        references: Sequence[str] = ()
        if isinstance(scorer, PythonScorer):
            references = (scorer.function,)
        elif isinstance(scorer, TrlScorer):
            references = scorer.functions
        named |= {f"reward.scorers.{scorer.name} = {reference}": reference for reference in references}
    return named


def decode(fields: Mapping[bytes, bytes]) -> History:
    """Return the history in the fields of the hash."""
    noted = []
    for field, value in fields.items():
        number, _, function = field.decode().partition(":")
        noted.append((int(number), function, Source(**json.loads(value))))
    history: dict[str, list[Source]] = {}
    for _, function, source in sorted(noted, key=lambda entry: entry[0]):
        own = history.setdefault(function, [])
        if not own or own[-1].sha256 != source.sha256:
            own.append(source)
    return history


async def read_functions(bus: Bus) -> History:
    return decode(await bus.hgetall(FUNCTIONS))


def changes(history: History) -> list[Change]:
    """Return the changes of code between versions, by function."""
    changed = []
    for function, sources in sorted(history.items()):
        for before, after in itertools.pairwise(sources):
            version = before.version if before.of_checkpoint else after.version
            if version is not None:  # before the first version, no figure is of the earlier code
                changed.append(Change(function, version, before.of_checkpoint))
    return changed


async def note_functions(bus: Bus, digests: Mapping[str, str]) -> list[Change]:
    """Note the source files (function → SHA-256, "" unknown) of a process that starts; return what has changed."""
    changed: list[Change] = []
    for function, sha256 in digests.items():
        while sha256:
            fields = await bus.hgetall(FUNCTIONS)
            known = decode(fields).get(function, ())
            if known and known[-1].sha256 == sha256:
                break
            newest = await bus.hget(RUN, "newest_version")
            source = Source(sha256, None if newest is None else PolicyVersion(int(newest)))
            number = sum(field.decode().partition(":")[2] == function for field in fields)
            if await _note(bus, number, function, source):
                changed += changes({function: [*known[-1:], source]})
                break
    return changed


async def inherit_functions(bus: Bus, digests: Mapping[str, str], version: PolicyVersion) -> list[Change]:
    """Note the source files that made a checkpoint, unless they are known; return what has changed since."""
    changed = []
    for function, sha256 in digests.items():
        known = (await read_functions(bus)).get(function, ())
        if sha256 in [source.sha256 for source in known]:
            continue
        source = Source(sha256, version, of_checkpoint=True)
        if await _note(bus, _OF_CHECKPOINT, function, source):
            changed += changes({function: [source, *known[:1]]})
    return changed


async def _note(bus: Bus, number: int, function: str, source: Source) -> bool:
    """Return False if another process was faster."""
    value = json.dumps(dataclasses.asdict(source))
    return bool(await bus.write(FUNCTIONS, "HSETNX", f"{number}:{function}", value))
