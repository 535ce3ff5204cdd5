"""What is read is compressed; answers to commands are not, as they are kept for clients that may read no encoding."""

import httpx
import pytest
from fastapi import FastAPI

from penstock.services.coordinator.api.compression import Compressed


@pytest.mark.parametrize(("method", "encoding"), [("GET", "gzip"), ("POST", None), ("PATCH", None)])
async def test_only_what_is_read_is_compressed(method: str, encoding: str | None) -> None:
    app = FastAPI()

    async def long() -> dict[str, str]:
        return {"detail": "a" * 5000}

    app.add_api_route("/", long, methods=[method])
    app.add_middleware(Compressed)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.request(method, "/", headers={"Accept-Encoding": "gzip"})
    assert (answer.headers.get("content-encoding"), answer.json()) == (encoding, {"detail": "a" * 5000})
    assert ("etag" in answer.headers) == (method == "GET")
