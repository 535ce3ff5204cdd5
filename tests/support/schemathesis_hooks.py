"""What schemathesis is told beside the API's description: how to send TOML, and not to follow the stream of events for long."""

from typing import Any

import schemathesis

schemathesis.serializer.alias(["application/toml"], "text/plain")


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """End the stream after a moment, unless the request asks for a wrong number of seconds."""
    if case.path != "/v1/events/stream":
        return
    query = dict(case.query or {})
    try:
        right = 0 < float(query.get("for_s", 600)) <= 3600
    except (TypeError, ValueError):
        right = False
    if right:
        case.query = {**query, "for_s": 0.05}
