"""Values of the tokens of a trained group: ``<run folder>/tokens/<version>-<group>.jsonl``, a line for each completion.

::

    {"ids": [41, 9], "texts": ["4", "2"], "logprobs": [-0.1, null], "trainer_logprobs": [-0.12, null], "versions": [7, 7]}

``logprobs`` are the engine's and ``trainer_logprobs`` those of the token's first forward pass in the step, in nats to four
decimals, both under the sampling distribution; null: not sampled, not trained. ``texts`` is null without a tokenizer, and
has "" for a token whose character the next one completes.

The trainer writes a file before it commits its version. As version numbers are never reused, the file of a step that was
not committed belongs to no group.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from penstock.shared.files.durable import write_whole

_MOST_BYTES = 1 << 30
"""Above which every second file is deleted."""


class TokenValues(TypedDict):
    """Of one completion; each list has one entry for each token."""

    ids: list[int]
    texts: list[str] | None
    logprobs: list[float | None]
    trainer_logprobs: list[float | None]
    versions: list[int]


def record_path(run_folder: Path, version: int, group: int) -> Path:
    return run_folder / "tokens" / f"{version}-{group}.jsonl"


def write_record(run_folder: Path, version: int, group: int, completions: Sequence[TokenValues]) -> None:
    """Write a group's file, and bound the folder. Raises OSError."""
    path = record_path(run_folder, version, group)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in completions))
    thin_out(path.parent, _MOST_BYTES)


def thin_out(folder: Path, most_bytes: int) -> None:
    """Delete every second file of a folder above ``most_bytes``; the newest version stays."""
    files = sorted(folder.glob("[0-9]*-*.jsonl"), key=lambda file: int(file.name.partition("-")[0]))
    if sum(file.stat().st_size for file in files) > most_bytes:
        for file in files[-2::-2]:
            file.unlink(missing_ok=True)


def read_record(run_folder: Path, version: int, group: int, completion: int | None = None) -> Iterator[TokenValues]:
    """Yield the values of each completion of a group, or of one, unchecked; nothing if they are not recorded."""
    with (
        contextlib.suppress(OSError, ValueError, RecursionError),
        record_path(run_folder, version, group).open("rb") as file,
    ):
        for number, line in enumerate(file):
            if completion in (None, number):
                yield json.loads(line)
