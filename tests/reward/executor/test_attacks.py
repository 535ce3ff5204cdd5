"""Every tier contains attacks on the executor, also in a container like a pod's, and later programs see no trace."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.executor.client import ExecutorClient
from penstock.shared.executor.protocol import Job, Outcome
from tests.conftest import need
from tests.support import executor_attacks as attacks
from tests.support.executor_attacks import ATTACKS, Attack
from tests.support.executor_process import Running, pod, running

PLACES = ("namespace", "landlock", "pod")
STDLIB = ("--internal.executor_profiles", '["stdlib"]', "--internal.executor_check_s", "1000")


@pytest.fixture(scope="module", params=PLACES)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if request.param == "landlock":
        flags: tuple[str, ...] = ("--reward.executor.isolation", "landlock")
        with running(*flags, *STDLIB) as process:
            yield process
    elif request.param == "pod":
        wrapper, descriptor = pod(tmp_path_factory.mktemp("pod"))
        flags = ("--reward.executor.isolation", "auto", "--internal.executor_check_s", "1000")
        with running(*flags, wrapper=wrapper, pass_fds=(descriptor,)) as process:
            assert process.ready()["tier"] == "landlock", "a pod has no namespaces of its own: auto takes the next tier"
            yield process
    else:
        need("bwrap", "bubblewrap")
        with running("--reward.executor.isolation", "auto", "--internal.executor_check_s", "1000") as process:
            assert process.ready()["tier"] == "namespace"
            yield process


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
async def test_an_attack_is_contained_and_the_next_program_is_clean(executor: Running, attack: Attack) -> None:
    client = ExecutorClient(executor.address)
    prelude = attacks.prelude(executor.process.pid, str(executor.secret), executor.port)
    try:
        ended = await client.run(Job(prelude + attack.code, calls=attack.calls, limits=attack.limits))
        assert ended.outcome in attack.ends, ended
        assert attack.prints is None or ended.stdout == attack.prints
        assert len(ended.stdout) <= attack.limits.output_bytes
        after = await client.run(Job(attacks.CLEAN, stdin="mine", calls=attacks.clean_calls()))
        assert (after.outcome, after.values) == (Outcome.FINISHED, (json.dumps(attacks.SEEN),)), after
    finally:
        await client.close()
    assert executor.process.poll() is None
    assert executor.secret.read_text() == "of the host"
    assert executor.secret.stat().st_mode & 0o777 == 0o666
    assert not any(Path(folder, "got").exists() for folder in ("/var/tmp", "/dev/shm"))


async def test_a_program_may_write_files_of_its_own_only_where_it_has_a_mount_of_its_own(executor: Running) -> None:
    client = ExecutorClient(executor.address)
    ended = await client.run(Job("open('/tmp/mine', 'w').write('here')\nprint(open('/tmp/mine').read())"))
    await client.close()
    if ended.tier == "namespace":
        assert (ended.outcome, ended.stdout) == (Outcome.FINISHED, "here\n")
    else:
        assert ended.outcome is Outcome.RUNTIME_ERROR
        assert ended.detail.endswith(": '/tmp/mine'"), "denied by Landlock, or read-only already"


def test_there_are_more_than_thirty_attacks_and_no_two_of_one_name() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 30
