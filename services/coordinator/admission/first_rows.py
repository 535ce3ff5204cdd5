"""Refuse datasets before a run starts: whose first rows all cannot be used, as with wrong names of columns, or whose prompts
all leave no room for a completion.

The first sentence is that of :func:`dataset.load <penstock.services.coordinator.admission.dataset.load>`, which reads all
rows. Prompts are measured in milliseconds, without a model: by a lower bound of the tokens of their texts, without the chat
template. Replicas refuse each by its exact length.
"""

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.services.coordinator.admission import dataset_files
from penstock.services.coordinator.admission.dataset import (
    SHOWN,
    Dataset,
    Problem,
    check_answer,
    check_loaded,
    read_problem,
)
from penstock.services.coordinator.admission.dataset_files import BadRow, RowFilter, with_messages
from penstock.services.coordinator.admission.demonstrations import CompletionColumns, Kind
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.model.context import own_context, read_config
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.scorers import AnswerScorer
from penstock.shared.settings.run import RunKind

log = logging.getLogger(__name__)

_MEASURED = 200
"""Problems, spread over the data."""
_ASKING = ("system", "developer", "user")
"""Whose messages no template may omit."""
_MERGED = 2
"""Tokens of a text that may merge with what is before and after it."""


def check(settings: Settings) -> bool:
    """Look at each dataset up to its first usable row. Return whether one of these rows asks by chat messages.

    Raises:
        SettingsError: the first ``data.max_bad_rows`` + 1 rows of a dataset are bad, or it cannot be read.
    """
    kind, evaluation = settings.kind, settings.evaluation
    teachers = [teacher.name for teacher in settings.reward.teachers]
    may_show, condition = kind is not RunKind.SAMPLES, settings.data.filter
    ask = [(source, "data.path", settings, may_show, teachers, condition) for source in settings.data.sources]
    sets = [(of.path, evaluation.setting_of(of), settings, not kind.generates) for of in evaluation.held_out]
    return any([*(_asks_by_messages(*each) for each in ask), *(_asks_by_messages(*each) for each in sets)])


def _asks_by_messages(
    source: str, setting: str, settings: Settings, may_show: bool, teachers: Sequence[str] = (), condition: str = ""
) -> bool:
    data, scorers, columns = settings.data, settings.reward.scorers, CompletionColumns(settings)
    names = [scorer.name for scorer in scorers]
    comparing = [scorer for scorer in scorers if isinstance(scorer, AnswerScorer)]
    kind, filtered, bad = Kind(columns), RowFilter(condition), []
    with contextlib.suppress(TemporaryError):  # of a hub, whose rows the coordinator reads
        for name, row in dataset_files.begin(source, setting, max(data.max_bad_rows + 1, SHOWN)):
            try:
                if isinstance(row, BadRow):
                    raise row
                row = with_messages(row, data)
                shown = may_show and kind.is_shown(name, row)
                asked = columns.split(row)[0] if shown else row
                problem = read_problem(name, asked, data, names, teachers=() if shown else teachers)
                if filtered.keeps(row, problem.characters) and not shown:
                    check_answer(problem, data, comparing)
                return problem.messages is not None
            except BadRow as error:
                bad.append(f"{name}: {error}")
        check_loaded(source, data, setting, 0, bad, 0)
    return bool(data.system or data.user)


def long_prompts(settings: Settings, train: Dataset) -> str:
    """Return what to say of prompts that leave no room for a completion; "": no such prompt is known.

    Raises:
        SettingsError: no prompt that was measured has room.
    """
    context = settings.rollout.max_model_len or own_context(read_config(settings.policy.model))
    backend = _backend(settings) if context and settings.kind.generates and not settings.episodes.is_on else None
    if backend is None:
        return ""
    chosen = np.unique(np.linspace(0, len(train) - 1, min(len(train), _MEASURED)).astype(int)).tolist()
    asked = [index for index in chosen if train.problems[index].demonstration is None]
    sources = list(settings.data.sources)
    new_tokens = [settings.sampling.of(sources[train.source_of(index)]).max_new_tokens for index in asked]
    least = [_tokens(backend, train.problems[index]) for index in asked]
    excess = [tokens + new - context for tokens, new in zip(least, new_tokens, strict=True)]
    without = [place for place, over in enumerate(excess) if over > 0]
    if not without:
        return ""
    at = min(without, key=lambda place: excess[place])
    detail = (
        f"the shortest, {train.problems[asked[at]].source}, has at least {least[at]} tokens, of {context - new_tokens[at]} at most (a "
        f"context of {context}, the model's or rollout.vllm.max_model_len, less sampling.max_new_tokens = {new_tokens[at]}): shorten them, "
        "or change one of these settings"
    )
    of = f"{len(asked)} prompts spread over the data"
    if len(without) == len(asked):
        raise SettingsError(f"expected prompts with room for a completion, found none among {of}; {detail}")
    return f"{len(without)} of {of} leave no room for a completion and will be dropped; {detail}, or data.filter"


def _backend(settings: Settings) -> Any:
    """Return the tokenizer's own encoder; None: it is not on this machine, or has none."""
    file = Path(settings.policy.tokenizer_source[1]) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception as error:  # noqa: BLE001 (its library raises no other type; replicas say what is wrong)
        log.info("prompts are not measured", extra={"reason": str(error)})
        return None
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def _tokens(backend: Any, problem: Problem) -> int:
    texts = [problem.text or "", *(turn.content for turn in problem.messages or () if turn.role in _ASKING)]
    encoded = backend.encode_batch_fast([text.strip() for text in texts], add_special_tokens=False)
    return sum(max(0, len(each.ids) - _MERGED) for each in encoded)
