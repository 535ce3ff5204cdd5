"""An export is the policy as published, from any source, and it generates."""

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.services.cli.__main__ import main
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore
from penstock.services.trainer.checkpoint.s3 import ObjectStore
from penstock.services.trainer.export.huggingface import export_version
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.policy import Policy, load_model
from penstock.services.trainer.phases import Phases
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import PenstockError
from penstock.shared.settings import Settings, dump, load_run
from penstock.shared.weights.format.snapshot import write_adapter, write_snapshot
from tests.support import tiny
from tests.support.object_storage import Storage
from tests.support.tolerance import ULPS
from tests.trainer.algorithm import test_update

pytestmark = pytest.mark.usefixtures("one_rank")

ROOT = Path(__file__).parents[3]


class Run:
    """A run after step 1 (version 1)."""

    def __init__(
        self, folder: Path, zero_stage: int, rank: int, dtype: str = "float32", model: Callable[[], Any] = tiny.model
    ) -> None:
        self.settings = Settings.model_validate(
            {
                "run": {"device": "cpu", "id": "exported", "folder": folder / "runs"},
                "policy": {
                    "model": str(tiny.save(folder / "model", of=model())),
                    "dtype": dtype,
                    "lora": {"rank": rank},
                },
                "weights": {"folder": folder / "weights", "transport": "file"},
                "sampling": {"max_new_tokens": 8},
                "algorithm": {"groups_per_step": 4},
                "trainer": {"learning_rate": 1e-2, "zero_stage": zero_stage},
            }
        )
        self.settings.run_folder.mkdir(parents=True)
        dump(self.settings, self.settings.run_folder / "settings.toml")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            adapted = adapter.add(load_model(self.settings.policy, torch.float32), self.settings.policy)
            self.engine = TrainingEngine(Policy(adapted).train(), self.settings, "cpu")
            Learner(self.engine, self.settings, Phases()).learn(
                test_update.batch(), test_update.lags(test_update.batch(), 0), 1
            )

    def checkpoint(self) -> Path:
        root = self.settings.run_folder / "checkpoints"
        self.engine.save(local_store.beside(root, 1) / "engine")()
        of = local_store.base_of(self.settings.policy)
        stage = self.settings.trainer.zero_stage
        state = CheckpointState(1, PolicyVersion(1), 4, "", 1, stage, "", adapter_of=of)
        return local_store.make_whole(root, state).folder

    def snapshot(self) -> Path:
        dtype = getattr(torch, self.settings.policy.dtype)
        snapshot = write_snapshot(self.settings.snapshot_folder, PolicyVersion(1), 1, self.engine.tensors(), dtype)
        return snapshot.location

    def published(self) -> dict[str, torch.Tensor]:
        dtype = getattr(torch, self.settings.policy.dtype)
        return {name: tensor.to(dtype, copy=True) for name, tensor in self.engine.tensors()}


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def assert_is(model: Any, expected: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    assert all(parameters[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("zero_stage", "rank", "dtype", "model"),
    [
        (0, 0, "float32", tiny.model),
        (1, 0, "bfloat16", tiny.model),
        (2, 4, "float32", tiny.model),
        (3, 0, "bfloat16", tiny.model),
        (3, 4, "float32", tiny.model),
        (1, 4, "bfloat16", tiny.model),
        (1, 0, "bfloat16", tiny.mixture),
        (2, 2, "float32", tiny.mixture),
        (3, 2, "bfloat16", tiny.mixture),
    ],
)
def test_an_export_is_bit_equal_to_what_was_published_from_a_checkpoint_and_from_a_snapshot(
    tmp_path: Path, zero_stage: int, rank: int, dtype: str, model: Callable[[], Any]
) -> None:
    run = Run(tmp_path, zero_stage, rank, dtype, model)
    expected, checkpoint = run.published(), run.checkpoint()
    exported = export_version(run.settings, PolicyVersion(1), tmp_path / "of-checkpoint")
    assert (exported.source, exported.step, exported.version) == (str(checkpoint), 1, 1)
    assert_is(loaded(tmp_path / "of-checkpoint"), expected)
    snapshot = run.snapshot()
    exported = export_version(run.settings, PolicyVersion(1), tmp_path / "of-snapshot")
    assert exported.source == str(snapshot)
    assert_is(loaded(tmp_path / "of-snapshot"), expected)


def test_weights_that_a_rollback_published_again_are_exported_under_their_new_number(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 0)
    checkpoint = run.checkpoint()
    with pytest.raises(PenstockError, match=r"there are no weights of version 5 .* exported: 0, 1\."):
        export_version(run.settings, PolicyVersion(5), tmp_path / "out")
    exported = export_version(run.settings, PolicyVersion(5), tmp_path / "out", checkpoint=str(checkpoint))
    assert (exported.version, exported.step, exported.source) == (5, 1, str(checkpoint))


def test_an_export_from_object_storage_is_bit_equal_to_what_was_published(tmp_path: Path, storage: Storage) -> None:
    run = Run(tmp_path, 2, 0)
    store = storage.settings()
    trainer = run.settings.trainer.model_copy(update={"store": store})
    settings = run.settings.model_copy(update={"trainer": trainer})
    checkpoint = run.checkpoint()
    stored, _ = CheckpointStore(ObjectStore(store, "exported")).put(local_store.find(checkpoint.parent)[0])
    shutil.rmtree(checkpoint.parent)
    exported = export_version(settings, PolicyVersion(1), tmp_path / "out")
    assert (exported.source, exported.step) == (stored.uri, 1)
    assert_is(loaded(tmp_path / "out"), run.published())
    again = export_version(settings, PolicyVersion(5), tmp_path / "again", checkpoint=stored.uri)
    assert (again.version, again.source) == (5, stored.uri), "a rollback published it again"


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_a_generation_config_that_transformers_refuses_to_save_is_exported_as_given(tmp_path: Path, where: str) -> None:
    run = Run(tmp_path, 1, 0)
    run.checkpoint()
    given = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    file = Path(run.settings.policy.model) / where
    file.with_name("generation_config.json").unlink()
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **given}))
    for name in ("out", "again"):  # the export is a policy that can be trained and exported, too
        export_version(run.settings, PolicyVersion(1), tmp_path / name)
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert {key: written.get(key, False) for key in given} == given, "False is the default of do_sample"
        assert_is(loaded(tmp_path / name), run.published())
        file.with_name("generation_config.json").write_text(json.dumps(written))


