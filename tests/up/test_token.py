"""The token that `penstock up` makes, over real HTTP."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.services.up.run_folder import NEXT_SETTINGS_FILE
from penstock.shared.settings import SETTINGS_FILE
from tests.conftest import PATIENCE_S, until
from tests.up.test_up import Up

COORDINATOR = f"""
import os, pathlib, sys
folder = pathlib.Path(os.environ["RUN"])
config = next(file for file in (folder / "{NEXT_SETTINGS_FILE}", folder / "{SETTINGS_FILE}") if file.exists())
os.execv(sys.executable, [sys.executable, "-m", "penstock.services.coordinator", "--config", str(config), "--replica", "coordinator-0"])
"""

STRANGER = """
import json, os, sys, urllib.error, urllib.request
url, token_file = sys.argv[1:]

def status(method, path, token):
    request = urllib.request.Request(url + path, method=method, headers={"Authorization": "Bearer " + token} if token else {})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code

def read(path):
    try:
        return open(path).read()
    except OSError as error:
        return type(error).__name__

status("GET", "/none", "")  # imports what it needs, which the other user may be unable to read
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(65534)
asked = [(method, path) for method, path in (
    ("GET", "/v1/run"), ("GET", "/v1/run/rollouts"), ("GET", "/v1/events/stream"), ("POST", "/v1/run/pause"),
    ("POST", "/v1/run/stop"), ("PATCH", "/v1/run/settings"), ("POST", "/v1/runs"), ("POST", "/session"))]
print(json.dumps({
    "statuses": sorted({status(method, path, token) for method, path in asked for token in ("", "x" * 64)}),
    "page": status("GET", "/", ""), "health": status("GET", "/healthz", ""), "token": read(token_file)}))
"""


@contextlib.contextmanager
def own_up() -> Iterator[Up]:
    with tempfile.TemporaryDirectory() as name:  # pytest's folder is private to this user
        Path(name).chmod(0o755)
        started = Up(Path(name))
        started.script("coordinator-0", COORDINATOR)
        yield started
        started.close()


@pytest.fixture
def up() -> Iterator[Up]:
    with own_up() as made:
        yield made


@pytest.fixture(scope="module")
def running() -> Iterator[Up]:
    """A run for tests that neither end nor change it."""
    with own_up() as started:
        started.start()
        yield started
        end(started)


async def url_of(up: Up) -> str:
    await until(lambda: (up.run_folder / "coordinator.json").exists())
    return str(json.loads((up.run_folder / "coordinator.json").read_text())["url"])


def penstock(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "penstock.services.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False)


def end(up: Up) -> str:
    up.signal(signal.SIGTERM)
    return up.wait()[1]


async def test_another_user_of_the_machine_cannot_read_or_operate_a_run(running: Up) -> None:
    url, token = await url_of(running), running.run_folder / "token"
    command = [sys.executable, "-c", STRANGER, url, str(token)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    seen = json.loads(told.stdout)
    assert (seen["statuses"], seen["page"], seen["health"]) == ([401], 200, 200)
    if os.geteuid() == 0:
        assert seen["token"] == "PermissionError"


async def test_the_command_line_reads_the_token_of_the_run_that_it_asks_and_sends_it_nowhere_else(running: Up) -> None:
    url, folder = await url_of(running), str(running.run_folder)
    assert '"run_id": "law"' in penstock("status", "--json", "--run", folder).stdout
    assert penstock("resume", "--run", folder, "--url", url).returncode == 0
    refused = penstock("resume", "--run", folder, "--url", url.replace("127.0.0.1", "localhost"))
    assert (refused.returncode, "expected a bearer token" in refused.stderr) == (1, True)


async def test_a_resume_keeps_the_token_and_no_file_or_line_of_the_run_holds_it(up: Up) -> None:
    up.start()
    await until(lambda: up.ready("coordinator-0"))
    file = up.run_folder / "token"
    token = file.read_text()
    assert (re.fullmatch(r"[0-9a-f]{64}\n", token) is not None, file.stat().st_mode & 0o777) == (True, 0o600)
    output = end(up)
    up.start("resume", "--resume", str(up.run_folder))
    await until(lambda: up.ready("coordinator-0"))
    headers = {"Authorization": f"Bearer {token.strip()}"}
    assert httpx.get(f"{await url_of(up)}/v1/run", headers=headers, timeout=PATIENCE_S).status_code == 200
    output += end(up)
    assert f"`penstock page --run {up.run_folder}` prints a link that opens it" in output
    assert "code=" not in output
    texts = {path.name: path.read_bytes() for path in up.run_folder.rglob("*") if path.is_file() and path != file}
    assert {SETTINGS_FILE, "coordinator-0.log"} <= set(texts)
    assert [name for name, text in texts.items() if token.strip().encode() in text] == []
    assert token.strip() not in output


async def test_a_link_of_the_command_line_opens_a_session_once(running: Up) -> None:
    await until(lambda: running.ready("coordinator-0"))
    link = json.loads(penstock("page", "--json", "--run", str(running.run_folder)).stdout)["url"]
    url, _, code = link.partition("/#code=")
    assert url == await url_of(running)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as browser:
        entered = browser.post("/session", headers={"Authorization": f"Bearer {code}"})
        ticket = {"Authorization": f"Bearer {entered.json()['ticket']}"}
        assert browser.get("/v1/run", headers=ticket).status_code == 200
        assert browser.post("/session", headers={"Authorization": f"Bearer {code}"}).status_code == 401


def test_a_token_in_a_runs_folder_that_others_can_read_is_refused(up: Up) -> None:
    up.run_folder.mkdir(parents=True)
    (up.run_folder / "token").write_text("0" * 64)
    (up.run_folder / "token").chmod(0o644)
    up.start()
    code, output = up.wait()
    assert code != 0
    assert f"expected a token that no other user can read, found {up.run_folder}/token with mode 0644" in output
