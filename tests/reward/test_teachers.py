"""Logprobs under teachers: of the model in this service and of a vLLM server, as the trainer would compute them."""

import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from penstock.services.reward import endpoint as endpoints
from penstock.services.reward.models import frozen_policy
from penstock.services.reward.models.reading import Reading, join, spans
from penstock.services.reward.service import make_scoring
from penstock.services.reward.teachers import EndpointTeacher, taught
from penstock.services.trainer.model.policy import load_reference
from penstock.shared.backoff import Backoff
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Purpose, RolloutGroup
from penstock.shared.errors import PermanentError, SettingsError, TemporaryError
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.conftest import free_port, until
from tests.reward.scorers.test_judge import Endpoint, Reply, sequence, serving
from tests.reward.test_reference import TEMPERATURE, at_sampled, episodes, group, trainers_own
from tests.support import builders, forge, tiny
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
    groups = [group(0, 4), group(1, 1), group(2, 11), episodes(3, 4), episodes(4, 0)]
    for experience, made in zip(await taught_by(of, *groups), groups, strict=True):
        assert whole(experience).dtype == np.float32
        np.testing.assert_allclose(at_sampled(made, whole(experience)), trainers_own(policy, made), atol=FORWARD)
        assert experience.reference_logprobs is None


@pytest.mark.parametrize("chunk_tokens", [4, 2048])
async def test_the_most_probable_tokens_of_a_teacher_have_the_logprobs_of_its_whole_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    """Of the 42 words in a vocabulary padded to 48: what is beyond is not sent, and counts."""
    monkeypatch.setattr(frozen_policy, "CHUNK_TOKENS", chunk_tokens)
    of = settings(
        tiny.save(tmp_path),
        {"name": "own", "model": str(tmp_path)},
        algorithm={"distillation": 1.0, "distillation_top_k": 5},
    )
    made = group(2, 11)
    (experience,) = await taught_by(of, made)
    np.testing.assert_allclose(
        whole(experience), trainers_own(load_reference(of.policy, torch.float32, "cpu"), made), atol=FORWARD
    )
    model, words = tiny.model(), len(AutoTokenizer.from_pretrained(tmp_path))
    for sample in experience.group.samples:
        ids = torch.from_numpy(np.concatenate([made.prompt_token_ids, sample.token_ids])).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(made.prompt_token_ids) - 1 : -1]
        expected = torch.log_softmax(logits.double() / TEMPERATURE, -1)
        chosen = expected[:, :words].topk(5).indices.sort(-1).values
        assert sample.teacher_top_ids is not None
        assert sample.teacher_top_logprobs is not None
        assert sample.teacher_top_ids.tolist() == chosen.tolist()
        np.testing.assert_allclose(sample.teacher_top_logprobs, expected.gather(-1, chosen), atol=FORWARD)


async def test_with_its_most_probable_tokens_a_row_has_one_teacher(tmp_path: Path) -> None:
    folder, made = tiny.save(tmp_path), group()
    of = settings(
        folder,
        *({"name": name, "model": str(folder)} for name in ("own", "other")),
        data={"teacher_field": "teacher"},
        algorithm={"distillation": 1.0, "distillation_top_k": 5},
    )
    with pytest.raises(PermanentError, match=r"one teacher of train.jsonl:1 with .*top_k.*found own, other"):
        await taught_by(of, of_problem(made, "own", "other"))


async def test_more_most_probable_tokens_than_words_are_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path)
    of = settings(
        folder, {"name": "own", "model": str(folder)}, algorithm={"distillation": 1.0, "distillation_top_k": 64}
    )
    with pytest.raises(
        SettingsError, match=r"distillation_top_k up to \d+, the tokens of the policy's vocabulary, found 64"
    ):
        await taught_by(of, group())


@pytest.mark.parametrize("top_k", [0, 3])
async def test_a_teacher_without_finite_numbers_is_unavailable_and_named_with_the_row(
    tmp_path: Path, top_k: int
) -> None:
    of = settings(
        tiny.save(tmp_path), {"name": "own", "model": str(tmp_path)},
        algorithm={"distillation": 1.0, "distillation_top_k": top_k},
    )  # fmt: skip
    scoring = make_scoring(of, Status())
    await scoring.start()
    try:
        model: Any = scoring._parts()[-1]
        with torch.no_grad():
            model._policy._placed.module.get_input_embeddings().weight[7] = math.nan
        with pytest.raises(TemporaryError, match=r"own unavailable: expected finite logprobs.*\(train.jsonl:1\)"):
            await scoring(group())
    finally:
        await scoring.close()


