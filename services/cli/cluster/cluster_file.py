"""The cluster that a run is deployed on: a TOML file with the chart's values."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.shared.errors import SettingsError

_CHART = Path(__file__).parents[4] / "deploy" / "k8s" / "penstock"
"""In a checkout."""


class ClusterFile(BaseModel):
    """One file for ``penstock deploy --on``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: str = Field(min_length=1)
    context: str = ""
    """Of kubectl; empty: the current one."""
    chart: str = ""
    """A folder or oci://…; empty: the checkout's."""
    version: str = ""
    """Of a chart in a registry."""
    values: dict[str, Any] = Field(default={})
    """The chart's."""

    @property
    def chart_place(self) -> str:
        """The chart, for Helm. Raises SettingsError if it is not known."""
        if not self.chart and not _CHART.is_dir():
            raise SettingsError(
                "expected `chart` in the cluster's file outside of a checkout: such as oci://REGISTRY/charts/penstock"
            )
        return self.chart or str(_CHART)


def read(path: Path) -> ClusterFile:
    """Return the cluster in ``path``; may raise SettingsError."""
    try:
        return ClusterFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise SettingsError(
            f"{path}: {name}: {first['msg']}; a cluster's file has namespace, context, chart, version and [values]"
        ) from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"could not read the cluster's file {path}: {error}") from error
