"""A run's processes (``python -m penstock.services.<name> --config … --replica …``) and their stop order."""

import contextlib
import dataclasses
import hashlib
import os
import random
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.shared.bus import embedded
from penstock.shared.errors import SettingsError
from penstock.shared.placement.devices import gpus_of
from penstock.shared.process.gpus import VISIBLE, visible_names
from penstock.shared.process.memory_timeline import host_bytes
from penstock.shared.process.parent import FOR_PYTHON
from penstock.shared.process.service import own_host
from penstock.shared.settings import ENVIRONMENT_PREFIX, Settings

STOP_ORDER = (
    ("episodes",),
    ("rollout",),
    ("reward",),
    ("executor", "trainer"),
    ("coordinator", "tracking"),
    ("valkey", "prometheus"),
)
"""Upstream first, to hand over work; the bus last, because services return entries to it."""
STOP_ORDER_ENDED = (
    ("episodes", "rollout", "reward", "trainer"),
    ("executor", "coordinator", "tracking"),
    ("valkey", "prometheus"),
)
"""After the end there is no work to hand over."""
STOP_ORDER_AT_ONCE = (
    ("episodes", "rollout", "reward", "trainer", "coordinator", "tracking"),
    ("executor",),
    ("valkey", "prometheus"),
)
"""On SIGTERM, after which a node or a container's runtime waits seconds only, and while the bus refuses writes: work that is
not handed over stays on the run's own bus."""
VALKEY = "valkey"
EXECUTOR = "executor"
TRACKING = "tracking"
PROMETHEUS = "prometheus"
_VALKEY_STOP_S = 10.0
_BUS_SHARE = 0.25
"""Of the machine's or container's memory, as the bus's maxmemory."""
_STOP_AFTER_DRAIN_S = 10.0
_EXECUTOR_STOP_S = 15.0
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LEAST_PORT, _TRIED_PORTS = 20_000, 50


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessPlan:
    name: str
    """On the bus, in the view and of its log; stable."""
    service: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_s: float = 20.0
    """Seconds to stop before it is killed."""
    socket: Path | None = None
    """A predecessor may have left it."""
    address: tuple[str, int] | None = None
    """TCP address for readiness and metrics, without heartbeats."""


def services(settings: Settings, config: Path, bus_url: str, environment: Mapping[str, str]) -> list[ProcessPlan]:
    """``bus_url`` is passed by environment: it may contain a password."""
    counts = {"coordinator": 1, "rollout": settings.rollout.replicas, "reward": settings.reward.replicas, "trainer": 1}
    if not settings.kind.generates:
        del counts["rollout"], counts["reward"]
    counts |= {"episodes": settings.episodes.replicas} if settings.episodes.is_on else {}
    counts |= {TRACKING: 1} if settings.tracking.sinks else {}
    threads = {"rollout": settings.run.threads, "trainer": settings.run.threads}
    names = [(service, f"{service}-{index}") for service, count in counts.items() for index in range(count)]
    return [
        ProcessPlan(
            name=name,
            service=service,
            command=(
                *(sys.executable, "-m", f"penstock.services.{service}"),
                *("--config", str(config), "--replica", name),
                *_port_flag(settings, name),
            ),
            environment=_environment(environment, bus_url, threads.get(service, 0))
            | _gpus(settings, service, name, environment),
            stop_s=settings.bus.drain_s + _STOP_AFTER_DRAIN_S,
        )
        for service, name in names
    ]


def valkey(socket: Path, data: Path, environment: Mapping[str, str]) -> ProcessPlan:
    """The bus stops taking work before the kernel ends it; rewriting its file may need as much memory again."""
    command = tuple(embedded.command(socket, data, int(_BUS_SHARE * host_bytes()[0])))
    return ProcessPlan(VALKEY, VALKEY, command, dict(environment), stop_s=_VALKEY_STOP_S, socket=socket)


