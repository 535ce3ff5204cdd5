"""Connect to Redis or Valkey by URL.

redis://[user:password@]host:port/db        one server            rediss://…          the same over TLS
unix:///path/to/socket                      one server on this machine
redis+sentinel://host:port,host:port/name   the primary that Sentinel names (rediss+sentinel: TLS to the servers)
redis+cluster://host:port,host:port         a cluster; one run uses one slot (rediss+cluster: TLS)
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from penstock.shared.errors import BusUnavailable, SettingsError
from penstock.shared.text.redaction import redact


class Pipeline(Protocol):
    def execute_command(self, *words: str | bytes | int | float) -> object:
        """Add one command."""

    def execute(self, *, raise_on_error: bool = True) -> Awaitable[list[Any]]:
        """Send them; return the answers, and errors among them unless ``raise_on_error``."""


class Client(Protocol):
    def execute_command(self, *words: str | bytes | int | float, parse_detail: bool = ...) -> Awaitable[Any]:
        """Run one command; redis-py decodes the answer. ``parse_detail``: that of XPENDING is of entries."""

    def pipeline(self, transaction: bool) -> Pipeline:
        """Return an empty pipeline."""

    def info(self, section: str) -> Awaitable[dict[str, Any]]:
        """Return one section of INFO."""

    def scan_iter(self, match: str, count: int) -> AsyncIterator[bytes]:
        """Iterate over the keys that match."""

    def aclose(self) -> Awaitable[None]:
        """Close the connections."""


_OLDEST = {"redis": 7, "valkey": 8}
_EVICTING = re.compile(r"allkeys|volatile")
_OPTIONS: dict[str, Any] = {
    "socket_connect_timeout": 5.0,
    "socket_timeout": 30.0,  # longer than any blocking read
    "socket_read_size": 1 << 20,
    "health_check_interval": 15,
    "protocol": 2,
}


def _direct(kind: Any) -> Any:
    """Return a connection class that writes at once; redis-py makes a task for each command, for the timeout."""

    class Connection(kind):  # type: ignore[misc]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if not self.is_connected or self._writer.is_closing():
                return await super().send_packed_command(command, check_health)  # type: ignore[no-any-return]
            if check_health:
                await self.check_health()
            try:
                self._writer.writelines(command)
                if self._writer.transport.get_write_buffer_size():
                    async with asyncio.timeout(self.socket_timeout):
                        await self._writer.drain()
            except BaseException:
                await self.disconnect(nowait=True)
                raise

    return Connection


class _Pool(redis.ConnectionPool):
    """Gives connections to those that wait in their order; of redis-py's own, newcomers take what waits were promised."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._places = asyncio.Semaphore(self.max_connections)

    def has_place(self) -> bool:
        """Whether another connection is to be had at once, and nothing waits for one."""
        return not self._places.locked()

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        await self._places.acquire()
        try:
            connection = self.get_available_connection()  # type: ignore[no-untyped-call]
        except BaseException:
            self._places.release()
            raise
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: Any) -> None:
        try:
            await super().release(connection)
        finally:
            self._places.release()


