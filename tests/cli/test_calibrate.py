"""Laws of ``penstock calibrate`` and of the plan that reads its file."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.cli import calibrate
from penstock.services.cli.__main__ import main
from penstock.services.cli.plan import make, settings_of
from penstock.services.plan.hardware import Calibration, parse_cluster, read_calibration
from penstock.shared.errors import SettingsError
from tests.support import tiny

ROOT = Path(__file__).parents[2]
RATES = Calibration("NVIDIA H200", "7b", 2e15, 9e12, 0.0, 1e10)


def test_every_rate_of_a_cpu_is_measured(tmp_path: Path) -> None:
    tiny.model(0).config.save_pretrained(tmp_path)
    file = tmp_path / "calibration.json"
    flags = ["--policy.model", str(tmp_path), "--run.device", "cpu", "--trainer.micro_batch_tokens", "300"]
    words = ["calibrate", "config/arithmetic.toml", *flags, "--to", str(file), "--seconds", "0.1"]
    # in a process of its own, as DeepSpeed keeps the process group that it saw first
    done = subprocess.run(
        [sys.executable, "-m", "penstock.services.cli", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = read_calibration(file)
    assert measured is not None
    assert (measured.device, measured.host_bytes_per_s) == ("cpu", 0.0)
    assert min(measured.flops_per_s, measured.bytes_per_s, measured.link_bytes_per_s) > 1e3


def test_the_plan_uses_the_rates_that_were_measured_and_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    calibrate.write(RATES, file)
    settings = settings_of(None, ["--sampling.max_new_tokens", "2048"])
    before, after = make(settings, "8xH200", "7b"), make(settings, "8xH200", "7b", file)
    gpu = after.planner.cluster.gpu
    assert (gpu.flops_per_s, gpu.bytes_per_s, after.planner.cluster.host_bytes_per_s) == (2e15, 9e12, 1e10)
    assert gpu.link_bytes_per_s == before.planner.cluster.gpu.link_bytes_per_s
    assert after.candidates[0].step_s < before.candidates[0].step_s


@pytest.mark.parametrize(
    ("device", "gpus"), [("cpu", "8xH200"), ("cpu", "4x80GiB"), ("NVIDIA H200", "8xH100"), ("NVIDIA L40S", "1xL4")]
)
def test_rates_of_another_kind_of_device_are_refused(device: str, gpus: str) -> None:
    with pytest.raises(
        SettingsError, match=f"expected rates of a GPU of {gpus} in --calibrate, found those of {device}"
    ):
        dataclasses.replace(RATES, device=device).of(parse_cluster(gpus))


def test_a_missing_folder_is_refused_before_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--to", "missing/rates.json"]) == 2
    assert capsys.readouterr().err == "penstock calibrate: no folder missing to write rates.json to: change --to\n"


def test_a_missing_file_of_rates_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no run's folder or file of rates at .*/missing: change --calibrate"):
        make(settings_of(None, []), "8xH200", "7b", tmp_path / "missing")


@pytest.mark.parametrize("values", [{"calibration": 2}, {"calibration": 1, "flops_per_s": 1.0}, {"calibration": 1, "flops_per_s": -1.0}])  # fmt: skip
def test_a_file_that_is_no_calibration_of_this_version_is_refused(tmp_path: Path, values: dict[str, float]) -> None:
    file = tmp_path / "calibration.json"
    whole = {"device": "cpu", "model": "7b", "bytes_per_s": 1.0, "link_bytes_per_s": 1.0, "host_bytes_per_s": 1.0}
    file.write_text(json.dumps((whole if values.get("flops_per_s", 0.0) < 0 else {}) | values))
    with pytest.raises(SettingsError, match="expected the rates of `penstock calibrate`"):
        read_calibration(file)
