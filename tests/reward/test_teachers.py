"""Logprobs under teachers: of the model in this service and of a vLLM server, as the trainer would compute them."""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from services.reward import endpoint as endpoints
from services.reward.service import make_scoring
from services.reward.teachers import EndpointTeacher, taught
from services.trainer.model.policy import load_reference
from shared.backoff import Backoff
from shared.bus.encoding import wire
from shared.bus.messages import Experience, Purpose, RolloutGroup
from shared.errors import PermanentError, SettingsError, TemporaryError
from shared.process.telemetry import Status
from shared.settings import Settings
from tests.conftest import free_port, until
from tests.reward.scorers.test_judge import Endpoint, Reply, sequence, serving
from tests.reward.test_reference import TEMPERATURE, group, trainers_own
from tests.support import builders, tiny
from tests.support.tolerance import FORWARD

VLLM = 1e-3
"""Another attention kernel, float32; 5e-6 was measured."""


def settings(policy: Path, *teachers: dict[str, str], **tables: dict[str, Any]) -> Settings:
    return Settings.model_validate(
        {
            "policy": {"model": str(policy), "dtype": "float32"},
            "sampling": {"temperature": TEMPERATURE} | tables.pop("sampling", {}),
            "reward": {
                "models": {"device": "cpu", "batch_tokens": 32},
                "scorers": [{"kind": "format", "needs_stop": True}],
                "teachers": teachers,
            },
            **tables,
        }
    )


def of_problem(made: RolloutGroup, *teachers: str, **changes: Any) -> RolloutGroup:
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, teachers=teachers, **changes))


async def taught_by(of: Settings, *made: RolloutGroup) -> list[Experience]:
    scoring = make_scoring(of, Status())
    await scoring.start()
    try:
        return [wire.decode(wire.encode(await scoring(each)), Experience) for each in made]
    finally:
        await scoring.close()


def whole(experience: Experience) -> Any:
    parts = [sample.teacher_logprobs for sample in experience.group.samples]
    assert all(part is not None for part in parts)
    return np.concatenate([part for part in parts if part is not None])


async def test_the_policy_as_its_own_teacher_gives_the_logprobs_of_the_trainer(tmp_path: Path) -> None:
    of = settings(tiny.save(tmp_path), {"name": "own", "model": str(tmp_path)})
    policy = load_reference(of.policy, torch.float32, "cpu")
    groups = [group(0, 4), group(1, 1), group(2, 11)]
    for experience, made in zip(await taught_by(of, *groups), groups, strict=True):
        assert whole(experience).dtype == np.float32
        np.testing.assert_allclose(whole(experience), trainers_own(policy, made), atol=FORWARD)
        assert experience.reference_logprobs is None


async def test_a_row_names_its_teachers_and_several_are_the_mean_of_their_probabilities(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "policy")
    tiny.save(tmp_path / "other", seed=1)
    teachers = [{"name": "own", "model": str(folder)}, {"name": "other", "model": str(tmp_path / "other")}]
    of = settings(folder, *teachers, data={"teacher_field": "teacher"})
    made = group()
    own, other, both, none, held_out = await taught_by(
        of,
        of_problem(made, "own"),
        of_problem(made, "other"),
        of_problem(made, "own", "other"),
        made,
        of_problem(made, "own", purpose=Purpose.EVALUATE),
    )
    assert abs(whole(own) - whole(other)).max() > 1
    np.testing.assert_allclose(np.exp(whole(both)), (np.exp(whole(own)) + np.exp(whole(other))) / 2, atol=1e-6)
    for experience in (none, held_out):
        assert [sample.teacher_logprobs for sample in experience.group.samples] == [None] * 4
    (everywhere,) = await taught_by(settings(folder, *teachers), made)
    assert whole(everywhere).tolist() == whole(both).tolist()


def test_the_mixture_of_a_half_and_a_quarter_is_three_eighths() -> None:
    made = builders.group(0, ("46",))
    logprobs = [np.log(np.full(3, share, np.float32)) for share in (0.5, 0.25)]
    (sample,) = taught(made, logprobs).samples
    assert sample.teacher_logprobs is not None
    assert np.exp(sample.teacher_logprobs).tolist() == pytest.approx([0.375] * 3)


async def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "policy")
    other = tiny.save(tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    scoring = make_scoring(settings(folder, {"name": "other", "model": str(other)}), Status())
    with pytest.raises(
        SettingsError, match=r"policy's vocabulary.*change model of teacher 'other' in \[\[reward.teach"
    ):
        await scoring.start()
    await scoring.close()


async def test_a_token_that_a_teacher_does_not_know_buries_its_group_alone(tmp_path: Path) -> None:
    of = settings(tiny.save(tmp_path), {"name": "own", "model": str(tmp_path)})
    made = group()
    strange = dataclasses.replace(made.samples[0], token_ids=np.array([3, tiny.VOCABULARY], np.int32))
    with pytest.raises(PermanentError, match=r"expected token ids below 48, found 48 in train.jsonl:1"):
        await taught_by(of, dataclasses.replace(made, samples=(strange, *made.samples[1:])))


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"sampling": {"top_p": 0.9}}, "expected no top_p, top_k, min_p or min_new_tokens"),
        ({"sampling": {"temperature": 0.7}}, "expected temperature = 1 in [sampling] with a teacher at a url"),
        (
            {"sampling": {"temperature": 1.0}, "reward": {"teachers": []}},
            "expected [[reward.teachers]] with data.teacher",
        ),
    ],
)
def test_what_would_be_another_distribution_is_refused(tables: dict[str, Any], sentence: str) -> None:
    reward = {"teachers": [{"name": "far", "model": "m", "url": "http://127.0.0.1:9/v1"}]}
    with pytest.raises(ValueError, match=r".*") as refused:
        Settings.model_validate({"reward": reward, "data": {"teacher_field": "teacher"}} | tables)
    assert sentence in str(refused.value)


