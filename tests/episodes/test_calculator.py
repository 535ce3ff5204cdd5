"""examples/calculator: a policy that learns when to call a tool."""

import random
from pathlib import Path

import pytest

from examples.arithmetic.make import Problem
from examples.calculator.make import make_rows, pupil
from examples.calculator.measure import measure
from penstock.services.episodes.answers import AnswerParser
from penstock.services.episodes.messages import Message, call
from penstock.services.episodes.renderer import Renderer
from penstock.shared.model.tokenizer import open_tokenizer
from penstock.shared.settings.policy import PolicySettings
from tests.support import forge

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator"
POLICY = EXAMPLE / "policy"


def test_the_warm_start_teaches_calls_as_the_policys_template_and_any_hermes_parser_have_them() -> None:
    tokenizer = open_tokenizer(PolicySettings(model=str(POLICY)))
    rng = random.Random(0)
    turns = next(turns for turns in iter(lambda: pupil(Problem("37*48=", "1776"), rng), None) if len(turns) == 3)
    written = [tokenizer(text)["input_ids"] for _, text in turns]
    assert len(written[0]) == len("37*48") + 3
    parser, renderer = AnswerParser(tokenizer, {}), Renderer(tokenizer)
    answer = parser(renderer.whole([Message("user", "37*48=")], ()), written[0], has_tools=True)
    expression = turns[0][1].partition('"expression": "')[2].partition('"')[0]
    assert answer == Message("assistant", calls=(call("calculator", {"expression": expression}),))
    result = turns[1][1].removeprefix("<|tool|>").partition("<eos>")[0]
    after = renderer.after([Message("user", "37*48="), answer, Message("tool", result)], 2, (), written[0][-1])
    assert after is not None
    assert after.tolist() == written[1]


def test_held_out_products_are_not_trained_on_and_the_rows_are_those_of_the_script() -> None:
    train, heldout = make_rows(0)
    products = {frozenset(row.prompt.removesuffix("=").split("*")) for row in train if "*" in row.prompt}
    held_out = [frozenset(row.prompt.removesuffix("=").split("*")) for row in heldout if "*" in row.prompt]
    assert (len(products), len(held_out), products.intersection(held_out)) == (1000, 200, set())
    assert all(f'"{row.prompt}"' in (EXAMPLE / "heldout.jsonl").read_text() for row in heldout)
    assert (POLICY / "model.safetensors").stat().st_size < 600_000


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_quarter_of_the_demo_doubles_what_is_solved(tmp_path: Path) -> None:
    words = ["examples/calculator/run.toml", "--run.steps=20", "--run.id=run", f"--run.folder={tmp_path}"]
    await forge.up(words, tmp_path / "up.txt")
    before, after = measure(POLICY), measure(tmp_path / "run" / "policy")
    assert before["products, sampled"].success < 0.2
    assert after["products, sampled"].success > 2 * before["products, sampled"].success
    assert after["products, greedy"].calls > after["sums, greedy"].calls
