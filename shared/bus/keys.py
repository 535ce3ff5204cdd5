"""Names of a run's keys, each declared beside its store; ``docs/reference/bus.md`` lists them.

One hash tag per run lets scripts work on a cluster.
"""

import dataclasses
import re
from typing import Protocol

from penstock.shared.errors import SettingsError

RUN_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Named(Protocol):
    @property
    def name(self) -> str:
        """Name within the run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A key; ``<part>`` in its name makes it one key per part."""

    name: str
    kind: str = ""
    lifetime: str = ""
    content: str = ""

    def of(self, part: str) -> "Key":
        """Return the key of one part.

        >>> Key("service:<replica>").of("rollout-0").name
        'service:rollout-0'
        """
        return Key(re.sub("<[a-z]+>", lambda _: part, self.name))


DECLARED: dict[str, Named] = {}


def declare(named: Named) -> None:
    """Raises ValueError: the name is already declared."""
    if named.name in DECLARED:
        raise ValueError(f"expected one declaration of the key {named.name!r}, and there are two")
    DECLARED[named.name] = named


def key(name: str, kind: str, lifetime: str, content: str) -> Key:
    """Declare a key: name, Redis type, lifetime and content."""
    declared = Key(name, kind, lifetime, content)
    declare(declared)
    return declared


RUN = key("run", "hash", "the run's", "state, step, cursor, head, newest_version, trainer_epoch, … (`Ledger`)")
GENERATING = key("generating", "hash", "until the group is whole", "group id → its prompt")
ASSEMBLY = key(
    "assembly:<group>",
    "hash",
    "until the group is whole",
    "parts, missing, lost; @part → its entry on `prompts`; part → its generated sample, or several that ended together",
)
PAYLOADS = key(
    "payloads",
    "hash",
    "until its group is dropped, requeued or buried, or a checkpoint covers its step",
    "`experience:<entry>` → the Experience of an entry of `experience`, also after its commit",
)
COUNTS = key(
    "counts",
    "hash",
    "the run's",
    "`trained`, `dropped:<reason>`, `dead:<stream>`, `requeued`, `unavailable`, `lost_samples`: exact (`Bus`)",
)
NO_ENDINGS = ("requeued", "unavailable", "lost_samples")
"""Counts that are not of groups that ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The key names of one run.

    >>> Keys("demo").of(RUN)
    'penstock:{demo}:run'
    """

    run_id: str

    def __post_init__(self) -> None:
        if RUN_ID_PATTERN.fullmatch(self.run_id) is None:
            raise SettingsError(
                f"expected a run id of 1 to 64 letters, digits, '.', '_' or '-', found {self.run_id!r}: change run.id"
            )

    def of(self, named: Named) -> str:
        return self.named(named.name)

    def named(self, name: str) -> str:
        return f"penstock:{{{self.run_id}}}:{name}"
