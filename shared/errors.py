"""The errors of Penstock, and the worker's reaction to each.

::

    PenstockError
    ├── SettingsError          the run's settings or inputs are wrong      → one sentence on stderr, exit 78 or 2 (``service``)
    ├── TemporaryError         may work later                              → the entry stays on the bus and is retried
    │   ├── NotHere            another replica may do it now               → given back, not counted as an attempt
    │   ├── BusUnavailable     Redis or Valkey does not answer             → wait with capped backoff, keep what is held
    │   ├── BusFull            it is at its maxmemory                      → admit nothing until memory is free
    │   ├── PeerError          a connection's other end left or misbehaves → the connection is closed
    │   ├── ShelfLost          no copy of a payload is left                → its group is generated again, counted
    │   └── StoreError         object storage does not answer, or refuses  → the checkpoint stays on disk, retried
    ├── PermanentError         will never work for this message            → the entry is buried with its reason
    │   └── MessageError       bytes that are no message of ours           → the same
    ├── WeightsError           a snapshot is torn, corrupt or missing      → keep serving the old weights, next source
    │   └── SourceGone         its source has ended                        → the same; reported once it lasts
    ├── StateLost              an engine or a device is gone               → the process ends and is restarted
    └── Fenced                 another process took this one's place       → stop at once, commit nothing

Other exceptions of a handler are bugs that cost their group (see ``worker``); elsewhere they end the process.

Messages are lower case and name what was expected, what was found and the setting to change.
"""

from penstock.shared.text.terminal import cut


class PenstockError(Exception):
    """Any error that Penstock reports; a message that repeats a long name is cut."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(cut(each) if isinstance(each, str) else each for each in arguments))


class SettingsError(PenstockError):
    """The configured run cannot start."""


class TemporaryError(PenstockError):
    """The same work may succeed later."""


class NotHere(TemporaryError):
    """Another replica may do the work now."""


class BusUnavailable(TemporaryError):
    """The server does not answer."""


class BusFull(TemporaryError):
    """The server is at its maxmemory."""


class PeerError(TemporaryError):
    """The peer left, timed out, or sent an invalid frame."""


class ShelfLost(TemporaryError):
    """No copy of a payload is left, or none answers."""


class StoreError(TemporaryError):
    """Object storage is unavailable; ``denied`` if only a person can change that."""

    def __init__(self, message: str, *, denied: bool = False) -> None:
        super().__init__(message)
        self.denied = denied


class PermanentError(PenstockError):
    """This message can never be handled."""


class MessageError(PermanentError):
    """The bytes are no message that this version can read."""


class WeightsError(PenstockError):
    """Weights are missing, torn, corrupt or of another layout."""


class SourceGone(WeightsError):
    """The process that offered weights has ended, such as a trainer that is restarted."""


class StateLost(PenstockError):
    """The process must be restarted."""


class Fenced(PenstockError):
    """Another process took this one's place."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a device or the host refused torch memory; torch has no class for the host's error."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
