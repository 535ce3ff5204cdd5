"""``python -m penstock.services.coordinator.api.openapi docs/openapi.json``: write the API description."""

import json
import sys
from pathlib import Path
from typing import Any

from penstock.services.coordinator.api.app import make_routes


class _Nothing:
    """In place of what routes use when they are called."""

    def __getattr__(self, name: str) -> "_Nothing":
        return self

    def __truediv__(self, name: str) -> "_Nothing":
        return self


def description() -> str:
    nothing: Any = _Nothing()
    return json.dumps(make_routes(nothing).openapi(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(description(), encoding="utf-8")
