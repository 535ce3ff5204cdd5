"""Train what a script of its own asks: start it for each episode, with the policy as its model, and score what it prints."""

import asyncio
import os
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("agent.py")


async def run(task: str, base_url: str, api_key: str, secret: int) -> float:
    """Return the reward of one episode; `secret` is a field of the row."""
    environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    script = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), task, str(secret), env=environment, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await script.communicate()
    if script.returncode:
        raise RuntimeError(f"the script ended with {script.returncode}")  # no reward: the episode is played again
    return float(printed.strip() == b"solved")
