"""`penstock data check` of a run with episodes."""

import copy
import dataclasses
from pathlib import Path

import pytest

from penstock.services.cli.__main__ import main
from penstock.services.cli.reports.environment_trial import Trial, template_faults, try_environment
from penstock.services.episodes.renderer import Renderer
from penstock.shared.settings import load
from tests.conftest import PATIENCE_S
from tests.support import builders
from tests.support.chat_tokenizers import CHARACTERS_TEMPLATE, STOP, characters, family

FAULTS: dict[str, list[str]] = {
    "guessing:Guess": [],
    "faulty_environments:Picky": [],
    "faulty_environments:Constant": [],
    "faulty_environments:Hanging": ["Hanging did not answer `call` within 1 s (episodes.tool_s): its episode would be"],
    "faulty_environments:Wrong": [
        "raised AttributeError: 'int' object has no attribute 'text', with arguments of its schema"
    ],
    "faulty_environments:Endless": ["ValueError: expected a finite reward, found inf"],
    "faulty_environments:Scoreless": ["it has no method get_reward"],
    "faulty_environments:Leaking": ["file descriptors after 10 episodes and", "processes after 10 episodes and"],
}
"""One whose texts differ: the last test here."""
LINES = {
    "guessing:Guess": "50 episodes of random calls: rewards of 0 to 1",
    "faulty_environments:Picky": "raised ValueError: not today: the policy reads this as its answer",
    "faulty_environments:Constant": "warning: every reward was 0.5",
}


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_of_an_environment_is_one_sentence(name: str) -> None:
    tool_s = 1 if name.endswith(":Hanging") else PATIENCE_S  # a busy machine may keep others from answering
    flags = [f"--episodes.environment=tests.support.{name}", f"--episodes.tool_s={tool_s}", "--data.path=x"]
    settings = load(None, [*flags, '--reward.scorers=[{kind = "environment"}]'], environment={})
    trial = Trial(settings, [dataclasses.replace(builders.prompt(1, "?"), extra={"secret": 3})])
    await trial.run()
    assert len(trial.faults) == len(FAULTS[name])
    assert all(map(str.__contains__, trial.faults, FAULTS[name]))
    assert LINES.get(name, "") in "\n".join(trial.lines)


TEMPLATES = {
    CHARACTERS_TEMPLATE: [],
    f"{{{{ messages | length }}}}{CHARACTERS_TEMPLATE}": ["each turn is a branch"],
    CHARACTERS_TEMPLATE.replace("m.content", "m.content | upper"): [
        "changes a tool's answer that spells control tokens"
    ],
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_of_the_policy_appends_and_keeps_control_tokens_text(template: str) -> None:
    tokenizer = copy.copy(characters())
    tokenizer.chat_template = template
    faults = template_faults(Renderer(tokenizer), tokenizer, [])
    assert len(faults) == len(TEMPLATES[template])
    assert all(map(str.__contains__, faults, TEMPLATES[template]))


@pytest.mark.parametrize("name", sorted(STOP))
def test_of_templates_of_families_one_rewrites_what_is_before_an_answer_of_a_tool(name: str) -> None:
    faults = template_faults(Renderer(family(name)), family(name), [])
    assert [fault.split(",")[0] for fault in faults] == (
        ["the chat template writes what is before a tool's answer otherwise after it"] if name == "gptoss" else []
    )


def test_the_check_of_a_run_plays_its_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "?", "secret": 1}\n')
    words = ["data", "check", "examples/calculator/run.toml", f"--data.path={tmp_path / 'train.jsonl'}"]
    words.append('--reward.scorers=[{kind = "environment"}]')
    words += ["--reward.expression=environment", "--episodes.environment=tests.support.faulty_environments:Moody"]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "episodes tests.support.faulty_environments:Moody: fault: reset gave" in shown
    assert "for one row, whose episodes are compared" in " ".join(shown.split())


def test_an_agent_elsewhere_is_said_not_to_be_tried(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(None, ["--episodes.agent=http://127.0.0.1:9/run", "--data.path=x"], environment={})
    assert try_environment(settings, [], characters())
    assert "agent http://127.0.0.1:9/run: not tried" in capsys.readouterr().out