ROWS = np.array([[1, 2]] * 3, np.int32), np.full((3, 2), -1.0, np.float32)


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (Reading(np.zeros(2, np.float32), *ROWS), "a logprob of each of 3 tokens, found 2"),
        (Reading(np.zeros(3, np.float32)), "2 most probable tokens at each of 3 positions"),
        (Reading(np.zeros(3, np.float32), ROWS[0][:2], ROWS[1][:2]), "2 most probable tokens at each of 3 positions"),
        (Reading(np.zeros(3, np.float32), ROWS[0], ROWS[1] * np.nan), "finite logprobs of the most probable tokens"),
        (Reading(np.zeros(3, np.float32), ROWS[0][:, ::-1], ROWS[1]), "different most probable tokens, found ids that"),
        (Reading(np.zeros(3, np.float32), ROWS[0], ROWS[1] * 0), "different most probable tokens, found probabilities"),
    ],
)
def test_a_reading_of_other_tokens_or_of_no_distribution_names_its_teacher_and_row(
    reading: Reading, reason: str
) -> None:
    made = builders.group(0, ("46",))
    with pytest.raises(TemporaryError, match=rf"far unavailable: expected {reason}.*\(train.jsonl:1\)"):
        join(spans(made), [reading], "far", made, 2)
    good = join(spans(made), [Reading(np.full(3, -1.0, np.float32), *ROWS)], "far", made, 2)
    assert good.top_ids_NK is not None
    assert good.top_logprobs_NK is not None
    parts = good.logprobs_N, good.top_ids_NK, good.top_logprobs_NK
    assert all(map(np.array_equal, parts, (np.full(3, -1.0), *ROWS)))


def test_each_sampled_token_of_a_tree_is_read_once_after_its_own_branch() -> None:
    made = dataclasses.replace(builders.group(0, ("46",)), samples=(builders.tree(),))  # ids 0 … 9 after 5 6 7
    first, second = parts = spans(made)
    assert (first.prompt_token_ids.tolist(), first.token_ids.tolist()) == ([5, 6, 7, 0, 1, 2], [3, 4, 5, 6, 7])
    assert (second.prompt_token_ids.tolist(), second.token_ids.tolist()) == ([5, 6, 7, 0, 1, 2], [8, 9])
    tops = [(np.full((n, 2), (n, n + 1), np.int32), np.full((n, 2), -n, np.float32)) for n in (5, 2)]
    readings = [Reading(np.full(n, -n, np.float32), *top) for n, top in zip((5, 2), tops, strict=True)]
    reading = join(parts, readings, "far", made, 2)
    assert reading.logprobs_N.tolist() == [0, 0, 0, -5, -5, -5, -5, -5, -2, -2]
    assert reading.top_ids_NK is not None
    assert reading.top_ids_NK[:, 0].tolist() == [0, 0, 0, 5, 5, 5, 5, 5, 2, 2]


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
    readings = [Reading(np.log(np.full(3, share, np.float32))) for share in (0.5, 0.25)]
    (sample,) = taught(made, readings).samples
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


@contextlib.asynccontextmanager
async def asked(of: Settings) -> AsyncIterator[EndpointTeacher]:
    """The first teacher of ``of``, closed whatever happens."""
    teacher = EndpointTeacher(of, of.reward.teachers[0])
    try:
        yield teacher
    finally:
        await teacher.close()


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
    async with (
        serving(sequence(vocabulary_text(folder), reply, reply, good)) as endpoint,
        asked(far(endpoint, folder)) as teacher,
    ):
        await teacher.start()
        with pytest.raises(TemporaryError, match="far unavailable"):
            await teacher.read(made)
        assert (await teacher.read(made)).logprobs_N.tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.usefixtures("quick")
