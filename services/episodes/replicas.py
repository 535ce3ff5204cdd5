"""The rollout replicas that draw turns, and which of them draws the next.

An episode stays with its last replica, whose prefix cache has its tokens, unless that one has ``_MARGIN`` turns more than
the least loaded. A replica that dies, drains, or holds an older version costs the turn in progress, which is drawn elsewhere.
"""

import asyncio
import contextlib
import dataclasses
import time

from prometheus_client import Counter

from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.bus.stores.replicas.heartbeats import heartbeats
from penstock.shared.errors import NotHere, PeerError
from penstock.shared.peers import frames
from penstock.shared.peers.handshake import Secret, connect
from penstock.shared.peers.turns import DrawnTurn, TurnRequest, read_drawn, read_running

REDRAWN = Counter(
    "penstock_episodes_redrawn_total",
    "Turns drawn again, by cause: left (the replica, while it drew), unreachable, not_here (it holds no version).",
    ["cause"],
)
for _cause in ("left", "unreachable", "not_here"):
    REDRAWN.labels(_cause)
_MARGIN = 2
_LOOK_S = 0.5
_CONNECT_S = 10.0
_REST_S = 2.0
"""A replica that did not answer is not asked for this time."""


class _Unreachable(PeerError):
    """No turn was asked for."""


@dataclasses.dataclass(slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclasses.dataclass(slots=True, eq=False)
class _Replica:
    address: str
    version: PolicyVersion
    running: int = 0
    """Turns, by its newest answer, of all services; at least those that it draws for this one."""
    own: int = 0
    failed_s: float = -_REST_S
    idle: list[_Connection] = dataclasses.field(default_factory=list)

    @property
    def load(self) -> int:
        return max(self.running, self.own)


class Replicas:
    """On one event loop; :meth:`run` keeps them up to date."""

    def __init__(self, bus: Bus, secret: Secret) -> None:
        self._bus, self._secret = bus, secret
        self._known: dict[str, _Replica] = {}
        self._changed = asyncio.Condition()

    @property
    def newest(self) -> PolicyVersion:
        """The newest version that one of them holds."""
        return max((replica.version for replica in self._known.values()), default=PolicyVersion(0))

    async def run(self) -> None:
        """Follow their heartbeats until cancelled; then hang up."""
        try:
            while True:
                await self._look()
                await asyncio.sleep(_LOOK_S)
        finally:
            for replica in self._known.values():
                _hang_up(replica)

    async def _look(self) -> None:
        beats = {beat.replica: beat for beat in await heartbeats(self._bus)}
        able = {
            name: beat
            for name, beat in beats.items()
            if beat.turns and beat.version is not None and beat.taking and beat.state != "stopping"
        }
        for name in self._known.keys() - able.keys():
            _hang_up(self._known.pop(name))
        for name, beat in able.items():
            known = self._known.get(name)
            if known is not None and known.address != beat.turns:
                _hang_up(known)
                known = None
            if known is None:
                known = self._known[name] = _Replica(beat.turns, PolicyVersion(0))
            known.version = PolicyVersion(int(beat.version or 0))
        async with self._changed:
            self._changed.notify_all()

    async def draw(self, request: TurnRequest, last: str) -> tuple[DrawnTurn, str]:
        """Draw a turn, preferably where the episode's ``last`` one was; return it with its replica's name. It waits while no
        replica can; bound it.

        Raises:
            PermanentError: none can ever.
            NotHere: an evaluation's version is held by none any more.
        """
        while True:
            name = await self._choose(request, last)
            try:
                return await self._ask(self._known[name], request), name
            except NotHere:
                REDRAWN.labels("not_here").inc()
            except (PeerError, OSError, TimeoutError) as error:
                REDRAWN.labels("unreachable" if isinstance(error, _Unreachable) else "left").inc()
                if name in self._known:
                    _hang_up(self._known[name])  # its other connections are broken, too
            if name in self._known:
                self._known[name].failed_s = time.monotonic()
            last = ""

    def serves(self, version: PolicyVersion) -> bool:
        """Whether one of them holds exactly ``version``."""
        return any(replica.version == version for replica in self._known.values())

    async def _choose(self, request: TurnRequest, last: str) -> str:
        least = request.prompt.min_version
        async with self._changed:
            while True:
                able = {name: each for name, each in self._known.items() if each.version >= least}
                if request.is_evaluation:
                    exact = {name: each for name, each in able.items() if each.version == least}
                    if able and not exact:
                        raise NotHere(f"no replica holds version {least} any more")
                    able = exact
                rested = {name: each for name, each in able.items() if time.monotonic() - each.failed_s >= _REST_S}
                if rested:
                    best = min(rested, key=lambda name: (rested[name].load, name))
                    stays = last in rested and rested[last].load <= rested[best].load + _MARGIN
                    return last if stays else best
                await self._changed.wait()

    async def _ask(self, replica: _Replica, request: TurnRequest) -> DrawnTurn:
        replica.own += 1
        connection: _Connection | None = None
        try:
            connection = _idle(replica) or await self._connect(replica.address)
            connection.writer.write(frames.pack(request.frame()))
            await connection.writer.drain()
            frame = await frames.receive_async(connection.reader, frames.SAMPLE_BYTES)
            replica.running = read_running(frame)
            replica.idle.append(connection)
            connection = None
            return read_drawn(frame)
        finally:
            replica.own -= 1
            if connection is not None:  # also when cancelled: the replica withdraws the turn
                connection.writer.close()

    async def _connect(self, address: str) -> _Connection:
        """Raises _Unreachable."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                return _Connection(*await connect(address, self._secret()))
        except (PeerError, OSError, TimeoutError) as error:
            raise _Unreachable(str(error)) from error


def _idle(replica: _Replica) -> _Connection | None:
    """Return an idle connection that the replica has not closed, as one that died did, or None."""
    while replica.idle:
        connection = replica.idle.pop()
        if not (connection.reader.at_eof() or connection.writer.is_closing()):
            return connection
        connection.writer.close()
    return None


def _hang_up(replica: _Replica) -> None:
    for connection in replica.idle:
        with contextlib.suppress(OSError):
            connection.writer.close()
    replica.idle.clear()
