"""What deploying a run again does to the one that is there: which workloads are replaced, and whether its pods restart."""

import dataclasses
import re
import sys

import typer

from penstock.services.up.display import console
from penstock.shared.errors import PenstockError

_SHAPED = re.compile(r"^kind: (\w+)\nmetadata:\n  name: (\S+)\n  annotations: \{penstock/shape: .*\}$", re.MULTILINE)
"""A JobSet or Job of the chart, which cannot be changed (``penstock.shaped``)."""
_TOML = re.compile(r"^  run\.toml: (\S+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Upgrade:
    """The difference between two manifests of a release."""

    replaced: tuple[str, ...]
    """JobSets and Jobs that end, whose GPUs are given back, such as ``JobSet my-run-penstock-ab12cd``."""
    restarts: bool
    """Whether pods of those that stay must start again to read the run's TOML."""


def compared(before: str, after: str) -> Upgrade:
    """Return what replacing one manifest by another does; ``before`` is empty for a first install.

    >>> head = "kind: JobSet\\nmetadata:\\n  name: {}\\n  annotations: {{penstock/shape: a}}\\ndata:\\n  run.toml: {}\\n"
    >>> compared(head.format("a-1", "eA=="), head.format("a-2", "eA=="))
    Upgrade(replaced=('JobSet a-1',), restarts=False)
    >>> compared(head.format("a-1", "eA=="), head.format("a-1", "eQ=="))
    Upgrade(replaced=(), restarts=True)
    """
    old, new = (set(_SHAPED.findall(manifest)) for manifest in (before, after))
    replaced = tuple(f"{kind} {name}" for kind, name in sorted(old - new))
    return Upgrade(replaced, bool(old & new) and _TOML.findall(before) != _TOML.findall(after))


def confirm(upgrade: Upgrade, name: str, yes: bool) -> None:
    """Ask before GPUs are given back; raises PenstockError without consent."""
    if not upgrade.replaced or yes:
        return
    sentence = (
        f"this replaces {' and '.join(upgrade.replaced)} of {name}: all of its pods end and their GPUs are given back, and the new "
        "ones wait for GPUs or quota like a new run"
    )
    if not sys.stdin.isatty():
        raise PenstockError(f"{sentence}; nothing was changed: give --yes to accept that")
    console.say(sentence)
    try:
        is_agreed = typer.confirm("Continue?")
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if not is_agreed:
        raise PenstockError("nothing was changed")
