"""Settings that every kind of ``[[reward.scorers]]`` has."""

from typing import Any

from pydantic import Field, model_validator

from shared.settings.section import Section


class BaseScorer(Section):
    """One scorer."""

    name: str = Field(default="", pattern=r"^[a-z_][a-z0-9_]*$")
    """Name in reward.expression and in metrics. Default: its kind."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        return {"name": values.get("kind", ""), **values} if isinstance(values, dict) else values