def test_an_export_generates_what_the_policy_generates(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 0)
    run.checkpoint()
    export_version(run.settings, PolicyVersion(1), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("12+34=", return_tensors="pt").input_ids
    trained = load_model(run.settings.policy, torch.float32)
    trained.load_state_dict(run.published(), strict=False)
    trained.tie_weights()
    actual, expected, initial = (
        model.generate(ids, max_new_tokens=8, do_sample=False, min_new_tokens=8).tolist()
        for model in (loaded(tmp_path / "out"), trained.eval(), tiny.model(0))
    )
    assert actual == expected
    assert actual != initial


@pytest.mark.filterwarnings("ignore:The following")  # peft's, of ranks of experts
@pytest.mark.parametrize("model", [tiny.model, tiny.mixture])
def test_an_adapter_is_exported_alone_and_peft_makes_of_it_the_merged_policy(
    tmp_path: Path, model: Callable[[], Any]
) -> None:
    from peft import PeftModel

    run = Run(tmp_path, 2, 4, model=model)
    run.checkpoint()
    export_version(run.settings, PolicyVersion(1), tmp_path / "adapter", adapter=True)
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    merged = PeftModel.from_pretrained(loaded(tmp_path / "model"), tmp_path / "adapter").merge_and_unload()
    expected = run.published()
    assert all(torch.allclose(tensor, expected[name], atol=ULPS) for name, tensor in merged.named_parameters())


def test_a_snapshot_of_an_adapter_gives_both_forms(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 4)
    expected = run.published()
    write_adapter(
        run.settings.snapshot_folder, PolicyVersion(1), 1, run.engine.factors(),
        adapter.file_configuration(run.engine.model), torch.float32,
    )  # fmt: skip
    export_version(run.settings, PolicyVersion(1), tmp_path / "merged")
    assert_is(loaded(tmp_path / "merged"), expected)
    export_version(run.settings, PolicyVersion(1), tmp_path / "alone", adapter=True)
    assert (tmp_path / "alone" / "adapter_model.safetensors").is_file()


def test_a_damaged_snapshot_is_not_used_and_the_checkpoint_stands_in(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 0)
    expected, checkpoint, snapshot = run.published(), run.checkpoint(), run.snapshot()
    bucket = snapshot / "bucket-00000.safetensors"
    bucket.write_bytes(bucket.read_bytes()[:-8] + b"\x00" * 7 + b"\x01")
    assert export_version(run.settings, PolicyVersion(1), tmp_path / "out").source == str(checkpoint)
    assert_is(loaded(tmp_path / "out"), expected)
    shutil.rmtree(checkpoint)
    with pytest.raises(
        PenstockError, match=r"there are no weights of .* \(.*it is corrupt\)\. Versions that can be exported: 0, 1"
    ):
        export_version(run.settings, PolicyVersion(1), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_latest_is_the_newest_version_that_is_there_and_a_damaged_checkpoint_is_refused_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, 1, 0)
    words = ["export", str(run.settings.run_folder), "--to", str(tmp_path / "out")]
    assert main(words) == 1
    assert "run exported has no snapshot and no checkpoint" in capsys.readouterr().err
    folder = run.checkpoint()
    optimizer, weights = sorted((folder / "engine" / "engine").iterdir(), reverse=True)
    assert {folder / file.name for file in local_store.find(folder.parent)[0].files} > {optimizer, weights}
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert main(words) == 1
    damage = f"it is damaged (the content of engine/engine/{weights.name} has changed)"
    assert damage in capsys.readouterr().err
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    optimizer.unlink()  # an export does not need it
    assert main(words) == 0
    assert_is(loaded(tmp_path / "out"), run.published())


def test_version_0_is_the_initial_policy_and_other_versions_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, 1, 0)
    run.checkpoint()
    export_version(run.settings, PolicyVersion(0), tmp_path / "initial")
    assert_is(loaded(tmp_path / "initial"), dict(tiny.model(0).named_parameters()))
    with pytest.raises(PenstockError, match=r"no snapshot and no checkpoint holds it\)\. Versions .* exported: 0, 1\."):
        export_version(run.settings, PolicyVersion(7), tmp_path / "out")
    with pytest.raises(PenstockError, match=r"expected a new or empty folder to write to, .* change --to"):
        export_version(run.settings, PolicyVersion(1), tmp_path / "initial")
    words = ["export", str(run.settings.run_folder), "--version", "7", "--to", str(tmp_path / "out")]
    capsys.readouterr()
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("penstock export: there are no weights of version 7 of run exported")
    with pytest.raises(PenstockError, match=r"policy\.lora\.rank = 0\): leave --adapter out"):
        export_version(run.settings, PolicyVersion(1), tmp_path / "out", adapter=True)


def test_a_process_of_its_own_answers_with_json_and_a_run_that_was_moved_is_found(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, 0)
    run.checkpoint()
    moved = tmp_path / "elsewhere"
    run.settings.run_folder.rename(moved)
    assert load_run(moved).run_folder == moved
    command = [sys.executable, "-m", "penstock.services.trainer.export", str(moved), "--version", "1", "--to"]
    done = subprocess.run(
        [*command, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=400, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "version": 1, "step": 1, "source": str(moved / "checkpoints" / "step-000001"),
        "folder": str(tmp_path / "out"), "adapter": False,
    }  # fmt: skip
    assert_is(loaded(tmp_path / "out"), run.published())
