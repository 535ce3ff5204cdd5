"""vLLM's route for token ids, ``/inference/v1/generate``: what an agent renders itself continues the turns whose ids it repeats."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.services.episodes.episode import Answer
from penstock.services.episodes.http.dialect import MOST_ANSWERS, BadRequest, Question, check, count, of, stops, tokens
from penstock.shared.bus.messages import FinishReason, Int32Array

_REFUSED = ("structured_outputs", "allowed_token_ids", "bad_words", "prompt_logprobs")
_IGNORED = ("stop_token_ids", "min_tokens", "min_p", "repetition_penalty", "ignore_eos")
_LARGEST_ID = (1 << 31) - 1


class Tokens:
    def read(self, body: Mapping[str, Any]) -> Question:
        sampling: Mapping[str, Any] = of(dict, body, "sampling_params", {})
        check({**sampling, "logprobs": None}, _REFUSED, _IGNORED)
        check(body, ("features", "content_parts"), ("cache_salt", "priority"))
        if body.get("output_mode", "tokens") != "tokens":
            raise BadRequest('expected output_mode "tokens", found another: leave it out')
        return Question(
            (),
            max_tokens=count(sampling, "max_tokens"),
            stop=stops(sampling.get("stop")),
            answers=count(sampling, "n", most=MOST_ANSWERS) or 1,
            stream=of(bool, body, "stream", False),
            token_ids=_token_ids(body.get("token_ids")),
        )

    def write(self, answers: Sequence[Answer], model: str) -> dict[str, Any]:
        asked, answered = tokens(answers)
        return {
            "request_id": uuid.uuid4().hex,
            "model": model,
            "choices": [_choice(place, answer) for place, answer in enumerate(answers)],
            "usage": {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered},
        }

    def stream(self, answers: Sequence[Answer], model: str) -> Iterator[tuple[str, Any]]:
        yield "", self.write(answers, model)
        yield "", None


def _token_ids(value: Any) -> Int32Array:
    if not isinstance(value, list) or not value:
        raise BadRequest("expected a list of token ids as token_ids, found none")
    if not all(type(each) is int and 0 <= each <= _LARGEST_ID for each in value):
        raise BadRequest("expected token ids of at least 0 as token_ids, found others")
    return np.array(value, dtype=np.int32)


def _choice(place: int, answer: Answer) -> dict[str, Any]:
    drawn = answer.drawn
    token_ids: list[int] = drawn.token_ids.tolist()
    ends = [*drawn.version_spans[1:, 0].tolist(), len(token_ids)]
    return {
        "index": place,
        "finish_reason": "length" if drawn.finish_reason is FinishReason.LENGTH else "stop",
        "stop_reason": answer.stopped or None,
        "token_ids": token_ids,
        "logprobs": {
            "content": [  # vLLM names a token in two ways, by its version
                {"token_id": token_id, "token": f"token_id:{token_id}", "logprob": logprob}
                for token_id, logprob in zip(token_ids, drawn.logprobs.tolist(), strict=True)
            ]
        },
        "weight_versions": [
            {"version": str(version), "start": start, "end": end}
            for (start, version), end in zip(drawn.version_spans.tolist(), ends, strict=bool(token_ids))
        ],
    }