async def test_an_endpoint_of_another_vocabulary_is_refused_at_the_start_and_waited_for_later(tmp_path: Path) -> None:
    folder, made = tiny.save(tmp_path), builders.group(0, ("46",))
    other: Reply = 200, {}, json.dumps({"prompt": "abc"})
    async with serving(sequence(other)) as endpoint, asked(far(endpoint, folder)) as teacher:
        with pytest.raises(SettingsError, match="expected a teacher with the policy's vocabulary"):
            await teacher.start()
        with pytest.raises(TemporaryError, match="expected a teacher with the policy's vocabulary"):
            await teacher.read(made)


def far_with_top_k(endpoint: Endpoint, policy: Path, top_k: int = 2) -> Settings:
    teacher = {"name": "far", "model": "teacher", "url": endpoint.url}
    algorithm = {"distillation": 1.0, "distillation_top_k": top_k}
    return settings(policy, teacher, sampling={"temperature": 1.0}, algorithm=algorithm)


def entries(**values: float) -> dict[str, Any]:
    return {name.lstrip("t"): {"logprob": value, "rank": 1, "decoded_token": "a"} for name, value in values.items()}


PROBE = prompt_logprobs([None, entries(t1=-2.0, t3=-1.0, t5=-2.0)])
UNREADABLE = "no logprob of each token and of 2 most probable ones"


@pytest.mark.usefixtures("quick")
async def test_the_most_probable_tokens_of_an_endpoint_are_read_with_the_sampled_one_beside_them(
    tmp_path: Path,
) -> None:
    folder, made = tiny.save(tmp_path), builders.group(0, ("46",))
    rows = [entries(t0=-9.0, t7=-1.0, t4=-0.6), entries(t1=-0.5, t0=-3.0), entries(t2=-5.0, t9=-1.0, t3=-2.0)]
    answer = prompt_logprobs([None, None, None, *rows])
    async with (
        serving(sequence(vocabulary_text(folder), PROBE, answer)) as endpoint,
        asked(far_with_top_k(endpoint, folder)) as teacher,
    ):
        await teacher.start()
        reading = await teacher.read(made)
    assert reading.logprobs_N.tolist() == [-9.0, -0.5, -5.0]
    assert reading.top_ids_NK is not None
    assert reading.top_logprobs_NK is not None
    assert reading.top_ids_NK.tolist() == [[4, 7], [0, 1], [3, 9]]
    assert reading.top_logprobs_NK.tolist() == [
        pytest.approx(row) for row in ([-0.6, -1.0], [-3.0, -0.5], [-2.0, -1.0])
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (entries(t0=-1.0), UNREADABLE),
        ([], UNREADABLE),
        (entries(t0=-1.0, t5=math.nan), UNREADABLE),
        (entries(t0=-1.0, t5=3.0), UNREADABLE),
        ({**entries(t0=-1.0), "-4": {"logprob": -1.0}}, UNREADABLE),
        ({**entries(t0=-1.0), str(1 << 40): {"logprob": -1.0}}, UNREADABLE),
        ({**entries(t0=-1.0), "x": {"logprob": -1.0}}, UNREADABLE),
        (entries(t0=-0.1, t5=-0.2), "different most probable tokens, found probabilities whose sum is 1.7"),
        (entries(t0=-1.0, t47=-2.0), "tokens below 42, the policy's vocabulary, found 47"),
    ],
)
@pytest.mark.usefixtures("quick")
async def test_most_probable_tokens_that_are_of_no_distribution_over_the_vocabulary_are_unavailable(
    tmp_path: Path, row: Any, reason: str
) -> None:
    folder, made = tiny.save(tmp_path), builders.group(0, ("46",))
    answer = prompt_logprobs(
        [None, None, None, row, *({**entries(t9=-1.0), str(i): {"logprob": -2.0}} for i in (1, 2))]
    )
    async with (
        serving(sequence(vocabulary_text(folder), PROBE, answer, answer)) as endpoint,
        asked(far_with_top_k(endpoint, folder)) as teacher,
    ):
        await teacher.start()
        with pytest.raises(TemporaryError, match=rf"far unavailable: .*{reason}.*\(train.jsonl:1\)"):
            await teacher.read(made)


