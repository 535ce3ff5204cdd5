# mypy: disable-error-code="misc,untyped-decorator"
"""An EnvServer of tests, for a Python that has verifiers: ``python verifiers_server.py PORT``; a taskset with its harness."""

import asyncio
import sys
from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.serve import EnvServer

__all__ = ["Asking", "Sums"]


class Row(vf.TaskData):
    secret: int = 0


class Sum(vf.Task[Row]):
    @vf.reward(weight=0.5)
    async def right(self, trace: Any) -> float:
        if self.data.secret == -3:
            raise RuntimeError("no judge is free")
        return 2.0 * bool(trace.last_reply == str(self.data.secret))


class Sums(vf.Taskset[Sum]):
    def load(self) -> Iterable[Sum]:
        return [Sum(Row(prompt=f"guess, row {number}", secret=number), self.config.task) for number in range(8)]


class Asking(vf.Harness[vf.HarnessConfig]):
    """Asks twice."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=600.0) as client:
            for _turn in range(2):
                response = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"authorization": f"Bearer {secret}"},
                )
                response.raise_for_status()
                said = response.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    seat = {"harness": {"id": "verifiers_server"}, "runtime": {"type": "subprocess"}}
    config = vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": "verifiers_server"}, "agent": seat})
    asyncio.run(EnvServer(config, f"tcp://127.0.0.1:{sys.argv[1]}").run())
