"""`penstock data check`, and datasets on a hub that is served here."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.cli.reports.data_check import histogram
from tests.support import tiny
from tests.support.hub_server import COMMIT, hub

ROOT = Path(__file__).parents[3]
TRAIN = b'{"prompt": "12+34=", "answer": 46}\n{"prompt": "1+1=", "answer": 2}\n{"question": "?"}\n'


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def python(folder: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where libraries of the hub, which read its address at their import, find one at ``url``."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def archive(name: str, content: bytes) -> bytes:
    buffer, member = io.BytesIO(), tarfile.TarInfo(name)
    member.size = len(content)
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def settings(folder: Path, source: str) -> str:
    path = folder / "run.toml"
    path.write_text(
        f'[policy]\nmodel = "examples/arithmetic/policy"\n[sampling]\nmax_new_tokens = 4\n[data]\nshuffle = false\n'
        f'path = "{source}"\nfilter = "prompt_characters > 4"\n'
    )
    return str(path)


def test_the_check_shows_what_a_dataset_on_a_hub_trains_on(tmp_path: Path) -> None:
    with hub("own/sums", {"train.jsonl": TRAIN, "test.jsonl": TRAIN[:35]}) as url:
        checked = python(
            tmp_path,
            url,
            "-m",
            "penstock.services.cli",
            "data",
            "check",
            settings(tmp_path, "hf://own/sums@main:train"),
        )
    assert checked.returncode == 0, checked.stderr
    assert "bad row" not in checked.stderr
    assert checked.stdout.splitlines() == [
        "training: hf://own/sums@main:train: 1 problems",
        "training: 1 problems, 1 bad rows, 1 rows left out by data.filter",
        "  bad row own/sums/train:3: expected a column 'prompt' or 'messages' that is not null, found 'question': change data.prompt_field, for GSM8K: "
        "--data.prompt_field question",
        "",
        "prompt 1 (own/sums/train:1, 6 tokens, answer '46'):",
        "12+34=",
        "",
        "prompt tokens: mean 6.0, longest 6",
        "  6: 1 ████████████████████████████████████████",
        "",
        "warning: 1 rows of hf://own/sums@main:train cannot be used, the first own/sums/train:3: expected a column 'prompt' "
        "or 'messages' that is not null, found 'question': change data.prompt_field, for GSM8K: --data.prompt_field question; "
        "`penstock data check` names all",
        "",
        "scorer answer: '46' 1, '0' 0",
    ]


@pytest.mark.parametrize(
    ("prompt", "noted"),
    [("12+34=", True), ("12+34=<eos>", False), ([{"role": "user", "content": "12+34="}], False)],
)
def test_texts_to_which_a_chat_template_is_not_applied_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: object, noted: bool
) -> None:
    tiny.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": prompt, "answer": 46}))
    flags = ["--policy.model", str(tmp_path), "--data.path", str(rows), "--data.filter", ""]
    assert main(["data", "check", settings(tmp_path, "train.jsonl"), *flags]) == 0
    assert ("the model's chat template is not applied" in capsys.readouterr().out) == noted


def test_the_check_shows_both_completions_of_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        '{"prompt": "12+34=", "chosen": "46", "rejected": "47"}\n{"prompt": "1+1=", "chosen": "2"}\n'
    )
    config = Path(settings(tmp_path, str(tmp_path / "pairs.jsonl")))
    columns = 'completion_field = "chosen"\nrejected_field = "rejected"\n[algorithm]\npreset = "dpo"\n'
    config.write_text(config.read_text() + columns)
    assert main(["data", "check", str(config)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"training: {tmp_path}/pairs.jsonl: 1 preference pairs"
    assert "pairs.jsonl:2: expected a completion in 'rejected'" in shown[2]
    assert [line.partition("(")[0] for line in shown if "completion (" in line] == [
        "better completion ",
        "worse completion ",
    ]
    assert [line.partition(": ")[2][:2] for line in shown if "completion (" in line] == ["46", "47"]


def test_flags_change_what_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demonstrations.jsonl").write_text('{"prompt": "12+34=", "sum": "46"}\n')
    config = settings(tmp_path, "another.jsonl")
    flags = ("--data.path", str(tmp_path / "demonstrations.jsonl"), "--data.completion_field", "sum")
    assert main(["data", "check", config, *flags, "--algorithm.loss=cross_entropy"]) == 0
    assert capsys.readouterr().out.startswith(f"training: {tmp_path}/demonstrations.jsonl: 1 demonstrations\n")


def test_counting_the_rows_of_an_epoch_prints_only_the_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demonstrations.jsonl").write_text('{"prompt": "12+34="}\n' * 20)
    config = settings(tmp_path, str(tmp_path / "demonstrations.jsonl"))
    assert main(["sft", config, "--epochs", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("penstock sft: expected at most 10 bad rows in ")


@pytest.mark.parametrize("epochs", ["0", "inf"])
def test_no_pass_over_the_data_is_refused_and_not_trained_as_one_step_and_neither_are_endless_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: str
) -> None:
    (tmp_path / "shown.jsonl").write_text('{"prompt": "12+34=", "completion": "46"}\n')
    config = settings(tmp_path, str(tmp_path / "shown.jsonl"))
    assert main(["sft", config, "--epochs", epochs, f"--run.folder={tmp_path}"]) == 2
    assert f"found {epochs}: change --epochs" in capsys.readouterr().err


COUNTING = """
import sys
from pathlib import Path
from penstock.services.cli.supervised import prepared
made = prepared(Path(sys.argv[1]), sys.argv[2:], 2.5)
print(made.settings.run.steps, sorted({"torch", "transformers", "pyarrow"} & sys.modules.keys()))
"""


def test_the_process_that_lasts_as_long_as_a_supervised_run_imports_no_library_that_reads_its_rows(
    tmp_path: Path,
) -> None:
    """Not even where the tokenizer's own code may need torch. 2.5 passes over 90 rows, which the filter keeps, by 16."""
    (tmp_path / "shown.jsonl").write_text("".join(f'{{"prompt": "{n}+0=", "completion": "{n}"}}\n' for n in range(100)))
    config = settings(tmp_path, str(tmp_path / "shown.jsonl"))
    flags = [f"--run.folder={tmp_path}", "--policy.trust_remote_code=true", "--algorithm.groups_per_step=16"]
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, config, *flags], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "15 []\n"