def test_distillation_without_a_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"expected \[\[reward.teachers\]\] with algorithm.distillation = 0.5, found none"
    ):
        make_scoring(settings(tmp_path, algorithm={"distillation": 0.5}), Status())


def far(endpoint: Endpoint, policy: Path) -> Settings:
    teacher = {"name": "far", "model": "teacher", "url": endpoint.url}
    return settings(policy, teacher, sampling={"temperature": 1.0})


def vocabulary_text(folder: Path) -> Reply:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return 200, {}, json.dumps({"prompt": tokenizer.decode(sorted(tokenizer.get_vocab().values()))})


def prompt_logprobs(rows: list[Any]) -> Reply:
    return 200, {}, json.dumps({"choices": [{"prompt_logprobs": rows}]})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_BACKOFF", Backoff(0.01, longest_s=1.0))
    monkeypatch.setattr(endpoints, "ATTEMPTS", 2)


@pytest.mark.parametrize(
    "reply",
    [
        (503, {}, "loading"),
        (200, {}, "[" * 100_000),
        (200, {}, json.dumps({"choices": []})),
        prompt_logprobs([None, {"5": {"logprob": -1.0}}]),
        prompt_logprobs([None, *[{"5": {"logprob": -1.0}}] * 5]),
        prompt_logprobs([None, None, None, *({str(i): {"logprob": math.nan}} for i in range(3))]),
        prompt_logprobs([None, None, None, *({str(i): {"logprob": 7.0}} for i in range(3))]),
        prompt_logprobs([None, None, None, *({str(i): {"logprob": True}} for i in range(3))]),
        prompt_logprobs([None, None, None, *({str(i): {"logprob": "-1"}} for i in range(3))]),
        None,
    ],
)
@pytest.mark.usefixtures("quick")
async def test_an_answer_without_the_logprobs_is_unavailable_and_a_good_one_counts(
    tmp_path: Path, reply: Reply | None
) -> None:
    folder, made = tiny.save(tmp_path), builders.group(0, ("46",))
    good = prompt_logprobs([None, None, None, *({str(i): {"logprob": -1.0 - i}} for i in range(3))])
    async with serving(sequence(vocabulary_text(folder), reply, reply, good)) as endpoint:
        teacher = EndpointTeacher(far(endpoint, folder), far(endpoint, folder).reward.teachers[0])
        await teacher.start()
        with pytest.raises(TemporaryError, match="far unavailable"):
            await teacher.logprobs(made)
        assert (await teacher.logprobs(made)).tolist() == [-1.0, -2.0, -3.0]
        await teacher.close()


@pytest.mark.usefixtures("quick")
async def test_an_endpoint_of_another_vocabulary_is_refused_at_the_start_and_waited_for_later(tmp_path: Path) -> None:
    folder, made = tiny.save(tmp_path), builders.group(0, ("46",))
    other: Reply = 200, {}, json.dumps({"prompt": "abc"})
    async with serving(sequence(other)) as endpoint:
        teacher = EndpointTeacher(far(endpoint, folder), far(endpoint, folder).reward.teachers[0])
        with pytest.raises(SettingsError, match="expected a teacher with the policy's vocabulary"):
            await teacher.start()
        with pytest.raises(TemporaryError, match="expected a teacher with the policy's vocabulary"):
            await teacher.logprobs(made)
        await teacher.close()


def model_for_vllm() -> Any:
    """Return a model with heads of 32 dimensions, the fewest that vLLM computes on a CPU."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=tiny.VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
            eos_token_id=tiny.STOP,
        )
    ).eval()


@contextlib.contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    port = free_port()
    flags = f"--model {folder} --served-model-name teacher --dtype float32 --max-model-len 128 --enforce-eager --port {port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", *flags.split()]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log = folder.parent / "vllm.log"
    with log.open("wb") as written:
        server = subprocess.Popen(command, env={**os.environ, **quiet, **offline}, stdout=written, stderr=written)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for process in (*psutil.Process(server.pid).children(recursive=True), server):
            process.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_the_policy_behind_a_vllm_server_gives_the_logprobs_of_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    folder = tiny.save(tmp_path / "policy", of=model_for_vllm())
    with vllm_server(folder) as url:
        of = settings(folder, {"name": "far", "model": "teacher", "url": url}, sampling={"temperature": 1.0})

        async def healthy() -> bool:
            async with httpx.AsyncClient() as client:
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get(url.replace("/v1", "/health"))).status_code == 200
            return False

        await until(healthy, timeout_s=1000)
        plain = group(0, 5)
        made = of_problem(plain, sampling=dataclasses.replace(plain.prompt.sampling, temperature=1.0))
        (experience,) = await taught_by(of, made)
    policy = load_reference(of.policy, torch.float32, "cpu")
    np.testing.assert_allclose(whole(experience), trainers_own(policy, made, 1.0), atol=VLLM)
