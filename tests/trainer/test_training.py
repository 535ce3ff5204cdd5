"""How the training thread ends."""

from typing import Any

import pytest
import torch.distributed as dist

from penstock.services.trainer import training
from penstock.services.trainer.rank0.mailbox.results import Began
from penstock.shared.settings import Settings


class Box:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(("ranks", "left"), [(1, 1), (2, 0)])
def test_a_rank_that_fails_says_so_and_does_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch, ranks: int, left: int
) -> None:
    box, events, error = Box(), list[str](), RuntimeError("out of memory")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(training, "_begin", lambda _: "cpu")
    monkeypatch.setattr(training.Loading, "policy", fail)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append(f"left after {box.sent[-1]}"))
    with pytest.raises(RuntimeError, match="out of memory"):
        training.train(Settings(), box, artifacts=None)  # type: ignore[arg-type]
    assert isinstance(box.sent[0], Began)
    assert box.sent[-1] is error
    assert events == ["left after out of memory"] * left, "NCCL would wait for the other ranks"
