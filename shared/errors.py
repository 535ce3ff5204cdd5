"""The errors of Penstock: one tree, and what a worker does on each branch.

::

    PenstockError
    ├── SettingsError          the run's settings or inputs are wrong      → one sentence on stderr, exit 2, no traceback
    ├── TemporaryError         may work later                              → the entry stays on the bus and is tried again
    │   ├── NotHere            another replica may do it now           → given back, and this attempt does not count
    │   ├── BusUnavailable     Redis or Valkey does not answer             → wait with capped backoff, keep what is held
    │   ├── BusFull            it is at its maxmemory                      → admit nothing until what is there has left
    │   ├── PeerError          a connection's other end left or babbles    → the connection is closed
    │   └── StoreError         object storage does not answer, or refuses  → the checkpoint stays on disk and is tried again
    ├── PermanentError         will never work for this message            → the entry is buried with its reason
    │   └── MessageError       bytes that are no message of ours           → the same
    ├── WeightsError           a snapshot is torn, corrupt or missing      → the old weights go on serving, next source
    ├── StateLost              an engine or a device is gone               → the process ends and is started again
    └── Fenced                 another process took this one's place       → stop at once, commit nothing

Anything else that a handler raises is a bug that costs its group: it is tried again, then buried with the cause (see ``worker``).
Outside of handlers it ends the process, the supervisor restarts it and the bus redelivers.

Messages are lower case and say what was expected, what was found and which setting to change.
"""


class PenstockError(Exception):
    """Anything that Penstock itself reports."""


class SettingsError(PenstockError):
    """The run cannot start as it is configured; the message names the setting to change."""


class TemporaryError(PenstockError):
    """The same work may succeed later: leave the entry on the bus."""


class NotHere(TemporaryError):
    """This replica cannot do the work now, through no fault of the entry: another may."""


class BusUnavailable(TemporaryError):
    """Redis or Valkey does not answer now."""


class BusFull(TemporaryError):
    """Redis or Valkey is at its maxmemory and takes nothing new."""


class PeerError(TemporaryError):
    """The other end of a connection left, did not answer in time, or sent what is no frame."""


class StoreError(TemporaryError):
    """Object storage does not answer, or refuses; ``denied`` where only a person can change that."""

    def __init__(self, message: str, *, denied: bool = False) -> None:
        super().__init__(message)
        self.denied = denied


class PermanentError(PenstockError):
    """This message can never be handled: bury it with this reason."""


class MessageError(PermanentError):
    """These bytes are not a message that this version can read."""


class WeightsError(PenstockError):
    """A snapshot of weights is missing, torn, corrupt or of another layout."""


class StateLost(PenstockError):
    """Something that this process cannot work without is gone, such as an engine or a device: it must be started again."""


class Fenced(PenstockError):
    """Another process took this one's place; whatever this one holds must not be committed."""
