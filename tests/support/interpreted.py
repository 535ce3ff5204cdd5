"""Run Triton kernels without a GPU in Triton's interpreter."""

import os
import subprocess
import sys

from tests.conftest import PATIENCE_S, need_module


def interpreted(script: str) -> list[str]:
    """Run ``script`` in a process, where torch.cuda.device does nothing, and return its output."""
    need_module("triton", "triton")
    begin = "import contextlib, torch\ntorch.cuda.device = lambda _: contextlib.nullcontext()\n"
    outcome = subprocess.run(
        [sys.executable, "-c", begin + script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    return outcome.stdout.splitlines()