PINNING = """
import json, sys
from penstock.services.up.hub_revision import pinned
from penstock.shared.errors import SettingsError
shown = [pinned(source, "data.path") for source in sys.argv[1:-1]]
known = ["/a.jsonl", "hf://own/sums@" + "8" * 40 + ":train"]
shown += [pinned(source, "data.path", known) for source in (sys.argv[1], sys.argv[3])]
try:
    pinned(sys.argv[-1], "data.path")
except SettingsError as error:
    shown.append(str(error))
print(json.dumps(shown))
"""


def test_a_run_pins_its_hub_datasets_to_a_commit(tmp_path: Path) -> None:
    sources = ("hf://own/sums:train", "hf://own/sums@main:small/train", f"hf://own/sums@{'7' * 40}:train", "/a.jsonl")
    with hub("own/sums", {"train.jsonl": TRAIN}) as url:
        shown = python(tmp_path, url, "-c", PINNING, *sources, "hf://own/none:train")
    *pins, refusal = json.loads(shown.stdout)
    assert pins == [
        f"hf://own/sums@{COMMIT}:train",
        f"hf://own/sums@{COMMIT}:small/train",
        f"hf://own/sums@{'7' * 40}:train",
        "/a.jsonl",
        f"hf://own/sums@{'8' * 40}:train",  # that of the run that is resumed
        f"hf://own/sums@{'7' * 40}:train",
    ]
    assert refusal.startswith("expected a dataset on the hub at hf://own/none:train, found: ")
    assert refusal.endswith("change data.path, or check HF_ENDPOINT and HF_TOKEN")


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        ({"train.jsonl": b'{"question": "1+1=", "answer": 2}\n' * 9}, "own/sums/train:1: expected a column 'prompt'"),
        ({"validation.jsonl": TRAIN}, "found: Bad split: train"),
        ({"train.jsonl": TRAIN}, ""),
        ({"train.jsonl.tar.gz": archive("train.jsonl", TRAIN)}, ""),  # which the library does not stream
    ],
)
def test_up_reads_the_first_rows_of_a_dataset_on_a_hub_before_it_starts_a_process(
    tmp_path: Path, files: dict[str, bytes], refusal: str
) -> None:
    asked = f"--run.folder={tmp_path}/runs", "--bus.url=redis://127.0.0.1:9", "--data.filter="
    config = settings(tmp_path, "hf://own/sums:train")
    with hub("own/sums", files) as url:
        ended = python(tmp_path, url, "-m", "penstock.services.cli", "up", config, *asked)
    assert ended.returncode == 2
    assert refusal in ended.stderr
    assert ("no Redis or Valkey server answers" in ended.stderr) == (not refusal), "which is checked after the data"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        ([3], ["3: 1 ████████████████████████████████████████"]),
        ([1] * 4 + [2], ["1: 4 ████████████████████████████████████████", "2: 1 ██████████"]),
        ([10, 29], ["10-12: 1 " + "█" * 40, *(f"{at}-{at + 2}: 0" for at in range(13, 26, 3)), "28-30: 1 " + "█" * 40]),
    ],
)
def test_lengths_are_counted_in_ranges(tokens: list[int], rows: list[str]) -> None:
    assert histogram(tokens) == rows


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Check two rows with scorers of a module of the user's; return the exit code and what was printed."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "12+34=", "answer": 46}\n{"prompt": "1+1=", "answer": 2}\n')
    (tmp_path / "mine.py").write_text(
        "def right(completions, answer, **_):\n    return [float(c == str(a)) for c, a in zip(completions, answer)]\n\n"
        "def wrong(completions, **_):\n    return [1.0]\n\n"
        "def picky(completions, answer, **_):\n    return [1 / (a - 2) for a in answer]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)

    def check(*flags: str) -> tuple[int, Any]:
        words = ["data", "check", settings(tmp_path, str(tmp_path / "train.jsonl")), *flags, "--data.filter="]
        return main(words), capsys.readouterr()

    return check


def trl(function: str) -> str:
    return f'--reward.scorers=[{{kind = "trl", functions = ["mine:{function}"]}}, {{kind = "random"}}]'


def test_the_scorers_are_tried_on_answers_and_on_a_trivial_completion(check: Any) -> None:
    code, printed = check(trl("right"))
    assert code == 0, printed.err
    assert "scorer trl: '46' 1, '2' 1, '0' 0, '0' 0" in printed.out.splitlines()
    assert "scorer random: '46' " in printed.out


def test_a_scorer_that_fails_on_every_row_is_refused(check: Any) -> None:
    code, printed = check(trl("wrong"))
    assert code == 2
    assert "expected 2 rewards from the function, one per completion, found 1" in printed.err


def test_a_scorer_that_fails_on_a_row_is_reported(check: Any) -> None:
    code, printed = check(trl("picky"))
    assert code == 1
    assert "train.jsonl:2: picky: ZeroDivisionError" in printed.out


def test_a_function_that_cannot_be_imported_is_refused(check: Any) -> None:
    code, printed = check("--algorithm.loss=nomod:fn")
    assert code == 2
    assert "algorithm.loss = nomod:fn: ModuleNotFoundError" in printed.err
