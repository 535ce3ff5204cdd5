"""Hooks for schemathesis: send TOML, and end the stream of events early."""

from typing import Any

import schemathesis

schemathesis.serializer.alias(["application/toml"], "text/plain")


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """End the stream soon, unless the request has an invalid number of seconds."""
    if case.path != "/v1/events/stream":
        return
    query = dict(case.query or {})
    try:
        right = 0 < float(query.get("for_s", 600)) <= 3600
    except (TypeError, ValueError):
        right = False
    if right:
        case.query = {**query, "for_s": 0.05}
