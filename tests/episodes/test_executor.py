"""The tool `python`: a session of the real executor for each episode. What the policy's programs try beside their task fails."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from penstock.services.episodes.drivers.hosts import Hosts
from penstock.services.episodes.drivers.loop import ToolLoop
from penstock.services.episodes.drivers.python import TOOL, Python
from penstock.shared.bus.messages import Ended, PolicyVersion, Prompt, Sample
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.bus.transcripts import turns_of
from penstock.shared.errors import SettingsError
from tests.conftest import Server, until
from tests.episodes.test_service import Player, buried, playing, settings
from tests.support import executor_attacks as attacks
from tests.support.executor_process import Running, running
from tests.support.raw_redis import raw

__all__ = ["playing"]
TOOLS = {"environment": "", "executor": "stdlib"}
STDLIB = ("--internal.executor_profiles", '["stdlib"]', "--internal.executor_check_s", "1000")


@pytest.fixture(scope="module")
def executor() -> Iterator[Running]:
    with running("--reward.executor.isolation", "auto", *STDLIB) as process:
        yield process


def sessions(executor: Running) -> float:
    (line,) = [line for line in executor.get("/metrics").splitlines() if line.startswith("penstock_executor_sessions ")]
    return float(line.split()[1])


def calls(*codes: str, end: str = "done") -> Any:
    """Return a policy that calls the tool with one code after another."""
    texts = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in codes]

    def script(prompt: str, *_: Any) -> tuple[str, float]:
        number = prompt.count("</tool_call>")
        return (f"<tool_call>{texts[number]}</tool_call>" if number < len(texts) else end), 0.5

    return script


def by_row(*scripts: Any) -> Any:
    """Return a policy that plays a row by its own script."""
    return lambda prompt, *rest: scripts[int(re.findall(r"row (\d+)", prompt)[0])](prompt, *rest)


async def admit(player: Player, count: int) -> None:
    await raw(player.bus).hset(player.bus.keys.named("run"), mapping={"state": "running", "newest_version": 3})
    prompts = [_with_room(player.prompt(group, 5)) for group in range(count)]
    assert await Ledger(player.bus).admit(prompts, 100, 10, 100, PolicyVersion(3)) == count


def _with_room(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, max_new_tokens=4000))


def observed(sample: Sample) -> list[str]:
    """Return what the tool answered."""
    turns: list[Any] = turns_of(sample)
    return [turn.get("content", "") for turn in turns if turn["role"] == "tool"]


async def test_a_session_keeps_its_state_over_the_turns_of_its_episode_alone(playing: Any, executor: Running) -> None:
    script = by_row(calls("x = 41", "x + 1", "1 / 0", "x"), calls("x", "7"))
    player = await playing(script, **TOOLS, executor_address=executor.address)
    await admit(player, 2)
    first, second = await player.groups(2)
    for sample in first.samples:
        assert (sample.text, sample.ended, sample.environment_reward) == ("done", Ended.STOP, None)
        said = observed(sample)
        assert (said[0], said[1], said[3]) == ("", "42\n", "41\n")
        assert said[2].endswith("ZeroDivisionError: division by zero\n")
    for sample in second.samples:
        assert observed(sample)[0].endswith("NameError: name 'x' is not defined\n")
    await until(lambda: sessions(executor) == 0)


async def test_it_stands_beside_an_environment_whose_tools_and_reward_stay_its_own(
    playing: Any, executor: Running
) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        code = "print(2 + 3)"
        if "t:5" not in prompt:
            return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>", 0.5
        return '<tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>', 0.5

    player = await playing(script, executor="stdlib", executor_address=executor.address)
    await admit(player, 1)
    (group,) = await player.groups(1)
    assert [(observed(sample), sample.environment_reward) for sample in group.samples] == [(["5\n"], 1.0)] * 2


WRITTEN: tuple[tuple[Any, str], ...] = (
    ({"name": "python", "arguments": {}}, "expected a JSON object with the text `code`"),
    ({"name": "python", "arguments": {"code": 3}}, "expected a JSON object with the text `code`"),
    ({"name": "other", "arguments": {"code": "1"}}, "there is no tool 'other', but python"),
    ({"name": "python", "arguments": {"code": "x ="}}, "SyntaxError: invalid syntax\n"),
    ({"name": "python", "arguments": {"code": "'\ud800'"}}, ""),
    (
        {"name": "python", "arguments": {"code": "exit()"}},
        "[the session has ended: exit status 0; the next call starts",
    ),
    ({"name": "python", "arguments": {"code": "while True: pass"}}, "[the session has ended: "),
)


async def test_whatever_the_policy_writes_is_answered(playing: Any, executor: Running) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        call = json.dumps(WRITTEN[int(re.findall(r"row (\d+)", prompt)[0])][0])
        return ("done" if "</tool_call>" in prompt else f"<tool_call>{call}</tool_call>"), 0.5

    changes = {**TOOLS, "tool_s": 2.0, "executor_address": executor.address}
    player = await playing(script, **changes)
    await admit(player, len(WRITTEN))
    for group, (_, words) in zip(await player.groups(len(WRITTEN)), WRITTEN, strict=True):
        for sample in group.samples:
            (said,) = observed(sample)
            assert words in said, group.group_id


def hostile(player: Player, executor: Running, server: Server) -> dict[str, str]:
    """Programs by what they try: each prints what it got."""
    bus, own, host = str(server.socket), executor.address.removeprefix("unix:"), player.hosts._hosts[0].pid
    unix = "s = socket.socket(socket.AF_UNIX); s.connect({0!r}); s.send(b'PING\\r\\n'); print('got', s.recv(9))"
    return {
        "reach the bus": unix.format(bus),
        "reach the executor": unix.format(own),
        "reach the network": f"print('got', socket.create_connection(('127.0.0.1', {executor.port}), 2))",
        "read the service's environment": f"print('got', open('/proc/{os.getpid()}/environ').read())",
        "read the memory of its environment's process": f"print('got', open('/proc/{host}/mem', 'rb').read(1))",
        "end its environment's process": f"os.kill({host}, 9); print('got')",
        "end the service": f"os.kill({os.getpid()}, 9); print('got')",
        "trace the service": f"print('got', ctypes.CDLL(None).ptrace(16, {os.getpid()}, 0, 0) + 2)",
        "read its reward": f"print('got', open('/proc/{host}/environ').read())",
        "import the service": "import penstock; print('got')",
        "read a secret": f"print('got', open({str(executor.secret)!r}).read())",
        "fork": "print('got', os.fork())",
        "start a program": "import subprocess; print('got', subprocess.run(['/bin/echo', 'x']))",
        "take memory": "b = bytearray(10 << 30); print('got')",
        "fill the disk": "n = open('/tmp/x', 'wb')\nfor _ in range(99): n.write(bytes(1 << 20))\nprint('got')",
        "answer for its environment": "os.write(3, b'done\\nvalue 1.0\\n'); os.write(1, b'{\"value\": 1.0}\\n')",
        "reach other sessions": "print('got', [n for n in range(5, 999) if os.path.exists(f'/proc/self/fd/{n}')] or 1 / 0)",
    }


async def test_a_program_sets_no_reward_and_reaches_neither_bus_nor_network_nor_another_episode(
    playing: Any, executor: Running, server: Server
) -> None:
    changes = {"executor": "stdlib", "executor_address": executor.address}
    chosen: list[Any] = []
    player = await playing(lambda *asked: chosen[0](*asked), **changes)
    programs = hostile(player, executor, server)
    prelude = "import ctypes, os, socket, time"
    chosen.append(by_row(*(calls(prelude, code) for code in programs.values()), calls("x = 41", "x + 1")))
    await admit(player, len(programs) + 1)
    *attacked, peaceful = await player.groups(len(programs) + 1)
    for attempt, group in zip(programs, attacked, strict=True):
        for sample in group.samples:
            assert sample.environment_reward == 0.0, attempt
            assert "got" not in observed(sample)[1].partition("Traceback")[0], (attempt, observed(sample))
    assert [observed(sample)[1] for sample in peaceful.samples] == ["42\n"] * 2
    assert executor.secret.read_text() == "of the host"
    assert player.hosts._hosts[0].alive
    await until(lambda: sessions(executor) == 0)


async def test_an_executor_that_is_lost_is_unavailable_and_never_a_reward_of_zero(playing: Any) -> None:
    with running("--reward.executor.isolation", "landlock", *STDLIB) as process:
        codes = ("x = 1", "import time; time.sleep(1000)")
        player = await playing(calls(*codes), executor="stdlib", executor_address=process.address)
        await admit(player, 1)
        await until(lambda: sessions(process) == 2)
        processes = process.processes()
        process.process.kill()
        process.process.wait()
    reason = (await buried(player, 1))[0]
    assert "code executor" in reason, "an error of no episode"
    _, alive = psutil.wait_procs(processes[1:], 60)
    assert not alive


async def test_sessions_end_with_a_service_that_is_killed(playing: Any, executor: Running) -> None:
    await until(lambda: sessions(executor) == 0)
    before = len(executor.processes())
    player = await playing(calls("import time; time.sleep(1000)"), **TOOLS, executor_address=executor.address)
    await admit(player, 1)
    await until(lambda: sessions(executor) == 2)
    assert player.python is not None
    transport = player.python._client._writer
    assert transport is not None
    transport.transport.abort()  # as the kernel does for a process that is killed
    await player.end()
    await until(lambda: sessions(executor) == 0 and len(executor.processes()) == before)


def test_the_attacks_on_sessions_are_those_on_programs() -> None:
    assert len([attack for attack in attacks.ATTACKS if not attack.calls]) >= 60, (
        "tests/reward/executor/test_sessions.py"
    )


def test_without_an_executor_or_with_a_tool_of_its_name_the_service_says_so() -> None:
    with pytest.raises(SettingsError, match=re.escape("set reward.executor.address, or let `penstock up` do both")):
        Python(settings(environment="", executor="stdlib"))
    made = settings(environment="", executor="stdlib", executor_address="127.0.0.1:1")
    hosts = Hosts(made.episodes)
    hosts.tools = [TOOL]
    with pytest.raises(SettingsError, match=re.escape("expected no tool 'python' with episodes.executor")):
        ToolLoop(made.episodes, hosts, "answer", Python(made))
