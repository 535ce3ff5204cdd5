"""Dataset: load files into problems, and order them for a run.

One row becomes one :class:`Problem`::

    {"prompt": "12+34=", "answer": "46", "level": 1}   text "12+34=", answer "46", extra {"level": 1}
    {"messages": [{"role": "user", "content": "…"}]}   chat messages

Bad rows are logged and counted, up to ``data.max_bad_rows``. The order is a pure function of seed and cursor.
"""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.services.coordinator.admission import dataset_files, references
from penstock.services.coordinator.admission.conversations import Question, framed, inserted
from penstock.services.coordinator.admission.dataset_files import ANSWER, PROMPT, BadRow, DatasetRow, RowFilter
from penstock.services.coordinator.admission.demonstrations import Demonstration, Demonstrations, Kind
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import ChatMessage, GroupId, Json, Prompt, Sampling
from penstock.shared.errors import MessageError, SettingsError
from penstock.shared.settings import DataSettings
from penstock.shared.settings.rewards.scorers import AnswerScorer

log = logging.getLogger(__name__)

SHOWN = 5
"""Bad rows listed in an error."""
_ANSWERING = ("assistant", "model")
"""The policy's roles in chat templates."""
_PROBE = Sampling(samples=1, max_new_tokens=1, temperature=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    source: str
    """``file:line``, for messages."""
    text: str | None
    messages: tuple[ChatMessage, ...] | None
    answer: str | None
    extra: dict[str, Json]
    scorers: tuple[str, ...] = ()
    """Scorers that apply; empty: all."""
    demonstration: Demonstration | None = None
    teachers: tuple[str, ...] = ()
    row_id: str = dataclasses.field(default="", compare=False)
    """Digest of question, with the columns in ``data.user``, answer and completions: equal rows are the same problem."""

    @property
    def characters(self) -> int:
        return len(self.text or "") + sum(len(turn.content) for turn in self.messages or ())

    def prompt(self, group_id: int, sampling: Sampling) -> Prompt:
        return Prompt(
            group_id=GroupId(group_id),
            problem=self.source,
            sampling=sampling,
            text=self.text,
            messages=self.messages,
            answer=self.answer,
            extra=self.extra,
            scorers=self.scorers,
            teachers=self.teachers,
            row_id=self.row_id,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    problems: tuple[Problem, ...]
    bad_rows: int
    filtered: int = 0
    """Rows that ``data.filter`` dropped."""
    sizes: tuple[int, ...] = ()
    """Problems of each source, if there are several."""
    bad: tuple[str, ...] = ()
    """Why each bad row is bad."""

    def __len__(self) -> int:
        return len(self.problems)

    @property
    def shows(self) -> bool:
        """Whether its first problem is a demonstration, and so all of its source."""
        return self.problems[0].demonstration is not None

    def source_of(self, index: int) -> int:
        """Return which of the sources a problem is of."""
        return int(np.searchsorted(np.cumsum(self.sizes), index, side="right")) if self.sizes else 0


def subset(problems: int, count: int, seed: int) -> list[int]:
    """Up to ``count`` indices, ascending."""
    if count >= problems:
        return list(range(problems))
    chosen = np.random.Generator(np.random.PCG64(seed)).choice(problems, size=count, replace=False)
    return sorted(int(index) for index in chosen)


def rows_to_try(problems: Sequence[Problem], scorers: Sequence[str], each: int = 3) -> list[Prompt]:
    """Return ``each`` prompts per scorer, spread over the data, for a trial; demonstrations are not scored."""
    problems = [problem for problem in problems if problem.demonstration is None]
    chosen: set[int] = set()
    some_name_scorers = any(problem.scorers for problem in problems)
    for name in scorers:
        applying: Sequence[int] = range(len(problems))
        if some_name_scorers:
            applying = [i for i, problem in enumerate(problems) if not problem.scorers or name in problem.scorers]
        last = len(applying) - 1
        chosen.update(applying[round(last * place / max(1, each - 1))] for place in range(each) if applying)
    return [problems[index].prompt(0, _PROBE) for index in sorted(chosen)]


def load(
    source: str | Path,
    data: DataSettings,
    setting: str,
    scorers: Sequence[str] = (),
    comparing: Sequence[AnswerScorer] = (),
    condition: str = "",
    demonstrations: Demonstrations | None = None,
    teachers: Sequence[str] = (),
) -> Dataset:
    """Load the dataset ``source``, a file, folder or name on a hub; ``demonstrations`` reads completions."""
    problems: list[Problem] = []
    bad: list[str] = []
    rows, filtered = RowFilter(condition), 0
    kind = None if demonstrations is None else Kind(demonstrations)
    for name, row in dataset_files.read(str(source), setting):
        try:
            row = row if isinstance(row, BadRow) else dataset_files.with_messages(row, data)
            shown = kind is not None and not isinstance(row, BadRow) and kind.is_shown(name, row)
            problem = read_problem(name, row, data, scorers, demonstrations if shown else None, teachers)
            if not isinstance(row, BadRow) and not rows.keeps(row, problem.characters):
                filtered += 1
                continue
            if problem.demonstration is None:
                check_answer(problem, data, comparing)
            problems.append(problem)
        except BadRow as error:
            bad.append(f"{name}: {error}")
            log.warning("bad row skipped", extra={"row": name, "reason": str(error)})
            if len(bad) > max(data.max_bad_rows, SHOWN - 1):
                break
    problems, unusable = _usable(problems, comparing)
    bad += unusable
    check_loaded(source, data, setting, len(problems), bad, filtered)
    return Dataset(tuple(problems), len(bad), filtered, bad=tuple(bad))


def _usable(problems: list[Problem], comparing: Sequence[AnswerScorer]) -> tuple[list[Problem], list[str]]:
    """Return the problems whose reference an answer can equal, and why the others are bad."""
    asked = [
        (place, scorer)
        for place, problem in enumerate(problems)
        for scorer in _applying(problem, comparing)
        if problem.demonstration is None
    ]
    refusals = references.check([(scorer, problems[place].answer or "") for place, scorer in asked])
    bad = {place: error for (place, _), error in zip(asked, refusals, strict=True) if error is not None}
    sentences = [f"{problems[place].source}: {error}" for place, error in sorted(bad.items())]
    for sentence in sentences:
        log.warning("bad row skipped", extra={"row": sentence.partition(": ")[0], "reason": sentence})
    return [problem for place, problem in enumerate(problems) if place not in bad], sentences


def load_training(
    data: DataSettings,
    scorers: Sequence[str] = (),
    comparing: Sequence[AnswerScorer] = (),
    demonstrations: Demonstrations | None = None,
    teachers: Sequence[str] = (),
) -> Dataset:
    given = (scorers, comparing, data.filter, demonstrations, teachers)
    parts = [load(source, data, "data.path", *given) for source in data.sources]
    if demonstrations is not None and not demonstrations.alone:
        _check_mixture(parts, data)
    if len(parts) == 1:
        return parts[0]
    return Dataset(
        tuple(problem for part in parts for problem in part.problems),
        sum(part.bad_rows for part in parts),
        sum(part.filtered for part in parts),
        tuple(len(part) for part in parts),
        tuple(sentence for part in parts for sentence in part.bad),
    )


def _check_mixture(parts: Sequence[Dataset], data: DataSettings) -> None:
    shown = [part.shows for part in parts]
    if any(shown) and not all(shown):
        return
    kinds, advice = "only demonstrations", 'train them alone by `penstock sft`, or by algorithm.loss = "cross_entropy"'
    if not any(shown):
        kinds, advice = "none", "change data.completion_field, or set algorithm.imitation = 0"
    raise SettingsError(
        f"expected datasets of demonstrations, of which every row has a completion in {data.completion_field!r}, beside others in "
        f"data.path with algorithm.imitation > 0, found {kinds}: {advice}"
    )


def check_loaded(
    source: str | Path, data: DataSettings, setting: str, problems: int, bad: Sequence[str], filtered: int
) -> None:
    if len(bad) > data.max_bad_rows:
        raise SettingsError(_too_many(source, bad, data.max_bad_rows, setting))
    if problems:
        return
    if filtered:
        raise SettingsError(
            f"expected rows of {source} that meet data.filter ({data.filter}), but none of {filtered} does: change data.filter"
        )
    if bad:
        raise SettingsError(
            f"expected at least one usable row in {source}, found {_count(len(bad))}: correct them, or change "
            f"{setting} or the columns in [data]{_or_none(setting)}. The first:\n  " + _first(bad)
        )
    raise SettingsError(f"expected at least one row in {source}, but it has no rows: change {setting}")


def _first(bad: Sequence[str]) -> str:
    """Return the first row of each reason."""
    by_reason: dict[str, str] = {}
    for sentence in bad:
        by_reason.setdefault(sentence.partition(": ")[2], sentence)
    return "\n  ".join(list(by_reason.values())[:SHOWN])


def _count(bad: int) -> str:
    return "a bad one" if bad == 1 else f"{bad} bad ones"


def _too_many(source: str | Path, bad: Sequence[str], limit: int, setting: str) -> str:
    return (
        f"expected at most {limit} bad rows in {source}, found more: correct them, change {setting} or the columns in "
        f"[data], or raise data.max_bad_rows{_or_none(setting)}. The first:\n  " + _first(bad)
    )


def _or_none(setting: str) -> str:
    return "" if setting == "data.path" else ' (a run needs no held-out rows: --evaluation.path "")'


def read_problem(
    source: str,
    row: DatasetRow,
    data: DataSettings,
    scorers: Sequence[str],
    demonstrations: Demonstrations | None = None,
    teachers: Sequence[str] = (),
) -> Problem:
    if isinstance(row, BadRow):
        raise row
    if demonstrations is not None:
        rest, completions = demonstrations.split(row)
        problem = read_problem(source, rest, data, scorers)
        row_id = _row_id(problem.row_id, *(each if isinstance(each, str) else each.learned for each in completions))
        return dataclasses.replace(problem, demonstration=demonstrations.encode(problem, completions), row_id=row_id)
    question = _question(row, data)
    text, messages = framed(question, row, data)
    answer = _answer(given := dataset_files.at(row, data.answer_field), data.answer_field)
    named = {data.prompt_field, dataset_files.MESSAGES, data.scorers_field, data.teacher_field}
    if not isinstance(given, (int, float)):  # a number keeps its type for TRL's functions
        named.add(data.answer_field)
    try:
        extra = {name: dataset_files.plain(value, name) for name, value in row.items() if name not in named}
        problem = Problem(source, text, messages, answer, extra, _names(row, data.scorers_field, scorers, "scorers"))
        if teachers:
            taught_by = _names(row, data.teacher_field, teachers, "teachers")
            if data.teacher_field and not taught_by:
                raise BadRow(
                    f"expected the name of a teacher ({', '.join(teachers)}) in {data.teacher_field!r}, found none"
                )
            problem = dataclasses.replace(problem, teachers=taught_by)
        problem = dataclasses.replace(problem, row_id=_row_id(_asked(*question), answer, *inserted(row, data)))
        wire.decode(wire.encode(problem.prompt(0, _PROBE)), Prompt)  # what no reader takes is bad here, too
    except (ValueError, OverflowError, TypeError, RecursionError, MessageError) as error:
        raise BadRow(f"a value cannot be put into a message: {error}") from error
    return problem


def _row_id(*parts: Json) -> str:
    """Return 16 hexadecimal digits.

    >>> _row_id("12+34=", "46")
    '608ad5339c5ed4d2'
    """
    text = json.dumps(parts, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _asked(text: str | None, messages: tuple[ChatMessage, ...] | None) -> Json:
    return text if messages is None else [[turn.role, turn.content] for turn in messages]


def _question(row: Mapping[str, object], data: DataSettings) -> Question:
    for field in (data.prompt_field, dataset_files.MESSAGES):
        value = row.get(field)
        if isinstance(value, str) and field == data.prompt_field:
            if not value:
                raise BadRow(f"expected text in {field!r}, found an empty one")
            return value, None
        if value is not None:
            return None, tuple(_turns(value, field))
    columns = ", ".join(sorted(repr(name) for name, value in row.items() if value is not None)) or "no column"
    advice = dataset_files.advice(row, [PROMPT] if dataset_files.at(row, data.answer_field) else [PROMPT, ANSWER])
    raise BadRow(
        f"expected a column {data.prompt_field!r} or {dataset_files.MESSAGES!r} that is not null, found {columns}: change "
        f"data.prompt_field{advice}"
    )


def _turns(value: object, field: str) -> Iterator[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"expected text or chat messages in {field!r}, found {_shown(value)}")
    last = ""
    for turn in value:
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadRow(f"expected {{role, content}} as texts in {field!r}, found {_shown(turn)}")
        last = role
        yield ChatMessage(role, content)
    if last.lower() in _ANSWERING:
        raise BadRow(
            f"expected messages that end with the question to the policy, found {last!r} as the last role in "
            f"{field!r}: its text "
            "would be shown to the policy; move the reference answer to the answer's column (data.answer_field), and give a "
            "prefilled answer as finished text in the prompt's column (data.prompt_field); demonstrations are for `penstock sft`"
        )


def _answer(value: object, field: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise BadRow(f"expected text or a number in {field!r}, found {_shown(value)}")


def check_answer(problem: Problem, data: DataSettings, comparing: Sequence[AnswerScorer]) -> None:
    """Raise BadRow if an applicable scorer lacks its reference answer."""
    applying = _applying(problem, comparing)
    if applying and not (problem.answer or "").strip():
        columns = f", beside columns {', '.join(sorted(map(repr, problem.extra)))}" if problem.extra else ""
        shown = "; rows with a completion are for `penstock sft`" if data.completion_field in problem.extra else ""
        shown = shown or dataset_files.advice(problem.extra, [ANSWER])
        raise BadRow(
            f"expected a reference answer in {data.answer_field!r} for scorer {applying[0].name!r}, but it is missing or empty"
            f"{columns}: add it, or change data.answer_field{shown}"
        )


def _applying(problem: Problem, comparing: Sequence[AnswerScorer]) -> list[AnswerScorer]:
    return [scorer for scorer in comparing if not problem.scorers or scorer.name in problem.scorers]


def _names(row: Mapping[str, object], field: str, known: Sequence[str], plural: str) -> tuple[str, ...]:
    value = row.get(field) if field else None
    listed = value.split(",") if isinstance(value, str) else value or []
    names = (
        [name.strip() if isinstance(name, str) else name for name in listed] if isinstance(listed, list) else [listed]
    )
    names = [name for name in names if name != ""]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BadRow(f"expected names of {plural} ({', '.join(known)}) in {field!r}, found {_shown(unknown[0])}")
    return tuple(str(name) for name in dict.fromkeys(names))


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
