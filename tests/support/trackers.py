"""Read what trackers hold, by their own libraries."""

import html
import json
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Points = list[tuple[int, float]]
Tables = list[tuple[int, list[str], list[list[Any]]]]
"""Step, columns and rows of each table."""


def tensorboard(folder: Path, run: str, name: str) -> Points:
    values = _values(folder, run)
    return [(step, value.simple_value) for step, value in values if value.tag == name]


def _values(folder: Path, run: str) -> Iterator[tuple[int, Any]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = (folder / "tensorboard" / run).glob("*tfevents*")
    for event in LegacyEventFileLoader(str(file)).Load():
        yield from ((event.step, value) for value in event.summary.value)


def text_tensors(folder: Path, run: str) -> list[tuple[int, Any]]:
    """Return step and array of each rollout table in TensorBoard's file."""
    from tensorboard.util.tensor_util import make_ndarray

    return [(step, make_ndarray(value.tensor)) for step, value in _values(folder, run) if value.tag == "rollouts"]


def tensorboard_tables(folder: Path, run: str) -> Tables:
    tables: Tables = []
    for step, array in text_tensors(folder, run):
        cells = [[html.unescape(cell.decode()[len("<pre>") : -len("</pre>")]) for cell in row] for row in array]
        tables.append((step, cells[0], cells[1:]))
    return tables


def mlflow(folder: Path, run: str, name: str) -> Points:
    client, actual = mlflow_run(folder, run)
    return [(metric.step, metric.value) for metric in client.get_metric_history(actual.info.run_id, name)]


def mlflow_run(folder: Path, run: str) -> tuple[Any, Any]:
    """Return a client and the run."""
    from mlflow import MlflowClient

    warnings.simplefilter("ignore")  # of its database library; pytest restores the filters
    uri = f"sqlite:///{folder.absolute()}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("penstock")
    (actual,) = client.search_runs([experiment.experiment_id], filter_string=f"attributes.run_name = '{run}'")
    return client, actual


def mlflow_tables(folder: Path, run: str) -> Tables:
    client, actual = mlflow_run(folder, run)
    files = [file.path for file in client.list_artifacts(actual.info.run_id, "rollouts")]
    shown = json.loads(actual.data.tags["mlflow.loggedArtifacts"])
    assert shown == [{"path": path, "type": "table"} for path in files], "its page shows all as tables"
    tables: Tables = []
    for path in files:
        table = json.loads(Path(client.download_artifacts(actual.info.run_id, path)).read_text(encoding="utf-8"))
        tables.append((int(Path(path).stem), table["columns"], table["data"]))
    return tables


def mlflow_reports(folder: Path, run: str) -> list[bytes]:
    client, actual = mlflow_run(folder, run)
    files = [file.path for file in client.list_artifacts(actual.info.run_id) if not file.is_dir]
    return [Path(client.download_artifacts(actual.info.run_id, path)).read_bytes() for path in files]


def trackio(folder: Path, run: str, name: str) -> Points:
    return [(step, metrics[name]) for step, metrics in _trackio(run) if name in metrics]


def _trackio(run: str) -> list[tuple[int, dict[str, Any]]]:
    rows = _trackio_rows("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", run)
    return [(step, json.loads(metrics)) for step, metrics in rows]


def _trackio_rows(query: str, run: str) -> list[Any]:
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "penstock.db") as connection:
        rows = connection.execute(query, (run,)).fetchall()
    connection.close()
    return rows


def trackio_tables(folder: Path, run: str) -> Tables:
    tables: Tables = []
    for step, metrics in _trackio(run):
        if "rollouts" in metrics:
            assert metrics["rollouts"]["_type"] == "trackio.table"
            rows = metrics["rollouts"]["_value"]
            tables.append((step, list(rows[0]), [list(row.values()) for row in rows]))
    return tables


def trackio_reports(folder: Path, run: str) -> list[bytes]:
    versions = _trackio_rows(
        "SELECT v.manifest FROM artifact_versions v JOIN run_artifact_links l ON l.artifact_version_id = v.id "
        "JOIN artifacts a ON a.id = v.artifact_id WHERE a.type = 'report' AND l.run_name = ?",
        run,
    )
    blobs = Path(os.environ["TRACKIO_DIR"]) / "artifacts/penstock/blobs/sha256"
    digests = [file["digest"] for (manifest,) in versions for file in json.loads(manifest)]
    return [(blobs / digest[:2] / digest).read_bytes() for digest in digests]


def wandb(folder: Path, run: str, name: str) -> Points:
    rows = [items for _, items in _wandb_rows(folder, run) if name in items]
    return [(int(items["train/global_step"]), float(items[name])) for items in rows]


def _wandb_rows(folder: Path, run: str) -> Iterator[tuple[Path, dict[str, str]]]:
    for file, record in _wandb(folder, run):
        yield file, {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def _wandb(folder: Path, run: str) -> Iterator[tuple[Path, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted((folder / "wandb").glob(f"*/wandb/offline-run-*/run-{run}.wandb")):
        for data in _records(file.read_bytes()[7:]):
            record = Record()
            record.ParseFromString(data)
            yield file, record


def wandb_tables(folder: Path, run: str) -> Tables:
    tables: Tables = []
    for file, items in _wandb_rows(folder, run):
        if "rollouts/path" in items:
            assert json.loads(items["rollouts/_type"]) == "table-file"
            table = json.loads((file.parent / "files" / json.loads(items["rollouts/path"])).read_text(encoding="utf-8"))
            tables.append((int(items["train/global_step"]), table["columns"], table["data"]))
    return tables


def wandb_reports(folder: Path, run: str) -> list[bytes]:
    artifacts = [record.artifact for _, record in _wandb(folder, run) if record.artifact.type == "report"]
    digests = {artifact.digest: artifact.manifest.contents[0].local_path for artifact in artifacts}
    return [Path(path).read_bytes() for path in digests.values()]  # the server stores one of a digest


def _records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log behind its header: blocks of 32 KiB, each with checksum, length, type, data."""
    at, record = 0, b""
    while at + 7 <= len(log):
        left = 32768 - (at + 7) % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        record += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


READERS: Mapping[str, Callable[[Path, str, str], Points]] = {
    "tensorboard": tensorboard,
    "mlflow": mlflow,
    "trackio": trackio,
    "wandb": wandb,
}

TABLES: Mapping[str, Callable[[Path, str], Tables]] = {
    "tensorboard": tensorboard_tables,
    "mlflow": mlflow_tables,
    "trackio": trackio_tables,
    "wandb": wandb_tables,
}

REPORTS: Mapping[str, Callable[[Path, str], list[bytes]]] = {
    "tensorboard": lambda folder, run: [],  # it has no place for files
    "mlflow": mlflow_reports,
    "trackio": trackio_reports,
    "wandb": wandb_reports,
}
