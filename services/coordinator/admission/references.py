"""References that no answer can equal, found by the answer scorer's own program before the run starts.

A process of its own, because services do not import one another. Whole numbers and decimals need no question. Where the
reward service is not installed, or the process fails or takes too long, the references are not checked.
"""

import importlib.util
import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from penstock.services.coordinator.admission.dataset_files import BadRow
from penstock.shared.settings.rewards.scorers import AnswerScorer

log = logging.getLogger(__name__)

_NEEDED = ("penstock.services.reward", "math_verify")
_LEAST_S, _REFERENCE_S = 60.0, 0.1
"""Of the check, and of each reference."""
_COMMAND = (sys.executable, "-m", "penstock.services.reward.scorers.answer.references")
_NUMBER = re.compile(r"\s*-?[0-9]+(\.[0-9]+)?\s*")


def check(references: Sequence[tuple[AnswerScorer, str]]) -> list[BadRow | None]:
    """Return why each reference is unusable to its scorer; None: it is usable, or was not checked."""
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
    if any(importlib.util.find_spec(module) is None for module in _NEEDED):
        return _unchecked(references, "they are checked where the reward service is installed")
    longest_s, written = max(_LEAST_S, _REFERENCE_S * len(references)), json.dumps(question).encode()
    try:
        done = subprocess.run(_COMMAND, input=written, capture_output=True, check=True, timeout=longest_s)
    except subprocess.TimeoutExpired:
        return _unchecked(references, f"their check took more than {longest_s:.0f} s")
    except subprocess.CalledProcessError as error:
        return _unchecked(references, f"their check failed: {error.stderr.decode(errors='replace')[-500:]}")
    answers: list[str] = json.loads(done.stdout)
    return answers


def _unchecked(references: Sequence[tuple[AnswerScorer, str]], reason: str) -> list[str]:
    log.warning("reference answers are not checked", extra={"reason": reason, "references": len(references)})
    return [""] * len(references)
