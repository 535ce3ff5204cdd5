"""The programs ``helm`` and ``kubectl`` of this machine."""

import shutil
import subprocess
from collections.abc import Sequence

from penstock.shared.errors import PenstockError

_PLACES = {"helm": "https://helm.sh", "kubectl": "https://kubernetes.io/docs/tasks/tools"}


def command(program: str, context: str, namespace: str, words: Sequence[str]) -> list[str]:
    """Return the command line; raises PenstockError if ``program`` is not in PATH."""
    path = shutil.which(program)
    if path is None:
        raise PenstockError(f"expected the program {program} in PATH: install it ({_PLACES[program]})")
    flag = "--kube-context" if program == "helm" else "--context"
    return [path, *words, "--namespace", namespace, *((flag, context) if context else ())]


def output(words: Sequence[str], given: str = "") -> str:
    """Run a command line; return its standard output, or raise PenstockError with its error."""
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PenstockError(
            f"{words[0].rpartition('/')[2]} {words[1]} failed: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout
