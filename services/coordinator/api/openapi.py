"""``python -m penstock.services.coordinator.api.openapi docs/openapi.json``: write the API description."""

import json
import sys
from pathlib import Path
from typing import Any

from penstock.services.coordinator.api.app import make_routes


def description() -> str:
    nothing: Any = None  # used only when called
    return json.dumps(make_routes(nothing).openapi(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(description(), encoding="utf-8")
