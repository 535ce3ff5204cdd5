"""Record the tokens of a step's last group, for people to read: texts, logprobs of engine and trainer, versions."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.shared.bus.messages import Experience, Float32Array, PolicyVersion, Purpose, Sample
from penstock.shared.errors import SettingsError
from penstock.shared.files.token_records import TokenValues, write_record
from penstock.shared.model.tokenizer import Tokenizer, open_tokenizer
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

_DECIMALS = 4
_LONGEST = 8
"""Tokens of one character, at most; more of them are no text."""


class TokenRecorder:
    """Rank 0's, on the training thread. What cannot be recorded is skipped: training never waits for it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tokenizer: Tokenizer | None = None
        self._is_opened = False

    def record(self, version: PolicyVersion, experience: Experience, logprobs: Mapping[int, Float32Array]) -> None:
        """Record a group. ``logprobs``: the trainer's, by the sample's index; NaN where a token was not trained."""
        group = experience.group
        drawn = group.prompt.purpose is not Purpose.DEMONSTRATE
        try:
            values = [
                _values(sample, self._texts(sample), logprobs.get(index), drawn=drawn)
                for index, sample in enumerate(group.samples)
            ]
            write_record(self._settings.run_folder, version, group.group_id, values)
        except (OSError, ValueError) as error:
            log.warning("a group's tokens are not recorded", extra={"group": group.group_id, "error": str(error)})

    def _texts(self, sample: Sample) -> list[str] | None:
        if not self._is_opened:
            self._is_opened = True
            try:
                self._tokenizer = open_tokenizer(self._settings.policy)
            except SettingsError as error:
                log.info("tokens are recorded without texts", extra={"detail": str(error)})
        if self._tokenizer is None:
            return None
        try:
            parts = np.split(sample.token_ids, sample.segments[1:, 0])
            return [text for part in parts for text in token_texts(self._tokenizer, part.tolist())]
        except Exception as error:  # noqa: BLE001 (whatever a tokenizer raises on what a model writes)
            log.warning("tokens are recorded without texts", extra={"error": str(error)})
            return None


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; "" for a token whose character the next one completes."""
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return tokenizer.batch_decode([[token_id] for token_id in token_ids], skip_special_tokens=False)
    from tokenizers.decoders import DecodeStream

    stream, texts, waiting = DecodeStream(skip_special_tokens=False), list[str](), list[int]()
    for token_id in token_ids:
        try:
            text = stream.step(fast, token_id)
        except Exception:  # noqa: BLE001 ("Invalid prefix encountered", from which a stream does not recover)
            stream = DecodeStream(skip_special_tokens=False)
            text = stream.step(fast, token_id)
        waiting = [] if text else [*waiting, token_id]
        if len(waiting) == _LONGEST:  # a stream decodes all that waits with each token
            text = fast.decode(waiting, skip_special_tokens=False)
            stream, waiting = DecodeStream(skip_special_tokens=False), []
        texts.append(text or "")
    return texts


def _values(sample: Sample, texts: list[str] | None, trained: Float32Array | None, *, drawn: bool) -> TokenValues:
    known = sample.sampled if drawn else np.zeros(len(sample.token_ids), np.bool_)
    return {
        "ids": sample.token_ids.tolist(),
        "texts": texts,
        "logprobs": _rounded(np.where(known, sample.behavior_logprobs, np.float32(np.nan))),
        "trainer_logprobs": [None] * len(sample.token_ids) if trained is None else _rounded(trained),
        "versions": sample.token_versions.tolist(),
    }


def _rounded(values: Float32Array) -> list[float | None]:
    finite = np.isfinite(values).tolist()
    rounded = np.round(values.astype(np.float64), _DECIMALS).tolist()
    return [value if known else None for value, known in zip(rounded, finite, strict=True)]
