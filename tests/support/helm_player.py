"""Run Helm over charts: ``python -m tests.support.helm_player`` with a job as JSON on each line of standard input.

``HELM_DRIVER=memory`` must be set before the process starts, because Go does not see later changes; each release has a
memory of its own. A job is a list of releases with namespace and steps (install, then upgrades). The answer, a line,
is one JSON list per release, with an object or an error per step.
"""

import asyncio
import json
import sys
from typing import Any

from helm_sdkpy import Configuration, HelmError, Install, Upgrade


def play(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [asyncio.run(_release(job, release)) for release in job["releases"]]


async def _release(job: dict[str, Any], release: dict[str, Any]) -> list[dict[str, Any]]:
    config = Configuration(namespace=release["namespace"], kubeconfig=job["kubeconfig"])
    collected: list[dict[str, Any]] = []
    for number, values in enumerate(release["steps"]):
        action = Upgrade(config) if number else Install(config)
        try:
            collected.append(await action.run(release["name"], job["chart"], values=values, wait=False))
        except HelmError as error:
            collected.append({"error": str(error)})
    return collected


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), flush=True)
