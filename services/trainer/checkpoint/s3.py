"""S3-compatible object storage by boto3.

Names are relative to ``<trainer.store.uri>/<run id>/``; writes are atomic. For servers without checksums:
``AWS_REQUEST_CHECKSUM_CALCULATION=when_required``.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.shared.errors import SettingsError, StoreError
from penstock.shared.extras import install_command
from penstock.shared.settings.trainer import StoreSettings

_PART_BYTES = 64 << 20
_PARTS_AT_A_TIME, _CONNECTIONS = 4, 24
"""Of a file; several files are sent at a time."""
_CONNECT_S, _READ_S = 10.0, 60.0
_DENIED = {
    "AccessDenied", "AllAccessDisabled", "ExpiredToken", "Forbidden", "InvalidAccessKeyId", "InvalidToken", "NoSuchBucket",
    "PermanentRedirect", "SignatureDoesNotMatch", "401", "403",
}  # fmt: skip
"""Error codes that only a person can resolve."""
_MISSING = {"NoSuchKey", "404"}


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    nbytes: int
    modified_s: float


class ObjectStore:
    def __init__(self, settings: StoreSettings, run_id: str) -> None:
        bucket, _, prefix = settings.uri.removeprefix("s3://").partition("/")
        self._bucket = bucket
        self._prefix = "/".join(part for part in (prefix.strip("/"), run_id) if part) + "/"
        self.uri = f"s3://{bucket}/{self._prefix}"
        """Prefix of all names, with a final slash."""
        self._client, self._transfer = _open(settings)
        self._asked = 0
        self._counting = threading.Lock()
        self._heard_s = 0.0
        for event in ("before-send.s3", "response-received.s3"):
            self._client.meta.events.register(event, self._hear)

    def silent_s(self) -> float:
        """Return the seconds since it last took or sent anything, while it is asked for something; else 0. For any thread."""
        return time.monotonic() - self._heard_s if self._asked else 0.0

    def _hear(self, *_: object, **__: object) -> None:
        self._heard_s = time.monotonic()

    def list(self, folder: str) -> dict[str, Object]:
        objects = {}
        with self._asking(f"list {folder}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + folder
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    name = entry["Key"].removeprefix(self._prefix)
                    objects[name] = Object(entry["Size"], entry["LastModified"].timestamp())
        return objects

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return the first ``most_bytes`` of a small object, or None."""
        with self._asking(f"read {name}"):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            except self._client.exceptions.NoSuchKey:
                return None
            data: bytes = answer["Body"].read(most_bytes)
            return data

    def write(self, name: str, data: bytes) -> None:
        with self._asking(f"write {name}"):
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def upload(self, path: Path, name: str) -> None:
        with self._asking(f"upload {path}"):
            self._client.upload_file(
                str(path), self._bucket, self._prefix + name, Config=self._transfer, Callback=self._hear
            )

    def download(self, name: str, path: Path, most_bytes: int) -> bool:
        """False if the object is missing or larger than ``most_bytes``."""
        room = _Room(most_bytes, self._hear)
        with self._asking(f"download {name}"):
            try:
                self._client.download_file(
                    self._bucket, self._prefix + name, str(path), Config=self._transfer, Callback=room.take
                )
            except _TooLarge:
                return False
            except self._client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] not in _MISSING:
                    raise
                return False
        return True

    def delete(self, name: str) -> None:
        with self._asking(f"delete {name}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def abort_uploads(self, folder: str) -> None:
        """Drop unfinished uploads to ``folder``, which are unlisted but use space."""
        with self._asking(f"look for unfinished uploads to {folder}"):
            listing = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix + folder)
            for upload in listing.get("Uploads", ()):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    @contextlib.contextmanager
    def _asking(self, action: str) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        self._hear()
        with self._counting:
            self._asked += 1
        try:
            yield
        except (BotoCoreError, Boto3Error, ClientError, OSError) as error:
            cause = error.__context__ if isinstance(error, Boto3Error) and error.__context__ else error
            code = cause.response["Error"]["Code"] if isinstance(cause, ClientError) else ""
            denied = code in _DENIED or isinstance(cause, NoCredentialsError)
            raise StoreError(f"could not {action} in {self.uri}: {cause}", denied=denied) from error
        finally:
            with self._counting:
                self._asked -= 1


class _TooLarge(Exception):
    """An object is larger than allowed."""


class _Room:
    """Aborts a download beyond ``nbytes``; boto3 calls it from several threads."""

    def __init__(self, nbytes: int, heard: Callable[[], None]) -> None:
        self._left_bytes = nbytes
        self._heard = heard
        self._changing = threading.Lock()

    def take(self, nbytes: int) -> None:
        self._heard()
        with self._changing:
            self._left_bytes -= nbytes
            if self._left_bytes < 0:
                raise _TooLarge


def _open(settings: StoreSettings) -> tuple[Any, Any]:
    try:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise SettingsError(
            f"trainer.store.uri needs boto3 ({error}): {install_command('s3')}, or leave trainer.store.uri empty"
        ) from error
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        max_pool_connections=_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": 3},
        s3={"addressing_style": "path" if settings.endpoint else "auto"},  # other servers seldom have bucket hosts
    )
    try:
        client = boto3.session.Session().client("s3", endpoint_url=settings.endpoint or None, config=config)
    except (BotoCoreError, ValueError) as error:
        raise SettingsError(
            f"could not create a client for {settings.uri}: {error}: change trainer.store.endpoint, or AWS_REGION"
        ) from error
    transfer = TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_PARTS_AT_A_TIME
    )
    return client, transfer
