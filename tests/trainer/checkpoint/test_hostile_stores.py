"""With a hostile store, no name leaves the folder, no pickle runs, and a key requires signatures."""

import asyncio
import dataclasses
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.reward.reference import Reference
from penstock.services.reward.scorers.reward_model import RewardModel
from penstock.services.rollout.engines.transformers.loading import check_for_vllm, open_model
from penstock.services.trainer.checkpoint import local_store, pickles
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.manifests import CheckpointState, digest_of
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore
from penstock.services.trainer.checkpoint.s3 import ObjectStore
from penstock.services.trainer.checkpoint.signatures import Signer, open_signer
from penstock.services.trainer.model.engine import saved_tensors
from penstock.services.trainer.model.policy import load_model
from penstock.shared.bus.messages import ChatMessage, PolicyVersion
from penstock.shared.errors import PermanentError, SettingsError, StoreError, WeightsError
from penstock.shared.files import durable
from penstock.shared.model.tokenizer import TokenizerCodec
from penstock.shared.settings import PolicySettings, Settings
from penstock.shared.settings.rewards.models import ModelScorer
from penstock.shared.weights.format import manifest as snapshots
from tests.conftest import PATIENCE_S, Server
from tests.support import builders, reward_models, tiny, trainer_ranks
from tests.support.object_storage import Storage
from tests.trainer.checkpoint.test_store import store_of, written
from tests.trainer.test_service import GROUPS, Run, bus_of, feed

CONTENT = b"owned"
MODEL = "engine/engine/mp_rank_00_model_states.pt"
FIRST, SECOND = b"1" * 64, b"2" * 64


def entry(name: object, nbytes: object = len(CONTENT), sha256: object = "") -> dict[str, object]:
    return {"name": name, "nbytes": nbytes, "sha256": sha256 or hashlib.sha256(CONTENT).hexdigest()}


def plant(storage: Storage, files: Any, **state: object) -> str:
    """Write a manifest with a correct digest, and its objects."""
    known = dataclasses.asdict(CheckpointState(1, PolicyVersion(1), 8, "", 1, 1))
    data = json.dumps({"state": {**known, **state}, "files": files}, sort_keys=True).encode()
    name = f"step-000001-v000001-{hashlib.sha256(data).hexdigest()[:16]}"
    folder = f"team/r/checkpoints/{name}"
    storage.client.put_object(Bucket="runs", Key=f"{folder}/manifest.json", Body=data)
    for file in files or ():
        if isinstance(file, dict) and isinstance(file["name"], str) and file["name"].isprintable() and file["name"]:
            storage.client.put_object(Bucket="runs", Key=f"{folder}/{file['name']}", Body=CONTENT)
    return name


NAMES = [
    "../../../PWNED", "/tmp/PWNED", "engine/../../PWNED", "engine/./PWNED", "engine//PWNED", "engine/", "..", ".", "",
    "engine\\..\\PWNED", "engine/a\0b", "engine/a\nb", ".hidden", "engine/.hidden", "a/b/c/d/e", "a" * 256, "é", "state.json\n", "CON:", 7, None,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:24])
def test_a_name_in_a_stored_manifest_that_is_no_file_of_the_folder_is_refused_and_nothing_is_written(
    tmp_path: Path, storage: Storage, name: object
) -> None:
    store = store_of(storage)
    planted = plant(storage, [entry("state.json"), entry(name)])
    assert store.whole() == []
    assert "is not a file inside a checkpoint's folder" in store.unreadable[planted]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([entry("a.pt"), entry("a.pt")], "its table of files has a name twice"),
        ([entry("a"), entry("a/b")], "its table of files has 'a' as a file and as a folder"),
        ([entry("a.pt", -1)], "its table of files gives a.pt -1 bytes"),
        ([entry("a.pt", True)], "its table of files gives a.pt True bytes"),
        ([entry("a.pt", "5")], "its table of files gives a.pt '5' bytes"),
        ([entry("a.pt", 5, "../x")], "its table of files gives a.pt no SHA-256"),
        ([{**entry("a.pt"), "part_bytes": 1}], "its table of files gives a.pt parts of 1 bytes"),
        ([{**entry("a.pt"), "mode": 7}], "its table of files is malformed"),
        (["a.pt"], "its table of files is not a list of entries"),
        ("a.pt", "its table of files is not a list of entries"),
        (None, "its table of files is not a list of entries"),
    ],
)
def test_a_stored_table_of_files_that_contradicts_itself_is_refused(storage: Storage, files: Any, reason: str) -> None:
    store = store_of(storage)
    name = plant(storage, files)
    assert store.whole() == []
    assert store.unreadable[name].startswith(reason)


