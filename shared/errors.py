"""The errors of Penstock, and the worker's reaction to each branch.

::

    PenstockError
    ├── SettingsError          the run's settings or inputs are wrong      → one sentence on stderr, exit 2, no traceback
    ├── TemporaryError         may work later                              → the entry stays on the bus and is tried again
    │   ├── NotHere            another replica may do it now               → given back, and this attempt does not count
    │   ├── BusUnavailable     Redis or Valkey does not answer             → wait with capped backoff, keep what is held
    │   ├── BusFull            it is at its maxmemory                      → admit nothing until memory is free
    │   ├── PeerError          a connection's other end left or misbehaves → the connection is closed
    │   └── StoreError         object storage does not answer, or refuses  → the checkpoint stays on disk, tried again
    ├── PermanentError         will never work for this message            → the entry is buried with its reason
    │   └── MessageError       bytes that are no message of ours           → the same
    ├── WeightsError           a snapshot is torn, corrupt or missing      → keep serving the old weights, next source
    ├── StateLost              an engine or a device is gone               → the process ends and is restarted
    └── Fenced                 another process took this one's place       → stop at once, commit nothing

Any other exception of a handler is a bug that costs its group: retried, then buried (see ``worker``). Outside of
handlers it ends the process, the supervisor restarts it and the bus redelivers.

Messages are lower case and say what was expected, what was found and which setting to change.
"""


class PenstockError(Exception):
    """Any error that Penstock reports."""


class SettingsError(PenstockError):
    """The configured run cannot start; the message names the setting to change."""


class TemporaryError(PenstockError):
    """The same work may succeed later."""


class NotHere(TemporaryError):
    """Another replica may do the work now; the entry is not at fault."""


class BusUnavailable(TemporaryError):
    """Redis or Valkey does not answer."""


class BusFull(TemporaryError):
    """Redis or Valkey is at its maxmemory."""


class PeerError(TemporaryError):
    """The peer left, did not answer in time, or sent an invalid frame."""


class StoreError(TemporaryError):
    """Object storage does not answer, or refuses; ``denied`` if only a person can change that."""

    def __init__(self, message: str, *, denied: bool = False) -> None:
        super().__init__(message)
        self.denied = denied


class PermanentError(PenstockError):
    """This message can never be handled."""


class MessageError(PermanentError):
    """The bytes are not a message that this version can read."""


class WeightsError(PenstockError):
    """A weight snapshot is missing, torn, corrupt or of another layout."""


class StateLost(PenstockError):
    """The process lost an engine or device and must be restarted."""


class Fenced(PenstockError):
    """Another process took this one's place; nothing held may be committed."""
