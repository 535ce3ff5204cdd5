"""Export in a process of its own, started by a trainer (``exporter``) or a user::

    python -m penstock.services.trainer.export RUN --version N --to FOLDER [--adapter] [--checkpoint FOLDER]

Prints one JSON object, or a sentence on stderr and exits 1. RUN is the run's folder, a TOML settings file, or ``-``
(settings on stdin).
"""

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path

from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import PenstockError
from penstock.shared.process.parent import die_with
from penstock.shared.settings import load_run, loads


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a version of a run's policy in Hugging Face form.")
    parser.add_argument("run")
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument(
        "--checkpoint", default="", help="folder or URI of a checkpoint that holds it under another number"
    )
    parser.add_argument("--dies-with", type=int, metavar="PID", help="end with this parent")
    asked = parser.parse_args()
    if asked.dies_with is not None and not die_with(asked.dies_with, signal.SIGKILL):
        return 1
    from penstock.services.trainer.export.huggingface import export_version

    try:
        settings = loads(sys.stdin.read(), "stdin") if asked.run == "-" else load_run(Path(asked.run))
        exported = export_version(
            settings, PolicyVersion(asked.version), asked.to, adapter=asked.adapter, checkpoint=asked.checkpoint
        )
    except PenstockError as error:
        print(f"export: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(dataclasses.asdict(exported)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
