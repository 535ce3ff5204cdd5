"""Query the Prometheus of ``penstock up --prometheus``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx


class Prometheus:
    def __init__(self, said: Path) -> None:
        self._said = said

    @property
    def address(self) -> str:
        """Its URL; empty until announced."""
        _, _, rest = self._said.read_text().partition("Prometheus: ")
        return rest.split()[0] if rest else ""

    def ask(self, expression: str) -> list[dict[str, Any]]:
        actual: list[dict[str, Any]] = self._get("/api/v1/query", query=expression).get("result", [])
        return actual

    def firing(self) -> list[Mapping[str, str]]:
        alerts = self._get("/api/v1/alerts").get("alerts", [])
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        if not (address := self.address):
            return {}
        try:
            # plain HTTP: an SSL context would cost 40 ms
            answer = httpx.get(f"{address}{path}", params=parameters, timeout=10, trust_env=False, verify=False)
        except httpx.TransportError:
            return {}
        if answer.status_code == 503:
            return {}  # it reads its write-ahead log
        assert answer.status_code == 200, answer.text
        data: dict[str, Any] = answer.json()["data"]
        return data
