"""The LLM judge against a failing server on a real socket."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.services.reward import endpoint as endpoints
from penstock.services.reward.scorers.judge import verdict
from penstock.services.reward.scorers.judge.reading import make_read
from penstock.services.reward.scorers.judge.scorer import Judge
from penstock.services.reward.scorers.judge.verdict import VerdictReader, fill
from penstock.shared.backoff import Backoff
from penstock.shared.bus.messages import ChatMessage, Score, ScoreStatus
from penstock.shared.errors import PermanentError, SettingsError
from penstock.shared.settings.rewards.scorers import JudgeScorer
from tests.conftest import PATIENCE_S
from tests.support import builders

Reply = tuple[int, dict[str, str], str]
Behaviour = Callable[[int, dict[str, object]], Awaitable[Reply | None]]


def says(content: object) -> Reply:
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}], "usage": usage})


class Endpoint:
    """An HTTP server whose n-th response a function gives; None hangs up."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.at_s: list[float] = []
        self.running = self.most_running = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while (reply := await self._one(reader)) is not None:
                    status, headers, text = reply
                    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                    body = text.encode()
                    writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body)
                    await writer.drain()
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader) -> Reply | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line for line in head.splitlines() if line.lower().startswith("content-length")).split()[1])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.heads.append(head)
        self.at_s.append(time.monotonic())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._behaviour(len(self.bodies), self.bodies[-1])
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(behaviour)
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(endpoint.handle(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield endpoint
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_BACKOFF", Backoff(0.01, longest_s=endpoints.MAX_WAIT_S))
    monkeypatch.setattr(endpoints, "ATTEMPTS", 3)


def settings(url: object = "http://127.0.0.1:9/v1", **more: object) -> JudgeScorer:
    return JudgeScorer.model_validate({"kind": "judge", "url": url, "model": "m"} | more)


async def judged(endpoint: Endpoint, *texts: str, **more: object) -> list[Score]:
    judge = Judge(settings(endpoint.url, **more))
    try:
        return await judge.score(builders.group(0, texts))
    finally:
        await judge.close()


def sequence(*replies: Reply | None) -> Behaviour:
    """The last reply repeats."""

    async def behave(number: int, body: dict[str, object]) -> Reply | None:
        return replies[min(number, len(replies)) - 1]

    return behave


async def test_a_verdict_becomes_a_value_on_the_declared_scale() -> None:
    async with serving(sequence(says("Good.\nScore: 3\nNo.\nScore: 7"))) as endpoint:
        (score,) = await judged(endpoint, "46", request={"top_p": 0.9})
    assert score == Score("judge", ScoreStatus.OK, 0.7)
    body = endpoint.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("m", 512, 0.0, 0.9)
    messages = body["messages"]
    assert isinstance(messages, list)
    assert "12+34=" in messages[0]["content"]
    assert "Response:\n46" in messages[0]["content"]


@pytest.mark.parametrize(("below", "path"), [("", ""), ("/", ""), ("/v1/", "/v1"), ("/a/b%20c", "/a/b%20c")])
async def test_the_request_goes_below_the_urls_path(below: str, path: str) -> None:
    async with serving(sequence(says("Score: 7"))) as endpoint:
        endpoint.url = endpoint.url.removesuffix("/v1") + below
        (score,) = await judged(endpoint, "46")
    assert score.status is ScoreStatus.OK
    assert endpoint.heads[0].startswith(f"POST {path}/chat/completions HTTP/1.1")


@pytest.mark.parametrize(
    "failure",
    [
        (429, {}, "slow down"),
        (500, {}, "oops"),
        (503, {"Retry-After": "0"}, ""),
        (200, {}, "no JSON"),
        (200, {}, '{"choices": []}'),
        (200, {}, '{"choices": [{"message": {"content": null}}]}'),
        (200, {}, "[1]"),
        says("I would rather not say."),
        says("Score: 11"),
        None,
    ],
)
async def test_what_may_pass_is_tried_again(failure: Reply | None) -> None:
    async with serving(sequence(failure, failure, says("Score: 10"))) as endpoint:
        assert await judged(endpoint, "46") == [Score("judge", ScoreStatus.OK, 1.0)]
    assert len(endpoint.bodies) == 3


@pytest.mark.parametrize(
    ("failure", "detail"),
    [
        ((429, {}, "slow down"), "found HTTP 429: 'slow down', as the last of 3 requests"),
        ((500, {}, "oops"), "found HTTP 500: 'oops', as the last of 3 requests"),
        ((200, {}, "garbage"), "the response (HTTP 200) has no chat message: 'garbage', as the last of 3 requests"),
        (says("hm"), "there is no verdict in 'hm', as the last of 3 requests"),
    ],
)
async def test_what_does_not_pass_is_unavailable_never_worth_nothing(failure: Reply, detail: str) -> None:
    async with serving(sequence(failure)) as endpoint:
        assert await judged(endpoint, "46") == [Score("judge", ScoreStatus.UNAVAILABLE, None, detail)]
    assert len(endpoint.bodies) == 3


async def test_what_an_endpoint_refuses_is_not_tried_again_and_the_key_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    caplog.set_level(logging.DEBUG)
    async with serving(sequence((401, {}, "wrong key: sk-secret"))) as endpoint:
        (score,) = await judged(endpoint, "46", key_source="env:JUDGE_KEY")
    assert "authorization: bearer sk-secret" in endpoint.heads[0].lower()
    assert (score.status, len(endpoint.bodies)) == (ScoreStatus.UNAVAILABLE, 1)
    assert score.detail.endswith("found 401: 'wrong key: …'")
    assert "sk-secret" not in caplog.text


async def test_an_endpoint_that_hangs_is_given_up() -> None:
    async def hang(number: int, body: dict[str, object]) -> Reply | None:
        await asyncio.Event().wait()
        return None

    async with serving(hang) as endpoint:
        (score,) = await judged(endpoint, "46", timeout_s=0.1)
    assert score.status is ScoreStatus.UNAVAILABLE
    assert score.detail == "there was no answer within 0.1 s, as the last of 3 requests"


async def test_an_endpoint_that_is_not_there_is_unavailable() -> None:
    async with serving(sequence()) as endpoint:
        pass
    (score,) = await judged(endpoint, "46")
    assert score.status is ScoreStatus.UNAVAILABLE
    assert score.detail.startswith("found ConnectError")


async def test_an_endpoint_that_asks_for_time_gets_it_from_every_request() -> None:
    async def busy_once(number: int, body: dict[str, object]) -> Reply | None:
        return (429, {"Retry-After": "1"}, "") if number == 1 else says("Score: 5")

    async with serving(busy_once) as endpoint:
        scores = await judged(endpoint, "46", "47", "48", concurrency=1)
    assert [score.value for score in scores] == [0.5, 0.5, 0.5]
    assert endpoint.at_s[1] - endpoint.at_s[0] >= 1.0


async def test_an_endpoint_that_asks_for_more_time_than_there_is_gives_the_group_back() -> None:
    async with serving(sequence((429, {"Retry-After": "3600"}, "quota"))) as endpoint:
        (score,) = await judged(endpoint, "46")
    assert score.status is ScoreStatus.UNAVAILABLE
    assert score.detail == "found HTTP 429: 'quota', and to wait 3600 s, more than 30 s"
    assert len(endpoint.bodies) == 1


async def test_no_more_requests_run_at_once_than_declared() -> None:
    full, release = asyncio.Event(), asyncio.Event()

    async def wait(number: int, body: dict[str, object]) -> Reply | None:
        if number == 2:
            full.set()
        await release.wait()
        return says("Score: 5")

    async with serving(wait) as endpoint, asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as running:
        scoring = running.create_task(judged(endpoint, *map(str, range(8)), concurrency=2))
        await full.wait()
        release.set()
        assert len(await scoring) == 8
    assert endpoint.most_running == 2
    assert len(endpoint.bodies) == 8


async def test_equal_completions_are_judged_once_and_a_group_tried_again_asks_only_for_what_is_missing() -> None:
    async def refuse_b_at_first(number: int, body: dict[str, object]) -> Reply | None:
        return (
            (400, {}, "no")
            if "Response:\nb" in json.dumps(body).replace("\\n", "\n") and number < 4
            else says("Score: 5")
        )

    async with serving(refuse_b_at_first) as endpoint:
        judge = Judge(settings(endpoint.url, concurrency=1))
        group = builders.group(0, ("a", "a", "b", "c"))
        first = [score.value for score in await judge.score(group)]
        second = [score.value for score in await judge.score(group)]
        await judge.close()
    assert (first, second) == ([0.5, 0.5, None, 0.5], [0.5, 0.5, 0.5, 0.5])
    assert len(endpoint.bodies) == 4


@pytest.mark.parametrize(
    ("rules", "answer", "value"),
    [
        ({}, "score: 5", 0.5),
        ({"scale": [1, 5]}, "Score: 2", 0.25),
        ({"scale": [-1, 1]}, "Score: -0.5", 0.25),
        ({}, "Score: 11", None),
        ({}, "**Score:** 8", 0.8),
        ({}, "Score: **8**", 0.8),
        ({}, "### Score\n**Score: [[8]]**", 0.8),
        ({}, "score = 7.5", 0.75),
        ({}, '{"score": 8}', 0.8),
        ({}, "The score is high.", None),
        ({}, "five", None),
        ({"pattern": r"\[\[(\w+)\]\]", "scale": {"yes": 1, "NO": 0}}, "I say [[Yes]]", 1.0),
        ({"pattern": r"\[\[(\w+)\]\]", "scale": {"yes": 1, "no": 0}}, "[[maybe]]", None),
        ({"pattern": "json:score"}, '```json\n{"why": "{x}", "score": 8}\n```', 0.8),
        ({"pattern": "json:score"}, '{"score": "8"} then {"score": 4}', 0.4),
        ({"pattern": "json:score"}, '{"score": NaN}', None),
        ({"pattern": "json:score"}, '{"score": true}', None),
        ({"pattern": "json:right", "scale": {"true": 1, "false": 0}}, '{"right": false}', 0.0),
        ({"pattern": "json:score"}, '{"score": 8', None),
        ({"pattern": "json:score"}, "{" * 100_000, None),
    ],
)
def test_a_verdict_is_what_was_declared_and_nothing_else(
    rules: dict[str, object], answer: str, value: float | None
) -> None:
    reader = VerdictReader(settings(**rules))
    assert reader.value(make_read(reader.rules)(answer)) == value


def test_the_template_is_filled_in_once_so_that_a_completion_cannot_write_in_it() -> None:
    prompt = builders.prompt()
    actual = fill(
        '{prompt}|{answer}|{extra.level}|{completion}|{"score": 7}', prompt, builders.sample("{answer} {prompt}")
    )
    assert actual == '12+34=|46|1|{answer} {prompt}|{"score": 7}'
    chat = dataclasses.replace(
        prompt, text=None, messages=(ChatMessage("user", "12+34="), ChatMessage("assistant", "?"))
    )
    assert fill("{prompt}", chat, builders.sample()) == "user: 12+34=\n\nassistant: ?"


def test_a_judge_reads_the_last_answer_or_all_messages_as_its_template_says() -> None:
    prompt, call = builders.prompt(), '{"name": "add", "arguments": {"a": 12, "b": 34}}'
    assert fill("{completion}", prompt, builders.episode()) == "46"
    assert fill("{transcript}", prompt, builders.sample()) == "12+34=\n\nassistant: 46"
    messages = f"user: 12+34=\n\nassistant: {call}\n\ntool: 46\n\nassistant: 46"
    assert fill("{transcript}", prompt, builders.episode()) == messages
    with pytest.raises(PermanentError, match="expected the messages of an episode's turns, found another transcript"):
        fill("{transcript}", prompt, builders.tree())


def test_a_template_that_asks_for_what_is_not_there_can_never_be_filled_in() -> None:
    with pytest.raises(PermanentError, match=r"the judge's template needs the column 'rubric' of train\.jsonl:1"):
        fill("{extra.rubric}", builders.prompt(), builders.sample())


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"key_source": "env:NOT_SET_ANYWHERE"}, "expected a key in NOT_SET_ANYWHERE for scorer 'judge'"),
        (
            {"key_source": "file:/nonexistent"},
            "could not read the key in /nonexistent (No such file or directory): change key_source of",
        ),
        ({"pattern": "("}, "expected a regular expression with a group as pattern of scorer 'judge'"),
        ({"pattern": "x"}, "found 'x', which has no group"),
        ({"url": "http://host:port/v1"}, "expected a URL for scorer 'judge'"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(more: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Judge(settings(**more))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "more",
    [
        {"url": "http://user:password@host/v1"},
        {"url": "ftp://host"},
        {"template": "{prompt}"},
        {"scale": [1, 1]},
        {"key_source": "sk-the-key-itself"},
    ],
)
def test_settings_of_a_judge_that_contradict_themselves_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        settings(**more)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_key_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "key").write_text("sk-1\n")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(
        SettingsError, match=f"expected a key that no other user can read, found .* mode 0{mode:o}: chmod"
    ):
        Judge(settings(key_source=f"file:{tmp_path / 'key'}"))


