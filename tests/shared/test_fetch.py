"""Laws of models that a cluster downloads: once, whole, and without pickles; against servers of a hub and of S3."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.shared.errors import SettingsError
from penstock.shared.model import fetch
from tests.conftest import PATIENCE_S
from tests.support.chart import ROOT
from tests.support.hub_server import COMMIT, hub
from tests.support.object_storage import Storage

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"a pickle"}


def test_a_hub_name_is_found_offline_after_one_download(tmp_path: Path) -> None:
    asked: list[str] = []
    source = f"hf://team/model@{COMMIT}"
    with hub("team/model", FILES, asked, kind="models") as url:
        environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "penstock.shared.model.fetch", "--into", str(tmp_path / "models"), source]
        for _ in range(2):
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
            )
            assert done.returncode == 0, done.stderr
    assert [line for line in asked if line.startswith("GET") and "model.safetensors" in line] == [
        f"GET /team/model/resolve/{COMMIT}/model.safetensors"
    ]
    assert not [line for line in asked if "pytorch_model.bin" in line]
    look = "from huggingface_hub import try_to_load_from_cache as look; print(open(look('team/model', 'model.safetensors')).read())"
    offline = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "models" / "huggingface"), "HF_HUB_OFFLINE": "1"}
    assert subprocess.check_output([sys.executable, "-c", look], env=offline, text=True) == "weights\n"


def test_a_model_in_a_bucket_arrives_whole(tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", storage.endpoint)
    for name, content in FILES.items():
        storage.client.put_object(Bucket="runs", Key=f"team/model/{name}", Body=content)
    fetch.fetch("s3://runs/team/model", tmp_path)
    folder = tmp_path / "runs" / "team" / "model"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    storage.deny()
    try:
        fetch.fetch("s3://runs/team/model", tmp_path)  # complete: nothing is asked
        with pytest.raises(SettingsError, match=r"expected a model at s3://runs/team/other, found: .*modelCache\.s3"):
            fetch.fetch("s3://runs/team/other", tmp_path)
    finally:
        storage.deny(denied=False)
    with pytest.raises(SettingsError, match="expected a model at s3://runs/none, found no object: change `models`"):
        fetch.fetch("s3://runs/none", tmp_path)


def test_an_object_cannot_leave_its_folder(tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", storage.endpoint)
    storage.client.put_object(Bucket="runs", Key="team/evil/../../../outside", Body=b"x")
    with pytest.raises(
        SettingsError, match=r"expected names below the prefix, found .team/evil/\.\./\.\./\.\./outside"
    ):
        fetch.fetch("s3://runs/team/evil", tmp_path / "models")
    assert not list(tmp_path.rglob("outside"))


def test_an_image_of_a_registry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        fetch.fetch("oci://registry.example.org/model", tmp_path)
    assert str(refused.value) == (
        "expected a model at hf://owner/name@revision, s3://bucket/prefix or pvc://claim/path, found "
        "'oci://registry.example.org/model': change `models`; an image of a registry can be mounted with extraVolumes"
    )


def test_others_wait_until_every_model_is_complete(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", storage.endpoint)
    monkeypatch.setattr(fetch, "_LOOK_S", 0.01)
    storage.client.put_object(Bucket="runs", Key="team/late/config.json", Body=b"{}")
    waiting = threading.Thread(target=fetch.wait, args=(["s3://runs/team/late"], tmp_path))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    fetch.fetch("s3://runs/team/late", tmp_path)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
