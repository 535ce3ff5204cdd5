"""A run with every kind of secret leaks none."""

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from penstock.shared.bus import embedded
from penstock.shared.bus.client import connection
from penstock.shared.errors import BusUnavailable, SettingsError
from penstock.shared.settings import loads
from tests.conftest import PATIENCE_S, free_port, until
from tests.support import forge
from tests.support.http_server import served
from tests.support.modes import open_to_others

BUS, KEY, OPERATE, READ = (f"{name}-5ecret/with@signs" for name in ("bus", "key", "operate", "read"))
SECRETS = (BUS, quote(BUS, safe=""), KEY, OPERATE, READ)


class Echo(http.server.BaseHTTPRequestHandler):
    """A judge that repeats its caller's key, in errors and answers."""

    asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key, Echo.asked = self.headers["Authorization"], Echo.asked + 1
        content = f"{key} Score: 7" if Echo.asked % 3 == 0 else f"my caller says {key}"
        body = json.dumps(
            {"choices": [{"message": {"content": content}}]} if Echo.asked % 3 != 1 else {"error": key}
        ).encode()
        self.send_response(500 if Echo.asked % 3 == 1 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    with served(Echo) as address:
        yield address


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a Valkey with a password, and its log's folder."""
    words, port, data = embedded.command(Path("unused"), tmp_path / "bus"), free_port(), tmp_path / "bus"
    options = dict(zip(words[1::2], words[2::2], strict=True))
    for name in ("--unixsocket", "--unixsocketperm"):
        options.pop(name)
    options |= {"--port": str(port), "--bind": "127.0.0.1"}
    (data / "valkey.conf").write_text(f'requirepass "{BUS}"\n')
    command = [words[0], str(data / "valkey.conf"), *(word for pair in options.items() for word in pair)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"redis://:{quote(BUS, safe='')}@127.0.0.1:{port}/0", data
    server.kill()
    server.wait(PATIENCE_S)


@pytest.mark.parametrize("password", ["", ":other@"])
async def test_a_bus_with_another_password_is_not_taken_for_one_that_is_down(
    bus: tuple[str, Path], password: str
) -> None:
    url, _ = bus
    async with asyncio.timeout(PATIENCE_S):
        while not await _answers(url):
            await asyncio.sleep(0.05)
    address = f"redis://{password}{url.rpartition('@')[2]}"
    with pytest.raises(SettingsError, match=r"refuses user and password .*PENSTOCK__BUS__URL") as refused:
        await connection.probe(address)
    assert "other" not in str(refused.value)


async def _answers(url: str) -> bool:
    try:
        return bool(await connection.probe(url))
    except BusUnavailable:
        return False


def secret_file(path: Path, secret: str) -> Path:
    path.write_text(f"{secret}\n")
    path.chmod(0o600)
    return path


PATHS = (
    "run",
    "run/history",
    "run/settings",
    "run/settings/history",
    "services",
    "dead-letters?stream=rollouts",
    "events",
    "policies",
    "runs",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_secret_of_a_run_is_in_its_files_its_bus_its_output_or_its_answers(
    bus: tuple[str, Path], judge: str, tmp_path: Path
) -> None:
    url, data = bus
    key = secret_file(tmp_path / "key", KEY)
    operate, read = secret_file(tmp_path / "operate", OPERATE), secret_file(tmp_path / "read", READ)
    scorers = (
        '[{kind = "answer", mode = "exact", extract = "whole"}, '
        f'{{kind = "judge", url = "{judge}", model = "m", key_source = "file:{key}"}}]'
    )
    values = {
        **{"run.id": "secrets", "run.folder": tmp_path / "runs", "run.steps": 100_000, "reward.scorers": scorers},
        **{"algorithm.groups_per_step": 4, "sampling.group_size": 4, "rollout.replicas": 1, "trainer.warmup_steps": 0},
        **{"evaluation.every_steps": 100_000, "evaluation.path": forge.FEW_PROBLEMS, "telemetry.log_level": "DEBUG"},
        **{"coordinator.token_file": operate, "coordinator.read_token_file": read, "coordinator.sample_every_steps": 1},
    }
    words, output = [f"--{name}={value}" for name, value in values.items()], tmp_path / "up.txt"
    with output.open("w") as file:
        process = forge.start(
            "penstock.services.cli", ["up", "config/arithmetic.toml", *words], file, PENSTOCK__BUS__URL=url
        )
    folder, answers = tmp_path / "runs" / "secrets", ""
    try:
        await until(lambda: (folder / "metrics.jsonl").exists() or process.poll() is not None)
        assert process.poll() is None, output.read_text()
        address = json.loads((folder / "coordinator.json").read_text())["url"]
        async with httpx.AsyncClient(
            base_url=address, headers={"Authorization": f"Bearer {OPERATE}"}, timeout=PATIENCE_S
        ) as http:
            for path in PATHS:
                answer = await http.get(f"/v1/{path}")
                assert answer.status_code == 200, answer.text
                answers += answer.text
            answers += (await http.get("/v1/run", headers={"Authorization": f"Bearer {READ}x"})).text
        loose = open_to_others(folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    assert loose == []
    assert "judge" in answers
    files = [
        path for place in (folder, data) for path in place.rglob("*") if path.is_file() and path.name != "valkey.conf"
    ]
    assert {"settings.toml", "up.json", "metrics.jsonl", "coordinator-0.log", "reward-0.log"} <= {
        path.name for path in files
    }
    assert any(path.suffix == ".aof" and path.stat().st_size > 10_000 for path in files), "the bus was written down"
    texts = {str(path): path.read_bytes() for path in [*files, output]} | {"answers": answers.encode()}
    assert [(place, secret) for place, text in texts.items() for secret in SECRETS if secret.encode() in text] == []


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('rollout.vllm.arguments.hf_token = "5ecret"', "expected no secret among the settings"),
        ('trainer.deepspeed.wandb.api_key = "5ecret"', "expected no secret among the settings"),
        ('[[reward.scorers]]\nkind = "judge"\nmodel = "m"\nurl = "http://u:5ecret@host/v1"', "change reward.scorers"),
        ('trainer.store.endpoint = "http://u:5ecret@host"', "change trainer.store.endpoint"),
    ],
)
def test_a_secret_among_the_settings_is_refused_without_being_shown(toml: str, words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        loads(toml, "run.toml")
    assert words in str(refused.value)
    assert "5ecret" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_run_folder_that_another_user_made_for_this_one_is_taken_as_it_is() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's folder is private to this user
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "shared").mkdir()
        (folder / "shared").chmod(0o777)
        program = (
            f"import os; from penstock.services.up import run_folder; from penstock.shared.settings import loads; "
            f"settings = loads('run.folder = \"{folder}\"\\nrun.id = \"shared\"', 'run.toml'); "
            "os.setuid(65534); print(run_folder.make_run_folder(settings))"
        )
        made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (made.stdout.strip(), made.stderr) == (str(folder / "shared"), "")
        assert (folder / "shared" / "up.lock").stat().st_mode & 0o777 == 0o600


def test_what_is_exported_out_of_a_private_folder_has_the_modes_of_this_users_new_files(tmp_path: Path) -> None:
    from penstock.services.cli.export import _copy

    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True, mode=0o700)
    (made / "inner" / "file").write_text("x")
    for path in (made, made / "inner", made / "inner" / "file"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = os.umask(0o027)
    try:
        _copy(made, tmp_path / "to")
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "to", *sorted((tmp_path / "to").rglob("*")))] == [
        "0o750",
        "0o750",
        "0o640",
    ]
