"""No secret among a run's settings reaches what people read: card, report, ConfigMap, log, page."""

import asyncio
import json
import logging
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tomli_w
from pydantic import BaseModel

from penstock.services.cli.policy.card import card, copy_records
from penstock.services.coordinator.records.report import write_report
from penstock.services.coordinator.schemas.resources import EventView
from penstock.shared.bus.bus import Bus
from penstock.shared.errors import SettingsError
from penstock.shared.preflight.cluster import without_secrets
from penstock.shared.process.log import JsonLines, PlainLines
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings, dump, loads
from penstock.shared.settings.reading.published import published
from penstock.shared.text.redaction import redacted

SECRET = "s3cr3t"
PLANTED = (
    f"https://user:{SECRET}@judge.example/v1",
    f"https://judge.example/v1?sig={SECRET}&api-version=1",
    f"https://judge.example/v1?code={SECRET}",
    f"https://judge.example/v1?key={SECRET}#token={SECRET}",
    f"redis://:{SECRET}@bus:6379/0?sentinel_password={SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"{{'Cookie': 'a={SECRET}; b={SECRET}'}}",
    f'{{"api-key": "{SECRET}"}}',
    f"HF_TOKEN={SECRET} AWS_SECRET_ACCESS_KEY={SECRET}",
)
KEY_FILE = f"file:/run/{SECRET}/key"


def planted(model: type[BaseModel], secret: str) -> BaseModel:
    """Return settings with ``secret`` in every text, path, key and item, unchecked."""
    return model.model_construct(
        **{name: plant(field.annotation, secret, field.default) for name, field in model.model_fields.items()}
    )


def plant(annotation: Any, secret: str, default: object) -> Any:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return planted(annotation, secret)
    if origin is Annotated:
        return plant(parts[0], secret, default)
    if origin in (typing.Union, types.UnionType):
        chosen = next((part for part in parts if part is str or part is Path), parts[0])
        return plant(chosen, secret, default)
    if origin is tuple:
        inner = typing.get_args(parts[0])[0] if typing.get_origin(parts[0]) is Annotated else parts[0]
        return tuple(plant(part, secret, None) for part in (typing.get_args(inner) or (inner,)))
    if origin is dict or annotation is dict:
        return {secret: {"Authorization": secret, "inner": [secret]}}
    if annotation is str:
        return secret
    if annotation is Path:
        return Path(secret)
    if origin is Literal:
        return parts[-1]
    return default if isinstance(default, bool | int | float) else 1


def texts(value: object) -> Iterator[str]:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            yield from texts(part)
    elif isinstance(value, str | Path):
        yield str(value)


