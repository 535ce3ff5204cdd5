"""Anthropic's Messages."""

import json
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
    stops,
    text_of,
    tokens,
)
from penstock.services.episodes.messages import Message, call
from penstock.shared.bus.messages import FinishReason


class Anthropic:
    def read(self, body: Mapping[str, Any]) -> Question:
        check(body)
        system = [Message("system", text_of(body.get("system")))] if body.get("system") else []
        messages = [message for each in maps(body.get("messages"), "messages") for message in _messages(each)]
        if not messages:
            raise BadRequest("expected at least one message, found none")
        return Question(
            [*system, *messages],
            [function(tool, "input_schema") for tool in maps(body.get("tools"), "tools")],
            count(body, "max_tokens"),
            stops(body.get("stop_sequences")),
            stream=of(bool, body, "stream", False),
        )

    def write(self, answers: Sequence[Answer], model: str) -> dict[str, Any]:
        (answer,) = answers
        asked, answered = tokens(answers)
        head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        usage = {"input_tokens": asked, "output_tokens": answered}
        return {**head, "content": _blocks(answer), **_end(answer), "usage": usage}

    def stream(self, answers: Sequence[Answer], model: str) -> Iterator[tuple[str, Any]]:
        whole = self.write(answers, model)
        began = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"type": "message_start", "message": began}
        for index, block in enumerate(whole["content"]):
            empty, deltas = _pieces(block)
            yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
            yield "content_block_stop", {"type": "content_block_stop", "index": index}
        yield "message_delta", {"type": "message_delta", "delta": _end(answers[0]), "usage": whole["usage"]}
        yield "message_stop", {"type": "message_stop"}


def _messages(body: Mapping[str, Any]) -> list[Message]:
    """Return a message, and before it one of each tool result that it has."""
    role, content = role_of(body), body.get("content")
    if isinstance(content, str):
        return [Message(role, content)]
    blocks = maps(content, "content")
    told = [
        Message("tool", text_of(block.get("content")), call_id=of(str, block, "tool_use_id", ""))
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    calls = [
        call(of(str, block, "name", ""), block.get("input", {}), of(str, block, "id", ""))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    thought = "".join(of(str, block, "thinking", "") for block in blocks if block.get("type") == "thinking")
    skipped = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in blocks if block.get("type") not in skipped]
    if rest or calls or thought or not told:
        return [*told, Message(role, text_of(rest), tuple(calls), thought)]
    return told


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    thought = [{"type": "thinking", "thinking": message.reasoning, "signature": ""}] if message.reasoning else []
    text = [{"type": "text", "text": message.text}] if message.text or not message.calls else []
    calls = [
        {
            "type": "tool_use",
            "id": made.id,
            "name": made.name,
            "input": made.values if isinstance(made.values, dict) else {},
        }
        for made in message.calls
    ]
    return [*thought, *text, *calls]


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block without its content, and the deltas that bring it."""
    match block["type"]:
        case "thinking":
            return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _end(answer: Answer) -> dict[str, Any]:
    if answer.stopped:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped}
    cut = answer.drawn.finish_reason is FinishReason.LENGTH
    reason = "tool_use" if answer.message.calls else "max_tokens" if cut else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
