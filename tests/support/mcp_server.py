"""An MCP server of tests: ``python mcp_server.py [stdio | http PORT] [only-reads]``; by its tools well-behaved, or not."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("tests")
annotations = ToolAnnotations(read_only_hint="only-reads" in sys.argv)
kept: list[str] = []


@server.tool(annotations=annotations)
def count(word: str) -> str:
    """Keep a word; return all that this server was given."""
    kept.append(word)
    return " ".join(kept)


@server.tool(annotations=annotations)
def misbehave(how: str) -> str:
    """Do what a server should not."""
    if how == "die":
        os._exit(1)
    if how == "hang":
        time.sleep(10_000)
    if how == "raise":
        raise ValueError("it does not work")
    if how == "flood":
        return "x" * (8 << 20)
    if how == "env":
        return " ".join(name for name in ("A_SECRET", "OMP_NUM_THREADS") if name in os.environ)
    return how


if __name__ == "__main__":
    if sys.argv[1] == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    server.run("stdio")
