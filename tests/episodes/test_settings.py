"""What is refused beside ``[episodes]``, and when: before a process starts."""

import subprocess
import sys
from typing import Any

import pytest

from penstock.shared.settings import Settings

GUESS = {"environment": "my_env:Guess"}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"episodes": {"max_turns": 3}}, "with episodes.max_turns, which has no effect without"),
        ({"episodes": {**GUESS, "agent": "my:run"}}, "expected no episodes.environment with episodes.agent"),
        ({"episodes": {"agent": "http://user:key@h/run"}}, "should match pattern"),
        ({"episodes": {"agent": "ftp://h/run"}}, "should match pattern"),
        (
            {"episodes": {"agent": "http://agents:8000/run"}},
            "in episodes.listen that the agent at agents can reach, found '127.0.0.1:0'",
        ),
        ({"episodes": {"agent": "tcp://a:1", "mcp": ["serve"]}}, "expected no episodes.mcp with episodes.agent"),
        ({"episodes": {"agent": "my:run", "executor": "stdlib"}}, "expected no episodes.executor with episodes.agent"),
        ({"episodes": {"environment": "example.org"}}, "should match pattern"),
        ({"episodes": {"agent": "tcp://a"}}, "should match pattern"),
        ({"episodes": {"environment": "my_env"}}, "should match pattern"),
        ({"episodes": GUESS, "run": {"deterministic": "run"}}, 'expected no run.deterministic = "run" with'),
        (
            {"reward": {"scorers": [{"kind": "environment"}]}},
            "expected episodes.environment or episodes.agent with",
        ),
        (
            {"episodes": {"tools": ["my:add"]}, "reward": {"scorers": [{"kind": "environment"}]}},
            "expected episodes.environment or episodes.agent with",
        ),
    ],
)
def test_what_does_not_work_with_episodes_is_refused_by_name(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
        Settings.model_validate(tables)


def test_an_agent_here_or_that_reaches_the_endpoint_is_accepted() -> None:
    for agent, listen in (("http://localhost:8000", "127.0.0.1:0"), ("https://agents/run", "trainer.local:8001")):
        Settings.model_validate({"episodes": {"agent": agent, "listen": listen}})


def test_an_environment_with_tools_and_its_reward_is_accepted() -> None:
    tables = {"episodes": {**GUESS, "tools": ["my:add"]}, "reward": {"scorers": [{"kind": "environment"}]}}
    assert Settings.model_validate(tables).episodes.name == "my_env:Guess"


def test_a_tool_of_the_executors_needs_one_with_its_profile() -> None:
    made = Settings.model_validate({"episodes": {"executor": "numpy"}})
    assert (made.episodes.name, made.needs_executor, made.executor_profiles) == ("python", True, ("numpy",))
    assert not Settings.model_validate({"episodes": {"tools": ["my:add"]}}).needs_executor


_READING = """
import logging, sys
from penstock.services.episodes.drivers.child import Code
from examples.calculator.calculator import Calculator
named = dict.fromkeys(("environment", "mcp", "agent"), "")
code = Code({**named, "environment": "examples.calculator.calculator:Calculator", "tools": []})
schemas = code.schemas()
assert "torch" not in sys.modules
from transformers import utils
assert schemas == [utils.get_json_schema(Calculator().calculator)]
assert "torch" in sys.modules
assert len(logging.getLogger("transformers").handlers) == 1
"""


def test_signatures_are_read_without_torch_and_what_is_imported_later_of_transformers_is_whole() -> None:
    subprocess.run([sys.executable, "-c", _READING], check=True)
