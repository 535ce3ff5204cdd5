"""What every table of the settings has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the TOML file."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


def shown(value: object) -> str:
    """Return a setting's value as the messages of rules show it: text in quotes."""
    return f'"{value}"' if isinstance(value, str) else str(value)
