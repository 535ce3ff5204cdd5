"""`penstock chat`, `penstock eval` and `penstock push` on a run's files."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.offline.policy import StoredPolicy
from penstock.shared.errors import SettingsError
from penstock.shared.settings import Settings, dump, load
from tests.chaos import episodes
from tests.support.hub_uploads import hub

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of the arithmetic example that was stopped after three steps, without a checkpoint."""
    monkeypatch.chdir(ROOT)
    settings = load(Path("config/arithmetic.toml"), ["--run.id=mine", f"--run.folder={tmp_path}"], environment={})
    folder = tmp_path / "mine"
    folder.mkdir()
    dump(settings, folder / "settings.toml")
    lines = [{"entry": f"{n}-0", "step": n, "version": n, "reward_mean": n / 8, "entropy": 0.5} for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "summary.json").write_text(
        json.dumps({"groups_admitted": 9, "counts": {"trained": 6, "dropped:stale": 3}})
    )
    return folder


def test_a_stored_version_answers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", str(run), "--version", "0", "--plain", "--temperature", "0"]
    assert main([*words, "--ask", "12+34="]) == 0
    assert capsys.readouterr().out == "46\n"
    assert main([*words, "--ask", "12+34=", "--json", "--max-new-tokens", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"text": "4", "tokens": 1, "finish_reason": "length", "versions": [0]}


def test_a_stored_version_is_asked_and_evaluated_by_the_sampling_of_the_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load(run / "settings.toml", environment={})
    stopping = settings.sampling.model_copy(update={"stop": ("4",)})
    policy = StoredPolicy(settings.model_copy(update={"sampling": stopping}), 0)
    (completion,) = policy.generate("12+34=", temperature=0.0)
    assert (completion.text, completion.finish_reason) == ("4", "stop")
    path = run / "one.jsonl"
    path.write_text('{"prompt": "12+34=", "answer": "46"}\n{"question": "1+1="}\n')
    words = ["eval", str(run), "--version", "0", "--evaluation.path", str(path), "--json"]
    correct = []
    for flags in ([], ['--sampling.stop=["4"]']):
        assert main([*words, *flags]) == 0
        printed = capsys.readouterr()
        correct.append(json.loads(printed.out)[0]["correct"])
        assert printed.err.splitlines() == [
            f"held out heldout: {path}: 1 problems, 1 bad rows",
            "  bad row one.jsonl:2: expected a column 'prompt' or 'messages' that is not null, found 'question': change data.prompt_field, such as --data.prompt_field question",
        ]
    assert correct == [1, 0]


def test_a_conversation_is_read_by_lines_and_a_refused_one_ends_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("12+34=\n\n" + "9" * 2000 + "\n1+1=\n"))
    assert main(["chat", str(run), "--version", "0", "--plain", "--temperature", "0"]) == 1, "a line was refused"
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "46"
    assert len(printed.out.splitlines()) == 2
    assert "penstock chat: expected a prompt of at most" in printed.err


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["chat", "RUN", "--version", "0", "--ask", "hi"], 1, "chat: the policy has no chat template: add --plain,"),
        (["chat", "RUN", "--version", "x", "--ask", "hi"], 2, "expected a version's number or latest, found 'x'"),
        (["chat", "RUN", "--ask", "hi"], 1, "has no snapshot and no checkpoint"),
        (["chat", "nowhere", "--ask", "hi"], 2, "no run's folder or settings file at nowhere"),
        (["eval", "nowhere.toml"], 2, "no settings file at nowhere.toml"),
        (["eval", "config/arithmetic.toml", "--version", "3"], 2, "--version is for a run's folder"),
        (["eval", "examples/trl/run.toml"], 2, "there is no held-out set: set evaluation.path"),
        (
            ["eval", "RUN", "--version", "0", "--episodes.tools", '["json:none"]'],
            2,
            "expected a tokenizer with a chat template",
        ),
        (["eval", "RUN", "--version", "7", "--evaluation.path="], 2, "there is no held-out set: set evaluation.path"),
        (["eval", "RUN", "--version", "7"], 1, "there are no weights of version 7"),
        (["push", "mine", "RUN"], 2, "and '.', found 'mine'"),
        (["push", "a b/c", "RUN"], 2, "each of letters, digits, '-', '_' and '.', found 'a b/c'"),
        (["push", "me/mine", "RUN", "--version", "0", "--adapter"], 1, "has no adapter (policy.lora.rank = 0)"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    run: Path, words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run) if word == "RUN" else word for word in words]) == code
    assert sentence in capsys.readouterr().err


