"""moto's S3 server on loopback, with a bucket that tests may damage.

Objects are kept in this process, so they outlive :meth:`Storage.stop`. Signatures are only checked to deny access.
"""

import logging
import os
from typing import Any

import httpx

from penstock.shared.settings.trainer import StoreSettings
from tests.conftest import PATIENCE_S

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Storage:
    def __init__(self) -> None:
        import boto3

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.port = 0
        self.start()
        os.environ.update(CREDENTIALS)
        self.client: Any = boto3.client("s3", endpoint_url=self.endpoint)
        self.client.create_bucket(Bucket="runs")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen on the previous port with the previous objects."""
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    def stop(self) -> None:
        self._server.stop()

    def deny(self, *, denied: bool = True) -> None:
        """Deny all requests."""
        httpx.post(f"{self.endpoint}/moto-api/reset-auth", content="0" if denied else "1000000000", timeout=PATIENCE_S)

    def settings(self, **more: Any) -> StoreSettings:
        return StoreSettings(**{"uri": "s3://runs/team", "endpoint": self.endpoint, **more})

    def names(self, prefix: str = "") -> list[str]:
        actual = self.client.list_objects_v2(Bucket="runs", Prefix=f"team/{prefix}")
        return [str(entry["Key"]).removeprefix("team/") for entry in actual.get("Contents", ())]

    def whole(self, run_id: str) -> list[int]:
        names = self.names(f"{run_id}/checkpoints/")
        return [int(name.split("/")[2].split("-")[1]) for name in names if name.endswith("/manifest.json")]

    def damage(self, prefix: str, ending: str) -> None:
        """Change one byte of the only matching object, keeping its length."""
        (name,) = [name for name in self.names(prefix) if name.endswith(ending)]
        data = bytearray(self.client.get_object(Bucket="runs", Key=f"team/{name}")["Body"].read())
        data[len(data) // 2] ^= 1
        self.client.put_object(Bucket="runs", Key=f"team/{name}", Body=bytes(data))

    def clear(self) -> None:
        for name in self.names():
            self.client.delete_object(Bucket="runs", Key=f"team/{name}")

    def close(self) -> None:
        self.stop()
        for name in CREDENTIALS:
            os.environ.pop(name, None)