def leaves(model: type[BaseModel], key: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from leaves(annotation, f"{key}{name}.")
        else:
            yield f"{key}{name}"


@pytest.mark.parametrize("secret", [*PLANTED, KEY_FILE, f"/home/{SECRET}/x y", f"{SECRET} is my prompt"])
def test_no_secret_of_any_setting_is_published(secret: str) -> None:
    settings = typing.cast(Settings, planted(Settings, secret))
    if "//" not in secret and ":" not in secret:  # no expression can be such a text
        settings = settings.model_copy(update={"reward": settings.reward.model_copy(update={"expression": "answer"})})
    assert sum(secret in text for text in texts(settings)) > 80, "planted in every table"
    shown = tomli_w.dumps(published(settings))
    assert SECRET not in shown
    assert "learning_rate" not in shown or "kind = " in shown
    sections = frozenset({"policy", "reward"})
    assert set(published(settings, sections)) <= sections


def test_settings_that_people_compare_are_published() -> None:
    toml = '[trainer]\nlearning_rate = 1e-5\n[policy]\nmodel = "me/mine"\n[reward]\nexpression = "2 * mine"\n'
    toml += '[data]\npath = "/data/private/train.jsonl"\n[algorithm]\non_stale = "mask"\n[[reward.scorers]]\nkind = "answer"\nmode = "exact"\nname = "mine"'
    assert published(loads(toml, "run.toml")) == {
        "trainer": {"learning_rate": 1e-5},
        "policy": {"model": "me/mine"},
        "reward": {"expression": "2 * mine", "scorers": [{"kind": "answer", "mode": "exact"}]},
        "data": {"path": "train.jsonl"},
        "algorithm": {"on_stale": "mask"},
    }


JUDGE = {"kind": "judge", "name": "grader", "model": "judge", "url": f"https://judge.example/v1?code={SECRET}"}
WITH_SECRETS: dict[str, dict[str, Any]] = {
    "bus.url": {"bus": {"url": f"redis://:{SECRET}@bus:6379/0"}},
    "reward.scorers.url": {"reward": {"scorers": [JUDGE]}},
    "trainer.store.endpoint": {"trainer": {"store": {"endpoint": f"https://s3.example?sig={SECRET}"}}},
}


@pytest.mark.parametrize("key", WITH_SECRETS)
def test_settings_with_a_secret_become_no_config_map(key: str, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(WITH_SECRETS[key]))
    finding = without_secrets(config)
    assert not finding.ok
    assert f"but {key} holds a password or key: remove it" in finding.sentence
    assert SECRET not in finding.sentence
    config.write_text("[run]\nsteps = 3\n[bus]\nurl = 'redis://bus:6379/0'\n")
    assert without_secrets(config).ok


@pytest.mark.parametrize("name", ["Authorization", "cookie", "api-key", "hub_token"])
def test_a_header_among_the_settings_is_refused(name: str) -> None:
    judge = {**JUDGE, "url": "https://judge.example/v1", "request": {name: SECRET}}
    with pytest.raises(SettingsError, match="expected no secret among the settings") as refused:
        loads(tomli_w.dumps({"reward": {"scorers": [judge]}}), "run.toml")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("secret", [*PLANTED, KEY_FILE])
def test_no_message_about_a_setting_shows_a_secret(secret: str) -> None:
    for key in leaves(Settings):
        table: dict[str, Any] = {}
        inner = table
        *around, name = key.split(".")
        for part in around:
            inner = inner.setdefault(part, {})
        inner[name] = [secret, {"x": secret}]
        said = ""
        try:
            loads(tomli_w.dumps(table), "run.toml")
        except SettingsError as error:
            said = redacted(str(error))
        assert SECRET not in said, key


@pytest.mark.parametrize("secret", [*PLANTED, KEY_FILE])
async def test_no_log_page_or_report_shows_a_secret(bus: Bus, secret: str, tmp_path: Path) -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 0, "could not ask %s", (secret,), None)
    record.detail = {"url": secret}
    shown = [JsonLines("a").format(record), PlainLines("a").format(record)]
    await tell(bus, "reward-0", "scorer failed", f"could not ask {secret}", url=secret)
    event = {
        "id": "1-0",
        "at_s": 1.0,
        "source": "reward-0",
        "name": "failed",
        "detail": secret,
        "fields": {"a": [secret]},
    }
    shown.append(EventView.model_validate(event).model_dump_json())
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    summary = {
        "reason": f"failed: {secret}",
        "changed_inputs": [secret],
        "groups_admitted": 1,
        "counts": {"trained": 1},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    settings = loads("[run]\nid = 'x'", "x").model_copy(update={"data": planted(loads("", "x").data.__class__, secret)})
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"folder": tmp_path.parent, "id": tmp_path.name})}
    )
    dump(settings, tmp_path / "settings.toml")
    shown.append((await asyncio.to_thread(write_report, tmp_path)).read_text())
    shown.append(card(settings, 1, 1))
    (tmp_path / "penstock").mkdir()
    copy_records(tmp_path, tmp_path / "penstock")
    shown += [path.read_text() for path in (tmp_path / "penstock").iterdir()]
    assert [text for text in shown if SECRET in text] == []