def test_an_evaluation_without_a_run_counts_what_the_policy_answers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--version", "0", "--problems", "30", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    policy = StoredPolicy(load(run / "settings.toml", environment={}), 0)
    rows = [json.loads(line) for line in Path("examples/arithmetic/heldout.jsonl").read_text().splitlines()]
    assert main(["eval", str(run), "--version", "0", "--evaluation.path", _first(rows, run), "--json"]) == 0
    (first,) = json.loads(capsys.readouterr().out)
    right = [policy.generate(row["prompt"], temperature=0.0)[0].text == row["answer"] for row in rows[:20]]
    assert (first["problems"], first["answered"], first["correct"]) == (20, 20, sum(right))
    assert (result["set"], result["problems"], result["answered"], result["note"]) == ("heldout", 30, 30, "")
    assert result["accuracy"] == result["correct"] / 30


def test_an_evaluation_without_a_run_ends_at_the_same_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run), "--version", "0", "--problems", "20", "--json"]
    digits = '["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]'
    assert main([*words, "--sampling.stop", digits]) == 0
    (stopped,) = json.loads(capsys.readouterr().out)
    assert (stopped["answered"], stopped["correct"]) == (20, 0)


def played(folder: Path, *flags: str, secrets: Sequence[int] = (3, 7, 11)) -> list[str]:
    """Return the words that evaluate a policy of random weights on episodes."""
    values = episodes.flags(folder)
    rows = [{"prompt": "?", "secret": secret, "folder": str(folder)} for secret in secrets]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"policy.model": values["policy.model"], "data.path": values["data.path"], "episodes.setup_s": 600}
    given = [f"--{name}={value}" for name, value in own.items()]
    path = str(folder / "heldout.jsonl")
    return [
        "eval",
        episodes.CONFIG,
        *given,
        "--evaluation.path",
        path,
        *("--evaluation.samples=2", "--evaluation.temperature=1"),
        *flags,
    ]


def test_an_evaluation_without_a_run_plays_the_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, results = played(tmp_path, "--json"), list[dict[str, Any]]()
    capsys.readouterr()  # of DeepSpeed, when the policy was written
    for agent in ("", "tests.support.guessing:recording_agent", ""):
        flags = ["--episodes.environment=", f"--episodes.agent={agent}"] if agent else []
        assert main([*words, *flags]) == 0
        (result,) = json.loads(capsys.readouterr().out)
        results.append({**result, "seconds": 0.0, "started_at_s": 0.0})
        assert (result["problems"], result["answered"], result["samples"], result["note"]) == (3, 3, 2, "")
        assert 1 <= result["turns"] <= 4
        assert result["calls"] <= result["turns"]
        assert sum(result["ended"].values()) == pytest.approx(1.0)
    of_environment, of_agent, again = results
    assert of_agent["ended"] == {"agent": 1.0}
    assert again == of_environment


def test_an_evaluation_without_a_run_says_which_episodes_it_could_not_play(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trouble = "--episodes.environment=tests.support.guessing:Trouble"  # -5 has no finite reward
    words = played(tmp_path, trouble, "--json", secrets=(-5, 3))
    capsys.readouterr()
    assert main(words) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["problems"], result["answered"]) == (2, 1)
    assert "expected a finite reward, found nan" in result["note"]


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"max_new_tokens": -1}, {"temperature": -1.0}, {"temperature": float("nan")}])  # fmt: skip
def test_a_stored_policy_refuses_what_cannot_be_sampled(run: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="samples and max_new_tokens must be at least 1"):
        StoredPolicy(load(run / "settings.toml", environment={}), 0).generate("1+1=", **wrong)


