"""Laws of the watch of `penstock up` over the coordinator."""

import time
from pathlib import Path
from typing import Any, cast

from penstock.services.client.coordinator import AsyncCoordinator
from penstock.services.up.display.watch import SILENT_S, RunSnapshot, Watch
from penstock.shared.http.answer import Answer


class Answers:
    """An HTTP client with one answer to every request."""

    def __init__(self, status: int, content: bytes) -> None:
        self.answer = status, content

    async def ask(self, method: str, url: str, **_: Any) -> Answer:
        return Answer(url, *self.answer)

    async def close(self) -> None:
        pass


async def test_a_coordinator_that_cannot_reach_the_bus_says_so_and_is_not_called_frozen(tmp_path: Path) -> None:
    said: list[str] = []
    watch = Watch(tmp_path, said.append)
    watch.seen = RunSnapshot(cast("Any", object()), at_s=time.time() - SILENT_S - 1)
    watch._coordinator = AsyncCoordinator("http://coordinator")
    watch._coordinator._client = cast("Any", Answers(503, b'{"detail": "the bus did not answer within 5 s"}'))
    assert not await watch.ask()
    watch.look_for_silence()
    watch.look_for_silence()
    watch.seen.at_s -= 3 * SILENT_S
    watch.look_for_silence()
    assert [text.split(" s: ", 1)[1] for text in said] == ["the bus did not answer within 5 s"] * 2