@pytest.mark.parametrize(
    "state", [{"step": "../../x"}, {"step": -1}, {"version": 2}, {"step": 10**13}, {"cursor": 1.5}, {"new": 1}]
)
def test_a_stored_state_of_other_types_or_of_another_name_is_refused(
    storage: Storage, state: dict[str, object]
) -> None:
    store = store_of(storage)
    name = plant(storage, [entry("state.json")], **state)
    assert store.whole() == []
    assert "its state" in store.unreadable[name]


def test_a_file_of_another_size_than_its_manifest_says_is_refused_before_anything_is_fetched(
    tmp_path: Path, storage: Storage
) -> None:
    store = store_of(storage)
    for nbytes in (4, 10**15):
        plant(storage, [entry("state.json", nbytes)])
    for stored in store.whole():
        with pytest.raises(WeightsError, match=r"expected state.json of \d+ bytes in s3://.*, found 5 bytes"):
            store.fetch(stored, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_download_ends_where_an_object_is_larger_than_it_may_be(tmp_path: Path, storage: Storage) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(9 << 20))
    objects = ObjectStore(storage.settings(), "r")
    objects.upload(path, "large")
    assert not objects.download("large", tmp_path / "out", (9 << 20) - 1)
    assert not (tmp_path / "out").exists()
    assert objects.download("large", tmp_path / "out", 9 << 20)


def test_a_checkpoint_that_the_disk_has_no_room_for_waits_and_says_so(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(storage)
    stored, _ = store.put(written(tmp_path / "here", 1))
    monkeypatch.setattr(durable, "free_bytes", lambda folder: durable.LEAST_BYTES + 10)
    with pytest.raises(StoreError, match=r"bytes of free space in .*, found 10: free disk space there"):
        store.fetch(stored, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_link_in_the_place_of_a_checkpoints_file_is_damage_and_is_not_stored(
    tmp_path: Path, storage: Storage
) -> None:
    made = written(tmp_path / "here", 1)
    outside = tmp_path / "secret"
    shutil.copy(made.folder / MODEL, outside)
    (made.folder / MODEL).unlink()
    (made.folder / MODEL).symlink_to(outside)
    assert local_store.damage(made.folder) == f"{MODEL} is a link or no regular file"
    with pytest.raises(StoreError, match=MODEL):
        store_of(storage).put(made)


def test_a_marker_whose_names_leave_the_folder_is_no_checkpoint(tmp_path: Path) -> None:
    made = written(tmp_path, 4)
    content = {**dataclasses.asdict(made.state), "files": [entry("../../../../dev/zero", 0)]}
    text = json.dumps({**content, "sha256": digest_of(content)})
    (made.folder / "state.json").write_text(text)
    assert local_store.read(made.folder) is None
    assert local_store.damage(made.folder) == "state.json has changed"


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_the_pickle_of_these_tests_creates_a_folder_where_it_is_read_without_a_guard(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "PWNED")))
    assert (tmp_path / "PWNED").exists()


