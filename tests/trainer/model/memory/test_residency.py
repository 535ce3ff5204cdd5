"""A trainer whose memory goes to the host between steps trains bit for bit as one that keeps it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from penstock.services.trainer.loop import Trainer
from penstock.services.trainer.model.memory import residency as residency_module
from penstock.services.trainer.rank0.artifacts import Rank0Artifacts
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind
from penstock.services.trainer.rank0.mailbox.queues import NoMailbox
from penstock.services.trainer.rank0.publication import Publication
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.weights.host_copies import HostCopies
from penstock.shared.weights.stream_order import Point
from tests.support import tiny, trainer_ranks, weights
from tests.trainer.algorithm import test_update
from tests.trainer.model.test_engine import Stepper, settings

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 4
FP32_BYTES = 4 * sum(parameter.numel() for parameter in tiny.model(0).parameters())


def trained(zero_stage: int, rungs: list[int]) -> tuple[Stepper, dict[str, torch.Tensor]]:
    """Return an engine after ``STEPS`` steps, freed down to each of ``rungs`` in turn after them."""
    stepper = Stepper(settings(zero_stage=zero_stage))
    residency = stepper.engine.residency
    for number in range(1, STEPS + 1):
        stepper.step(number)
        if rungs:
            rung = rungs[number % len(rungs)]
            residency.free(rung)
            residency.restore()
    return stepper, stepper.weights()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_training_is_bit_equal_with_and_without_switches(zero_stage: int) -> None:
    _, kept = trained(zero_stage, [])
    _, moved = trained(zero_stage, [4, 3, 2])
    assert kept.keys() == moved.keys()
    assert all(torch.equal(kept[name], moved[name]) for name in kept)


def bytes_of(stepper: Stepper) -> int:
    return sum(parameter.data.untyped_storage().nbytes() for parameter in stepper.engine.policy.parameters())


@pytest.mark.parametrize(("zero_stage", "optimizer_share"), [(0, 2), (1, 3), (2, 3)])
def test_rung_3_frees_moments_and_master_weights_and_rung_4_the_weights_too(
    zero_stage: int, optimizer_share: int
) -> None:
    stepper, _ = trained(zero_stage, [])
    residency = stepper.engine.residency
    memory = residency.memory()
    assert memory["weights"] == pytest.approx(FP32_BYTES, rel=0.01)
    assert memory["optimizer"] == pytest.approx(optimizer_share * FP32_BYTES, rel=0.01)
    residency.free(3)
    state = next(iter(stepper.engine._engine.optimizer.state.values()))
    assert state["exp_avg"].untyped_storage().nbytes() == 0
    assert bytes_of(stepper) > 0
    residency.restore()
    residency.free(4)
    assert bytes_of(stepper) == 0
    residency.restore()
    assert residency.memory() == memory


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_training_is_bit_equal_where_part_of_the_optimizer_is_moved(zero_stage: int) -> None:
    _, kept = trained(zero_stage, [])
    stepper = Stepper(settings(zero_stage=zero_stage))
    residency, moved = stepper.engine.residency, list[int]()
    for number in range(1, STEPS + 1):
        stepper.step(number)
        moved.append(residency.free(3, needed_bytes=number * FP32_BYTES / STEPS))
        residency.restore()
    assert all(bytes_moved >= number * FP32_BYTES / STEPS for number, bytes_moved in enumerate(moved, 1))
    assert moved[0] < residency.memory()["optimizer"]
    weights = stepper.weights()
    assert all(torch.equal(kept[name], weights[name]) for name in kept)


def test_only_what_is_needed_leaves_the_device() -> None:
    """Each of master weights and moments is one storage at ZeRO stage 1."""
    stepper, _ = trained(1, [])
    residency = stepper.engine.residency
    each = residency.memory()["optimizer"] // 3
    for needed, moved in ((0.0, 0), (each / 2, each), (each, each), (1.5 * each, 2 * each), (9 * each, 3 * each)):
        assert residency.free(3, needed_bytes=needed) == pytest.approx(moved, rel=0.01)
        residency.restore()
        residency.follow()


@pytest.mark.parametrize(("lacking", "moved"), [([0.0], 1), ([0.5, 0.0], 2), ([0.5, 0.1, 0.0], 3), ([0.1] * 9, 3)])
def test_more_leaves_while_fragments_keep_what_generation_needs(
    monkeypatch: pytest.MonkeyPatch, lacking: list[float], moved: int
) -> None:
    kept, _ = trained(1, [])
    stepper, _ = trained(1, [])
    residency = stepper.engine.residency
    each = residency.memory()["optimizer"] // 3
    left = [each * share for share in lacking]
    monkeypatch.setattr(residency_module, "_lacking_bytes", lambda *_: left.pop(0))
    assert residency.free(3, needed_bytes=each / 2) == pytest.approx(moved * each, rel=0.01)
    assert residency.memory()["optimizer"] == pytest.approx((3 - moved) * each, rel=0.01)
    residency.restore()
    for each_stepper in (kept, stepper):
        each_stepper.step(STEPS + 1)
    assert all(torch.equal(weight, stepper.weights()[name]) for name, weight in kept.weights().items())


@pytest.mark.parametrize(("free_bytes", "lacking_bytes"), [(35, -9.5), (25.5, 0), (20, 5.5)])
def test_generation_needs_room_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, free_bytes: float, lacking_bytes: float
) -> None:
    """7B on an H200: 150 GB, of which turns use 135; the trainer has 122 and generation takes 21, so 8 have to leave."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free_bytes, 150))
    assert residency_module._lacking_bytes(torch.device("cuda"), 122, 8) == pytest.approx(lacking_bytes)


