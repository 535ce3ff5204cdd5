"""Models for a cluster: one process downloads them to a volume, others wait until they are complete.

::

    <folder>/huggingface/         the hub's cache: hf://owner/name@revision is then found under its hub name
    <folder>/<bucket>/<prefix>/   s3://bucket/prefix
    <folder>/compiled/<role>/     compiled kernels of replicas
    <folder>/.ready/<digest>      one file for each complete source

Run as ``python -m penstock.shared.model.fetch [--wait] --into FOLDER SOURCE...``.
"""

import argparse
import hashlib
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.shared.errors import SettingsError
from penstock.shared.http.hub import bound_hub

log = logging.getLogger(__name__)
_HUB = re.compile(r"hf://(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_S3 = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]+)/(?P<prefix>[^/].*?)/?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ROLES = ("reward", "rollout", "trainer")
_LOOK_S = 1.0
_SAY_S = 60.0


def fetch(source: str, folder: Path) -> None:
    """Download ``source``, unless it is complete in ``folder``.

    Raises:
        SettingsError: unknown form, or the download failed.
    """
    if _ready(source, folder).exists():
        return
    hub, bucket = _HUB.fullmatch(source), _S3.fullmatch(source)
    if not (hub or bucket):
        raise SettingsError(
            f"expected a model at hf://owner/name@revision, s3://bucket/prefix or pvc://claim/path, found {source!r}: change `models`; "
            "an image of a registry can be mounted with extraVolumes"
        )
    try:
        if hub:
            _from_hub(hub["name"], hub["revision"], folder / "huggingface")
        elif bucket:
            _from_bucket(bucket["bucket"], bucket["prefix"], folder)
    except SettingsError:
        raise
    except Exception as error:  # the libraries raise whatever their HTTP clients raise
        sentence = " ".join(str(error).split())[:300] or type(error).__name__
        raise SettingsError(
            f"expected a model at {source}, found: {sentence}: check the name, modelCache.tokenSecret and modelCache.s3"
        ) from error
    _ready(source, folder).parent.mkdir(exist_ok=True)
    _ready(source, folder).touch()


def _ready(source: str, folder: Path) -> Path:
    return folder / ".ready" / hashlib.sha256(source.encode()).hexdigest()[:16]


def _from_hub(name: str, revision: str | None, cache: Path) -> None:
    from huggingface_hub import snapshot_download

    bound_hub()
    snapshot = Path(snapshot_download(name, revision=revision, cache_dir=cache, ignore_patterns=list(_PICKLES)))
    if revision:  # so that the hub name alone means this revision
        refs = snapshot.parent.parent / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(snapshot.name, encoding="ascii")


def _from_bucket(bucket: str, prefix: str, folder: Path) -> None:
    import boto3

    client = boto3.client("s3")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    names = [item["Key"] for page in pages for item in page.get("Contents", ()) if not item["Key"].endswith("/")]
    if not names:
        raise SettingsError(f"expected a model at s3://{bucket}/{prefix}, found no object: change `models`")
    target = folder / bucket / prefix
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    for name in names:
        _download(client, bucket, name, partial, partial / name.removeprefix(f"{prefix}/"))
    partial.chmod(0o755)
    shutil.rmtree(target, ignore_errors=True)  # of an attempt that ended before it was noted
    partial.rename(target)


def _download(client: object, bucket: str, name: str, root: Path, file: Path) -> None:
    if not file.resolve().is_relative_to(root.resolve()):
        raise SettingsError(
            f"expected names below the prefix, found {name!r} in the bucket {bucket}: rename that object"
        )
    if any(file.match(pattern) for pattern in _PICKLES):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    client.download_file(bucket, name, str(file))  # type: ignore[attr-defined]  # boto3 makes it at run time


def wait(sources: Sequence[str], folder: Path) -> None:
    """Wait until every source is complete in ``folder``."""
    said_s = 0.0
    while missing := [source for source in sources if not _ready(source, folder).exists()]:
        if time.monotonic() - said_s > _SAY_S:
            said_s = time.monotonic()
            log.warning("waiting for models, which the release's job `models` downloads: %s", ", ".join(missing))
        time.sleep(_LOOK_S)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.shared.model.fetch", description="Download models to a volume."
    )
    parser.add_argument("--wait", action="store_true", help="wait for another process that downloads them")
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    asked = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if asked.wait:
        wait(asked.sources, asked.into)
        return 0
    for role in _ROLES:
        (asked.into / "compiled" / role).mkdir(parents=True, exist_ok=True)
    try:
        for source in asked.sources:
            fetch(source, asked.into)
            log.info("%s is complete", source)
    except SettingsError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
