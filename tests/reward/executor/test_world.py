"""A program's environment, equal in every tier: files, packages, threads, locks."""

import asyncio
import dataclasses
import json
import sysconfig
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from penstock.services.reward.executor.isolation import Interpreter
from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import MAX_OUTPUT_BYTES, MIB, Call, Execution, Job, Limits, Outcome
from penstock.shared.settings.rewards.scorers import CodeScorer
from tests.conftest import PATIENCE_S, need
from tests.support.executor_process import Running, running

THREADS = """
import _thread, os, threading
started, event = 0, threading.Event()
try:
  while True: _thread.start_new_thread(event.wait, ()); started += 1
except RuntimeError: pass
os.write(1, b"%d\\n" % started)
os._exit(0)
"""


@pytest.fixture(scope="module", params=["namespace", "landlock"])
def executor(request: pytest.FixtureRequest) -> Iterator[Running]:
    if request.param == "namespace":
        need("bwrap", "bubblewrap")
    with running("--reward.executor.isolation", request.param, "--internal.executor_check_s", "1000") as executor:
        yield executor


async def run(executor: Running, *jobs: Job) -> list[Execution]:
    client = ExecutorClient(executor.address)
    try:
        return await asyncio.gather(*(client.run(_patient(job)) for job in jobs))
    finally:
        await client.close()


def _patient(job: Job) -> Job:
    return dataclasses.replace(job, limits=dataclasses.replace(job.limits, wall_s=PATIENCE_S))


async def stdout(executor: Running, job: Job) -> str:
    (execution,) = await run(executor, job)
    assert execution.outcome is Outcome.FINISHED, execution
    return execution.stdout


@pytest.mark.parametrize("text", ["", "20\n22\n", "x" * (3 * MIB)], ids=["nothing", "lines", "megabytes"])
async def test_standard_input_can_be_opened_by_its_name(executor: Running, text: str) -> None:
    code = "both = open('/dev/stdin').read(), open(0).read()\nprint(len(both[0]), both[0] == both[1])"
    assert await stdout(executor, Job(code, stdin=text)) == f"{len(text)} True\n"


async def test_standard_error_can_be_silenced(executor: Running) -> None:
    code = "import os, sys\nsys.stderr = open(os.devnull, 'w')\nprint('x', file=sys.stderr)\nprint('y')"
    assert await stdout(executor, Job(code)) == "y\n"


async def test_a_lock_is_granted_and_excludes_nobody(executor: Running) -> None:
    code = (
        "import fcntl, json, os\nfor path in ('/dev/null', json.__file__):\n"
        "  first, second = (os.open(path, os.O_RDONLY) for _ in range(2))\n"
        "  for file in (first, second):\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint('granted')"
    )
    assert await stdout(executor, Job(code)) == "granted\n"


@pytest.mark.parametrize("memory_mib", [256, 512])
async def test_a_pool_of_sixteen_threads_runs(executor: Running, memory_mib: int) -> None:
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nimport time\n"
        "with ThreadPoolExecutor(16) as pool: print(sum(pool.map(lambda n: time.sleep(0.01) or n, range(64))))"
    )
    assert await stdout(executor, Job(code, limits=Limits(memory_bytes=memory_mib * MIB))) == "2016\n"


@pytest.mark.parametrize("memory_mib", [256, 512])
async def test_a_program_may_start_32_threads(executor: Running, memory_mib: int) -> None:
    (execution,) = await run(executor, Job(THREADS, limits=Limits(memory_bytes=memory_mib * MIB)))
    assert execution.outcome is Outcome.FINISHED, execution
    if execution.tier == "namespace":
        assert execution.stdout == "32\n"
    else:
        assert int(execution.stdout) >= 32, "the kernel counts the threads of all programs together"


async def test_profile_stdlib_has_the_standard_library_and_no_installed_package(executor: Running) -> None:
    packages = sysconfig.get_path("purelib")
    code = (
        f"import importlib, sys\nsys.path.append({packages!r})\nimportlib.invalidate_caches()\n"
        "import wave, xml.dom.minidom, json.tool, sqlite3\n"
        "for name in ('msgpack', 'pydantic', 'numpy', 'pip', 'setuptools'):\n"
        "  try: importlib.import_module(name)\n  except (ImportError, OSError): pass\n  else: print(name)\n"
        f"try: print(open({packages + '/msgpack/__init__.py'!r}).read())\nexcept OSError: pass\nprint('end')"
    )
    assert await stdout(executor, Job(code)) == "end\n"
    assert await stdout(executor, Job(f"import numpy, numpy.testing\n{code}", "numpy")) == "numpy\nend\n"


def test_what_is_readable_leaves_out_the_virtual_environment_and_hides_packages() -> None:
    interpreter = Interpreter.find("")
    packages = sysconfig.get_path("purelib")
    assert not any(
        packages.startswith(f"{path}/") or path.startswith(packages) for path in interpreter.readable("stdlib")
    )
    assert all(path.endswith(("/site-packages", "/dist-packages")) for path in interpreter.hidden("stdlib"))


async def test_the_most_that_a_program_may_write_fits_into_a_frame(executor: Running) -> None:
    limits = Limits(cpu_s=60.0, output_bytes=MAX_OUTPUT_BYTES)
    code = (
        "import os\ndef f():\n  os.write(1, b'\\xff' * (limit - 100))\n"
        "  os.write(3, b'value \"' + b'\\xff' * (limit - 100) + b'\"\\n')\n  os._exit(0)"
    ).replace("limit", str(MAX_OUTPUT_BYTES))

    loud, quiet = await run(executor, Job(code, calls=(Call("f"),), limits=limits), Job("print('beside it')"))
    assert (loud.outcome, len(loud.stdout)) == (Outcome.FINISHED, MAX_OUTPUT_BYTES - 100)
    assert loud.values == (json.dumps("\ufffd" * (MAX_OUTPUT_BYTES - 100), ensure_ascii=False),)
    assert quiet.stdout == "beside it\n", "the connection was not lost"


def test_a_scorer_that_allows_more_output_than_a_frame_holds_is_refused() -> None:
    assert CodeScorer(kind="code", output_kib=10_240).output_kib * 1024 == MAX_OUTPUT_BYTES
    with pytest.raises(ValidationError, match="less than or equal to 10240"):
        CodeScorer(kind="code", output_kib=10_241)
