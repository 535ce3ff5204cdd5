"""Laws of every request: authorization, form, idempotency."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from penstock.services.coordinator.api.app import make_app, make_routes
from penstock.services.coordinator.api.auth import Access, Role, open_access
from penstock.services.coordinator.api.routes import registry as registry_routes
from penstock.services.coordinator.service import Coordinator
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.errors import SettingsError
from penstock.shared.settings.run import CoordinatorSettings
from tests.support.coordinator_players import make, running, settings
from tests.support.raw_redis import raw

OPERATE, READ = "operate-operate-operate", "read-read-read-read"


@pytest.fixture
async def parts(bus: Bus, tmp_path: Path) -> AsyncIterator[Coordinator]:
    await Ledger(bus).create()
    async with running(make(bus, settings(tmp_path, steps=50, coordinator={"autostart": False}))) as coordinator:
        yield coordinator


def client(parts: Coordinator, access: Access | None = None, token: str = "") -> httpx.AsyncClient:
    app = make_app(dataclasses.replace(parts.api, access=access or Access()))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def problem(answer: httpx.Response, status: int, words: str) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert answer.json()["status"] == status
    assert words in answer.json()["detail"]


async def test_a_token_reads_or_operates_and_probes_need_none(parts: Coordinator) -> None:
    access = Access(OPERATE.encode(), READ.encode())
    async with client(parts, access) as nobody, client(parts, access, READ) as reader:
        refused = await nobody.get("/v1/run")
        problem(refused, 401, "expected a bearer token of this coordinator, found none")
        assert refused.headers["www-authenticate"] == 'Bearer realm="penstock"'
        assert [(await nobody.get(path)).status_code for path in ("/healthz", "/readyz", "/openapi.json")] == [
            200,
            200,
            401,
        ]
        assert (await reader.get("/v1/run")).status_code == 200
        problem(await reader.post("/v1/run/start"), 403, "expected a token that may operate for POST")
    async with client(parts, access, OPERATE) as operator, client(parts, access, OPERATE + "x") as wrong:
        problem(await wrong.get("/v1/run"), 401, "found another")
        assert (await operator.post("/v1/run/start")).json()["state"] == "running"


@pytest.mark.parametrize(
    ("header", "role"),
    [
        (f"Bearer {OPERATE}", Role.OPERATE),
        (f"bearer {READ}", Role.READ),
        (f"Basic {OPERATE}", None),
        ("Bearer ", None),
        ("", None),
    ],
)
def test_roles_of_headers(header: str, role: Role | None) -> None:
    assert Access(OPERATE.encode(), READ.encode()).role(header) is role


def test_without_a_read_token_nobody_only_reads() -> None:
    assert Access(OPERATE.encode()).role("Bearer ") is None


def test_an_address_that_others_reach_needs_a_token(tmp_path: Path) -> None:
    short, token, same = (tmp_path / name for name in ("short", "token", "same"))
    short.write_text("secret\n")
    token.write_text(f"{OPERATE}\na second line\n")
    same.write_text(OPERATE)
    for file in (short, token, same):
        file.chmod(0o600)
    shared = tmp_path / "shared"
    shared.write_text(OPERATE)
    shared.chmod(0o644)
    assert open_access(CoordinatorSettings(host="127.0.0.1")) == Access()
    assert open_access(CoordinatorSettings(host="0.0.0.0", token_file=token)) == Access(OPERATE.encode())
    for wrong, sentence in (
        (CoordinatorSettings(host="0.0.0.0"), "set coordinator.token_file, or coordinator.host to a loopback address"),
        (CoordinatorSettings(token_file=short), "expected a token of at least 16 characters"),
        (CoordinatorSettings(token_file=tmp_path / "none"), "No such file"),
        (CoordinatorSettings(token_file=shared), f"found {shared} with mode 0644: chmod 600 {shared}"),
        (CoordinatorSettings(read_token_file=token), "coordinator.read_token_file is set without"),
        (CoordinatorSettings(token_file=token, read_token_file=same), "but both are the same"),
    ):
        with pytest.raises(SettingsError, match=sentence):
            open_access(wrong)


async def test_a_page_of_another_origin_may_not_operate(parts: Coordinator) -> None:
    async with client(parts) as http:
        problem(await http.post("/v1/run/start", headers={"Origin": "https://evil.example"}), 403, "of this origin")
        problem(await http.post("/v1/run/start", headers={"Origin": "https://localhost"}), 403, "of this origin")
        own = await http.post("/v1/run/start", headers={"Origin": "http://localhost"})
        assert own.status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "10.0.0.1", ""])
@pytest.mark.parametrize("path", ["/v1/run", "/healthz", "/", "/metrics"])
async def test_without_a_token_only_names_of_this_machine_are_answered(
    parts: Coordinator, host: str, path: str
) -> None:
    async with client(parts) as http:
        problem(await http.get(path, headers={"Host": host}), 421, "set coordinator.token_file")
        for own in ("localhost:9", "127.0.0.1:8000", "[::1]"):
            assert (await http.get("/v1/run", headers={"Host": own})).status_code == 200
    async with client(parts, Access(OPERATE.encode()), OPERATE) as http:
        assert (await http.get("/v1/run", headers={"Host": "penstock.example"})).status_code == 200


def every_request(parts: Coordinator) -> list[tuple[str, str]]:
    described = make_routes(parts.api).openapi()["paths"]
    routes = [(method.upper(), path) for path, methods in described.items() for method in methods]
    names = {"stream": "prompts", "entry": "1-0", "run_id": "other", "replica": "rollout-0"}
    filled = [(method, re.sub(r"{(\w+)}", lambda field: names.get(field[1], "1"), path)) for method, path in routes]
    pages = [("GET", "/"), ("GET", "/page/page.js"), ("GET", "/openapi.json")]
    strays = [("POST", path) for path in ("/", "/healthz", "/page/x", "/v1/nothing", "/v1/run/", "/openapi.json")]
    return [*filled, *pages, *strays, ("HEAD", "/"), ("HEAD", "/v1/run")]


async def written_by(bus: Bus, requests: Awaitable[None]) -> tuple[set[bytes], int]:
    keys = set(await raw(bus).keys("*"))
    await raw(bus).config_resetstat()
    await requests
    stats = await raw(bus).info("commandstats")
    writing = ("set", "hset", "hdel", "del", "unlink", "xadd", "evalsha", "eval")
    return set(await raw(bus).keys("*")) - keys, sum(
        stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in writing
    )


@pytest.fixture
async def quiet(bus: Bus, tmp_path: Path) -> Coordinator:
    """A coordinator without loops, so that only requests write."""
    await Ledger(bus).create()
    return make(bus, settings(tmp_path, steps=50, coordinator={"autostart": False}))


async def test_nothing_is_written_without_a_token_and_nothing_without_a_route(quiet: Coordinator, bus: Bus) -> None:
    async def ask(http: httpx.AsyncClient, requests: list[tuple[str, str]], statuses: set[int]) -> None:
        for number, (method, path) in enumerate(requests):
            answer = await http.request(method, path, headers={"Idempotency-Key": f"key-{number}"})
            assert answer.status_code in statuses, (method, path, answer.text)

    requests = every_request(quiet)
    assert len(requests) >= 50
    open_paths = ("/", "/healthz", "/readyz", "/page/page.js", "/page/x")
    guarded = [request for request in requests if request[1] not in open_paths]
    async with client(quiet, Access(OPERATE.encode())) as stranger, client(quiet) as own:
        assert await written_by(bus, ask(stranger, guarded, {401})) == (set(), 0)
        opened = [("POST", path) for path in open_paths]
        assert await written_by(bus, ask(stranger, opened, {404, 405})) == (set(), 0)
        strays = [("POST", "/v1/nothing"), ("POST", "/v1/run/"), ("POST", "/openapi.json"), ("DELETE", "/v1/run")]
        assert await written_by(bus, ask(own, strays, {404, 405})) == (set(), 0)


async def test_no_request_with_another_name_as_host_is_answered(quiet: Coordinator, bus: Bus) -> None:
    async def ask(http: httpx.AsyncClient) -> None:
        for host in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "10.0.0.1:8000",
            "127.0.0.1@evil.example",
        ):
            for method, path in every_request(quiet):
                answer = await http.request(method, path, headers={"Host": host, "Origin": f"http://{host}"})
                assert answer.status_code == 421, (host, method, path)
                assert "location" not in answer.headers

    async with client(quiet) as http:
        assert await written_by(bus, ask(http)) == (set(), 0)


async def test_a_request_has_one_host(quiet: Coordinator) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    for hosts in ([], [b"localhost", b"localhost"], [b"localhost", b"evil.example"]):
        scope = {
            "type": "http",
            "method": "GET",
            "scheme": "http",
            "path": "/v1/run",
            "raw_path": b"/v1/run",
            "query_string": b"",
            "headers": [(b"host", host) for host in hosts],
        }
        await make_app(quiet.api)(scope, receive, send)
        assert [message["status"] for message in sent if message["type"] == "http.response.start"] == [400]
        sent.clear()


async def test_head_is_answered_as_get_without_a_body(parts: Coordinator) -> None:
    async with client(parts) as http:
        for path in ("/", "/page/page.js", "/healthz", "/v1/run/settings", "/v1/policies/7", "/v1/nothing"):
            get, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
        stream = await http.head("/v1/events/stream")
        assert (stream.status_code, stream.headers["content-type"], stream.content) == (
            200,
            "text/event-stream; charset=utf-8",
            b"",
        )


HOSTILE = ("9" * 5000, "-" + "9" * 5000, "1e999", "9" * 400, "NaN", '"\\ud800"', "[" * 100_000, "{}", "null", "-1")


async def test_hostile_values_are_refused_with_a_sentence(parts: Coordinator) -> None:
    names = (
        "algorithm.max_lag",
        "trainer.learning_rate",
        "sampling.group_size",
        "sampling.temperature",
        "weights.update",
        "run.gpu_hours",
    )
    async with client(parts) as http:
        for name in names:
            for value in HOSTILE:
                answer = await http.patch(
                    "/v1/run/settings",
                    content=f'{{"changes": {{"{name}": {value}}}}}',
                    headers={"If-Match": '"0"', "Content-Type": "application/json"},
                )
                assert answer.status_code in (400, 422), (name, value[:20], answer.text)
                assert "expected" in answer.json()["detail"] or "parsing" in answer.json()["detail"]
        for name in ("run.steps", "sampling.group_size", "trainer.learning_rate", "rollout.vllm.arguments.x"):
            for value in (
                "9" * 5000,
                "9" * 400,
                "-" + "9" * 30,
                "9999999999999999999",
                "nan",
                "1979-05-27",
                "[" * 9000,
            ):
                toml = f'run.id = "hostile"\n{name} = {value}\n'
                answer = await http.post("/v1/runs", content=toml, headers={"Content-Type": "application/toml"})
                accepted = name.startswith("rollout") and value == "1979-05-27"
                assert answer.status_code == (201 if accepted else 422), (name, value[:20], answer.text)
                await http.delete("/v1/runs/hostile")


async def test_registered_runs_are_bounded_and_can_be_deleted(
    parts: Coordinator, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = len(await raw(bus).keys("penstock:{*}:settings")) + 2
    monkeypatch.setattr(registry_routes, "_MOST_REGISTERED", most)
    toml = {"Content-Type": "application/toml"}
    async with client(parts) as http:
        for name in ("first", "second"):
            assert (await http.post("/v1/runs", content=f'run.id = "{name}"', headers=toml)).status_code == 201
        third = await http.post("/v1/runs", content='run.id = "third"', headers=toml)
        problem(third, 409, f"expected at most {most} registered runs on this bus")
        large = await http.post("/v1/runs", content=f'run.id = "x" # {"x" * 128 * 1024}', headers=toml)
        problem(large, 413, "expected settings of at most 131072 bytes")
        assert (await http.delete("/v1/runs/first")).status_code == 204
        assert await raw(bus).keys("penstock:{first}:*") == []
        problem(await http.delete("/v1/runs/first"), 404, "no run on this bus has the id first")
        assert (await http.post("/v1/runs", content='run.id = "third"', headers=toml)).status_code == 201
        await raw(bus).hset("penstock:{third}:run", "state", "running")
        problem(await http.delete("/v1/runs/third"), 409, "stop it first")
        await raw(bus).set("penstock:{second}:service:rollout-0", "x")
        problem(await http.delete("/v1/runs/second"), 409, "run second has working services (1)")
        problem(await http.delete(f"/v1/runs/{bus.run_id}"), 409, "cannot delete its own run")


async def test_what_cannot_be_answered_or_read_is_a_problem(parts: Coordinator) -> None:
    async with client(parts) as http:
        problem(await http.get("/v1/run", headers={"Accept": "text/html"}), 406, "does not match Accept: text/html")
        assert (await http.get("/v1/run", headers={"Accept": "text/html, */*;q=0.1"})).status_code == 200
        form = await http.post("/v1/run/pause", data={"reason": "x"})
        problem(form, 415, "found application/x-www-form-urlencoded")
        large = await http.post("/v1/run/pause", content=b"x" * (2**20 + 1))
        problem(large, 413, "expected a body of at most 1048576 bytes")
        unknown = await http.delete("/v1/run")
        problem(unknown, 405, "found DELETE /v1/run")
        assert unknown.headers["allow"] == "GET, HEAD"
        assert (await http.put("/v1/run/settings")).headers["allow"] == "GET, HEAD, PATCH"


async def test_a_request_keeps_its_id_and_the_log_has_it(parts: Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with client(parts) as http:
        assert (await http.get("/healthz", headers={"X-Request-Id": "abc-1"})).headers["x-request-id"] == "abc-1"
        assert len((await http.get("/healthz", headers={"X-Request-Id": "a b"})).headers["x-request-id"]) == 32
        await http.post("/v1/run/start", headers={"X-Request-Id": "abc-2"})
    logged = [record for record in caplog.records if getattr(record, "request", "") == "abc-2"]
    assert [(record.getMessage(), vars(record)["status"]) for record in logged] == [("request", 200)]


async def test_a_list_is_given_page_by_page(parts: Coordinator, bus: Bus) -> None:
    async with client(parts) as http:
        for name in ("start", "pause", "resume", "stop"):
            await http.post(f"/v1/run/{name}", json={"reason": f"for {name}"})
        first = (await http.get("/v1/run/history", params={"limit": 3})).json()
        second = (await http.get("/v1/run/history", params={"limit": 3, "cursor": first["next"]})).json()
    changes = [(state["before"], state["state"], state["reason"]) for state in first["items"] + second["items"]]
    assert changes == [
        ("running", "stopped", "for stop"),
        ("paused", "running", "for resume"),
        ("running", "paused", "on request: for pause"),
        ("created", "running", "for start"),
    ]
    assert second["next"] is None


async def test_a_key_is_answered_once_and_again_with_the_same(parts: Coordinator) -> None:
    async with client(parts) as http:
        first = await http.post("/v1/run/start", headers={"Idempotency-Key": "k-1"})
        again = await http.post("/v1/run/start", headers={"Idempotency-Key": "k-1"})
        assert first.json() == again.json() == {"state": "running", "changed": True, "reason": "on request"}
        assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
        other = await http.post("/v1/run/start", headers={"Idempotency-Key": "k-1"}, json={"reason": "x"})
        problem(other, 422, "with another request body")
        elsewhere = await http.post("/v1/run/pause", headers={"Idempotency-Key": "k-1"})
        assert elsewhere.json()["state"] == "paused"


async def test_a_key_that_is_being_answered_is_a_conflict(parts: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = asyncio.Event(), asyncio.Event()
    command = parts.api.steering.command

    async def slow(name: str, reason: str) -> object:
        entered.set()
        await go.wait()
        return await command(name, reason)

    monkeypatch.setattr(parts.api.steering, "command", slow)
    async with client(parts) as http:
        first = asyncio.create_task(http.post("/v1/run/start", headers={"Idempotency-Key": "k-2"}))
        await entered.wait()
        problem(await http.post("/v1/run/start", headers={"Idempotency-Key": "k-2"}), 409, "in progress")
        go.set()
        assert (await first).status_code == 200