KINDS: list[tuple[int, dict[str, Any]]] = [
    (0, {}), (1, {}), (2, {}), (3, {}), (0, {"lora": {"rank": 4}}), (1, {"lora": {"rank": 4}}), (3, {"lora": {"rank": 4}}),
    (1, {"trainer": {"offload": "optimizer"}}), (3, {"trainer": {"offload": "all"}}),
]  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("zero_stage", "tables"), KINDS, ids=str)
@pytest.mark.parametrize("as_archive", [True, False])
def test_each_file_of_a_checkpoint_that_would_run_code_is_refused_by_name_and_the_code_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int, tables: dict[str, Any], as_archive: bool
) -> None:
    of, pwned = trainer_ranks.settings(zero_stage, 1, tmp_path, **tables), tmp_path / "PWNED"
    rank = trainer_ranks.Rank(of)
    rank.learn(1)
    rank.engine.save(tmp_path / "made")()
    names = sorted(path.relative_to(tmp_path / "made") for path in (tmp_path / "made").rglob("*.pt"))
    assert len(names) == (2 if zero_stage else 1)
    rank.engine.load(tmp_path / "made")  # as written, it loads
    for name in names:
        folder = tmp_path / "hostile"
        shutil.copytree(tmp_path / "made", folder)
        content = torch.load(folder / name, weights_only=True)
        torch.save({**content, "more": Bomb(pwned)}, folder / name, _use_new_zipfile_serialization=as_archive)
        monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)  # whatever else runs in the process
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises(SettingsError, match=r"refused to load the checkpoint in .*posix\.mkdir"):
            rank.engine.load(folder)
        if as_archive:
            assert pickles.refusal(folder / name) == f"{name.name} would call posix.mkdir, which no checkpoint contains"
        if "model_states" in name.name:
            with pytest.raises(WeightsError, match="refused to load the checkpoint in"):
                saved_tensors(folder, zero_stage)
        assert not pwned.exists()
        shutil.rmtree(folder)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_critics_file_that_would_run_code_is_damage(tmp_path: Path) -> None:
    of = trainer_ranks.settings(1, 1, algorithm=trainer_ranks.ALGORITHMS["actor-critic"])
    rank = trainer_ranks.Rank(of)
    rank.learn(1)
    beside = local_store.beside(tmp_path, 1)
    rank.engine.save(beside / "critic")()
    path = min((beside / "critic").rglob("*optim_states.pt"))
    torch.save({**torch.load(path, weights_only=True), "more": Bomb(tmp_path / "PWNED")}, path)
    made = local_store.make_whole(tmp_path, CheckpointState(1, PolicyVersion(1), 8, "", 1, 1))
    assert local_store.damage(made.folder).startswith(f"{path.name} would call posix.mkdir")
    assert not (tmp_path / "PWNED").exists()


def test_a_stored_file_that_would_run_code_is_refused_where_it_is_fetched(tmp_path: Path, storage: Storage) -> None:
    path = local_store.beside(tmp_path / "here", 1) / MODEL
    path.parent.mkdir(parents=True)
    torch.save({"module": Bomb(tmp_path / "PWNED")}, path)
    made = local_store.make_whole(tmp_path / "here", CheckpointState(1, PolicyVersion(1), 8, "", 1, 1))
    stored, _ = store_of(storage).put(made)
    with pytest.raises(WeightsError, match=r"mp_rank_00_model_states.pt would call posix.mkdir"):
        store_of(storage).fetch(stored, tmp_path / "there")
    assert not (tmp_path / "PWNED").exists()


def test_a_file_of_deepspeed_that_the_marker_does_not_list_is_damage(tmp_path: Path) -> None:
    made = written(tmp_path, 4)
    more = made.folder / "engine/engine/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    more.write_text("read in the place of another")
    assert local_store.damage(made.folder).endswith(f"{more.name} is not one of the files that were written")


def signer(*keys: bytes, run_id: str = "r") -> Signer:
    return Signer(run_id, keys)


def signed(root: Path, by: Signer) -> Checkpoint:
    path = local_store.beside(root, 1) / MODEL
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("weights")
    return local_store.make_whole(root, CheckpointState(1, PolicyVersion(1), 8, "", 1, 1), signer=by)


REFUSED = [
    (signer(), "it has no signature, and trainer.signing_key_file requires one by run r"),
    (signer(SECOND), "its signature is not by run r with a key of trainer.signing_key_file"),
    (signer(FIRST, run_id="other"), "its signature is not by run r with a key of trainer.signing_key_file"),
]


