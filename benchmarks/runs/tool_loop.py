"""The agent of ``benchmarks.runs.whole_run --turns``: asks the policy, answers as a tool would, and asks again."""

import random
from typing import Any

import httpx

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL_WORDS = 40
_WAIT_S = 900.0


async def agent(task: Any, base_url: str, api_key: str, turns: int, **row: Any) -> float:
    """Return a random reward after ``turns`` answers."""
    messages = [{"role": "user", "content": task}] if isinstance(task, str) else list(task)
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=_WAIT_S) as http:
        for turn in range(turns):
            if turn:
                messages.append({"role": "user", "content": "tool " * TOOL_WORDS})
            answer = await http.post("chat/completions", json={"model": "policy", "messages": messages})
            message = answer.raise_for_status().json()["choices"][0]["message"]
            messages.append({"role": "assistant", "content": message["content"] or ""})
    return random.random()
