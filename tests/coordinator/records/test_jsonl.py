"""Laws of records on disk: they are read from where a reader asks, and a torn end is cut off."""

import json
from pathlib import Path

import pytest

from penstock.services.coordinator.records.jsonl import Lines, newest_first


def numbers(path: Path, before: tuple[int, int] | None) -> list[int]:
    return [int(str(line["step"])) for line in newest_first(path, before)]


@pytest.mark.parametrize("text", ["", "x" * 70_000])
def test_lines_before_an_entry_are_found_wherever_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = [{"entry": f"{step // 2 + 1}-{step % 2}", "step": step, "text": text[: step * 7000]} for step in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"entry": "99-0", "torn')
    for step in range(12):
        assert numbers(path, (step // 2 + 1, step % 2)) == list(range(step - 1, -1, -1))
    assert numbers(path, (50, 0)) == numbers(path, None) == list(range(11, -1, -1))
    assert numbers(path, (0, 0)) == []


@pytest.mark.parametrize("torn", [b"", b'{"step": 4', b'{"step": 4\n', b"\0\0\0", b"\0" * 70_000, b"\n\n{}\n[1]\n"])
def test_what_follows_the_last_record_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    kept = b"\n\n{}\n" if torn.endswith(b"[1]\n") else b""
    path.write_bytes(whole + torn)
    lines = Lines(path)
    assert (lines.last, path.read_bytes()) == ({} if kept else {"step": 2}, whole + kept)
    assert Lines(tmp_path / "none.jsonl").last is None
