"""``penstock data check``: show what a run will be trained on, before it starts.

::

    rows ──▶ bad, filtered, used ──▶ in training order ──▶ rendered with special tokens ──▶ lengths in tokens
                                                      └──▶ a few scored by each scorer, and played by the environment
"""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from penstock.services.cli.reports.environment_trial import try_environment
from penstock.services.cli.reports.scorer_trial import try_scorers
from penstock.services.coordinator.admission.dataset import Dataset, Problem
from penstock.services.coordinator.data import Data, load_data, order_of
from penstock.services.up.display import console
from penstock.services.up.requirements import functions_checked
from penstock.shared.bus.messages import Int32Array, Sampling
from penstock.shared.errors import PermanentError
from penstock.shared.model.context import check_context
from penstock.shared.model.model_source import check_tokenizer
from penstock.shared.model.tokenizer import (
    Limits,
    Tokenizer,
    TokenizerCodec,
    check_stop_texts,
    open_tokenizer,
)
from penstock.shared.settings import Settings
from penstock.shared.settings.evaluation import HeldOutSet
from penstock.shared.text.terminal import escaped_line

_MOST_MEASURED = 5_000
"""Problems whose length is measured, spread over the data."""
_BINS = 8
_BAR = 40
_LONGEST_PROMPT = 2_000
_UNFRAMED = (
    "note: prompts are texts, to which the model's chat template is not applied: to ask as in a chat, set data.user, such as "
    """--data.user "{prompt} Put the answer in \\boxed{}.", or data.system, or give messages in data.prompt_field"""
)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLengths:
    tokens: Sequence[int]
    refused: Sequence[str]
    """Why prompts cannot be generated."""
    completions: Sequence[int] = ()
    """Of the same rows, if these are demonstrations or pairs."""


def check(settings: Settings, shown: int) -> bool:
    """Print the report; return whether every measured prompt can be generated and scored. Raises SettingsError."""
    logging.getLogger("penstock.services").addHandler(logging.NullHandler())  # the report names the bad rows
    with functions_checked(settings):
        data, tokenizer, codec = _opened(settings)
    check_stop_texts(tokenizer, settings.sampling, settings.reward.markers)
    _say_counts(settings, data.train)
    for held_set, problems in data.held_out:
        console.say(held_out_rows(held_set, problems))
    order = order_of(settings, data.train)
    for place in range(min(shown, len(data.train))):
        _say_prompt(place, data.train.problems[order.index(place)], settings, codec, tokenizer)
    asked = data.train.problems[order.index(0)].text
    if asked is not None and codec.is_unframed(asked):
        console.say(f"\n{_UNFRAMED}")
    lengths = measure(data.train.problems, settings, codec)
    _say_lengths(lengths, len(data.train))
    for notice in data.notices:
        console.say(f"\n{notice.level}: {notice.text}")
    scored = not settings.kind.generates or try_scorers(settings, data.train.problems)
    played = not settings.episodes.is_on or try_environment(settings, data.train.problems, tokenizer)
    return scored and played and not lengths.refused


def _opened(settings: Settings) -> tuple[Data, Tokenizer, TokenizerCodec]:
    check_context(settings)
    check_tokenizer(*settings.policy.tokenizer_source, for_messages=False)  # before the data, which may take minutes
    data = load_data(settings)
    tokenizer = open_tokenizer(settings.policy)
    limits = Limits.of(settings)
    return data, tokenizer, TokenizerCodec(tokenizer, limits, settings.data.chat_template, settings.reward)


def prompt_lengths(settings: Settings) -> PromptLengths:
    """Return what :func:`check` says about lengths, and those of completions. Raises SettingsError."""
    logging.getLogger("penstock.services").addHandler(logging.NullHandler())
    data, _, codec = _opened(settings)
    return measure(data.train.problems, settings, codec)


def measure(problems: Sequence[Problem], settings: Settings, codec: TokenizerCodec) -> PromptLengths:
    chosen = np.unique(np.linspace(0, len(problems) - 1, min(len(problems), _MOST_MEASURED)).astype(int))
    tokens, refused, completions = [], [], list[int]()
    for index in chosen:
        try:
            tokens.append(len(_prompt_ids(problems[index], settings, codec)))
        except PermanentError as error:
            refused.append(str(error))
        if (shown := problems[index].demonstration) is not None:
            completions += [len(each.token_ids) for each in shown.completions]
    return PromptLengths(tokens, refused, completions)


