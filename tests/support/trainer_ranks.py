"""Scenes of two ranks for ``tests/trainer/test_ranks.py``, started once by the launcher because imports take seconds.
Rank 0 writes the results.
"""

import dataclasses
import errno
import json
import queue
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from penstock.services.trainer.algorithm.estimates import AdapterOff, Reference
from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.batch.packing import micro_batch
from penstock.services.trainer.checkpoint import commits, local_store
from penstock.services.trainer.checkpoint.manifests import CheckpointState
from penstock.services.trainer.loop import Trainer
from penstock.services.trainer.model import adapter
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers import spans
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.phases import Phases
from penstock.services.trainer.rank0.artifacts import Artifacts, Rank0Artifacts
from penstock.services.trainer.rank0.mailbox.commands import Command, CommandKind
from penstock.services.trainer.rank0.mailbox.queues import NoMailbox
from penstock.services.trainer.rank0.mailbox.results import Saved
from penstock.services.trainer.rank0.publication import Publication
from penstock.services.trainer.rank_group import start_ranks
from penstock.shared.bus.messages import Experience, PolicyVersion, StepPlan
from penstock.shared.files import durable
from penstock.shared.files.token_records import read_record
from penstock.shared.process import memory_timeline
from penstock.shared.settings import Settings
from tests.support import teaching, tiny, tiny_hybrids, tolerance
from tests.support.packed import rows
from tests.trainer.algorithm import test_tree_steps, test_update

