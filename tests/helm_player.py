"""Runs Helm over one chart in a process of its own: ``python -m tests.helm_player`` with a job as JSON on standard input.

``HELM_DRIVER=memory`` must be in the environment before the process starts: Helm's Go runtime does not see later changes.
Each step installs or upgrades; the answer is one JSON list, an object or an error's text for each step.
"""

import asyncio
import json
import sys
from typing import Any

from helm_sdkpy import Configuration, HelmError, Install, Upgrade


def play(job: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    config = Configuration(namespace=job["namespace"], kubeconfig=job["kubeconfig"])
    for step in job["steps"]:
        action = {"install": Install, "upgrade": Upgrade}[step["action"]](config)
        try:
            found.append(asyncio.run(action.run(job["release"], job["chart"], values=step["values"], wait=False)))
        except HelmError as error:
            found.append({"error": str(error)})
    return found


if __name__ == "__main__":
    print(json.dumps(play(json.load(sys.stdin))))
