"""What is refused beside ``[episodes]``, and when: before a process starts."""

from typing import Any

import pytest

from penstock.shared.settings import Settings

GUESS = {"environment": "my_env:Guess"}
TEACHER = {"name": "large", "model": "acme/large"}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"episodes": {"max_turns": 3}}, "with episodes.max_turns, which has no effect without"),
        ({"episodes": {**GUESS, "agent": "my:run"}}, "with episodes.agent, which calls its own"),
        ({"episodes": {"environment": "my_env"}}, "should match pattern"),
        ({"episodes": GUESS, "reward": {"teachers": [TEACHER]}}, "expected no [[reward.teachers]] with"),
        ({"episodes": GUESS, "run": {"deterministic": "run"}}, 'expected no run.deterministic = "run" with'),
        ({"reward": {"scorers": [{"kind": "environment"}]}}, "expected episodes.environment or episodes.agent with"),
        (
            {"episodes": {"tools": ["my:add"]}, "reward": {"scorers": [{"kind": "environment"}]}},
            "expected episodes.environment or episodes.agent with",
        ),
    ],
)
def test_what_does_not_work_with_episodes_is_refused_by_name(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
        Settings.model_validate(tables)


def test_an_environment_with_tools_and_its_reward_is_accepted() -> None:
    tables = {"episodes": {**GUESS, "tools": ["my:add"]}, "reward": {"scorers": [{"kind": "environment"}]}}
    assert Settings.model_validate(tables).episodes.name == "my_env:Guess"
