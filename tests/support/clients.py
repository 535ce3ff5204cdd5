"""Agents of tests: one tool loop, which guesses a number, by each client that is supported, unmodified."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

TURNS = 5


class Game:
    """A secret number from 0 to 14; :meth:`guess` is the tool."""

    def __init__(self, secret: int) -> None:
        self.secret = secret
        self.tries: list[int] = []

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        self.tries.append(number)
        return "=" if number == self.secret else "<" if self.secret < number else ">"

    @property
    def reward(self) -> float:
        """1 if it was guessed, else how close the nearest guess was; 0 without any."""
        return max((1 - abs(number - self.secret) / 15 for number in self.tries), default=0.0)


async def play(task: str, base_url: str, api_key: str, secret: int, client: str) -> float:
    """Let a client of :data:`CLIENTS` play; what it raises of an answer that it dislikes ends its game."""
    game = Game(secret)
    try:
        await CLIENTS[client](game, task, base_url, api_key)
    except (AssertionError, ImportError):
        raise
    except Exception:
        if not game.tries:
            raise
    return game.reward


async def by_tokens(task: str, base_url: str, api_key: str, secret: int) -> float:
    """Play by vLLM's route for token ids, rendered here; reward what is refused as it should be."""
    import httpx

    from tests.support.chat_tokenizers import characters

    game, tokenizer, url = Game(secret), characters(), f"{base_url.removesuffix('/v1')}/inference/v1/generate"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": task}], tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=600.0) as client:
        refused: list[dict[str, Any]] = [
            {"token_ids": []},
            {"token_ids": [-1]},
            {"token_ids": [1 << 40]},
            {"token_ids": [126, 127]},
            {"token_ids": "1"},
            {"token_ids": ids, "output_mode": "text"},
            {"token_ids": ids, "sampling_params": {"allowed_token_ids": [5]}},
            {"token_ids": ids, "content_parts": [{"type": "image"}]},
        ]
        statuses = [(await client.post(url, json=body)).status_code for body in refused]
        assert statuses == [400] * len(refused), statuses
        for _ in range(TURNS):
            asked = {"max_tokens": 100, "temperature": 0.1, "logprobs": 1}
            body = {"model": "any", "token_ids": ids, "sampling_params": asked, "cache_salt": "mine"}
            (choice,) = (await client.post(url, json=body)).json()["choices"]
            text = tokenizer.decode(choice["token_ids"])
            tried = re.search(r'"number":(\d+)', text)
            if tried is None:
                break
            hint = game.guess(int(tried[1]))
            ids += [*choice["token_ids"], *tokenizer.encode(f"t:{hint}<eos>a:", add_special_tokens=False)]
    return game.reward


async def _chat(game: Game, task: str, base_url: str, api_key: str, *, stream: bool = False) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        (model,) = (await client.models.list()).data
        assert model.model_dump()["max_model_len"] > 0
        messages: list[Any] = [{"role": "user", "content": task}]
        for _ in range(TURNS):
            asked: dict[str, Any] = {"model": model.id, "messages": messages, "tools": [TOOL]}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    completion: Any = await events.get_final_completion()
            else:
                completion = await client.chat.completions.create(**asked)
            answer = completion.choices[0].message
            messages.append(answer.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            for call in answer.tool_calls or ():
                hint = game.guess(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": hint})
            if not answer.tool_calls:
                return


async def _chat_streamed(game: Game, task: str, base_url: str, api_key: str) -> None:
    await _chat(game, task, base_url, api_key, stream=True)


async def _responses(game: Game, task: str, base_url: str, api_key: str, *, stream: bool = False) -> None:
    from openai import AsyncOpenAI

    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        items: list[Any] = [{"role": "user", "content": task}]
        for _ in range(TURNS):
            asked: dict[str, Any] = {"model": "any", "input": items, "tools": [tool]}
            if stream:
                async with client.responses.stream(**asked) as events:
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(**asked)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                hint = game.guess(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": hint})
            if not calls:
                return


async def _responses_streamed(game: Game, task: str, base_url: str, api_key: str) -> None:
    await _responses(game, task, base_url, api_key, stream=True)


async def _anthropic(game: Game, task: str, base_url: str, api_key: str) -> None:
    """Also counts the tokens of its first request, and has every second answer streamed."""
    from anthropic import AsyncAnthropic

    tool: Any = {"name": "guess", "description": "Guess.", "input_schema": TOOL["function"]["parameters"]}
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), auth_token=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": task}]
        counted = (await client.messages.count_tokens(model="any", messages=messages, tools=[tool])).input_tokens
        for turn in range(TURNS):
            asked: dict[str, Any] = {"model": "any", "max_tokens": 500, "messages": messages, "tools": [tool]}
            if turn % 2:
                async with client.messages.stream(**asked) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            assert turn or answer.usage.input_tokens == counted
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": game.guess(**block.input)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if not results:
                return
            messages.append({"role": "user", "content": results})


async def _openai_agents(game: Game, task: str, base_url: str, api_key: str) -> None:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)  # it posts traces to its vendor
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIResponsesModel(model="any", openai_client=client)
        agent = Agent(name="guesser", instructions="Guess.", tools=[function_tool(game.guess)], model=model)
        await Runner.run(agent, task, max_turns=TURNS)


async def _langgraph(game: Game, task: str, base_url: str, api_key: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition
    from pydantic import SecretStr

    tools = [tool(game.guess)]
    model = ChatOpenAI(model="any", base_url=base_url, api_key=SecretStr(api_key)).bind_tools(tools)

    async def ask(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    asked: Any = {"messages": [("user", task)]}
    await graph.compile().ainvoke(asked, {"recursion_limit": 2 * TURNS})


async def _pydantic_ai(game: Game, task: str, base_url: str, api_key: str) -> None:
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, instructions="Guess.", tools=[game.guess])
    await agent.run(task, usage_limits=UsageLimits(request_limit=TURNS))


async def _smolagents(game: Game, task: str, base_url: str, api_key: str) -> None:
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    @tool  # type: ignore[untyped-decorator, unused-ignore]
    def guess(number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        return game.guess(number)

    model = OpenAIModel(model_id="any", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[guess], model=model, verbosity_level=LogLevel.OFF)
    await asyncio.to_thread(agent.run, task, max_steps=TURNS)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
CLIENTS: dict[str, Callable[[Game, str, str, str], Awaitable[None]]] = {
    "openai, chat": _chat,
    "openai, chat, streamed": _chat_streamed,
    "openai, responses": _responses,
    "openai, responses, streamed": _responses_streamed,
    "anthropic": _anthropic,
    "openai-agents": _openai_agents,
    "langgraph": _langgraph,
    "pydantic-ai": _pydantic_ai,
    "smolagents": _smolagents,
}
