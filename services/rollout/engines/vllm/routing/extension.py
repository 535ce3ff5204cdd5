"""vLLM worker methods of engines that record experts."""

from typing import Any

from penstock.services.rollout.engines.vllm.routing.capture import capture_routes
from penstock.services.rollout.engines.vllm.worker import WorkerExtension


class RoutingExtension(WorkerExtension):
    """Of workers that record experts, too."""

    def __new__(cls, *arguments: Any, **named: Any) -> "RoutingExtension":
        worker: RoutingExtension = super().__new__(cls, *arguments, **named)  # type: ignore[assignment]
        capture_routes(worker)
        return worker
