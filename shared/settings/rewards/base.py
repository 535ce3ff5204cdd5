"""Settings that every kind of ``[[reward.scorers]]`` has."""

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.shared.settings.section import Section


class BaseScorer(Section):
    """One scorer."""

    name: str = Field(default="", pattern=r"^[a-z_][a-z0-9_]*$")
    """Name in reward.expression and in metrics. Default: its kind."""

    @property
    def reads_answer(self) -> bool:
        """Whether it reads completions without their reasoning (reward.reasoning)."""
        return True

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that it looks for, which stay in completions even if they are special tokens."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        return {"name": values.get("kind", ""), **values} if isinstance(values, dict) else values


class OpinionScorer(BaseScorer):
    """A scorer that may want to see the reasoning."""

    reads: Literal["answer", "whole"] = Field(default="answer")
    """What it reads: the `answer` after the reasoning (reward.reasoning), or the `whole` completion."""

    @property
    def reads_answer(self) -> bool:
        return self.reads == "answer"
