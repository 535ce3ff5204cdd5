"""What the run's folder knows about versions and commits, by which a successor sees what the bus has lost.

::

    newest_version    the largest number given to a version, written before its commit, and not used again
    commits           a line for each commit (``<version> <step> <groups>``), and one for each loss of the bus
                      (``lost <version> <Unix seconds>``: commits of later versions, up to here, are lost)
"""

import contextlib
import dataclasses
import logging
import time
from pathlib import Path

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.files.durable import NO_ROOM, no_room, write_whole

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_NOTE, _COMMITS, _LOST = "newest_version", "commits", b"lost"


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    version: PolicyVersion
    step: int
    groups: int
    """0: another version of the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Commits:
    kept: tuple[Commit, ...] = ()
    lost: tuple[Commit, ...] = ()
    """In all losses."""
    newly_lost: tuple[Commit, ...] = ()
    """In the last loss of a step."""
    lost_at_s: float = 0.0

    @property
    def newest(self) -> PolicyVersion:
        """The last version that was committed, even if it is lost, or 0."""
        return max((commit.version for commit in (*self.kept, *self.lost)), default=PolicyVersion(0))

    def after(self, version: PolicyVersion | None) -> tuple[Commit, ...]:
        """Return the kept commits of later versions than ``version``; None: all."""
        return tuple(commit for commit in self.kept if version is None or commit.version > version)

    def without(self, version: PolicyVersion | None, at_s: float) -> "Commits":
        """Return these after a loss of what was committed after ``version``; the same if that is nothing."""
        lost = self.after(version)
        if not lost:
            return self
        kept = tuple(commit for commit in self.kept if version is not None and commit.version <= version)
        if not any(commit.groups for commit in lost):
            return Commits(kept, self.lost + lost, self.newly_lost, self.lost_at_s)
        return Commits(kept, self.lost + lost, lost, at_s)


def note_committed(folder: Path, version: PolicyVersion, step: int, groups: int) -> None:
    """Record a commit; not on a full disk."""
    _append(folder, f"{version} {step} {groups}")


def note_lost(folder: Path, after: PolicyVersion | None) -> Commits:
    """Record that the bus lost the commits of later versions than ``after``; None: all. Return all commits."""
    commits = read_commits(folder)
    if not commits.after(after):
        return commits
    at_s = time.time()
    _append(folder, f"lost {-1 if after is None else after} {at_s:.0f}")
    return commits.without(after, at_s)


def read_commits(folder: Path) -> Commits:
    """Read the commits of a run's folder; lines that a dying process left incomplete are skipped."""
    commits = Commits()
    try:
        lines = (folder / _COMMITS).read_bytes().splitlines()
    except OSError:
        return commits
    kept: list[Commit] = []
    for words in map(bytes.split, lines):
        with contextlib.suppress(ValueError):
            first, second, third = words
            if first == _LOST:
                commits = dataclasses.replace(commits, kept=(*commits.kept, *kept))
                after = int(second)
                commits, kept = commits.without(None if after < 0 else PolicyVersion(after), float(third)), []
            else:
                kept.append(Commit(PolicyVersion(int(first)), int(second), int(third)))
    return dataclasses.replace(commits, kept=(*commits.kept, *kept))


def _append(folder: Path, line: str) -> None:
    with contextlib.suppress(OSError), (folder / _COMMITS).open("a", encoding="ascii") as file:
        file.write(f"\n{line}")  # the break first: a line that a full disk cut does not spoil the next


def note_version(folder: Path, version: PolicyVersion) -> None:
    """Record a version's number in the run's folder before its commit, so that a lost bus cannot cause its reuse.

    Waits while the disk is full.
    """
    if version < noted_version(folder):
        return  # written by a trainer that replaced us
    said = False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / _NOTE, str(int(version)))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not said:
                log.warning("training waits for disk space", extra={"reason": no_room(folder / _NOTE, error)})
            said = True
            time.sleep(_AGAIN_S)
        else:
            return


def noted_version(folder: Path) -> PolicyVersion:
    """Return the largest recorded number, or 0."""
    try:
        return PolicyVersion(int((folder / _NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return PolicyVersion(0)