async def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1\n")
    (tmp_path / "key").chmod(0o600)
    async with serving(sequence(says("Rating: [[10]]"))) as endpoint:
        await judged(endpoint, "46", key_source=f"file:{tmp_path / 'key'}")
    assert "authorization: bearer sk-1\r\n" in endpoint.heads[0].lower()


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ((200, {}, "[" * 100_000), "the response (HTTP 200) has no chat message: "),
        ((200, {}, " " * (1024**2 + 1)), "the response has more than 1048576 bytes"),
    ],
)
async def test_a_response_that_is_too_deep_or_too_large_is_no_answer_and_no_crash(reply: Reply, detail: str) -> None:
    async with serving(sequence(reply)) as endpoint:
        score = await judged(endpoint, "46")
    assert (score[0].status, score[0].value) == (ScoreStatus.UNAVAILABLE, None)
    assert score[0].detail.startswith(detail)


async def test_a_count_of_tokens_that_no_number_holds_is_not_counted() -> None:
    content = {"choices": [{"message": {"role": "assistant", "content": "score: 7"}}]}
    reply = json.dumps({**content, "usage": {"prompt_tokens": 10**400}})
    async with serving(sequence((200, {}, reply))) as endpoint:
        assert [score.value for score in await judged(endpoint, "46")] == [0.7]


def test_an_answer_of_nothing_but_opened_objects_holds_no_verdict() -> None:
    read = make_read({"json_field": "score"})
    assert read('{"a":' * 4_000) is None
    assert read("{" * 10_000 + '{"score": 5}') == 5


async def test_an_answer_on_which_the_pattern_runs_for_ever_holds_no_verdict_and_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdict, "TIMEOUT_S", 0.1)
    reader, passes = VerdictReader(settings(pattern=r"(?:(?:a|a)+b|score: )(\d)")), 0
    try:
        reading = asyncio.create_task(reader.read("a" * 200))
        while not reading.done():
            passes += 1
            await asyncio.sleep(0.001)
        assert (reading.result(), await reader.read("score: 7")) == (None, 0.7)
    finally:
        await reader.close()
    assert passes > 1, "the event loop ran meanwhile"