@pytest.mark.parametrize(("by", "reason"), REFUSED, ids=["unsigned", "another key", "another run"])
def test_with_a_key_a_checkpoint_that_it_did_not_sign_is_refused_here_and_in_the_store(
    tmp_path: Path, storage: Storage, by: Signer, reason: str
) -> None:
    made = signed(tmp_path / "here", by)
    assert local_store.damage(made.folder, signer=by) == ""
    assert local_store.damage(made.folder, signer=signer(FIRST)) == reason
    stored, _ = CheckpointStore(ObjectStore(storage.settings(), "r"), by).put(made)
    ours = CheckpointStore(ObjectStore(storage.settings(), "r"), signer(FIRST))
    assert ours.whole() == []
    assert ours.unreadable == {stored.name: reason}


def test_a_signed_checkpoint_comes_back_and_a_new_key_takes_over_while_the_old_one_is_listed(
    tmp_path: Path, storage: Storage
) -> None:
    made = signed(tmp_path / "here", signer(FIRST))
    CheckpointStore(ObjectStore(storage.settings(), "r"), signer(FIRST)).put(made)
    rotated = CheckpointStore(ObjectStore(storage.settings(), "r"), signer(SECOND, FIRST))
    (stored,) = rotated.whole()
    fetched = rotated.fetch(stored, tmp_path / "there")
    assert local_store.damage(fetched.folder, signer=signer(SECOND, FIRST)) == ""
    newer = signed(tmp_path / "newer", signer(SECOND, FIRST))
    assert local_store.damage(newer.folder, signer=signer(SECOND)) == ""


def test_a_signed_marker_that_was_changed_is_refused_although_its_digest_was_made_again(tmp_path: Path) -> None:
    made = signed(tmp_path, signer(FIRST))
    marker = made.folder / "state.json"
    raw = json.loads(marker.read_text())
    signature = raw.pop("signature")
    del raw["sha256"]
    raw["cursor"] = 9
    marker.write_text(json.dumps({**raw, "sha256": digest_of(raw), "signature": signature}))
    assert local_store.damage(made.folder) == ""
    assert local_store.damage(made.folder, signer=signer(FIRST)) == REFUSED[1][1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("short\n", "found a shorter one"), ("\n", "found no key"), (None, "No such file or directory")],
)
def test_a_key_file_that_holds_no_usable_key_is_refused_in_a_sentence(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    of = Settings.model_validate({"trainer": {"signing_key_file": path}})
    with pytest.raises(SettingsError, match=rf"{reason}.*: change trainer.signing_key_file"):
        open_signer(of)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_key_file_that_other_users_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(FIRST)
    path.chmod(mode)
    with pytest.raises(
        SettingsError, match=f"expected a key that no other user can read, found {path} with mode 0{mode:o}: chmod 600"
    ):
        open_signer(Settings.model_validate({"trainer": {"signing_key_file": path}}))


def test_the_keys_of_a_run_are_the_lines_of_its_key_file_and_appear_in_no_text(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(SECOND + b"\n\n" + FIRST + b"\n")
    path.chmod(0o600)
    opened = open_signer(Settings.model_validate({"run": {"id": "r"}, "trainer": {"signing_key_file": path}}))
    assert opened == signer(SECOND, FIRST)
    assert "222" not in repr(opened)


@pytest.mark.slow
async def test_a_trainer_signs_what_it_writes_refuses_what_another_key_signed_and_goes_on_with_both(
    tmp_path: Path, server: Server
) -> None:
    key = tmp_path / "run.key"
    key.write_bytes(FIRST)
    key.chmod(0o600)
    run = Run(tmp_path, server, "signed", checkpoint_every_steps=1, signing_key_file=f'"{key}"')
    async with bus_of(run) as (bus, ledger):
        await feed(bus, 0, 2 * GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 2, process)
            await run.stops(process)
        made = tmp_path / "runs" / "signed" / "checkpoints" / "step-000002"
        assert local_store.damage(made, signer=signer(FIRST, run_id="signed")) == ""
        refusal = "its signature is not by run signed with a key of trainer.signing_key_file"
        assert local_store.damage(made, signer=signer(SECOND, run_id="signed")) == refusal
        key.write_bytes(SECOND)
        async with run.trainer() as process:
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 2
        assert f"the checkpoint of step 2 is damaged ({refusal}; " in run.log.read_text()
        key.write_bytes(SECOND + b"\n" + FIRST)
        await feed(bus, 2 * GROUPS, GROUPS)
        async with run.trainer() as process:
            await run.reaches(ledger, 3, process)
            await run.stops(process)
    assert local_store.damage(made.with_name("step-000003"), signer=signer(SECOND, run_id="signed")) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"buckets": [{"file": "../x", "nbytes": 0, "sha256": "0" * 64}]}, "found '../x'"),
        ({"buckets": [{"file": "a\0b", "nbytes": 0, "sha256": "0" * 64}]}, r"found 'a\\x00b'"),
        ({"buckets": [{"file": "manifest.json/", "nbytes": 0, "sha256": "0" * 64}]}, "found 'manifest.json/'"),
        ({"buckets": [{"file": "b", "nbytes": 0, "sha256": "0" * 64}] * 2}, "found a name twice"),
        ({"buckets": [{"file": "b", "nbytes": -1, "sha256": "0" * 64}]}, "found -1 bytes"),
        ({"buckets": [{"file": "b", "nbytes": 1.5, "sha256": "0" * 64}]}, "found 1.5 bytes"),
    ],
)
def test_a_snapshots_manifest_whose_files_are_not_beside_it_is_refused(change: dict[str, Any], reason: str) -> None:
    data = json.dumps({"format": 1, "version": 1, "step": 1, "tensors": [], "buckets": [], **change}).encode()
    with pytest.raises(WeightsError, match=reason):
        snapshots.decode(data, "here")


