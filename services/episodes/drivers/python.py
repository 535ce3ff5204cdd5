"""The tool ``python``: an episode's session of the code executor, which starts with its first call and ends with it.

The executor's address and secret stay in this process: neither users' code nor a program sees them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from penstock.services.episodes.drivers.child import text_of
from penstock.services.episodes.messages import ToolCall
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.executor.client import ExecutorClient, ExecutorSession, read_executor_secret
from penstock.shared.executor.protocol import Limits
from penstock.shared.settings import Settings

NAME = "python"
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Run Python code. Names and files are kept from call to call. Returns what the code prints, and "
        "the value of its last expression.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code."}},
            "required": ["code"],
        },
    },
}
_LONGEST = 10
"""As a multiple of ``tool_s``, after which the executor ends a call however busy it is."""


class Python:
    """:meth:`close` it; on one event loop. Raises SettingsError: there is no executor."""

    def __init__(self, settings: Settings) -> None:
        of, executor = settings.episodes, settings.reward.executor
        if not executor.address:
            raise SettingsError(
                "expected the address of an executor with episodes.executor, found none: start one (python -m "
                "penstock.services.reward.executor) and set reward.executor.address, or let `penstock up` do both"
            )
        self._client = ExecutorClient(executor.address, read_executor_secret(executor))
        self._profile, self._within_s = of.executor, of.setup_s + _LONGEST * of.tool_s
        self._limits = Limits(wall_s=of.tool_s, cpu_s=of.tool_s * of.max_turns)

    async def close(self) -> None:
        await self._client.close()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator["PythonSession"]:
        """Yield an episode's session."""
        async with self._client.session(self._profile, self._limits) as session:
            yield PythonSession(session, self._within_s)


class PythonSession:
    def __init__(self, session: ExecutorSession, within_s: float) -> None:
        self._session, self._within_s = session, within_s

    async def call(self, call: ToolCall) -> str:
        """Return the answer to a call. Raises TemporaryError: the executor does not work, or has lost the session."""
        code = call.values.get("code") if isinstance(call.values, dict) else None
        if not isinstance(code, str):
            return f"expected a JSON object with the text `code` as the arguments of {NAME}"
        try:
            async with asyncio.timeout(self._within_s):
                ran = await self._session.run(code)
        except TimeoutError as error:
            raise TemporaryError(f"the code executor gave no answer within {self._within_s:g} s") from error
        text = text_of(ran.stdout)
        if ran.exit_status is None:
            return text
        why = ran.detail or f"exit status {ran.exit_status}"
        return f"{text}\n[the session has ended: {why}; the next call starts a new one]".lstrip()
