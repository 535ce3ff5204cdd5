"""Refuse datasets whose first rows all cannot be used, as with wrong names of columns, before a run starts.

The sentence is that of :func:`dataset.load <penstock.services.coordinator.admission.dataset.load>`, which reads all rows.
"""

import contextlib
from collections.abc import Sequence

from penstock.services.coordinator.admission import dataset_files
from penstock.services.coordinator.admission.dataset import SHOWN, check_answer, check_loaded, read_problem
from penstock.services.coordinator.admission.dataset_files import BadRow, RowFilter
from penstock.services.coordinator.admission.demonstrations import CompletionColumns, Kind
from penstock.shared.errors import TemporaryError
from penstock.shared.settings import Settings
from penstock.shared.settings.rewards.scorers import AnswerScorer
from penstock.shared.settings.run import RunKind


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
                shown = may_show and kind.is_shown(name, row)
                asked = columns.split(row)[0] if shown else row
                problem = read_problem(name, asked, data, names, teachers=() if shown else teachers)
                if filtered.keeps(row, problem.characters) and not shown:
                    check_answer(problem, data.answer_field, comparing)
                return problem.messages is not None
            except BadRow as error:
                bad.append(f"{name}: {error}")
        check_loaded(source, data, setting, 0, bad, 0)
    return bool(data.system)
