"""OpenAI's Chat Completions."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.services.episodes.episode import Answer
from penstock.services.episodes.http.dialect import (
    MOST_ANSWERS,
    BadRequest,
    Question,
    check,
    count,
    function,
    maps,
    of,
    role_of,
    stops,
    text_of,
    tokens,
)
from penstock.services.episodes.messages import Message, call
from penstock.shared.bus.messages import FinishReason


class Chat:
    def read(self, body: Mapping[str, Any]) -> Question:
        check(body)
        messages = [_message(each) for each in maps(body.get("messages"), "messages")]
        if not messages:
            raise BadRequest("expected at least one message, found none")
        return Question(
            messages,
            [function(of(dict, tool, "function", tool)) for tool in maps(body.get("tools"), "tools")],
            count(body, "max_completion_tokens", "max_tokens"),
            stops(body.get("stop")),
            count(body, "n", most=MOST_ANSWERS) or 1,
            of(bool, body, "stream", False),
        )

    def write(self, answers: Sequence[Answer], model: str) -> dict[str, Any]:
        choices = [
            {"index": place, "message": {"role": "assistant", **_content(answer)}, **_end(answer)}
            for place, answer in enumerate(answers)
        ]
        return {**_head("chat.completion", model), "choices": choices, "usage": _usage(answers)}

    def stream(self, answers: Sequence[Answer], model: str) -> Iterator[tuple[str, Any]]:
        head = _head("chat.completion.chunk", model)
        for place, answer in enumerate(answers):
            content = _content(answer)
            for index, made in enumerate(content.get("tool_calls", ())):
                made["index"] = index
            delta = {"role": "assistant", **content}
            yield "", {**head, "choices": [{"index": place, "delta": delta, "finish_reason": None}]}
            yield "", {**head, "choices": [{"index": place, "delta": {}, **_end(answer)}]}
        yield "", {**head, "choices": [], "usage": _usage(answers)}
        yield "", None


def _message(body: Mapping[str, Any]) -> Message:
    calls = []
    for made in maps(body.get("tool_calls"), "tool_calls"):
        inner = of(dict, made, "function", {})
        calls.append(call(of(str, inner, "name", ""), inner.get("arguments", "{}"), of(str, made, "id", "")))
    return Message(
        role_of(body),
        text_of(body.get("content")),
        tuple(calls),
        of(str, body, "reasoning_content", of(str, body, "reasoning", "")),
        of(str, body, "tool_call_id", ""),
        of(str, body, "name", ""),
    )


def _content(answer: Answer) -> dict[str, Any]:
    message = answer.message
    content: dict[str, Any] = {"content": message.text or (None if message.calls else "")}
    if message.reasoning:
        content["reasoning_content"] = message.reasoning
    if message.calls:
        content["tool_calls"] = [
            {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}
            for made in message.calls
        ]
    return content


def _end(answer: Answer) -> dict[str, Any]:
    cut = answer.drawn.finish_reason is FinishReason.LENGTH
    return {"finish_reason": "tool_calls" if answer.message.calls else "length" if cut else "stop", "logprobs": None}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    asked, answered = tokens(answers)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
