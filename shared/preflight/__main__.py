"""``python -m penstock.shared.preflight``: the checks that are asked for; exit 1 if one fails.

Prints one sentence for each failure on stderr; with ``--json`` every finding, one a line, on stdout.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock.shared.preflight import cluster, node
from penstock.shared.preflight.finding import Finding
from penstock.shared.settings import load


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m penstock.shared.preflight", description="Check a node or a pod before a run."
    )
    made.add_argument("--gpu", action="store_true", help="an NVIDIA driver that fits the installed CUDA")
    made.add_argument("--rdma", action="store_true", help="RDMA devices, their library, and memory that may be locked")
    made.add_argument("--shm-mib", type=int, default=0, help="the least size of /dev/shm")
    made.add_argument("--name", action="append", default=[], help="a name that DNS must know")
    made.add_argument("--closed", action="append", default=[], metavar="HOST:PORT", help="what must not be reachable")
    made.add_argument("--config", type=Path, help="the run's TOML file: check that it holds no secret, and its bus")
    made.add_argument("--leave", type=Path, metavar="FILE", help="write a file for another pod")
    made.add_argument("--seen", type=Path, metavar="FILE", help="a file that another pod wrote")
    made.add_argument("--json", action="store_true", help="print every finding")
    return made


def findings(asked: argparse.Namespace) -> Iterator[Finding]:
    """Run the checks that are asked for."""
    if asked.gpu:
        yield node.driver()
    if asked.rdma:
        yield node.rdma()
        yield node.locked_memory()
    if asked.shm_mib:
        yield node.shared_memory(asked.shm_mib << 20)
    yield from (cluster.names(name) for name in asked.name)
    for place in asked.closed:
        host, _, port = place.rpartition(":")
        yield cluster.closed(host, int(port))
    if asked.config:
        yield cluster.without_secrets(asked.config)
        settings = load(asked.config)
        yield from asyncio.run(cluster.bus(settings.bus.url, settings.run.id))
    if asked.leave:
        yield cluster.leave(asked.leave)
    if asked.seen:
        yield cluster.seen(asked.seen)


def report(results: Iterable[Finding], *, as_json: bool) -> int:
    """Print findings as they come; return the exit status."""
    status = 0
    for finding in results:
        if as_json:
            print(finding.line(), flush=True)  # noqa: T201
        if not finding.ok:
            status = 1
            print(f"{finding.check}: {finding.sentence}", file=sys.stderr, flush=True)  # noqa: T201
    return status


def main(words: Sequence[str]) -> int:
    asked = parser().parse_args(words)
    return report(findings(asked), as_json=asked.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