def histogram(tokens: Sequence[int]) -> list[str]:
    """Return a line for each range of lengths.

    >>> histogram([1, 1, 2])
    ['1: 2 ████████████████████████████████████████', '2: 1 ████████████████████']
    """
    least, most = min(tokens), max(tokens)
    width = max(1, -(-(most - least + 1) // _BINS))
    counts = np.bincount((np.array(tokens) - least) // width)
    starts = [least + width * index for index in range(len(counts))]
    names = [f"{start}-{start + width - 1}" if width > 1 else str(start) for start in starts]
    wide, digits = max(map(len, names)), len(str(counts.max()))
    return [
        f"{name:>{wide}}: {count:>{digits}} {'█' * -(-int(count) * _BAR // int(counts.max()))}".rstrip()
        for name, count in zip(names, counts, strict=True)
    ]


def _prompt_ids(problem: Problem, settings: Settings, codec: TokenizerCodec) -> Int32Array:
    if problem.demonstration is not None:
        return problem.demonstration.prompt_token_ids
    return codec.encode(problem.prompt(0, Sampling(1, settings.sampling.max_new_tokens, settings.sampling.temperature)))


def _say_counts(settings: Settings, train: Dataset) -> None:
    sizes = train.sizes or (len(train),)
    whole = sum(settings.data.sources.values())
    end = 0
    for (source, weight), size in zip(settings.data.sources.items(), sizes, strict=True):
        end += size
        share = f", {weight / whole:.1%} of the draws" if train.sizes else ""
        shown = train.problems[end - 1].demonstration
        kind = "problems" if shown is None else "demonstrations" if shown.rejected is None else "preference pairs"
        console.say(f"training: {source}: {size} {kind}{share}")
    filtered = f", {train.filtered} rows left out by data.filter" if settings.data.filter else ""
    console.say("\n".join([f"training: {len(train)} problems, {train.bad_rows} bad rows{filtered}", *_bad(train)]))


def held_out_rows(held_set: HeldOutSet, problems: Dataset) -> str:
    """Return the counts of a held-out set's rows, and why each bad one is bad."""
    counts = f"{len(problems)} problems, {problems.bad_rows} bad rows"
    return "\n".join([f"held out {held_set.name}: {held_set.path}: {counts}", *_bad(problems)])


def _bad(problems: Dataset) -> list[str]:
    return [f"  bad row {escaped_line(sentence)}" for sentence in problems.bad]


def _say_prompt(place: int, problem: Problem, settings: Settings, codec: TokenizerCodec, tokenizer: Tokenizer) -> None:
    try:
        token_ids = _prompt_ids(problem, settings, codec)
    except PermanentError as error:
        console.say(f"\nprompt {place + 1}: cannot be generated: {error}")
        return
    (text,) = tokenizer.batch_decode([token_ids.tolist()], skip_special_tokens=False)
    cut = "…" if len(text) > _LONGEST_PROMPT else ""
    console.say(f"\nprompt {place + 1} ({problem.source}, {len(token_ids)} tokens, answer {problem.answer!r}):")
    console.say(f"{text[:_LONGEST_PROMPT]}{cut}")
    if (shown := problem.demonstration) is not None:
        names = ("completion",) if shown.rejected is None else ("better completion", "worse completion")
        for name, completion in zip(names, shown.completions, strict=True):
            (text,) = tokenizer.batch_decode([completion.token_ids.tolist()], skip_special_tokens=False)
            console.say(f"{name} ({len(completion.token_ids)} tokens): {text[:_LONGEST_PROMPT]}")
            for first, last, is_sampled in completion.spans if len(completion.segments) else ():
                (text,) = tokenizer.batch_decode([completion.token_ids[first:last].tolist()], skip_special_tokens=False)
                console.say(
                    f"  {'trained' if is_sampled else 'given'} ({last - first} tokens): {text[:_LONGEST_PROMPT]!r}"
                )


def _say_lengths(lengths: PromptLengths, problems: int) -> None:
    measured = len(lengths.tokens) + len(lengths.refused)
    of = "" if measured == problems else f" of {measured} prompts, spread over the data"
    if lengths.tokens:
        mean = sum(lengths.tokens) / len(lengths.tokens)
        console.say(f"\nprompt tokens{of}: mean {mean:.1f}, longest {max(lengths.tokens)}")
        for line in histogram(lengths.tokens):
            console.say(f"  {line}")
    if lengths.refused:
        console.say(f"\n{len(lengths.refused)} of {measured} prompts cannot be generated. The first:")
        for sentence in lengths.refused[:5]:
            console.say(f"  {escaped_line(sentence)}")
