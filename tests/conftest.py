"""Fixtures: one Valkey for the session, one bus per test."""

import collections
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pydantic.v1  # noqa: F401 (FastAPI imports it late; pytest parses it, and CPython 3.11 fails if a finalizer runs meanwhile)
import pytest

from penstock.services.client import coordinator
from penstock.services.reward.executor import program, zygote_process
from penstock.services.reward.subprocess_pool import pool
from penstock.shared.bus import embedded
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.replicas import heartbeats
from penstock.shared.executor import client
from penstock.shared.process import memory_timeline
from penstock.shared.process.importing import importing
from tests.support.waits import PATIENCE_S as PATIENCE_S
from tests.support.waits import free_port as free_port
from tests.support.waits import until as until
from tests.support.waits import words as words

if TYPE_CHECKING:
    from tests.support.object_storage import Storage

# spinning threads would take the cores from parallel tests
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# trl's trainers would report to their makers' hub from a thread that outlives its test
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# no timed tests: an example may take long on a busy machine
hypothesis.settings.register_profile(
    "penstock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("penstock")


if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # of a shell's background job, from which tests' processes would have it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collection imports torch, transformers and vLLM in each test process."""
    with importing():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, then those with most tests, so that parallel processes end together."""
    allowed_s: dict[Path, list[float]] = {}
    for item in items:
        slow, limit = item.get_closest_marker("slow"), item.get_closest_marker("timeout")
        if slow is not None or limit is not None:
            allowed_s.setdefault(item.path, []).append(600.0 if limit is None else limit.args[0])
    most_s = {path: (max(allowances), sum(allowances)) for path, allowances in allowed_s.items()}
    tests = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (*most_s.get(item.path, (0.0, 0.0)), tests[item.path]), reverse=True)


def pytest_collection_finish() -> None:
    """Let torch's 57 loggers propagate: pytest attaches its handlers to each that does not, six times a test."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_sessionfinish() -> None:
    """Wait for threads that blocking calls were left to: torch aborts a process that ends while their timeouts raise."""
    for thread in threading.enumerate():
        if thread.name.startswith("bounded: "):
            thread.join(PATIENCE_S)


@pytest.fixture(autouse=True, scope="module")
def _own_environment() -> Iterator[None]:
    """Undo what a file's tests and libraries set (vLLM: LD_PRELOAD, LOCAL_WORLD_SIZE; ranks: RANK): others share the process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _own_draws() -> None:
    """Let a test draw the same numbers from torch's generator whatever drew from it before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find the machine's memory free, of which others take what they need."""
    total_bytes, _ = memory_timeline.host_bytes()
    monkeypatch.setattr(memory_timeline, "host_bytes", lambda: (total_bytes, total_bytes))


@pytest.fixture(autouse=True, scope="session")
def _patient_processes() -> Iterator[None]:
    """On a busy machine, processes start and answer late."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool, "START_WITHIN_S", PATIENCE_S)
        patched.setattr(pool, "PATIENCE", 1000)
        patched.setattr(coordinator, "ANSWERS_WITHIN_S", PATIENCE_S)
        patched.setattr(client, "CONNECT_WITHIN_S", PATIENCE_S)
        patched.setattr(zygote_process, "START_WITHIN_S", PATIENCE_S)
        patched.setattr(program, "REACTS_WITHIN_S", PATIENCE_S)
        yield


@pytest.fixture(autouse=True)
def _heartbeats_outlive_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep this process from writing the next one in time."""
    monkeypatch.setattr(heartbeats, "MISSED_HEARTBEATS", 10_000)


class Server:
    def __init__(self, folder: Path) -> None:
        self.data = folder / "valkey"
        self.socket = embedded.socket_path("test")
        self.url = embedded.url(self.socket)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            embedded.command(self.socket, self.data), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def stop(self, with_signal: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(with_signal)
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        shutil.rmtree(self.socket.parent, ignore_errors=True)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("bus"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.close()


@pytest.fixture
async def bus(server: Server) -> AsyncIterator[Bus]:
    connected_bus = await Bus.connect(server.url, f"test-{uuid.uuid4().hex[:8]}", wait_s=PATIENCE_S)
    yield connected_bus
    await connected_bus.close()


def need(tool: str, package: str) -> str:
    """Return a program's path; without it skip, or fail if CI=true."""
    path = shutil.which(tool)
    if path is None:
        reason = f"needs {tool} from Debian's package {package}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def need_module(name: str, package: str) -> None:
    """Skip without a Python module, or fail if CI=true."""
    if importlib.util.find_spec(name) is None:
        reason = f"needs the Python package {package}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def helm() -> None:
    need_module("helm_sdkpy", "helm-sdkpy")
    need_module("kubernetes_validate", "kubernetes-validate")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Make this process the only rank. DeepSpeed keeps its process group."""
    import torch
    import torch.distributed as dist

    from penstock.services.trainer.rank_group import start_ranks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not dist.is_initialized():
            start_ranks("cpu")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def server_of_objects() -> Iterator["Storage"]:
    """An S3 server, with credentials in the environment."""
    need_module("moto", "moto[s3]")
    need_module("flask_cors", "flask-cors")
    from tests.support.object_storage import Storage

    storage = Storage()
    yield storage
    storage.close()


@pytest.fixture
def storage(server_of_objects: "Storage") -> "Storage":
    server_of_objects.clear()
    return server_of_objects
