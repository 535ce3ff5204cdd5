"""``[episodes]``: turns with tools, an environment or an agent."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from penstock.shared.settings.section import Section

_OBJECT = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


class EpisodesSettings(Section):
    """Episodes of several turns (docs/episodes.md). Set environment, tools or agent; sampling.max_new_tokens then limits a turn."""

    environment: str = Field(default="", pattern=rf"^$|{_OBJECT}")
    """`package.module:Class` of an environment."""
    tools: tuple[Annotated[str, Field(pattern=_OBJECT)], ...] = Field(default=())
    """Functions that the policy can call, each `package.module:function`."""
    agent: str = Field(default="", pattern=rf"^$|{_OBJECT}")
    """`package.module:function` of an agent, which asks the policy over HTTP."""
    max_turns: Annotated[int, Field(ge=1, le=200)] = Field(default=8)
    """Answers in an episode, at most 200."""
    tool_s: PositiveFloat = Field(default=30.0)
    """Maximum seconds of a tool call, and of `get_reward`."""
    setup_s: PositiveFloat = Field(default=120.0)
    """Maximum seconds of its import, and of `reset`."""
    deadline_s: PositiveFloat = Field(default=1800.0)
    """Seconds after which an episode ends, and is scored."""
    replicas: PositiveInt = Field(default=1)
    """Replicas that `penstock up` starts."""
    max_episodes: PositiveInt = Field(default=256)
    """Episodes that a replica runs at a time."""
    listen: str = Field(default="127.0.0.1:0", pattern=r"^.+:[0-9]+$")
    """`host:port` at which agents reach the policy; port 0: any free one."""

    @property
    def is_on(self) -> bool:
        return bool(self.environment or self.tools or self.agent)

    @property
    def name(self) -> str:
        """What turns happen in, for prompts and reports."""
        return self.environment or self.agent or ", ".join(self.tools)

    def check_beside(self, others: Sequence[str], rewarded: Sequence[str]) -> None:
        """Raise ValueError for settings that do not work with episodes yet, or scorers ``rewarded`` by no environment."""
        if self.is_on and others:
            raise ValueError(
                f"expected no {others[0]} with [episodes], which do not work together yet: leave one of them out"
            )
        if rewarded and not (self.environment or self.agent):
            raise ValueError(
                f"expected episodes.environment or episodes.agent with the scorer {rewarded[0]!r}, whose value is the reward that these "
                "give: set one of them, or leave the scorer out"
            )

    @model_validator(mode="after")
    def _agree(self) -> "EpisodesSettings":
        if self.agent and (self.environment or self.tools):
            raise ValueError(
                "expected no episodes.environment and episodes.tools with episodes.agent, which calls its own: leave one of them out"
            )
        changed = sorted(name for name, of in type(self).model_fields.items() if getattr(self, name) != of.default)
        if not self.is_on and changed:
            raise ValueError(
                f"expected episodes.environment, episodes.tools or episodes.agent with episodes.{changed[0]}, which has no effect "
                "without: set one of them, or leave it out"
            )
        return self
