"""What is refused beside ``[episodes]``, and when: before a process starts."""

from typing import Any

import pytest

from penstock.shared.settings import Settings

GUESS = {"environment": "my_env:Guess"}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"episodes": {"max_turns": 3}}, "with episodes.max_turns, which has no effect without"),
        ({"episodes": {**GUESS, "agent": "my:run"}}, "expected one of episodes.environment and episodes.agent"),
        (
            {"episodes": {"verifiers": "tcp://a:1", "mcp": ["serve"]}},
            "expected no episodes.mcp with episodes.verifiers",
        ),
        ({"episodes": {"openenv": "example.org"}}, "should match pattern"),
        ({"episodes": {"verifiers": "http://a:1"}}, "should match pattern"),
        ({"episodes": {"environment": "my_env"}}, "should match pattern"),
        ({"episodes": GUESS, "evaluation": {"path": "held.jsonl"}}, "expected no evaluation.path with"),
        ({"episodes": GUESS, "run": {"deterministic": "run"}}, 'expected no run.deterministic = "run" with'),
        (
            {"reward": {"scorers": [{"kind": "environment"}]}},
            "expected episodes.environment, openenv, agent or verifiers with",
        ),
        (
            {"episodes": {"tools": ["my:add"]}, "reward": {"scorers": [{"kind": "environment"}]}},
            "expected episodes.environment, openenv, agent or verifiers with",
        ),
    ],
)
def test_what_does_not_work_with_episodes_is_refused_by_name(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
        Settings.model_validate(tables)


def test_an_environment_with_tools_and_its_reward_is_accepted() -> None:
    tables = {"episodes": {**GUESS, "tools": ["my:add"]}, "reward": {"scorers": [{"kind": "environment"}]}}
    assert Settings.model_validate(tables).episodes.name == "my_env:Guess"
