"""What every table of the settings has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the TOML file."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)