def _first(rows: list[dict[str, str]], run: Path) -> str:
    path = run / "first.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:20]))
    return str(path)


def test_a_problem_that_cannot_be_generated_is_counted_as_unanswered(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "long.jsonl"
    path.write_text(json.dumps({"prompt": "9" * 2000, "answer": "1"}) + '\n{"prompt": "1+1=", "answer": "no"}\n')
    assert main(["eval", str(run), "--version", "0", "--evaluation.path", str(path), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["problems"], result["answered"], result["correct"], result["accuracy"]) == (2, 1, 0, 0.0)
    assert result["note"].startswith("1 of 2 problems are without an answer (expected a prompt of at most")


def test_a_pushed_policy_comes_with_settings_curves_and_ledger(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with hub() as kept:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", kept.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        assert main(["push", "me/mine", str(run), "--version", "0"]) == 1
        assert "give a token that may write by HF_TOKEN" in capsys.readouterr().err
        assert kept.files == {}
        monkeypatch.setenv("HF_TOKEN", "right")
        assert main(["push", "me/mine", str(run), "--version", "0", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "version": 0,
            "step": 0,
            "url": f"{kept.url}/me/mine/commit/{'5' * 40}",
        }
        kept.repositories["me/open"] = False
        assert main(["push", "me/open", str(run), "--version", "0"]) == 2
        assert "me/open is public on" in capsys.readouterr().err
        assert main(["push", "me/new", str(run), "--version", "0", "--public"]) == 0
    assert kept.repositories == {"me/mine": True, "me/open": False, "me/new": False}
    assert kept.commits == [("me/mine", "Version 0 of run mine"), ("me/new", "Version 0 of run mine")]
    assert kept.files["model.safetensors"] == (ROOT / "examples/arithmetic/policy/model.safetensors").read_bytes()
    assert kept.files["penstock/metrics.jsonl"] == (run / "metrics.jsonl").read_bytes()
    card = kept.files["README.md"].decode()
    assert "| dropped:stale | 3 |" in card
    assert 'expression = "answer"' in card
    assert str(run.parent) not in card


def test_the_curves_of_a_card_end_at_its_step(run: Path) -> None:
    from penstock.services.cli.policy.card import card

    settings = load(run / "settings.toml", environment={})
    text = card(settings, 2, 2)
    assert "| step | reward_mean | entropy |" in text, "no empty columns"
    assert "| 1 | 0.125 | 0.5 |" in text
    assert "| 2 | 0.25 | 0.5 |" in text
    assert "| 3 | 0.375" not in text


@pytest.mark.parametrize(
    ("changed", "tag", "method"),
    [
        ({"loss": "cross_entropy"}, "sft", "supervised fine-tuning on demonstrations (SFT)"),
        ({"preset": "dpo"}, "dpo", "direct preference optimization on given pairs (DPO)"),
        ({}, "reinforcement-learning", "grpo"),
    ],
)
def test_a_card_says_what_trained_the_policy(run: Path, changed: dict[str, str], tag: str, method: str) -> None:
    from penstock.services.cli.policy.card import card

    data = (
        {"data": {"path": "x.jsonl", "rejected_field": "worse", "completion_field": "better"}} if tag == "dpo" else {}
    )
    more = {"run": {"id": run.name, "folder": run.parent}, "algorithm": changed, **data}
    line = {"step": 1, "loss": 0.25, "evaluation_loss": 0.5, "lag_mean": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    text = card(Settings.model_validate(more), 1, 1)
    assert f"tags: [penstock, {tag}]" in text
    assert f"({method})." in text
    assert ("| step | loss | evaluation_loss |" in text) == (tag != "reinforcement-learning")
    assert "reward_mean" not in text
    assert ("[sampling]" in text, "[reward]" in text) == (False, False)
