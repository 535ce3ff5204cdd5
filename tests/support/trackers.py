"""Read what trackers hold, by their own libraries."""

import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Points = list[tuple[int, float]]


def tensorboard(folder: Path, run: str, name: str) -> Points:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = (folder / "tensorboard" / run).glob("*tfevents*")
    events = LegacyEventFileLoader(str(file)).Load()
    return [(event.step, value.simple_value) for event in events for value in event.summary.value if value.tag == name]


def mlflow(folder: Path, run: str, name: str) -> Points:
    from mlflow import MlflowClient

    warnings.simplefilter("ignore")  # of its database library; pytest restores the filters
    uri = f"sqlite:///{folder.absolute()}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("penstock")
    (actual,) = client.search_runs([experiment.experiment_id], filter_string=f"attributes.run_name = '{run}'")
    return [(metric.step, metric.value) for metric in client.get_metric_history(actual.info.run_id, name)]


def trackio(folder: Path, run: str, name: str) -> Points:
    import json

    database = Path(os.environ["TRACKIO_DIR"]) / "penstock.db"
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (run,)).fetchall()
    connection.close()
    return [(step, json.loads(metrics)[name]) for step, metrics in rows if name in json.loads(metrics)]


def wandb(folder: Path, run: str, name: str) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for file in sorted((folder / "wandb").glob(f"*/wandb/offline-run-*/run-{run}.wandb")):
        for data in _records(file.read_bytes()[7:]):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if name in items:
                points.append((int(items["train/global_step"]), float(items[name])))
    return points


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