LORA = {"rank": 4}
KL = {"coefficient": 0.1}
LONGER = 3
CHUNKED = {
    "logits_chunk_tokens": 2,
    # partition even the smallest weights, like a large model's
    "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "actor-critic": {
        "preset": "ppo",
        "minibatches": 2,
        "kl": {"coefficient": 0.05, "estimator": "k1"},
        "critic": {"learning_rate": 1e-3},
    },
    "dpo": {"preset": "dpo"},
    "top-k": {"advantage": "none", "distillation": 1.0, "distillation_top_k": 3},
}
STAGES = {"actor-critic": 1, "dpo": 3, "top-k": 1}
"""Each algorithm's ZeRO stage. Others: chunks below, and ``tests/trainer/test_service.py`` (an actor-critic)."""
AHEAD = {
    # gather one weight ahead, like a large model's
    "deepspeed": {
        "zero_optimization": {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 1,
        }
    },
}
HYBRID: dict[str, Any] = {
    "model": "short convolution",
    "trainer": {"deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
}
CAP = 24
RELAID: dict[str, tuple[int, int, dict[str, Any]]] = {
    "0 to 0": (0, 0, {}),
    "1 to 3": (1, 3, {}),
    "3 to 1": (3, 1, {}),
    "2 to 2": (2, 2, {"trainer": {"weight_decay": 0.1}}),
    "3 to 3": (3, 3, {"trainer": {"offload": "optimizer"}}),
    "lora": (2, 3, {"lora": LORA}),
}
"""ZeRO stages of one rank and of two, which continue each other's checkpoints."""
Batch = Callable[..., list[Experience]]


def settings(zero_stage: int, ranks: int, folder: Path = Path("runs"), **tables: Any) -> Settings:
    trainer = dict(tables.get("trainer", {}))
    chunks = {name: trainer.pop(name) for name in ("logits_chunk_tokens",) if name in trainer}
    return Settings.model_validate(
        {
            "run": {"id": "ranks", "folder": folder, "device": "cpu"},
            "policy": {"dtype": "float32", "lora": tables.get("lora", {}), "model": tables.get("model", "tiny")},
            "sampling": {"max_new_tokens": 8},
            "coordinator": {"sample_every_steps": 1},
            "internal": {"probe_every_versions": 0, **chunks},
            "algorithm": {"groups_per_step": 4, **tables.get("algorithm", {})},
            "trainer": {
                "ranks": ranks, "zero_stage": zero_stage, "learning_rate": 1e-3,
                "micro_batch_tokens": CAP, "checkpoint_every_steps": 1, **trainer,
            },
        }
    )  # fmt: skip


def episodes(tables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``tables`` with forward passes that hold a tree."""
    tables = tables or {}
    return {**tables, "trainer": {**tables.get("trainer", {}), "micro_batch_tokens": 120}}


class Rank:
    def __init__(self, of: Settings, batch: Batch = test_update.batch) -> None:
        torch.manual_seed(0)
        self._batch = batch
        make = tiny_hybrids.HYBRIDS.get(of.policy.model, tiny.model)
        model = adapter.add(make().requires_grad_(True), of.policy)
        self._top_k = of.algorithm.distillation_top_k
        policy = Policy(
            model,
            chunk_tokens=of.internal.logits_chunk_tokens,
            packing=of.trainer.packing,
            distils=self._top_k > 0,
        )
        self.engine = TrainingEngine(policy.train(), of, "cpu")
        critic = None
        if of.algorithm.needs_critic:
            trunk = tiny.model(0).requires_grad_(True).get_decoder()
            critic = TrainingEngine(Critic(trunk, 32).train(), of, "cpu")
        self._learner = Learner(self.engine, of, Phases(), critic, self._reference(of))

    def _reference(self, of: Settings) -> Reference | None:
        if not of.algorithm.needs_reference:
            return None
        return AdapterOff(self.engine) if of.policy.lora.rank else Policy(tiny.model(0)).eval()

    def learn(self, step: int, longer: int = 0, plan: StepPlan | None = None) -> dict[str, float]:
        data = self._batch(longer=longer)
        if self._top_k:
            data = teaching.with_tops(data, 5, self._top_k)
        return self._learner.learn(data, test_update.lags(data), step, repeated=plan)

    def try_out(self, group: Experience) -> None:
        self._learner.try_out([group])

    @property
    def plan(self) -> StepPlan | None:
        return self._learner.plan

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.tensors()}


def two_steps(of: Settings, longer: int = 0, batch: Batch = test_update.batch) -> dict[str, Any]:
    """Measurements of two steps, and the weights after them."""
    rank = Rank(of, batch)
    return {"measured": [rank.learn(1, longer), rank.learn(2, longer)], "weights": rank.weights()}


def with_trials(of: Settings) -> dict[str, Any]:
    """Two steps with a trial of each group between them, run by both ranks."""
    rank = Rank(of)
    measured = [rank.learn(1)]
    for group in test_update.batch():
        rank.try_out(group)
    return {"measured": [*measured, rank.learn(2)], "weights": rank.weights()}


def evaluated(of: Settings, *, evaluates: bool) -> dict[str, Any]:
    """Two steps, a forward pass alone, the weights, and a third step and its weights."""
    rank = Rank(of)
    rank.learn(1)
    rank.learn(2)
    if evaluates:  # weights are gathered ahead, for a backward pass that does not come
        rank.engine.evaluate(micro_batch(rows(0)))
    weights = rank.weights()
    return {"weights": weights, "measured": [rank.learn(3)], "after": rank.weights()}


def resumed(of: Settings, folder: Path) -> dict[str, Any]:
    """A third step, by the original engine and by one resumed from its checkpoint."""
    before, after = Rank(of), Rank(of)
    before.learn(1)
    before.engine.save(folder)()
    dist.barrier()
    after.engine.load(folder)
    return {"one": [before.learn(2), before.weights()], "other": [after.learn(2), after.weights()]}


def relaid(of: Settings, folder: Path) -> dict[str, Any]:
    """Weights read from what one rank wrote, those of a step made from them, and what was written after it."""
    rank = Rank(of)
    rank.engine.load(folder / "one", of_others=of.trainer.zero_stage > 0)
    loaded = rank.weights()
    rank.learn(2)
    assert not rank.engine.save(folder / "two")().error
    dist.barrier()
    return {"loaded": loaded, "weights": rank.weights()}


def without_memory(of: Settings, most_tokens: int, batch: Batch = test_update.batch) -> dict[str, Any]:
    """A step in which rank 1 fails above ``most_tokens`` tokens, and rank 0 always; and its replay with memory."""
    rank, replayed, forward = Rank(of, batch), Rank(of, batch), Policy.forward

    def tight(self: Policy, actual: Any) -> Any:
        if dist.get_rank() == 1 and torch.is_grad_enabled() and actual.tokens > most_tokens:
            raise torch.OutOfMemoryError(f"{actual.tokens} tokens")
        return forward(self, actual)

    with mock.patch.object(Policy, "forward", tight):
        actual = {"measured": rank.learn(1), "weights": rank.weights()}
    replayed.learn(1, plan=rank.plan)
    return {**actual, "plans": [_plain(entry.plan) for entry in (rank, replayed)], "replayed": replayed.weights()}


def _plain(plan: StepPlan | None) -> dict[str, Any]:
    assert plan is not None
    return dataclasses.asdict(plan)


def crowded(of: Settings, folder: Path) -> dict[str, Any]:
    """Errors of checkpoints where a rank's part has room and those of both have not, and where they have."""
    rank = Rank(of)
    rank.learn(1)
    assert rank.engine.save(folder / "first")().error == ""
    dist.barrier()
    files = sorted((folder / "first").rglob("*optim_states.pt"))
    largest = max(file.stat().st_size for file in files)
    errors = []
    for free_bytes in (1.5 * largest, 3 * largest):
        with mock.patch.object(durable, "free_bytes", lambda _, free=free_bytes: durable.LEAST_BYTES + int(free)):
            errors.append(rank.engine.save(folder / "second")().error)
        dist.barrier()
        errors.append(str(len(list((folder / "second").rglob("*.pt")))))
        dist.barrier()
    return {"errors": errors, "files": len(list((folder / "first").rglob("*.pt")))}


def on_slow_disk(of: Settings, folder: Path) -> dict[str, Any]:
    """Whether rank 1's file, the last one, is there whenever rank 0 enters a collective of DeepSpeed's, but the first."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    there, write, barrier = list[bool](), torch.save, dist.barrier
    gather = DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue

    def has_written(of_rank: int) -> bool:
        return bool(list((folder / "engine").glob(f"*pp_rank_{of_rank}_*optim_states.pt")))

    def late(states: Any, path: Any, **named: Any) -> None:
        if dist.get_rank() == 1 and "optim_states" in str(path):
            while not has_written(0):
                time.sleep(0.01)
            time.sleep(1.0)
        write(states, path, **named)

    def watched(of: Callable[..., None]) -> Callable[..., None]:
        def collective(*given: Any) -> None:
            there.append(has_written(1))
            of(*given)

        return collective

    with mock.patch.object(DeepSpeedZeroOptimizer_Stage3, "checkpoint_event_epilogue", watched(gather)):
        rank = Rank(of)
        rank.learn(1)
        with (
            mock.patch.object(torch, "save", late),
            mock.patch.object(memory_timeline, "host_bytes", return_value=(0.0, 0.0)),  # so that it is written at once
            mock.patch("deepspeed.runtime.engine.dist.barrier", watched(barrier)),
        ):
            error = rank.engine.save(folder)().error
    return {"error": error, "there": there[1:]}


def on_full_disk(of: Settings) -> list[bool]:
    """Whether rank 0 has noted the version when rank 1 begins to gather it; rank 0's disk has room a second late."""
    publication = Publication(of, "127.0.0.1", lambda: b"")
    artifacts = (Artifacts if dist.get_rank() else Rank0Artifacts)(of, publication)
    seen, note, take_part = list[bool](), commits.note_version, Publication.take_part
    version = PolicyVersion(commits.noted_version(of.run_folder) + 1)
    dist.barrier()

    def late(*given: Any) -> None:
        time.sleep(1.0)
        note(*given)

    def watched(*given: Any) -> None:
        seen.append(commits.noted_version(of.run_folder) == version)
        take_part(*given)

    noting = mock.patch("penstock.services.trainer.rank0.artifacts.note_version", late)
    with noting, mock.patch.object(Publication, "take_part", watched):
        artifacts.publish(Rank(of).engine, version, 1)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, seen)
    return [noted for of_rank in every for noted in of_rank]


def train_command(groups: tuple[Experience, ...], version: int) -> Command:
    lags = test_update.lags(groups)
    return Command(CommandKind.TRAIN, groups=groups, lags=lags, learning_rate=1e-3, version=PolicyVersion(version))


class Written(NoMailbox):
    """Has what became of checkpoints, on every rank."""

    def __init__(self) -> None:
        self.saved: queue.SimpleQueue[Saved] = queue.SimpleQueue()

    def send_saved(self, saved: Saved) -> None:
        self.saved.put(saved)


def full_folder(of: Settings) -> dict[str, Any]:
    """Three steps with checkpoints; rank 1 cannot write its part of the second."""
    writes = dist.get_rank() == 0
    publication = Publication(of, "127.0.0.1", lambda: b"")
    artifacts = Rank0Artifacts(of, publication) if writes else Artifacts(of, publication)
    mailbox, data, said = Written(), tuple(test_update.batch()), []
    trainer = Trainer(Rank(of).engine, of, mailbox, artifacts)
    for step in (1, 2, 3):
        write = _refuse if (step, dist.get_rank()) == (2, 1) else torch.save
        state = CheckpointState(step, PolicyVersion(step), 0, "", 2, 3, "00") if writes else None
        commands = [
            train_command(data, step),
            Command(CommandKind.CHECKPOINT, state=state),
        ]
        with mock.patch.object(torch, "save", write):
            made, _ = [trainer.execute(command) for command in commands]
            saved = mailbox.saved.get()
        said.append((type(made).__name__, saved.checkpoint is not None))
    root = of.run_folder / "checkpoints"
    dist.barrier()
    whole = [actual.state.step for actual in local_store.find(root)]
    values = list(read_record(of.run_folder, 1, data[-1].group_id)) if writes else []
    recorded = [len([value for value in each["trainer_logprobs"] if value is not None]) for each in values]
    return {"said": said, "whole": whole, "left": sorted(path.name for path in root.iterdir()), "recorded": recorded}


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def main(folder: Path) -> None:
    start_ranks("cpu")
    torch.set_num_threads(1)
    with tolerance.smooth_adam():
        actual = _found(folder)
    if dist.get_rank() == 0:
        torch.save(actual, folder / "found.pt")
        print(json.dumps(sorted(actual)))
    dist.barrier()
    dist.destroy_process_group()


def _found(folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = {f"zero-{stage}": two_steps(settings(stage, 2)) for stage in (1, 3)}
    actual["tried"] = with_trials(settings(3, 2))
    actual["chunks"] = two_steps(settings(3, 2, trainer=CHUNKED), LONGER)
    actual["top-k chunks"] = two_steps(settings(3, 2, trainer=CHUNKED, algorithm=ALGORITHMS["top-k"]), LONGER)
    for evaluates in (False, True):
        actual[f"evaluated {evaluates}"] = evaluated(settings(3, 2, trainer=AHEAD), evaluates=evaluates)
    for name, stage in STAGES.items():
        actual[name] = two_steps(settings(stage, 2, algorithm=ALGORITHMS[name]))
    actual["full disk"] = on_full_disk(settings(3, 2))
    for stage in (2, 3):
        with_kl = settings(stage, 2, lora=LORA, algorithm={"kl": KL})
        actual[f"lora-{stage}"] = two_steps(with_kl)
    for name, (_, stage, tables) in RELAID.items():
        actual[f"relaid {name}"] = relaid(settings(stage, 2, **tables), folder / name)
    actual["lora-resumed"] = resumed(with_kl, folder / "lora")
    with mock.patch.multiple(
        spans, FORK_TOKENS=1, CHUNK_TOKENS=1, _SLACK_TOKENS=0
    ):  # ranks call mixers unequally often
        actual["hybrid"] = two_steps(settings(3, 2, **HYBRID), LONGER)
        actual["hybrid episodes"] = two_steps(settings(3, 2, **episodes(HYBRID)), LONGER, test_tree_steps.episodes)
    for name, algorithm in {"sequences": {}, "sequences-dpo": ALGORITHMS["dpo"]}.items():
        one_by_one = {**CHUNKED, "packing": "sequences"}
        actual[name] = two_steps(settings(3, 2, trainer=one_by_one, algorithm=algorithm), LONGER)
    for stage, tables in ((1, {}), (3, {"trainer": CHUNKED})):
        actual[f"episodes-{stage}"] = two_steps(
            settings(stage, 2, **episodes(tables)), LONGER, test_tree_steps.episodes
        )
    actual["episodes split"] = without_memory(settings(2, 2, **episodes()), 60, test_tree_steps.episodes)
    actual["split"] = without_memory(settings(2, 2), 11)
    actual["left out"] = without_memory(settings(2, 2), 7)
    for stage in (2, 3):
        actual[f"slow disk-{stage}"] = on_slow_disk(settings(stage, 2), folder / f"slow-{stage}")
    actual["crowded"] = crowded(settings(2, 2), folder / "crowded")
    actual["full"] = full_folder(settings(3, 2, folder))
    actual["compiler"] = [name for name in sys.modules if name == "torch._inductor.compile_fx"]
    return actual


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
