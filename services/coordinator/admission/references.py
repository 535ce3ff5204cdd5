"""References that no answer can equal, found by the answer scorer's own program before the run starts.

A process of its own, because services do not import one another. Whole numbers and decimals need no question.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from services.coordinator.admission.dataset_files import BadRow
from shared.errors import SettingsError
from shared.settings.rewards.scorers import AnswerScorer

_COMMAND = (sys.executable, "-m", "services.reward.scorers.answer.references")
_NUMBER = re.compile(r"\s*-?[0-9]+(\.[0-9]+)?\s*")


def check(references: Sequence[tuple[AnswerScorer, str]]) -> list[BadRow | None]:
    """Return why each reference is unusable to its scorer. Raises SettingsError: the program failed."""
    open_questions = [
        place
        for place, (scorer, text) in enumerate(references)
        if scorer.place == "choice" or not _NUMBER.fullmatch(text)
    ]
    answers = _ask([references[place] for place in open_questions]) if open_questions else []
    reasons: Mapping[int, str] = dict(zip(open_questions, answers, strict=True))
    return [BadRow(reasons[place]) if reasons.get(place) else None for place in range(len(references))]


def _ask(references: Sequence[tuple[AnswerScorer, str]]) -> list[str]:
    scorers = list({scorer.name: scorer for scorer, _ in references}.values())
    names = [scorer.name for scorer in scorers]
    question = {
        "scorers": [scorer.model_dump(mode="json") for scorer in scorers],
        "references": [(names.index(scorer.name), text) for scorer, text in references],
    }
    done = subprocess.run(_COMMAND, input=json.dumps(question).encode(), capture_output=True, check=False)
    if done.returncode:
        raise SettingsError(f"the check of the reference answers failed: {done.stderr.decode(errors='replace')[-500:]}")
    answers: list[str] = json.loads(done.stdout)
    return answers
