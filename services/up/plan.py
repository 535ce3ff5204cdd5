"""Which processes a run has, how each is started, and the order in which they stop.

Each service starts here the way it is started alone: ``python -m services.<name> --config … --replica …``.
"""

import dataclasses
import hashlib
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shared.bus import embedded
from shared.process.environment import FOR_PYTHON
from shared.process.service import own_host
from shared.settings import ENVIRONMENT_PREFIX, Settings

STOP_ORDER = (("rollout",), ("reward",), ("executor", "trainer"), ("coordinator",), ("valkey", "prometheus"))
"""Upstream first, so that what is under way can still be handed over; the coordinator after those that it watches over;
the bus last, for everybody gives back there what they hold."""
STOP_ORDER_ENDED = (("rollout", "reward", "trainer"), ("executor", "coordinator"), ("valkey", "prometheus"))
"""Of a run that has ended: nothing is under way any more, so those that only work need not wait for one another."""
VALKEY = "valkey"
EXECUTOR = "executor"
PROMETHEUS = "prometheus"
_VALKEY_STOP_S = 10.0
_STOP_AFTER_DRAIN_S = 10.0
_EXECUTOR_STOP_S = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process to keep running."""

    name: str
    """Its name on the bus, in the view and of its log: the same over restarts."""
    service: str
    """One of those in ``STOP_ORDER``."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All of its environment."""
    stop_s: float = 20.0
    """How long it may take to stop before it is killed."""
    socket: Path | None = None
    """A socket file that its predecessor may have left behind."""
    address: tuple[str, int] | None = None
    """Where it answers TCP when it does its work, of one that has no heartbeat: there are its metrics."""


def services(settings: Settings, config: Path, bus_url: str, environment: Mapping[str, str]) -> list[ProcessPlan]:
    """Return the processes of a run, the bus aside. ``config`` holds the resolved settings; ``bus_url`` comes to each
    process by its environment, because it may hold a password."""
    counts = {"coordinator": 1, "rollout": settings.rollout.replicas, "reward": settings.reward.replicas, "trainer": 1}
    threads = {"rollout": settings.run.threads, "trainer": settings.run.threads}
    return [
        ProcessPlan(
            name=f"{service}-{index}",
            service=service,
            command=(
                *(sys.executable, "-m", f"services.{service}"),
                *("--config", str(config), "--replica", f"{service}-{index}"),
                *_port_flag(settings, f"{service}-{index}"),
            ),
            environment=_environment(environment, bus_url, threads.get(service, 0)) | _gpus(settings, service, index),
            stop_s=settings.bus.drain_s + _STOP_AFTER_DRAIN_S,
        )
        for service, count in counts.items()
        for index in range(count)
    ]


def valkey(socket: Path, data: Path, environment: Mapping[str, str]) -> ProcessPlan:
    """Return the embedded bus. Raises SettingsError when it is not installed."""
    command = tuple(embedded.command(socket, data))
    return ProcessPlan(VALKEY, VALKEY, command, dict(environment), stop_s=_VALKEY_STOP_S, socket=socket)


def executor(settings: Settings, config: Path, environment: Mapping[str, str]) -> list[ProcessPlan]:
    """Return the code executor where a scorer needs one and reward.executor.address names none that runs already."""
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
                "services.reward.executor",
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


def free_port(host: str, wanted: int = 0) -> int:
    """Return a port that nobody has now, for a process that cannot tell us which one it took.

    Raises:
        OSError: somebody has the one that is ``wanted``.
    """
    with socket.create_server((host, wanted), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        return int(found.getsockname()[1])


def executor_address(run_folder: Path) -> str:
    """Return where the executor of a run listens; short, for a socket's path has 107 bytes."""
    return _executor_prefix() + hashlib.sha256(str(run_folder).encode()).hexdigest()[:12]


def is_own_executor(address: str) -> bool:
    """Whether ``penstock up`` starts the executor at ``address``."""
    return not address or address.startswith(_executor_prefix())


def _executor_prefix() -> str:
    return f"unix:{tempfile.gettempdir()}/penstock-executor-{os.getuid()}-"


def metrics_ports(settings: Settings) -> list[tuple[str, int]]:
    """Return (setting, port) of every fixed port of the services' metrics."""
    return [("run.metrics_port", port) for port in _ports(settings).values()]


def _ports(settings: Settings) -> dict[str, int]:
    """Return each process's metrics port: run.metrics_port and the following ones; nothing where any port will do."""
    names = ["coordinator-0", "trainer-0", *([EXECUTOR] if settings.needs_executor else [])]
    names += [f"rollout-{index}" for index in range(settings.rollout.replicas)]
    names += [f"reward-{index}" for index in range(settings.reward.replicas)]
    first = settings.run.metrics_port
    return {name: first + index for index, name in enumerate(names)} if first else {}


def _port_flag(settings: Settings, name: str) -> tuple[str, ...]:
    port = _ports(settings).get(name)
    return () if port is None else ("--run.metrics_port", str(port))


def _gpus(settings: Settings, service: str, index: int) -> dict[str, str]:
    """Return what shows a process its GPUs and no other; nothing where the settings name none."""
    if service == "trainer":
        shown = settings.trainer.gpus
    elif service in ("rollout", "reward"):
        section = getattr(settings, service)
        each = len(section.gpus) // section.replicas
        shown = section.gpus[index * each : (index + 1) * each]
    else:
        shown = ()
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, shown))} if shown else {}


def _environment(base: Mapping[str, str], bus_url: str, threads: int) -> dict[str, str]:
    """The resolved settings hold every override already: a second one by the environment would undo a flag."""
    kept = {name: value for name, value in base.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    kept |= {f"{ENVIRONMENT_PREFIX}BUS__URL": bus_url, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if threads:
        kept |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return kept


def current_environment() -> dict[str, str]:
    """Return this process's environment."""
    return dict(os.environ)
