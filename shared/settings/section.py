"""What every table of the settings has in common."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

OptionalPath = Annotated[Path | None, BeforeValidator(lambda value: value or None)]
"""A path, not set by an empty text, as in `--weights.folder=`."""
Count = Annotated[int, Field(ge=1, le=1024)]
"""Of processes, hosts or GPUs: more are a typing error, which would exhaust the machine."""


class Section(BaseModel):
    """One table of the TOML file.

    Every process imports all tables at its start: each is built when it is used, and docstrings are read when they are
    shown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def shown(value: object) -> str:
    """Return a setting's value as the messages of rules show it: text in quotes."""
    return f'"{value}"' if isinstance(value, str) else str(value)