def test_a_checkpoint_waits_for_the_states_that_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper, _ = trained(1, [])
    engine, fill = stepper.engine, HostCopies._fill

    def slowly(copies: HostCopies, behind: Point) -> None:
        time.sleep(0.3)
        fill(copies, behind)

    monkeypatch.setattr(HostCopies, "_fill", slowly)
    digests = []
    for name in ("kept", "moved"):
        (tmp_path / name).mkdir()
        written = engine.save(tmp_path / name)()
        assert not written.error
        digests.append({path.relative_to(tmp_path / name): file for path, file in written.files.items()})
        engine.residency.free(3)
        engine.residency.restore()
    assert digests[0] == digests[1]


def test_a_turn_frees_the_snapshot_before_its_memory_returns_and_copies_it_once_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = trainer_ranks.settings(1, 1, tmp_path)
    of = of.model_copy(update={"placement": of.placement.model_copy(update={"mode": "shared"})})
    publication = Publication(of, "127.0.0.1", weights.secret)
    rank, calls = trainer_ranks.Rank(of), list[str]()
    residency = rank.engine.residency
    trainer = Trainer(rank.engine, of, NoMailbox(), Rank0Artifacts(of, publication))

    def noted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def called(*given: object) -> object:
            calls.append(name)
            return call(*given)

        return called

    monkeypatch.setattr(publication, "free", noted("snapshot", publication.free))
    monkeypatch.setattr(residency, "restore", noted("restore", residency.restore))
    for name, copies in residency._copies.items():
        monkeypatch.setattr(copies, "offload", noted(f"copy {name}", copies.offload))
    for version, kind in enumerate(["free", "train", "train", "free", "train"]):
        calls.append(kind)
        trainer.execute(
            Command(
                CommandKind[kind.upper()], groups=tuple(test_update.batch()), lags={PolicyVersion(0): 1}, learning_rate=1e-3,
                version=PolicyVersion(version), rung=3,
            )
        )  # fmt: skip
    publication.close()
    turn_ends = ["free", "copy optimizer"]
    assert calls == [
        *turn_ends,
        "train",
        "snapshot",
        "restore",
        "train",
        "snapshot",
        *turn_ends,
        "train",
        "snapshot",
        "restore",
    ]


@contextlib.contextmanager
def away_and_back(stepper: Stepper, folder: Path) -> Iterator[tuple[Trainer, dict[str, float]]]:
    """Yield a trainer and its memory by component; after the block, all that left returns as it was."""
    of = trainer_ranks.settings(1, 1, folder)
    publication = Publication(of, "127.0.0.1", weights.secret)
    trainer = Trainer(stepper.engine, of, NoMailbox(), Rank0Artifacts(of, publication))
    residency, kept = stepper.engine.residency, stepper.weights()
    memory = residency.memory()
    yield trainer, memory
    trainer._reload()
    residency.follow()
    assert residency.memory() == memory
    weights_now = stepper.weights()
    assert all(torch.equal(kept[name], weights_now[name]) for name in kept)
    publication.close()


def test_a_model_whose_memory_is_free_frees_more_at_a_higher_rung_alone(tmp_path: Path) -> None:
    stepper = Stepper(settings(zero_stage=1))
    stepper.step(1)
    with away_and_back(stepper, tmp_path) as (trainer, memory):
        freed = [trainer._free(rung, None) for rung in (3, 2, 4, 4)]
        assert [result.moved_bytes for result in freed] == [
            memory["optimizer"], 0, memory["weights"] + memory["gradients"], 0,
        ]  # fmt: skip
        assert [bool(result.memory) for result in freed] == [True, False, False, False], "measured when all is there"
        assert bytes_of(stepper) == 0


def test_what_stayed_at_rung_3_leaves_at_rung_4(tmp_path: Path) -> None:
    stepper, _ = trained(1, [])
    with away_and_back(stepper, tmp_path) as (trainer, memory):
        part = trainer._free(3, memory["optimizer"] / 4).moved_bytes
        assert 0 < part < memory["optimizer"]
        assert part + trainer._free(4, None).moved_bytes == sum(memory.values())
        assert sum(stepper.engine.residency.memory().values()) == 0
