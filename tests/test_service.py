"""Laws of a service's start: by hand, beside a run that goes on, it finds what it needs."""

import json
from pathlib import Path

import pytest

from shared.errors import SettingsError
from shared.service import parse


def _config(folder: Path, url: str) -> list[str]:
    (folder / "a-run").mkdir()
    config = folder / "settings.toml"
    config.write_text(f'[run]\nid = "a-run"\nfolder = "{folder}"\n[bus]\nurl = "{url}"\n')
    return ["--config", str(config), "--replica", "rollout-7"]


def test_a_replica_that_is_started_by_hand_finds_the_embedded_bus_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK__BUS__URL", raising=False)
    words = _config(tmp_path, "embedded")
    with pytest.raises(SettingsError, match=r"start `penstock up` first, or change bus\.url"):
        parse("rollout", words)
    (tmp_path / "a-run" / "up.json").write_text(json.dumps({"bus": "unix:///tmp/x/valkey.sock", "processes": []}))
    settings, replica = parse("rollout", words)
    assert (settings.bus.url, replica) == ("unix:///tmp/x/valkey.sock", "rollout-7")


def test_a_bus_that_is_named_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK__BUS__URL", raising=False)
    settings, _ = parse("rollout", _config(tmp_path, "redis://somewhere:6379"))
    assert settings.bus.url == "redis://somewhere:6379"