@pytest.mark.usefixtures("quick")
async def test_an_answer_that_is_larger_than_that_of_its_tokens_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 tokens with 3 × 128 bytes each, beside the bytes that any answer may have."""
    monkeypatch.setattr("penstock.services.reward.teachers.LARGEST_BYTES", 1000)
    folder, made = tiny.save(tmp_path), builders.group(0, ("46",))
    rows = [{**entries(t9=-1.0), str(i): {"logprob": -2.0}} for i in range(3)]
    good = prompt_logprobs([None, None, None, *rows])
    padded: Reply = 200, {}, good[2] + " " * (1001 + 6 * 3 * 128 - len(good[2]))
    async with (
        serving(sequence(vocabulary_text(folder), PROBE, padded, padded, good)) as endpoint,
        asked(far_with_top_k(endpoint, folder)) as teacher,
    ):
        await teacher.start()
        with pytest.raises(TemporaryError, match="far unavailable: the response has more than 3304 bytes"):
            await teacher.read(made)
        assert (await teacher.read(made)).logprobs_N.tolist() == [-2.0, -2.0, -2.0]


@pytest.mark.usefixtures("quick")
async def test_a_server_that_gives_fewer_most_probable_tokens_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path)
    message = "Requested prompt logprobs of 40, which is greater than max allowed: 20"
    refusal: Reply = 400, {}, json.dumps({"error": {"message": message}})
    async with (
        serving(sequence(vocabulary_text(folder), refusal)) as endpoint,
        asked(far_with_top_k(endpoint, folder, 40)) as teacher,
    ):
        with pytest.raises(
            SettingsError, match=r"gives the 40 most .*start it with --max-logprobs 40, or lower algorithm"
        ):
            await teacher.start()


def model_for_vllm() -> Any:
    """Return a model with heads of 32 dimensions, the fewest that vLLM computes on a CPU."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tiny.tokenizer()),  # no padding, from which an endpoint cannot choose
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
    flags += f" --num-gpu-blocks-override {forge.VLLM_BLOCKS}"
    words = ["--host", "127.0.0.1", "--distributed-executor-backend", forge.UNIPROC, *flags.split()]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    quiet["TORCHDYNAMO_DISABLE"] = "1"
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log = folder.parent / "vllm.log"
    with log.open("wb") as written:
        server = forge.start("vllm.entrypoints.openai.api_server", words, written, forked=True, **quiet, **offline)
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
        of = settings(
            folder,
            {"name": "far", "model": "teacher", "url": url},
            sampling={"temperature": 1.0},
            algorithm={"distillation": 1.0, "distillation_top_k": 20},
        )

        async with httpx.AsyncClient() as client:

            async def healthy() -> bool:
                with contextlib.suppress(httpx.HTTPError):
                    return "teacher" in (await client.get(f"{url}/models")).text  # and no other server on that port
                return False

            await until(healthy, timeout_s=1000)
        plain = group(0, 5)
        made = of_problem(plain, sampling=dataclasses.replace(plain.prompt.sampling, temperature=1.0))
        tree = of_problem(episodes(3, 4, 1.0))
        experience, of_tree = await taught_by(of, made, tree)
        async with asked(with_top_k(of, 21)) as teacher:
            with pytest.raises(SettingsError, match="start it with --max-logprobs 21, or lower algorithm"):
                await teacher.start()
    policy = load_reference(of.policy, torch.float32, "cpu")
    np.testing.assert_allclose(whole(experience), trainers_own(policy, made, 1.0), atol=VLLM)
    np.testing.assert_allclose(at_sampled(tree, whole(of_tree)), trainers_own(policy, tree, 1.0), atol=VLLM)
    here = settings(
        folder,
        {"name": "far", "model": str(folder)},
        sampling={"temperature": 1.0},
        algorithm={"distillation": 1.0, "distillation_top_k": 20},
    )
    (expected,) = await taught_by(here, made)
    for sample, local in zip(experience.group.samples, expected.group.samples, strict=True):
        assert sample.teacher_top_ids is not None
        assert sample.teacher_top_logprobs is not None
        assert local.teacher_top_logprobs is not None
        assert sample.teacher_top_ids.tolist() == local.teacher_top_ids.tolist()  # type: ignore[union-attr]
        np.testing.assert_allclose(sample.teacher_top_logprobs, local.teacher_top_logprobs, atol=VLLM)


def with_top_k(of: Settings, top_k: int) -> Settings:
    return of.model_copy(update={"algorithm": of.algorithm.model_copy(update={"distillation_top_k": top_k})})
