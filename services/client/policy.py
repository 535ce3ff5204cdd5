"""The live policy of a run, as its replicas serve it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from penstock.services.client.coordinator import CoordinatorClient, Unreadable

Conversation: TypeAlias = Sequence[Mapping[str, str]]
"""Messages: ``[{"role": "user", "content": "…"}]``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    text: str
    tokens: int
    finish_reason: str
    """stop, or length: cut at the limit."""
    versions: tuple[int, ...]
    """Policy versions that generated it."""


class Policy(Protocol):
    """A policy that can be asked."""

    def generate(
        self,
        prompt: str | Conversation,
        *,
        samples: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Completion]:
        """Return completions of a text, or of a conversation in the tokenizer's chat template.

        Lengths and temperature are the run's by default.

        Raises:
            PenstockError: the prompt cannot be generated, or no replica answers.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class LivePolicy:
    """The policy that the run's replicas serve now; training goes first."""

    client: CoordinatorClient

    @property
    def version(self) -> int | None:
        """The newest version that replicas serve."""
        return self.client.run().head

    def generate(
        self,
        prompt: str | Conversation,
        *,
        samples: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Completion]:
        question: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": turns(prompt)}
        question |= {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature}
        answer = self.client.generate(question)
        try:
            return [
                Completion(each["text"], each["tokens"], each["finish_reason"], tuple(each["versions"]))
                for each in answer["completions"]
            ]
        except (KeyError, TypeError) as error:
            raise Unreadable(
                f"expected completions of a Penstock coordinator, found another answer: {error!r}"
            ) from error


def turns(prompt: str | Conversation) -> list[dict[str, str]]:
    """Return a conversation's messages."""
    return [dict(message) for message in prompt if not isinstance(message, str)]
