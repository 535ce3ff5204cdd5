"""The HTTP API conforms to its description (schemathesis)."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.services.coordinator.api.openapi import description
from penstock.shared.bus import streams
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.messages import PolicyVersion, Prompt
from penstock.shared.bus.stores.policy.ledger import Ledger
from penstock.shared.process.telemetry import Presence, Status
from penstock.shared.settings import dump
from tests.conftest import PATIENCE_S, Server, need_module, until
from tests.support import builders
from tests.support.coordinator_players import Trainer, settings

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-that-may-operate"


def test_the_committed_description_is_that_of_the_code() -> None:
    committed = (ROOT / "docs" / "openapi.json").read_text(encoding="utf-8")
    assert committed == description(), "the API changed: run `make openapi` and read the difference"


def test_every_reference_resolves_and_a_generator_builds_a_client_s_models(tmp_path: Path) -> None:
    need_module("datamodel_code_generator", "datamodel-code-generator")
    described = json.loads(description())

    def references(value: object) -> set[str]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = {value["$ref"]} if isinstance(value, dict) and isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, parts))

    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert known >= references(described) > set()
    generator = [sys.executable, "-m", "datamodel_code_generator", "--input", str(ROOT / "docs/openapi.json")]
    forms = ["--input-file-type", "openapi", "--openapi-scopes", "schemas", "paths", "parameters", "--strict-refs"]
    output = ["--output-model-type", "pydantic_v2.BaseModel", "--formatters", "builtin"]
    subprocess.run([*generator, *forms, *output, "--output", str(tmp_path / "models.py")], check=True)
    read = "import models; print(models.ProblemDetails(type='', title='', status=404, detail='x').detail)"
    done = subprocess.run([sys.executable, "-c", read], cwd=tmp_path, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout == "x\n"


@pytest.fixture
async def url(server: Server, tmp_path: Path) -> AsyncIterator[str]:
    """A coordinator process with a version, a replica and dead letters."""
    run_id, token = f"schema-{os.getpid()}", tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    run = settings(tmp_path, run={"id": run_id}, coordinator={"autostart": False, "token_file": token})
    dump(run.model_copy(update={"bus": run.bus.model_copy(update={"url": server.url})}), tmp_path / "run.toml")
    bus = await Bus.connect(server.url, run_id, wait_s=PATIENCE_S)
    command = [sys.executable, "-m", "penstock.services.coordinator", "--config", str(tmp_path / "run.toml")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log)
    announced, leave = tmp_path / "runs" / run_id / "coordinator.json", asyncio.Event()
    try:
        await until(lambda: announced.exists() or process.poll() is not None)
        await Trainer(bus).start()
        await Ledger(bus).set_checkpoint(PolicyVersion(0), "/checkpoints/step-000000")
        await bury(bus, 3)
        beating = asyncio.create_task(Presence(bus, "rollout", "rollout-0", 60.0, Status(state="working")).run(leave))
        yield json.loads(announced.read_text())["url"]
        leave.set()
        await beating
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        await bus.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


async def bury(bus: Bus, count: int) -> None:
    for number in range(count):
        await bus.publish(streams.PROMPTS, builders.prompt(number), str(number))
    for delivery in await bus.read(streams.PROMPTS, Prompt, "test", count, 1.0):
        await bus.bury(delivery, "poison")


@pytest.mark.timeout(600)
async def test_schemathesis_finds_nothing(url: str, tmp_path: Path) -> None:
    need_module("schemathesis", "schemathesis")
    command = [
        *(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "--config-file",
            str(ROOT / "tests" / "support" / "schemathesis.toml"),
        ),
        *("run", f"{url}/openapi.json", "--checks", "all", "--max-examples", "2", "--seed", "1", "--no-color"),
        *("--header", f"Authorization: Bearer {TOKEN}", "--request-timeout", str(PATIENCE_S)),
    ]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.support.schemathesis_hooks"}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-8000:]
