"""Seconds to upload a checkpoint to an S3 server, beside those of writing it to the disk.

    python -m benchmarks.trainer.upload                                               # 512 MiB of 4 ranks, to moto
    python -m benchmarks.trainer.upload --mib 65536 --ranks 8 --endpoint http://127.0.0.1:9000   # to a server of yours

``one_s`` file after file, as before; ``put_s`` by one host, several files at a time, verified while others are sent;
``hosts_s`` by two hosts at once, a process each, until the manifest is there. moto is a Python program and slower than disks:
``client_s_per_gb``, a host's processor time, tells what a host can send. Credentials as AWS's tools find them. Prints one
JSON object.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore
from penstock.services.trainer.checkpoint.s3 import ObjectStore
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.files import durable
from penstock.shared.settings.trainer import StoreSettings

_BLOCK = 4 << 20
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


def serve(port: int) -> None:
    """Run moto's server until killed."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False).start()
    time.sleep(3600)


def written(root: Path, ranks: int, nbytes: int) -> tuple[Checkpoint, float]:
    """Write a checkpoint of ``ranks`` files; return it with the seconds until the disk had the files."""
    block, seconds = secrets.token_bytes(_BLOCK), 0.0
    for rank in range(ranks):
        path = local_store.beside(root, 1) / f"engine/engine/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        began_s = time.perf_counter()
        with path.open("wb") as file:
            for place in range(0, nbytes // ranks, _BLOCK):
                file.write(place.to_bytes(8) + block[8:])
        durable.flush(path)
        seconds += time.perf_counter() - began_s
    return local_store.make_whole(root, CheckpointState(1, PolicyVersion(1), 0, "", ranks, 3)), seconds


def store_of(settings: StoreSettings, run: str, host: int = 0, hosts: int = 1) -> CheckpointStore:
    """Return a host's access to the store."""
    return CheckpointStore(ObjectStore(settings, run), host=host, hosts=hosts)


def share(settings: StoreSettings, run: str, made: Checkpoint) -> None:
    """Be the second host."""
    store_of(settings, run, 1, 2).put_share(made)


def timed(action: Callable[[], object]) -> float:
    """Return how long ``action`` takes."""
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def measure(settings: StoreSettings, run: str, made: Checkpoint) -> dict[str, float]:
    """Return the seconds of one round."""
    objects = ObjectStore(settings, f"{run}-one")

    def one_by_one() -> None:
        for file in made.files:
            objects.upload(made.folder / file.name, file.name)

    def by_hosts() -> None:
        second = multiprocessing.get_context("spawn").Process(target=share, args=(settings, f"{run}-hosts", made))
        second.start()
        store_of(settings, f"{run}-hosts", 0, 2).put(made)
        second.join()

    one_s, began_s = timed(one_by_one), time.process_time()
    put_s = timed(lambda: store_of(settings, f"{run}-put").put(made))
    client_s = time.process_time() - began_s
    return {"one_s": one_s, "put_s": put_s, "client_s": client_s, "hosts_s": timed(by_hosts)}


def start_moto() -> tuple[str, Any]:
    """Start moto in a process of its own; return its address."""
    import boto3

    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    server.start()
    os.environ.update(_CREDENTIALS)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            break
        except OSError:
            time.sleep(0.1)
    endpoint = f"http://127.0.0.1:{port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="runs")
    return endpoint, server


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoint", default="", help="an S3 server; default: moto's, started here")
    parser.add_argument("--uri", default="s3://runs/upload", help="bucket and prefix")
    parser.add_argument("--folder", type=Path, help="where files are written; default: the temporary folder")
    arguments = parser.parse_args()
    endpoint, server = (arguments.endpoint, None) if arguments.endpoint else start_moto()
    settings = StoreSettings(uri=arguments.uri, endpoint=endpoint)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-upload-", dir=arguments.folder) as name:
        made, disk_s = written(Path(name), arguments.ranks, arguments.mib << 20)
        rows = []
        for number in range(arguments.rounds):
            rows.append(measure(settings, f"{os.getpid()}-{number}", made))
            print(f"round {number + 1}: {rows[-1]}", file=sys.stderr, flush=True)
    if server is not None:
        server.kill()
    gigabytes = sum(file.nbytes for file in made.files) / 1e9
    figures = {"disk_s": disk_s} | {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    figures |= {
        "client_s_per_gb": figures["client_s"] / gigabytes,
        "speed_up": figures["one_s"] / figures["put_s"],
        "to_disk_ratio": disk_s / figures["put_s"],
        "hosts_to_disk_ratio": disk_s / figures["hosts_s"],
    }
    shown = {
        "benchmark": "upload",
        "server": arguments.endpoint or "moto",
        "mib": arguments.mib,
        "ranks": arguments.ranks,
    }
    print(json.dumps({**shown, "cores": os.cpu_count(), **{key: round(value, 3) for key, value in figures.items()}}))


if __name__ == "__main__":
    main()
