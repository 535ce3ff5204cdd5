"""A user's scorer, exact unless the file in ``SPOILED_BY`` says ``same`` (one reward for all), ``differ`` (a reward of
its own for each sample), ``huge`` (rewards whose sum overflows), ``fail`` (raises) or ``wait S`` (S seconds a sample).
"""

import itertools
import os
import time
from pathlib import Path

from penstock.shared.bus.messages import FinishReason, Prompt, Sample

VARIABLE = "SPOILED_BY"
HUGE = 3e38
"""Finite in float32; its double is not."""
_numbers = itertools.count()


def score(sample: Sample, prompt: Prompt) -> float:
    """Return 1 for a right answer that ended by itself, else 0."""
    right = float(sample.text == prompt.answer and sample.finish_reason is not FinishReason.LENGTH)
    match Path(os.environ[VARIABLE]).read_text().split():
        case ["same"]:
            return 0.5
        case ["differ"]:
            return next(_numbers) % 1000 / 1000
        case ["huge"]:
            return right * HUGE
        case ["fail"]:
            raise ZeroDivisionError("the scorer's index is gone")
        case ["wait", seconds]:
            time.sleep(float(seconds))
    return right