class _Direct(redis.Redis):
    """Redis whose commands keep a few connections; redis-py's pool, retries and records cost more than a command."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kept: list[Any] = []

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        return (await self.execute_all([words], options))[0]

    async def execute_all(
        self, commands: Sequence[Sequence[Any]], options: dict[str, Any], *, raise_on_error: bool = True
    ) -> list[Any]:
        """Run commands in one round trip; return the answers, and errors among them unless ``raise_on_error``."""
        pool: Any = self.connection_pool
        connection = self._kept.pop() if self._kept else await pool.get_connection()
        try:
            await pool.ensure_connection(connection)
            packed = [part for words in commands for part in connection.pack_command(*words)]
            await connection.send_packed_command(packed)
            answers = [await self._answer(connection, words[0], options) for words in commands]
        finally:
            if len(self._kept) < _MOST_KEPT and pool.has_place():  # else others wait for it
                self._kept.append(connection)
            else:
                await pool.release(connection)
        if raise_on_error and (error := next((each for each in answers if isinstance(each, ResponseError)), None)):
            raise error
        return answers

    async def _answer(self, connection: Any, command: str, options: dict[str, Any]) -> Any:
        try:
            return await self.parse_response(connection, command, **options)
        except ResponseError as error:
            return error

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:
        return super().pipeline(transaction, shard_hint) if transaction else _Commands(self)


class _Commands:
    """A :class:`Pipeline` of a :class:`_Direct`."""

    def __init__(self, client: _Direct) -> None:
        self._client = client
        self._commands: list[Sequence[Any]] = []

    def execute_command(self, *words: Any) -> None:
        self._commands.append(words)

    async def execute(self, *, raise_on_error: bool = True) -> list[Any]:
        return await self._client.execute_all(self._commands, {}, raise_on_error=raise_on_error)


_ENCODE = "change bus.url; in a password, write / as %2F, @ as %40, : as %3A, # as %23, ? as %3F and % as %25"
_MOST_CONNECTIONS, _MOST_KEPT = 64, 8


def first_server(url: str) -> tuple[str, int] | None:
    """Return host and port of the URL's first server; None for a socket or embedded."""
    parts = urlsplit(url)
    scheme, _, form = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss"):
        return None
    try:
        return _nodes(parts, 6379)[0] if form else (parts.hostname or "127.0.0.1", parts.port or 6379)
    except ValueError:
        raise SettingsError(f"{redact(url)!r} is not a bus URL: {_ENCODE}") from None


def open_client(url: str) -> Client:
    scheme, _, form = urlsplit(url).scheme.partition("+")
    if (scheme not in ("redis", "rediss", "unix") or form not in ("", "sentinel", "cluster")) or (
        scheme == "unix" and form
    ):
        raise SettingsError(
            f"expected a URL redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://, found {redact(url)!r}: "
            "change bus.url"
        )
    try:
        if form == "sentinel":
            return _sentinel(urlsplit(url), tls=scheme == "rediss")
        if form == "cluster":
            return _cluster(urlsplit(url), tls=scheme == "rediss")
        pool = _Pool.from_url(url, max_connections=_MOST_CONNECTIONS, retry=Retry(NoBackoff(), 0), **_OPTIONS)
        pool.connection_class = _direct(pool.connection_class)
        return cast(Client, _Direct.from_pool(pool))
    except ValueError:  # it may contain part of the password
        raise SettingsError(f"{redact(url)!r} is not a bus URL: {_ENCODE}") from None


async def close_client(client: Client) -> None:
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in manager.sentinels if manager is not None else ():
        await sentinel.aclose()
    await client.aclose()


def _nodes(url: SplitResult, default_port: int) -> list[tuple[str, int]]:
    hosts = url.netloc.rpartition("@")[2].split(",")
    return [(host or "127.0.0.1", int(port or default_port)) for host, _, port in (h.partition(":") for h in hosts)]


def _credentials(url: SplitResult) -> dict[str, str]:
    user, _, password = url.netloc.rpartition("@")[0].partition(":")
    credentials = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in credentials.items() if value}


def _sentinel(url: SplitResult, tls: bool) -> Client:
    name, _, db = url.path.strip("/").partition("/")
    query = dict(parse_qsl(url.query))
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        _nodes(url, 26379), sentinel_kwargs={"password": query.get("sentinel_password"), "protocol": 2}
    )
    options = {
        **_OPTIONS,
        **_credentials(url),
        "db": int(db or 0),
        "retry": Retry(NoBackoff(), 0),
        "max_connections": 1000,
    }
    return cast(Client, sentinel.master_for(name or "mymaster", ssl=tls, **_tls_files(query if tls else {}), **options))