@pytest.mark.parametrize("shape", [[-1], [-2, -3]])
def test_a_snapshots_manifest_with_a_negative_shape_is_refused(shape: list[int]) -> None:
    tensor = {"name": "w", "dtype": "float32", "shape": shape, "offset": 0, "bucket": 0}
    bucket = {"file": "b", "nbytes": 64, "sha256": "0" * 64}
    data = json.dumps({"format": 1, "version": 1, "step": 1, "tensors": [tensor], "buckets": [bucket]}).encode()
    with pytest.raises(WeightsError, match="expected w to be within its bucket in here"):
        snapshots.decode(data, "here")


OPENERS: dict[str, Callable[[str], object]] = {
    "trainer": lambda model: load_model(PolicySettings(model=model), torch.float32),
    "rollout": lambda model: open_model(PolicySettings(model=model), tiny.tokenizer(), "cpu"),
    "vllm": lambda model: check_for_vllm(PolicySettings(model=model)),
    "reward": lambda model: RewardModel(ModelScorer(kind="model", model=model), reward_models.WORK),
    "reference": lambda model: Reference(Settings.model_validate({"policy": {"model": model}})),
}


@pytest.mark.parametrize("opened", OPENERS.values(), ids=OPENERS)
def test_a_model_folder_whose_weights_are_a_pickle_is_refused_before_it_is_read(
    tmp_path: Path, opened: Callable[[str], object]
) -> None:
    folder = tmp_path / "model"
    tiny.model(0).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Bomb(tmp_path / "PWNED")}, folder / "pytorch_model.bin")
    with pytest.raises(SettingsError) as refused:
        opened(str(folder))
    assert f"expected weights as safetensors in '{folder}', found pytorch_model.bin, a pickle" in str(refused.value)
    assert str(refused.value).endswith(
        ("or change policy.model", "or change model of scorer 'model' in [[reward.scorers]]")
    )
    assert not (tmp_path / "PWNED").exists()


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}",
    "{{ self.__init__.__globals__.__builtins__.open('PWNED', 'w') }}",
    "{{ messages.append(1) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_that_reaches_for_the_interpreter_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    codec = TokenizerCodec(tiny.tokenizer(template), tiny.opened(tiny.model()))
    asked = dataclasses.replace(builders.prompt(0), text=None, messages=(ChatMessage("user", "1"),))
    with pytest.raises(PermanentError, match="the chat template cannot render"):
        codec.encode(asked)
    assert list(tmp_path.iterdir()) == []
