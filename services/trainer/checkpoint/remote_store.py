"""Checkpoints in object storage: the manifest is written last, and names contain its digest.

::

    <trainer.store.uri>/<run id>/
        checkpoints/step-000020-v000025-0f3a…/      the last part begins the SHA-256 of the manifest
            engine/… critic/… state.json            as in the run's folder
            manifest.json                           the state, and every file with its size and SHA-256; written last
        policy/ adapter/                            the final policy, as in the run's folder

Each of several hosts sends its ranks' files, and the first one the manifest once all are there (:meth:`CheckpointStore.put`).

The bucket is untrusted: names stay inside the folder (``manifests``), downloads are bounded, and with keys unsigned
manifests are refused (``signatures``). By names from contents, interrupted uploads resume, and two trainers cannot mix
files.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from penstock.services.trainer.checkpoint import local_store, manifests, pickles
from penstock.services.trainer.checkpoint.local_store import Checkpoint, digest, is_intact
from penstock.services.trainer.checkpoint.manifests import CheckpointFile, CheckpointState
from penstock.services.trainer.checkpoint.s3 import Object, ObjectStore
from penstock.services.trainer.checkpoint.signatures import UNSIGNED, Signer, open_signer
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import StoreError, WeightsError
from penstock.shared.files import durable
from penstock.shared.files.checkpoint_folder import name_of
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

_FOLDER = "checkpoints/"
_MANIFEST = "manifest.json"
_LETTERS = 16
_RANK = re.compile(r"pp_rank_(\d+)")
"""Of the rank that wrote a file, in DeepSpeed's names."""
_FILES_AT_A_TIME = 4
_LOOK_S, _LEAST_PATIENCE_S = 1.0, 10.0
_PATIENCE = 2.0
"""With the first of other hosts' files, in times of what this host's own took."""
_NAME = re.compile(r"step-[0-9]{6,12}-v([0-9]{6,12})-[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    name: str
    uri: str
    state: CheckpointState
    files: tuple[CheckpointFile, ...]
    stored_at_s: float


class CheckpointStore:
    """One run's checkpoints in ``objects``, for any thread; methods may raise StoreError.

    ``host`` of ``hosts`` is this one, whose ranks' files it sends.
    """

    def __init__(self, objects: ObjectStore, signer: Signer = UNSIGNED, host: int = 0, hosts: int = 1) -> None:
        self._objects = objects
        self._host, self._hosts = host, hosts
        self._signer = signer
        self._changing = threading.Lock()  # guards the fields below; not held during requests
        self._known: dict[str, StoredCheckpoint] = {}
        self._unreadable: dict[str, str] = {}
        self._damaged: set[str] = set()
        self._others_sent = True
        """Whether files of other hosts came for the last checkpoint: if none did, the next waits for the least time."""

    @property
    def silent_s(self) -> float:
        """Seconds since the storage last took or sent anything, while it is asked for something; else 0."""
        return self._objects.silent_s()

    @property
    def unreadable(self) -> dict[str, str]:
        """Reasons for refused manifests so far, by checkpoint name."""
        with self._changing:
            return dict(self._unreadable)

    @property
    def damaged(self) -> frozenset[str]:
        with self._changing:
            return frozenset(self._damaged)

    @property
    def uri(self) -> str:
        return self._objects.uri

    def whole(self) -> list[StoredCheckpoint]:
        """The checkpoints with manifests, oldest version first."""
        listed = self._objects.list(_FOLDER)
        with self._changing:
            known = dict(self._known)
        checkpoints = {}
        for key, stored in listed.items():
            name, _, rest = key.removeprefix(_FOLDER).partition("/")
            if rest == _MANIFEST and _NAME.fullmatch(name):
                checkpoint = known.get(name) or self._open(name, stored.modified_s)
                if checkpoint is not None:
                    checkpoints[name] = checkpoint
        with self._changing:
            self._known = checkpoints
        return sorted(checkpoints.values(), key=lambda stored: (stored.state.version, stored.stored_at_s))

    def _open(self, name: str, stored_at_s: float) -> StoredCheckpoint | None:
        data = self._objects.read(f"{_FOLDER}{name}/{_MANIFEST}", manifests.MOST_BYTES + 1) or b""
        try:
            state, files = self._decode(name, data)
        except ValueError as error:
            with self._changing:
                is_new = name not in self._unreadable
                self._unreadable[name] = str(error)
            if is_new:
                log.warning("manifest of a stored checkpoint is refused", extra={"uri": name, "error": str(error)})
            return None
        return StoredCheckpoint(name, self._uri(name), state, files, stored_at_s)

    def _decode(self, name: str, data: bytes) -> tuple[CheckpointState, tuple[CheckpointFile, ...]]:
        if not name.endswith(_letters(data)):
            raise ValueError(f"its digest is {_letters(data)}")
        raw = manifests.parse(data)
        if reason := self._signer.refusal(raw):
            raise ValueError(reason)
        if not isinstance(raw.get("state"), dict):
            raise ValueError("it has no state")
        state, files = manifests.decode_state(raw["state"]), manifests.decode_files(raw.get("files"))
        if name != _name(state, data):
            raise ValueError(f"its state belongs to {_name(state, data)}")
        return state, files

    def _uri(self, name: str) -> str:
        return f"{self.uri}{_FOLDER}{name}"

    def put(self, checkpoint: Checkpoint) -> tuple[StoredCheckpoint, int]:
        """Return the checkpoint and the bytes that this host sent (0 if present). Resumes interrupted uploads.

        It waits for other hosts' files, which :meth:`put_share` sends, and sends itself what does not come.
        """
        name, files, manifest = self._described(checkpoint)
        there = self._objects.list(f"{_FOLDER}{name}/")
        if (stored_manifest := there.get(f"{_FOLDER}{name}/{_MANIFEST}")) is not None:
            return StoredCheckpoint(name, self._uri(name), checkpoint.state, files, stored_manifest.modified_s), 0
        began_s, own = time.monotonic(), self._share(checkpoint, files)
        sent_bytes = self._upload(checkpoint, name, own)
        others = [file for file in files if file not in own]
        took_s = time.monotonic() - began_s if self._others_sent else 0.0
        self._wait_for_others(name, others, max(_LEAST_PATIENCE_S, _PATIENCE * took_s))
        sent_bytes += self._upload(checkpoint, name, files)
        if not local_store.is_there(checkpoint):
            raise StoreError(f"{checkpoint.folder} was removed or replaced meanwhile")
        stored_at_s = self._finish(name, files, manifest)
        return StoredCheckpoint(name, self._uri(name), checkpoint.state, files, stored_at_s), sent_bytes

    def put_share(self, checkpoint: Checkpoint) -> int:
        """Send this host's files of a checkpoint that is not whole in the store; return their bytes."""
        name, files, _ = self._described(checkpoint)
        if self._objects.list(f"{_FOLDER}{name}/{_MANIFEST}"):
            return 0
        return self._upload(checkpoint, name, self._share(checkpoint, files))

    def _described(self, checkpoint: Checkpoint) -> tuple[str, tuple[CheckpointFile, ...], bytes]:
        """Return the name that all hosts give it, its files and its manifest. Contents are verified as they are sent."""
        known, folder = {file.name: file for file in checkpoint.files}, checkpoint.folder
        paths = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
        if missing := known.keys() - paths:
            raise _changed(checkpoint, *missing)
        files = tuple(
            known.get(name) or dataclasses.replace(digest(path), name=name) for name, path in sorted(paths.items())
        )
        content = {"state": dataclasses.asdict(checkpoint.state), "files": [dataclasses.asdict(file) for file in files]}
        manifest = json.dumps(self._signer.signed(content), sort_keys=True).encode()
        return _name(checkpoint.state, manifest), files, manifest

    def _share(self, checkpoint: Checkpoint, files: tuple[CheckpointFile, ...]) -> list[CheckpointFile]:
        return [file for file, host in _hosts(files, checkpoint.state.ranks, self._hosts) if host == self._host]

    def _upload(self, checkpoint: Checkpoint, name: str, files: Sequence[CheckpointFile]) -> int:
        """Send those of ``files`` that are missing, some at a time and the largest first; return their bytes."""
        missing = sorted(self._missing(name, files), key=lambda file: -file.nbytes)
        with concurrent.futures.ThreadPoolExecutor(_FILES_AT_A_TIME) as workers:
            for _ in workers.map(functools.partial(self._upload_file, checkpoint, name), missing):
                pass
        return sum(file.nbytes for file in missing)

    def _upload_file(self, checkpoint: Checkpoint, name: str, file: CheckpointFile) -> None:
        path = checkpoint.folder / file.name
        try:
            is_same = _is_there(path, file)
        except OSError as error:
            raise StoreError(f"could not read {path}: {error.strerror}") from error
        if not is_same:
            raise _changed(checkpoint, file.name)
        self._objects.upload(path, f"{_FOLDER}{name}/{file.name}")

    def _missing(self, name: str, files: Sequence[CheckpointFile]) -> list[CheckpointFile]:
        there = self._objects.list(f"{_FOLDER}{name}/")
        sizes = {key.removeprefix(f"{_FOLDER}{name}/"): stored.nbytes for key, stored in there.items()}
        return [file for file in files if sizes.get(file.name) != file.nbytes]

    def _wait_for_others(self, name: str, files: Sequence[CheckpointFile], patience_s: float) -> None:
        """Wait until all of ``files`` are in the store, or none came for ``patience_s``."""
        missing, ends_s = self._missing(name, files), time.monotonic() + patience_s
        while missing and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
            if len(left := self._missing(name, files)) < len(missing):
                missing, ends_s = left, time.monotonic() + patience_s
        have_come = len(missing) < len(files) or not files
        self._others_sent = have_come or not self._others_sent  # every second time it waits longer again
        if missing:
            log.warning("other hosts' files did not come, and are sent by this one", extra={"files": len(missing)})

    def _finish(self, name: str, files: tuple[CheckpointFile, ...], manifest: bytes) -> float:
        if missing := self._missing(name, files):
            raise StoreError(
                f"expected {missing[0].name} of {missing[0].nbytes} bytes in {self._uri(name)}: it is missing"
            )
        self._objects.write(f"{_FOLDER}{name}/{_MANIFEST}", manifest)
        return self._objects.list(f"{_FOLDER}{name}/{_MANIFEST}")[f"{_FOLDER}{name}/{_MANIFEST}"].modified_s

    def put_folder(self, folder: Path) -> int:
        for path in _files(folder):
            self._objects.upload(path, f"{folder.name}/{path.relative_to(folder).as_posix()}")
        return sum(path.stat().st_size for path in _files(folder))

    def fetch(self, stored: StoredCheckpoint, root: Path) -> Checkpoint:
        """Download a checkpoint to ``root``, completed by one rename; resumes earlier fetches."""
        beside = root / f".fetch-{stored.name}.tmp"
        for left in root.glob(".fetch-*.tmp"):
            if left != beside or left.is_symlink():
                _remove(left)
        try:
            self._fetch_all(stored, beside)
        except WeightsError:
            with self._changing:
                self._damaged.add(stored.name)
            raise
        files = tuple(file for file in stored.files if file.name != local_store.MARKER)
        return local_store.rename(beside, root, stored.state, files)

    def _fetch_all(self, stored: StoredCheckpoint, beside: Path) -> None:
        listed = self._objects.list(f"{_FOLDER}{stored.name}/")
        for file in stored.files:
            _check_size(file, stored, listed)
        missing = [file for file in stored.files if not _is_there(beside / file.name, file)]
        free_bytes = durable.usable_bytes(durable.existing(beside))
        if (nbytes := sum(file.nbytes for file in missing)) > free_bytes:
            raise StoreError(
                f"expected {nbytes:,} bytes of free space in {beside.parent} for {stored.uri}, found {free_bytes:,}: "
                f"free disk space there"
            )
        for file in missing:
            self._fetch(stored, file, beside / file.name)
        marker = local_store.read(beside)
        if marker is None or marker.state != stored.state or not set(marker.files) <= set(stored.files):
            raise WeightsError(
                f"expected {local_store.MARKER} of {stored.uri} to agree with its manifest: it is another's"
            )
        pickled = (beside / file.name for file in stored.files if file.name.endswith(pickles.SUFFIX))
        reasons = itertools.chain(
            [local_store.damage(beside, local_store.MARKER, self._signer)], map(pickles.refusal, pickled)
        )
        if reason := next(filter(None, reasons), ""):
            raise WeightsError(f"refused to load the checkpoint in {stored.uri}: {reason}")

    def _fetch(self, stored: StoredCheckpoint, file: CheckpointFile, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._objects.download(f"{_FOLDER}{stored.name}/{file.name}", path, file.nbytes):
            raise WeightsError(f"expected {file.name} of {file.nbytes} bytes in {stored.uri}: it is missing or larger")
        if not is_intact(path, file):
            path.unlink()
            raise WeightsError(
                f"expected {file.name} in {stored.uri} with SHA-256 {file.sha256}, found another content"
            )

    def delete(self, stored: StoredCheckpoint) -> None:
        self._objects.delete(f"{_FOLDER}{stored.name}/{_MANIFEST}")
        for file in stored.files:
            self._objects.delete(f"{_FOLDER}{stored.name}/{file.name}")

    def clear_remains(self, before_step: int) -> None:
        """Partial uploads and unreadable manifests of earlier steps."""
        listed = self._objects.list(_FOLDER)
        folders = {key.removeprefix(_FOLDER).partition("/")[0] for key in listed}
        unreadable = self.unreadable
        for name in sorted(folders):
            words = name.split("-")
            older = len(words) == 4 and words[1].isdecimal() and int(words[1]) < before_step
            if older and (name in unreadable or f"{_FOLDER}{name}/{_MANIFEST}" not in listed):
                self._objects.abort_uploads(f"{_FOLDER}{name}/")
                for key in [key for key in listed if key.startswith(f"{_FOLDER}{name}/")]:
                    self._objects.delete(key)


def open_store(settings: Settings) -> CheckpointStore | None:
    store = settings.trainer.store
    if not store.uri:
        return None
    objects = ObjectStore(store, settings.run.id)
    return CheckpointStore(objects, open_signer(settings), settings.trainer.node, settings.trainer.nodes)


def version_in(uri: str) -> PolicyVersion | None:
    """Return the version in a stored checkpoint's name; None if ``uri`` is not one's."""
    name = _NAME.fullmatch(uri.rpartition("/")[2])
    return None if name is None else PolicyVersion(int(name[1]))


def _letters(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()[:_LETTERS]


def _name(state: CheckpointState, manifest: bytes) -> str:
    return f"{name_of(state.step)}-v{state.version:06d}-{_letters(manifest)}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _hosts(files: Iterable[CheckpointFile], ranks: int, hosts: int) -> Iterator[tuple[CheckpointFile, int]]:
    """Yield each file with the host that sends it: that of the rank that wrote it, or the one with the fewest bytes so far."""
    loads, others, each = [0] * hosts, [], max(1, ranks // hosts)
    for file in files:
        if (rank := _RANK.search(file.name)) is None:
            others.append(file)
            continue
        host = min(int(rank[1]) // each, hosts - 1)
        loads[host] += file.nbytes
        yield file, host
    for file in sorted(others, key=lambda file: (-file.nbytes, file.name)):
        host = loads.index(min(loads))
        loads[host] += file.nbytes
        yield file, host


def _changed(checkpoint: Checkpoint, *names: str) -> StoreError:
    changed = ", ".join(sorted(names))
    return StoreError(f"{changed} in {checkpoint.folder} has changed since it was written: it is damaged")


def _check_size(file: CheckpointFile, stored: StoredCheckpoint, listed: Mapping[str, Object]) -> None:
    there = listed.get(f"{_FOLDER}{stored.name}/{file.name}")
    if there is None or there.nbytes != file.nbytes:
        size = "none" if there is None else f"{there.nbytes} bytes"
        raise WeightsError(f"expected {file.name} of {file.nbytes} bytes in {stored.uri}, found {size}")


def _is_there(path: Path, file: CheckpointFile) -> bool:
    return path.is_file() and path.stat().st_size == file.nbytes and is_intact(path, file)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
