"""Laws of ``penstock plan --memory``: the latest and the peak of each phase, and the plan beside it."""

import json
from pathlib import Path

import pytest

from penstock.services.cli.reports import memory
from penstock.services.coordinator.records.memory import memory_line
from penstock.shared.bus.messages import MemoryReport, MemorySample
from penstock.shared.errors import PenstockError
from penstock.shared.settings import Settings, load

GIB = float(1 << 30)


def line(number: int, replica: str, phase: str, **components: float) -> str:
    parts = {name.replace("_", " "): nbytes for name, nbytes in components.items()}
    sample = MemorySample("host GPU-1", phase, number, 1.0, sum(parts.values()), 140.0 * GIB, parts)
    return json.dumps(memory_line(f"{number}-0", MemoryReport(replica, (sample,)))) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = {
        "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "settings.toml").write_text(f'[policy]\nmodel = "{tmp_path}"\n[weights]\ntransport = "file"\n')
    weights = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096) + 8192 * 1024
    (tmp_path / "memory.jsonl").write_text(
        line(1, "trainer-0", "wait", weights=2.0 * weights, master_weights=4.0 * weights, moments=8.0 * weights)
        + line(2, "trainer-0", "wait", weights=2.0 * weights)
        + line(3, "rollout-0", "generate", weights=2.0 * weights, shadow=2.0 * weights)
    )
    return tmp_path


def test_the_latest_and_the_peak_of_each_phase_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.show(run, as_json=False)
    shown = capsys.readouterr().out
    assert "trainer-0 on host GPU-1: 140.0 GiB" in shown
    rows = [word.split()[:3] for word in shown.splitlines() if word.startswith(("wait", "generate"))]
    assert ["generate", "0.281", "0.281"] in rows
    assert ["wait", "0.141", "0.984"] in rows
    assert "moments 0.562" in " ".join(shown.split())


def test_the_plan_predicts_what_a_run_of_its_settings_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.show(run, as_json=True)
    rollout, trainer = json.loads(capsys.readouterr().out)
    for name in ("weights", "master weights", "moments"):
        assert trainer["predicted"][name] == trainer["components"][name]
    assert rollout["predicted"]["shadow"] == rollout["components"]["shadow"]
    planned, share = rollout["predicted"], Settings().rollout.vllm.gpu_memory_utilization
    assert sum(planned.values()) - planned["shadow"] == pytest.approx(share * 140 * GIB), "vLLM fills it"
    memory.show(run, as_json=False)
    assert ["weights", "0.141", "0.141", "+0%"] in [row.split() for row in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(("engine", "filled"), [("auto", False), ("transformers", False), ("vllm", True)])
def test_on_a_cpu_vllm_alone_fills_what_it_may_use(run: Path, engine: str, *, filled: bool) -> None:
    settings = load(run / "settings.toml", [f"--rollout.engine={engine}"], {})
    measured = memory.PhaseMemory("rollout-0", "host cpu", "generate", 140 * GIB, 1.0, 1.0, {})
    needed = 4 * 2 * 8 * 128 * 2 * (256 * 512)
    assert memory.predicted(settings, measured)["key-value cache"] == pytest.approx(needed) or filled
    assert (memory.predicted(settings, measured)["key-value cache"] > 100 * GIB) == filled


def test_a_folder_without_records_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").touch()
    with pytest.raises(PenstockError, match=r"no records of memory in .*memory\.jsonl"):
        memory.show(tmp_path, as_json=False)
