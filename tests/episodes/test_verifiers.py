"""Episodes that a real EnvServer of verifiers plays, whose packages live in a Python of their own; the policy is scripted."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from penstock.services.episodes.drivers.verifiers import EnvServer
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Ended
from penstock.shared.errors import TemporaryError
from tests.episodes.test_service import buried, players
from tests.support.environments import python_with, served

pytestmark = pytest.mark.timeout(600)  # among the first: it may install a Python
SERVER = Path(__file__).parents[1] / "support" / "verifiers_server.py"


@pytest.fixture
async def played(bus: Bus, tmp_path: Path) -> AsyncIterator[Any]:
    async with players(bus, tmp_path) as begin:
        yield lambda port, script: begin(script, environment="", agent=f"tcp://127.0.0.1:{port}")


async def test_a_taskset_gives_the_reward_of_the_turns_that_its_harness_asked_for(played: Any) -> None:
    def script(prompt: str, *_: Any) -> tuple[str, float]:
        (row,) = re.findall(r"row (\d+)", prompt)
        return (row if "again" in prompt and int(row) % 2 else "0"), 0.5

    async with served(python_with("verifiers==0.4.0"), SERVER) as port:
        player = await played(port, script)
        await player.admit(*range(7), -3)
        for number, group in enumerate(await player.groups(7)):
            for sample in group.samples:
                assert (sample.environment_reward, sample.ended) == (float(number % 2 or not number), Ended.AGENT)
                assert sample.segments[:, 2].tolist() == [0, 1, 0, 1]
                assert sample.segments[:, 1].tolist() == [-1, 0, 1, 2], "its turns are one path"
        assert "the environment gave no reward" in (await buried(player, 1))[7]


ANSWERS: list[tuple[list[tuple[bytes, Any]], str]] = [
    ([(b"reply", {"success": False, "error": "x" * 10_000})], "the environment could not be played: xxx"),
    ([(b"reply", {"success": True, "traces": []})], "expected an episode of one agent, found 0 traces"),
    ([(b"reply", {"success": True, "traces": [{"id": "a"}]})], "gave no answer of the protocol"),
    ([(b"reply", [])], "gave no answer of the protocol"),
    ([(b"delta", 5)], "gave no answer of the protocol"),
    ([(b"delta", {"trace": "a", "discard": True})], "began the episode again"),
]


@pytest.mark.parametrize(("frames", "sentence"), ANSWERS)
async def test_other_answers_of_a_server_make_the_episode_unavailable(frames: Any, sentence: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        server = EnvServer(f"tcp://127.0.0.1:{port}", 600.0)
        playing = asyncio.create_task(asyncio.to_thread(server.run, "task", "http://127.0.0.1:1/v1", "key", secret=1))
        client, run, kind, asked = await router.recv_multipart()
        assert (kind, msgpack.unpackb(asked)["task_data"]) == (b"run", {"secret": 1, "prompt": "task"})
        for answer, said in frames:
            await router.send_multipart([client, run, answer, msgpack.packb(said)])
        with pytest.raises(TemporaryError, match=sentence):
            await playing


def test_a_server_that_is_not_there_makes_the_episode_unavailable() -> None:
    with pytest.raises(TemporaryError, match="did not play the episode within 1 s"):
        EnvServer("tcp://127.0.0.1:9", 1.0).run("task", "http://127.0.0.1:1/v1", "key")
