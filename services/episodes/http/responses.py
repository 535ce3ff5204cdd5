"""OpenAI's Responses, without a server's state: every request has its whole history."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.services.episodes.episode import Answer
from penstock.services.episodes.http.dialect import (
    BadRequest,
    Question,
    check,
    count,
    function,
    maps,
    of,
    role_of,
    text_of,
    tokens,
)
from penstock.services.episodes.messages import Message, ToolCall, call
from penstock.shared.bus.messages import FinishReason


class Responses:
    def read(self, body: Mapping[str, Any]) -> Question:
        check(body)
        instructions = of(str, body, "instructions", "")
        asked = body.get("input")
        items = [{"role": "user", "content": asked}] if isinstance(asked, str) else maps(asked, "input")
        messages = _messages(items)
        if not messages:
            raise BadRequest("expected an input, found none")
        return Question(
            [*([Message("system", instructions)] if instructions else []), *messages],
            [function(tool) for tool in maps(body.get("tools"), "tools")],
            count(body, "max_output_tokens"),
            stream=of(bool, body, "stream", False),
        )

    def write(self, answers: Sequence[Answer], model: str) -> dict[str, Any]:
        (answer,) = answers
        asked, answered = tokens(answers)
        cut = answer.drawn.finish_reason is FinishReason.LENGTH and not answer.message.calls
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "output": _items(answer),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": asked,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answered,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": asked + answered,
            },
        }

    def stream(self, answers: Sequence[Answer], model: str) -> Iterator[tuple[str, Any]]:
        whole = self.write(answers, model)
        began = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events = [("response.created", {"response": began})]
        for place, item in enumerate(whole["output"]):
            events += _events(place, item)
        events.append((f"response.{whole['status']}", {"response": whole}))
        for number, (name, data) in enumerate(events):
            yield name, {"type": name, "sequence_number": number, **data}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of input items; an answer's text, reasoning and calls are one message."""
    messages: list[Message] = []
    thought, text, calls = "", "", list[ToolCall]()

    def end_answer() -> None:
        nonlocal thought, text, calls
        if thought or text or calls:
            messages.append(Message("assistant", text, tuple(calls), thought))
        thought, text, calls = "", "", list[ToolCall]()

    for item in items:
        kind = of(str, item, "type", "message")
        if kind == "reasoning":
            thought += "".join(of(str, part, "text", "") for part in maps(item.get("content") or [], "content"))
        elif kind == "function_call":
            calls.append(call(of(str, item, "name", ""), item.get("arguments", "{}"), of(str, item, "call_id", "")))
        elif kind == "function_call_output":
            end_answer()
            messages.append(Message("tool", text_of(item.get("output")), call_id=of(str, item, "call_id", "")))
        elif kind == "message" and role_of(item) == "assistant":
            text += text_of(item.get("content"))
        elif kind == "message":
            end_answer()
            messages.append(Message(role_of(item), text_of(item.get("content"))))
        else:
            raise BadRequest(f"expected messages, reasoning and function calls as input, found {kind[:100]!r}")
    end_answer()
    return messages


def _items(answer: Answer) -> list[dict[str, Any]]:
    message, items = answer.message, list[dict[str, Any]]()
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": content})
    if message.text or not message.calls:
        written: list[dict[str, Any]] = [{"type": "output_text", "text": message.text, "annotations": []}]
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**head, "content": written})
    for made in message.calls:
        head = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed", "call_id": made.id}
        items.append({**head, "name": made.name, "arguments": made.arguments})
    return items


def _events(place: int, item: dict[str, Any]) -> list[tuple[str, Any]]:
    where = {"output_index": place, "item_id": item["id"]}
    empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
    began = {**item, **empty}
    events: list[tuple[str, Any]] = [("response.output_item.added", {"output_index": place, "item": began})]
    if item["type"] == "message":
        (part,) = item["content"]
        within = {**where, "content_index": 0}
        events += [
            ("response.content_part.added", {**within, "part": {**part, "text": ""}}),
            ("response.output_text.delta", {**within, "delta": part["text"], "logprobs": []}),
            ("response.output_text.done", {**within, "text": part["text"], "logprobs": []}),
            ("response.content_part.done", {**within, "part": part}),
        ]
    if item["type"] == "function_call":
        given = item["arguments"]
        events += [
            ("response.function_call_arguments.delta", {**where, "delta": given}),
            ("response.function_call_arguments.done", {**where, "arguments": given, "name": item["name"]}),
        ]
    return [*events, ("response.output_item.done", {"output_index": place, "item": item})]