def _cluster(url: SplitResult, tls: bool) -> Client:
    options = {**_OPTIONS, **_credentials(url), **_tls_files(dict(parse_qsl(url.query)) if tls else {})}
    nodes = [ClusterNode(host, port) for host, port in _nodes(url, 6379)]
    return cast(Client, RedisCluster(startup_nodes=nodes, ssl=tls, max_connections=1000, **options))


def _tls_files(query: dict[str, str]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if name.startswith("ssl_")}


async def check_server(client: Client) -> str:
    """Return name and version: Raises SettingsError: the server is too old, or may evict data; BusUnavailable: no
    answer.
    """
    try:
        info = await client.info("server")
        memory = await client.info("memory")
    except (RedisError, OSError) as error:
        raise BusUnavailable(f"no Redis or Valkey server answers: {error}") from error
    info, memory = _one_node(info), _one_node(memory)
    name = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{name}_version", info.get("redis_version", "0")))
    if int(version.split(".")[0]) < _OLDEST[name]:
        raise SettingsError(
            f"expected Redis >= {_OLDEST['redis']} or Valkey >= {_OLDEST['valkey']}, found {name} {version}: "
            "update the server or change bus.url"
        )
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if int(memory.get("maxmemory", 0)) > 0 and _EVICTING.match(policy):
        raise SettingsError(
            f"expected a server that never evicts, found maxmemory-policy {policy}: set it to noeviction, "
            "or change bus.url"
        )
    return f"{name} {version}"


async def check_replication(client: Client) -> str:
    """Return what is wrong with a replicated server that cannot be configured (a managed one), or "".

    Replication is asynchronous: a server that takes writes while its replicas are behind loses them in a failover.
    Raises SettingsError: it can be configured; BusUnavailable: no answer.
    """
    try:
        info = await client.info("replication")
        nodes = list(info.values()) if "role" not in info else [info]
        primaries = [node for node in nodes if isinstance(node, dict) and node.get("role") == "master"]
        is_watched = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None) is not None
        if all("min_slaves_good_slaves" in node or not (is_watched or node["connected_slaves"]) for node in primaries):
            return ""
        sentence = (
            "expected min-replicas-to-write of at least 1 on a bus with replicas or a Sentinel, found 0: a failover to a "
            "replica that is behind loses the steps that the replica lacks; set min-replicas-to-write 1 and "
            "min-replicas-max-lag 2 in the configuration of every server of the bus (at once: CONFIG SET)"
        )
        await client.execute_command("CONFIG", "GET", "min-replicas-to-write")
    except ResponseError:  # no permission, or no such command
        return f"{sentence}; where the provider does not allow it, lost steps are counted and trained again"
    except (RedisError, OSError) as error:
        raise BusUnavailable(f"no Redis or Valkey server answers: {error}") from error
    raise SettingsError(sentence)


async def probe(url: str, *, replication: bool = False) -> str:
    """Connect briefly; return name and version. ``replication``: check that too. Raises SettingsError, as well, for a wrong
    user or password, which services wait for, as it may be the server's that is wrong."""
    client = open_client(url)
    try:
        version = await check_server(client)
        if replication:
            await check_replication(client)
        return version
    except BusUnavailable as error:
        if not isinstance(error.__cause__, AuthenticationError):
            raise
        raise SettingsError(
            f"the server at {redact(url)} refuses user and password ({error.__cause__}): set bus.url, best by PENSTOCK__BUS__URL, to "
            "redis://USER:PASSWORD@HOST:PORT"
        ) from error
    finally:
        await close_client(client)


async def memory_bytes(client: Client) -> tuple[int, int]:
    memory = _one_node(await client.info("memory"))
    used = int(memory.get("used_memory", 0)) - int(memory.get("mem_not_counted_for_evict", 0))
    return used, int(memory.get("maxmemory", 0))


def _one_node(info: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(info.values()), None)
    return first if isinstance(first, dict) and "redis_version" not in info and "maxmemory" not in info else info
