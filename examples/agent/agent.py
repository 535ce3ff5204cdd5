"""Guess a number with any model behind OpenAI's API; nothing here knows of training.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py "?" 7
"""

import json
import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


def main(task: str, secret: int) -> str:
    client = OpenAI()
    messages: list[Any] = [{"role": "user", "content": task}]
    for _ in range(4):
        completion = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        answer: Any = completion.choices[0].message
        messages.append(answer)
        for call in answer.tool_calls or ():
            number = json.loads(call.function.arguments)["number"]
            if number == secret:
                return "solved"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "<" if secret < number else ">"})
        if not answer.tool_calls:
            break
    return "not solved"


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2])))
