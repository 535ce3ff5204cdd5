"""Whether references can be matched at all: the program that the coordinator asks while it reads the data.

::

    {"scorers": [{"kind": "answer", …}], "references": [[0, "4"], [0, "see above"]]}  ──▶  ["", "expected …"]

A reference is usable if a completion that writes it where the scorer looks, without dollar signs, has the value 1.
"""

import asyncio
import json
import sys
from collections.abc import Sequence

from penstock.services.reward.scorers.answer.scorer import AnswerMatcher
from penstock.shared.errors import PermanentError
from penstock.shared.settings.rewards.scorers import AnswerScorer


def refusals(scorer: AnswerScorer, references: Sequence[str]) -> list[str]:
    """Return why each reference is unusable, "" if it is not."""
    return asyncio.run(_refusals(scorer, references))


async def _refusals(scorer: AnswerScorer, references: Sequence[str]) -> list[str]:
    if scorer.preset == "math-verify":  # whose verdict on a reference takes a process and a few milliseconds
        return [""] * len(references)
    matcher = AnswerMatcher(scorer)
    try:
        return [await _refusal(matcher, reference) for reference in references]
    finally:
        await matcher.close()


async def _refusal(matcher: AnswerMatcher, reference: str) -> str:
    try:
        expected = matcher.reference(reference)
    except PermanentError as error:
        return str(error)
    if await matcher.matches_itself(expected):
        return ""
    return (
        f"expected a reference that an answer can equal, found {expected[:80]!r}, which does not even equal itself: "
        "write one value, list or formula"
    )


def main() -> None:
    question = json.load(sys.stdin)
    scorers = [AnswerScorer.model_validate(scorer) for scorer in question["scorers"]]
    answers = [""] * len(question["references"])
    for place, scorer in enumerate(scorers):
        asked = [index for index, (of, _) in enumerate(question["references"]) if of == place]
        refused = refusals(scorer, [question["references"][index][1] for index in asked])
        for index, refusal in zip(asked, refused, strict=True):
            answers[index] = refusal
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
