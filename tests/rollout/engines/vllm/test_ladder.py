"""What a worker says if the memory that it freed is not there again."""

from types import SimpleNamespace

import pytest
import torch

from penstock.services.rollout.engines.vllm import ladder
from penstock.services.rollout.engines.vllm.ladder import Ladder
from penstock.shared.errors import SettingsError


class Worker:
    """A GPU's worker, whose device has 40 GiB free once it sleeps, and 4 when it wakes."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, failure: str) -> None:
        self.free_gib = [20, 40, 4]
        self._failure = failure

    def sleep(self, level: int) -> None:
        assert level == 2

    def wake_up(self, tags: list[str] | None) -> None:
        raise RuntimeError(self._failure)


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (
            "CUDA Error: out of memory at cumem_allocator.cpp:163",
            SettingsError,
            r"expected the 20\.0 GiB .* found 4\.0 GiB free: raise placement\.rung",
        ),
        ("CUDA error: an illegal memory access", RuntimeError, "illegal"),
    ],
)
def test_a_worker_that_finds_no_memory_to_resume_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, failure: str, error: type[Exception], words: str
) -> None:
    worker = Worker(failure)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (worker.free_gib.pop(0) << 30, 80 << 30))
    of_worker = Ladder(worker)
    of_worker.free(2, keep_weights=False)
    with pytest.raises(error, match=words):
        of_worker.take_back()


def test_a_buffer_that_the_caches_of_several_layers_view_is_counted_once() -> None:
    shared, own = torch.zeros(4, 256, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2), kv_caches=[*shared.unbind(), [own, own[:64]]])
    worker = SimpleNamespace(device=torch.device("cpu"), model_runner=runner)
    assert Ladder(worker).measure()["kv_cache"] == 1024 + 128


def test_on_a_cpu_nothing_is_freed() -> None:
    assert ladder.free_bytes(torch.device("cpu")) == 0
