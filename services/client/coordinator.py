"""Client of the coordinator's HTTP API; answers are the models of ``penstock.services.client.views``."""

import contextlib
import json
import os
import shlex
import time
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from penstock.services.client.views import EventsPage, EventView, ReplicaView, RunView, ServicesPage, View
from penstock.shared.errors import PenstockError
from penstock.shared.files.secret_file import read_secret
from penstock.shared.http.answer import Answer, NoHttpAnswer
from penstock.shared.http.client import LARGEST_BYTES, HttpClient, ask, stream_lines
from penstock.shared.peers import tickets

TOKEN_FILE = "token"  # noqa: S105 (the name of a file)
"""Token file in the run's folder."""
ANSWERS_WITHIN_S = 30.0
"""Of a command's request: a coordinator short of processor time answers late, and one that is gone refuses at once."""
_WATCHED_S = 10.0
"""The same where another request follows."""
_GENERATE_S = 150.0
_ANNOUNCED, _SETTINGS, _SUMMARY, _METRICS = "coordinator.json", "settings.toml", "summary.json", "metrics.jsonl"
_TAIL_BYTES = 1 << 16
"""Of the metrics, more than a step's line."""
_POLL_S = 0.2
_SILENCE_S = 30.0
_LARGEST_BYTES = 256 * 1024**2
"""A page of rollouts has many texts."""
_LONGEST_REASON = 8_000

JsonObject: TypeAlias = dict[str, Any]
"""A raw answer; see docs/openapi.json."""


class Unreachable(PenstockError):
    """No coordinator answers there."""


class Unreadable(Unreachable):
    """The answer is not from a compatible coordinator."""


class Unable(Unreachable):
    """The coordinator answers that it cannot serve the request now; ``reason`` is its own."""

    def __init__(self, answer: Answer, reason: str) -> None:
        super().__init__(f"the coordinator cannot answer {answer.url} now ({answer.status}): {reason}")
        self.reason = reason


class RequestRefused(PenstockError):
    """The coordinator refused; the message is its reason."""


V = TypeVar("V", bound=View)


def find(url: str | None, run_folder: Path) -> str:
    """Return ``url``, else the one in ``coordinator.json``. Raises Unreachable: the file does not exist or is empty."""
    if url:
        return url.rstrip("/")
    file = run_folder / _ANNOUNCED
    try:
        announced = json.loads(file.read_text(encoding="utf-8"))["url"]
    except FileNotFoundError as error:
        if (run_folder / _SETTINGS).exists():
            raise Unreachable(f"the run in {run_folder} has no coordinator: {why_none(run_folder)}") from error
        raise Unreachable(
            f"no run at {run_folder}: {file.name} is missing there: start one with `penstock up`, "
            "or give --run RUN_FOLDER or --url http://HOST:PORT"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{file} does not contain the coordinator's URL: give --url http://HOST:PORT") from error
    return str(announced).rstrip("/")


def how_ended(run_folder: Path) -> str:
    """Return how the run without a coordinator has ended, by its folder; "" if it is starting or can be resumed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        summary = json.loads((run_folder / _SUMMARY).read_text(encoding="utf-8"))
        planned = tomllib.loads((run_folder / _SETTINGS).read_text(encoding="utf-8"))["run"]["steps"]
        if not (run_folder / _ANNOUNCED).exists() and (summary["state"] == "stopped" or summary["steps"] >= planned):
            return f"it has {summary['state']} after {summary['steps']} steps"
    return ""


def why_none(run_folder: Path) -> str:
    """Return why a run has no coordinator, by its folder."""
    resume = f"`penstock up --resume {shlex.quote(str(run_folder))}"
    if ended := how_ended(run_folder):
        more = f"; {resume} --run.steps N` extends it" if "finished" in ended else ""
        return f"{ended}. Its report.html and records are in that folder{more}"
    step = last_step(run_folder)
    after = f" after step {step}" if step else ""
    return f"it is starting, or was interrupted{after}. Its records are in that folder; {resume}` continues it"


def last_step(run_folder: Path) -> int:
    """Return the newest recorded step; 0: none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), (run_folder / _METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return int(json.loads(file.read().rstrip().rpartition(b"\n")[2])["step"])
    return 0


def read_token(path: Path | None, url: str = "", run_folder: Path | None = None) -> str:
    """Return the token in ``path``, else the run's own if ``url`` is its coordinator's, else "".

    Raises:
        SettingsError: unreadable, or readable by others.
    """
    if path is None and run_folder is not None and _is_coordinator(url, run_folder):
        own = run_folder / TOKEN_FILE
        path = own if own.exists() else None
    return "" if path is None else read_secret(path, "--token-file", "token").decode("latin-1")


def _is_coordinator(url: str, run_folder: Path) -> bool:
    """Check the announced process: a dead one's port may be reused."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        announced = json.loads((run_folder / _ANNOUNCED).read_text(encoding="utf-8"))
        os.kill(int(announced["pid"]), 0)  # raises if the process ended or belongs to another user
        return str(announced["url"]).rstrip("/") == url
    return False


def page_link(url: str, token: str) -> str:
    """Return a single-use link to the page, or the page itself without tokens."""
    return f"{url}/#code={tickets.issue(token.encode('latin-1'), tickets.PAGE, tickets.PAGE_S)}" if token else f"{url}/"


class CoordinatorClient:
    """Client of one coordinator.

    Args:
        token: bearer token, if needed.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def run(self) -> RunView:
        return _read(self._answer("GET", "/v1/run"), RunView)

    def run_json(self) -> str:
        """Return ``GET /v1/run`` with the replicas, as JSON text."""
        replicas = [replica.model_dump() for replica in self.replicas()]
        return json.dumps({**self.get("/v1/run"), "services": replicas}, indent=2)

    def newest_events(self, most: int) -> list[EventView]:
        """Return the newest events, oldest first."""
        return _read(self._answer("GET", "/v1/events", query={"limit": most}), EventsPage).items[::-1]

    def replicas(self) -> list[ReplicaView]:
        return _read(self._answer("GET", "/v1/services", query={"limit": 500}), ServicesPage).services

    def get(self, path: str, **query: str | int) -> JsonObject:
        answer: JsonObject = _value(self._answer("GET", path, query=query))
        return answer

    def post(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """Post to ``path``, once even if resent.

        Raises:
            Refused: by the coordinator.
            Unreachable: no answer.
        """
        answer: JsonObject = _value(self._answer("POST", path, body=body, key=uuid.uuid4().hex))
        return answer

    def generate(self, question: JsonObject) -> JsonObject:
        """Return the live policy's completions (``POST /v1/run/generate``).

        Raises:
            RequestRefused: by the coordinator.
            Unreachable: no answer.
        """
        answer: JsonObject = _value(self._answer("POST", "/v1/run/generate", body=question, timeout_s=_GENERATE_S))
        return answer

    def delete(self, path: str) -> None:
        """Delete ``path``. Raises Refused: by the coordinator."""
        self._answer("DELETE", path)

    def items(self, path: str, most: int, *, a_page: int = 500, **query: str | int) -> list[JsonObject]:
        """Return up to ``most`` items of a list, page by page."""
        items: list[JsonObject] = []
        while len(items) < most:
            page = self.get(path, **query, limit=min(a_page, most - len(items)))
            items += page["items"]
            if page["next"] is None:
                break
            query["cursor"] = page["next"]
        return items

    def finished(self, operation: JsonObject, tell: Callable[[str], None]) -> JsonObject:
        """Wait for an operation's end, reporting to ``tell``. Raises Refused: failed or cancelled."""
        while operation["state"] == "running":
            time.sleep(_POLL_S)
            operation = self.get(f"/v1/operations/{operation['id']}")
            tell(str(operation["detail"]))
        if operation["state"] != "succeeded":
            raise RequestRefused(f"{operation['kind']} {operation['state']}: {operation['detail']}")
        return operation

    def events(self) -> Iterator[JsonObject]:
        """Yield new events; after a disconnect, missed events follow."""
        headers, last = {**self._headers, "Accept": "text/event-stream"}, ""
        while True:
            more = {**headers, "Last-Event-ID": last} if last else headers
            url = f"{self._url}/v1/events/stream"
            try:
                for line in stream_lines(url, more, _SILENCE_S, _checked):
                    if line.startswith("data: "):
                        event: JsonObject = json.loads(line.removeprefix("data: "))
                        last = str(event["id"])
                        yield event
            except NoHttpAnswer as error:
                raise Unreachable(_nobody(self._url, error)) from error

    def _answer(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int] | None = None,
        body: JsonObject | None = None,
        key: str = "",
        timeout_s: float | None = None,
    ) -> Answer:
        headers = {**self._headers, "Idempotency-Key": key} if key else self._headers
        try:
            answer = ask(
                method,
                f"{self._url}{path}",
                params=dict(query or {}),
                json=body,
                headers=headers,
                timeout_s=timeout_s or ANSWERS_WITHIN_S,
                largest_bytes=_LARGEST_BYTES,
                trust_env=False,
            )
        except NoHttpAnswer as error:
            raise Unreachable(_nobody(self._url, error)) from error
        return _checked(answer)


class AsyncCoordinator:
    """Asynchronous client."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = HttpClient(headers=headers, timeout_s=_WATCHED_S, trust_env=False)

    async def run(self) -> RunView:
        return _read(await self._get("/v1/run"), RunView)

    async def replicas(self) -> list[ReplicaView]:
        return _read(await self._get("/v1/services?limit=500"), ServicesPage).services

    async def events(self) -> list[EventView]:
        """Return the newest events, oldest first."""
        return _read(await self._get("/v1/events?limit=50"), EventsPage).items[::-1]

    async def close(self) -> None:
        await self._client.close()

    async def _get(self, path: str) -> Answer:
        try:
            answer = await self._client.ask("GET", f"{self.url}{path}", largest_bytes=16 * LARGEST_BYTES)
        except NoHttpAnswer as error:
            raise Unreachable(_nobody(self.url, error)) from error
        return _checked(answer)


def _nobody(url: str, error: Exception) -> str:
    return (
        f"no coordinator answers at {url} ({error}): while `penstock up` runs, another follows within seconds; else "
        "`penstock up --resume RUN` continues the run"
    )


def _checked(answer: Answer) -> Answer:
    if answer.is_success:
        return answer
    try:
        reason = str(answer.json()["detail"])[:_LONGEST_REASON]
    except (ValueError, KeyError, TypeError) as error:
        if answer.status < 500:
            raise _unreadable(answer, f"status {answer.status}") from error
        reason = "it gives no reason"
    if answer.status >= 500:
        raise Unable(answer, reason)
    raise RequestRefused(reason)


def _value(answer: Answer) -> JsonObject:
    try:
        value = answer.json(most_values=None)
    except ValueError as error:
        raise _unreadable(answer, str(error)) from error
    if not isinstance(value, dict):
        raise _unreadable(answer, "no JSON object")
    return value


def _read(answer: Answer, kind: type[V]) -> V:
    try:
        return kind.model_validate_json(bytes(answer.content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _unreadable(answer, f"{where}: {first['msg']}") from error


def _unreadable(answer: Answer, reason: str) -> Unreadable:
    return Unreadable(
        f"expected a Penstock coordinator at {answer.url}, found another answer ({reason[:200]}): check --url"
    )