def executor(settings: Settings, config: Path, environment: Mapping[str, str]) -> list[ProcessPlan]:
    """Return the executor if a scorer or a tool needs one and reward.executor.address names none."""
    address = settings.reward.executor.address
    if not settings.needs_executor or not is_own_executor(address):
        return []
    host = own_host(settings)
    port = _ports(settings).get(EXECUTOR) or free_port(host)
    return [
        ProcessPlan(
            name=EXECUTOR,
            service=EXECUTOR,
            command=(
                sys.executable,
                "-m",
                "penstock.services.reward.executor",
                "--config",
                str(config),
                "--run.metrics_port",
                str(port),
                "--run.host",
                host,
            ),
            environment={name: environment[name] for name in FOR_PYTHON if name in environment},
            stop_s=_EXECUTOR_STOP_S,
            socket=Path(address.removeprefix("unix:")),
            address=(host, port),
        )
    ]


def free_port(host: str, port: int = 0) -> int:
    """Return a free port, or ``port``, for a process that cannot report its own.

    It binds later, when another process may have one of the ports that the system gives out by itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for other in () if port else _not_given():
        with contextlib.suppress(OSError), socket.create_server((host, other), family=family):
            return other
    with socket.create_server((host, port), family=family) as listener:
        return int(listener.getsockname()[1])


def _not_given() -> list[int]:
    """Return some ports in random order, of those that the system does not give out by itself."""
    try:
        first = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    ports = range(_LEAST_PORT, first)
    return random.SystemRandom().sample(ports, min(len(ports), _TRIED_PORTS))


def executor_address(run_folder: Path) -> str:
    """Return the executor's socket; paths are limited to 107 bytes."""
    return _executor_prefix() + hashlib.sha256(str(run_folder).encode()).hexdigest()[:12]


def is_own_executor(address: str) -> bool:
    return not address or address.startswith(_executor_prefix())


def _executor_prefix() -> str:
    return f"unix:{tempfile.gettempdir()}/penstock-executor-{os.getuid()}-"


def metrics_ports(settings: Settings) -> list[int]:
    return list(_ports(settings).values())


def _ports(settings: Settings) -> dict[str, int]:
    names = ["coordinator-0", "trainer-0", *([EXECUTOR] if settings.needs_executor else [])]
    names += [f"rollout-{index}" for index in range(settings.rollout.replicas)]
    names += [f"reward-{index}" for index in range(settings.reward.replicas)]
    names += [f"episodes-{index}" for index in range(settings.episodes.replicas)] if settings.episodes.is_on else []
    names += [f"{TRACKING}-0"] if settings.tracking.sinks else []
    first = settings.run.metrics_port
    return {name: first + index for index, name in enumerate(names)} if first else {}


def _port_flag(settings: Settings, name: str) -> tuple[str, ...]:
    port = _ports(settings).get(name)
    return () if port is None else ("--run.metrics_port", str(port))


def _gpus(settings: Settings, service: str, name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return which GPUs a process sees; settings number those that ``penstock up`` sees itself."""
    shown = gpus_of(settings, service, name)
    names = visible_names(environment) if settings.run.device != "cpu" else None
    return {VISIBLE: ",".join(_name_of(gpu, names) for gpu in shown)} if shown else {}


def _name_of(gpu: int, names: Sequence[str] | None) -> str:
    if names is None:
        return str(gpu)
    if gpu < len(names):
        return names[gpu]
    raise SettingsError(
        f"expected numbers below {len(names)} in trainer.gpus, rollout.gpus and reward.gpus, which number the GPUs in "
        f"{VISIBLE}={','.join(names)}, found {gpu}: change them, or unset the variable"
    )


def _environment(base: Mapping[str, str], bus_url: str, threads: int) -> dict[str, str]:
    """The resolved settings already contain overrides."""
    kept = {name: value for name, value in base.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    kept |= {f"{ENVIRONMENT_PREFIX}BUS__URL": bus_url, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if threads:
        kept |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return kept


def current_environment() -> dict[str, str]:
    return dict(os.environ)
