"""Memory savings change no result, and packing loses nothing."""

import ast
import gc
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.services.trainer.algorithm.update import Learner
from penstock.services.trainer.batch.assignment import assign_pieces, plan
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.checkpoint import pickles
from penstock.services.trainer.model import optimizer
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.engine import TrainingEngine, saved_tensors
from penstock.services.trainer.model.layers import kernels
from penstock.services.trainer.model.layers.logits import token_logprobs
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.saving.ranges import RANGES
from penstock.services.trainer.phases import Phases
from penstock.shared.errors import SettingsError
from penstock.shared.files import durable
from penstock.shared.model.flops import ModelSizes, forward_flops, peak_tflops
from penstock.shared.process import memory_timeline
from penstock.shared.settings import PolicySettings, Settings
from penstock.shared.settings.trainer import DEEPSPEED_ALLOWED, reduced_together
from tests.conftest import need_module
from tests.support import builders, tiny
from tests.support.packed import rows
from tests.support.tolerance import FORWARD, GRADIENT, MOVEMENT, RESUMED, ULPS, gap, moved_apart, smooth_adam
from tests.trainer.algorithm import test_update

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_trainer_of_one_rank_listens_on_no_wildcard_address() -> None:
    code = (
        "import psutil\nfrom penstock.services.trainer.rank_group import start_ranks\nassert start_ranks('cpu') == (0, 1)\n"
        "print([c.laddr.ip for c in psutil.Process().net_connections('inet') if c.status == 'LISTEN'])"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not {"0.0.0.0", "::"} & set(ast.literal_eval(done.stdout.splitlines()[-1]))


def settings(zero_stage: int = 0, **trainer: Any) -> Settings:
    internal = {name: trainer.pop(name) for name in ("logits_chunk_tokens", "peak_tflops") if name in trainer}
    return Settings.model_validate(
        {
            "policy": {"dtype": "float32"},
            "sampling": {"max_new_tokens": 8},
            "algorithm": {"preset": "grpo", "groups_per_step": 4, "entropy_bonus": 0.01},
            "run": {"device": "cpu"},
            "internal": internal,
            "trainer": {"learning_rate": 1e-3, "zero_stage": zero_stage, **trainer},
        }
    )


class Stepper:
    def __init__(self, of: Settings) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chunk = of.internal.logits_chunk_tokens
            model = tiny.model(0).requires_grad_(True)
            self.engine = TrainingEngine(Policy(model, entropy_gradient=True, chunk_tokens=chunk).train(), of, "cpu")
        self._learner = Learner(self.engine, of, Phases())

    def step(self, number: int) -> dict[str, float]:
        data = test_update.batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._learner.learn(data, test_update.lags(data), number)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.float().clone() for name, tensor in self.engine.tensors()}

    def state_types(self) -> set[torch.dtype]:
        optimizer_state: Any = self.engine._engine.optimizer.optimizer.state
        return {v.dtype for state in optimizer_state.values() for v in state.values() if torch.is_tensor(v)}


def step(of: Settings) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    with smooth_adam():
        stepper = Stepper(of)
    return [stepper.step(number) for number in (1, 2)][-1], stepper.weights()


@pytest.mark.parametrize(
    "trainer",
    [
        {"logits_chunk_tokens": 5},
        {"gradient_checkpointing": True},
        {"zero_stage": 1},
        {"zero_stage": 1, "deepspeed": {"zero_optimization": {"contiguous_gradients": True}}},
        {"zero_stage": 1, "offload": "optimizer"},
        {"zero_stage": 2, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}}},
        {"zero_stage": 3},
        {"zero_stage": 3, "logits_chunk_tokens": 5, "gradient_checkpointing": True},
        {"zero_stage": 3, "offload": "optimizer"},
        {"zero_stage": 3, "offload": "all", "logits_chunk_tokens": 5},
    ],
    ids=lambda t: "-".join(f"{k}={v}" for k, v in t.items())[:70],
)
def test_what_saves_memory_makes_the_same_step(trainer: dict[str, Any]) -> None:
    plain, weights = step(settings(logits_chunk_tokens=0))
    actual, others = step(settings(**{"logits_chunk_tokens": 0, **trainer}))
    assert actual["loss"] == pytest.approx(plain["loss"], abs=FORWARD)
    assert actual["entropy"] == pytest.approx(plain["entropy"], abs=FORWARD)
    assert actual["grad_norm"] == pytest.approx(plain["grad_norm"], rel=GRADIENT)
    assert moved_apart(others, weights, dict(tiny.model(0).named_parameters())) < MOVEMENT


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_bucket_for_all_gradients_makes_the_step_of_a_larger_one(zero_stage: int) -> None:
    own, weights = step(settings(zero_stage=zero_stage))
    larger = {"zero_optimization": {"reduce_bucket_size": 1_000_000}}
    other, others = step(settings(zero_stage=zero_stage, deepspeed=larger))
    assert (own["loss"], own["grad_norm"]) == (other["loss"], other["grad_norm"])
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_bucket_has_room_for_the_gradients_of_all_weights(zero_stage: int) -> None:
    stepper = Stepper(settings(zero_stage=zero_stage))
    trained = [weight for weight in stepper.engine.policy.parameters() if weight.requires_grad]
    numbers = sum(getattr(weight, "ds_numel", weight.numel()) for weight in trained)
    assert stepper.engine._engine.optimizer.reduce_bucket_size == reduced_together(numbers, 0) == numbers
    as_set = settings(zero_stage=zero_stage, deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}})
    assert Stepper(as_set).engine._engine.optimizer.reduce_bucket_size == reduced_together(numbers, 1000) == 1000


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_moments_of_eight_bits_make_almost_the_same_steps_and_a_checkpoint_holds_them(
    tmp_path: Path, zero_stage: int
) -> None:
    need_module("bitsandbytes", "bitsandbytes")
    of = settings(zero_stage=zero_stage, optimizer="adamw_8bit")
    with smooth_adam():
        first, second, plain = Stepper(of), Stepper(of), Stepper(settings(zero_stage=zero_stage))
    for entry in (first, plain):
        entry.step(1)
        entry.step(2)
    assert {torch.uint8, torch.float32} <= first.state_types()
    # an 8-bit moment is off by up to 1/128: 0.008 of the movement is common, another optimizer over 0.5
    assert 1e-4 < moved_apart(first.weights(), plain.weights(), dict(tiny.model(0).named_parameters())) < 0.05
    first.engine.save(tmp_path)()
    with smooth_adam():
        second.engine.load(tmp_path)
    first.step(3)
    second.step(3)
    again = second.weights()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.weights().items())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_file_for_which_the_disk_has_no_room_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    stepper = Stepper(settings(zero_stage))
    stepper.step(1)
    assert stepper.engine.save(tmp_path / "first")().error == ""
    largest = max((tmp_path / "first").rglob("*.pt"), key=lambda path: path.stat().st_size)
    nbytes = largest.stat().st_size
    monkeypatch.setattr(durable, "free_bytes", lambda _: durable.LEAST_BYTES + int(0.85 * nbytes))
    assert re.search(
        rf"{largest.name} needs [\d,]+ bytes, and [\d,]+ are free for it$",
        stepper.engine.save(tmp_path / "second")().error,
    )
    assert not list((tmp_path / "second").rglob(largest.name))
    monkeypatch.setattr(durable, "free_bytes", lambda _: durable.LEAST_BYTES + nbytes)
    assert stepper.engine.save(tmp_path / "second")().error == ""
    Stepper(settings(zero_stage)).engine.load(tmp_path / "second")


def plain(value: Any) -> Any:
    """Return a checkpoint's contents as what can be compared."""
    if torch.is_tensor(value):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, Enum) else value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "trainer",
    [
        {"zero_stage": 0},
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 3, "offload": "all"},
        {"optimizer": "adamw_8bit"},
    ],
    ids=str,
)
def test_a_checkpoint_is_of_the_step_at_which_it_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: dict[str, Any], dtype: Any
) -> None:
    if "optimizer" in trainer:
        need_module("bitsandbytes", "bitsandbytes")
    stepper = Stepper(settings(**trainer).model_copy(update={"policy": PolicySettings(dtype=dtype)}))
    stepper.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(memory_timeline, "host_bytes", lambda: (0.0, 0.0))
        write_at_once = stepper.engine.save(tmp_path / "at once")
        assert list((tmp_path / "at once").rglob("*.pt")), "a host without memory for the copy"
    at_once = write_at_once()
    write = stepper.engine.save(tmp_path / "copied")
    stepper.step(2)
    assert not list((tmp_path / "copied").rglob("*.pt"))
    copied = write()
    assert at_once.error == copied.error == ""
    others = [plain(torch.load(tmp_path / "at once" / path.relative_to(tmp_path / "copied"))) for path in copied.files]
    assert [plain(torch.load(path)) for path in copied.files] == others


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_optimizers_states_are_gone_before_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    stepper = Stepper(settings(zero_stage))
    stepper.step(1)
    stepper.engine.save(tmp_path)()
    base = getattr(stepper.engine.optimizer, "optimizer", stepper.engine.optimizer)
    moments = [weakref.ref(states["exp_avg"]) for states in base.state.values()]
    assert moments
    load, are_gone = pickles.loading, list[bool]()

    def loading(folder: Path, read: Any) -> Any:
        gc.collect()
        are_gone.extend(moment() is None for moment in moments)
        return load(folder, read)

    monkeypatch.setattr(pickles, "loading", loading)
    stepper.engine.load(tmp_path)
    assert are_gone == [True] * len(moments)
    assert stepper.step(2)["grad_norm"] > 0.0


@pytest.mark.parametrize(
    "trainer", [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 3}, {"zero_stage": 3, "offload": "all"}]
)
def test_a_loaded_checkpoint_can_be_deleted_and_its_space_is_free(tmp_path: Path, trainer: dict[str, Any]) -> None:
    of = settings(**trainer)
    first, second = Stepper(of), Stepper(of)
    first.step(1)
    first.engine.save(tmp_path)()
    second.engine.load(tmp_path)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    shutil.rmtree(tmp_path)
    first.step(2)
    second.step(2)
    others = second.weights()
    assert all(torch.equal(tensor, others[name]) for name, tensor in first.weights().items())


def assert_continued(folder: Path, before: Settings, after: Settings) -> None:
    """Check that a checkpoint, read by range, brings back the weights, and that the next step is the same."""
    with smooth_adam():
        first, second = Stepper(before), Stepper(after)
        first.step(1)
        first.step(2)
        first.engine.save(folder)()
        second.engine.load(folder, of_others=True)
    start = second.weights()
    assert all(torch.equal(tensor, start[name]) for name, tensor in first.weights().items())
    first.step(3)
    second.step(3)
    assert moved_apart(second.weights(), first.weights(), start) < RESUMED


@pytest.mark.parametrize("trainer", [{}, {"offload": "optimizer"}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (1, 2)])
def test_a_checkpoint_is_continued_at_another_zero_stage(
    tmp_path: Path, before: int, after: int, trainer: dict[str, Any]
) -> None:
    assert_continued(tmp_path, settings(before, **trainer), settings(after, **trainer))


def test_weights_that_are_offloaded_are_continued_by_range_too(tmp_path: Path) -> None:
    assert_continued(tmp_path, settings(3, offload="all"), settings(3, offload="all"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_a_critic_is_continued_at_another_zero_stage(tmp_path: Path, before: int, after: int) -> None:
    def critic(zero_stage: int) -> TrainingEngine:
        trunk = tiny.model(0).requires_grad_(True).get_decoder()
        return TrainingEngine(Critic(trunk, 32).train(), settings(zero_stage), "cpu")

    def step_of(engine: TrainingEngine) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.backward((engine.forward(micro_batch(rows(0))) - 1.0).square().mean(), last=True)
            engine.step(1e-3)

    def saved(engine: TrainingEngine) -> dict[str, torch.Tensor]:
        folder = tmp_path / f"{id(engine)}"
        engine.save(folder)()
        tensors = saved_tensors(folder, engine._trainer.zero_stage)
        return {name: tensor.clone() for name, tensor in tensors.items()}  # which map the files

    with smooth_adam():
        first, second = critic(before), critic(after)
        step_of(first)
        start = saved(first)
        second.load(tmp_path / f"{id(first)}", of_others=True)
    assert all(torch.equal(tensor, start[name]) for name, tensor in saved(second).items())
    step_of(first)
    step_of(second)
    assert moved_apart(saved(second), saved(first), start) < RESUMED


def without_ranges(path: Path) -> None:
    saved = torch.load(path, weights_only=True)
    del saved[RANGES]
    torch.save(saved, path)


def without_half_of_a_range(path: Path) -> None:
    saved = torch.load(path, weights_only=True)
    name, start, numel, *rest = saved[RANGES][0]
    saved[RANGES][0] = (name, start, numel // 2, *rest)
    torch.save(saved, path)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_checkpoint_of_another_optimizer_of_deepspeed_is_for_its_own_settings(tmp_path: Path) -> None:
    """That of bfloat16 at stage 1, which sums gradients in float32, does not say what its flat tensors hold."""
    of = settings(1, deepspeed={"data_types": {"grad_accum_dtype": "fp32"}})
    of = of.model_copy(update={"policy": of.policy.model_copy(update={"dtype": "bfloat16"})})

    def engine(seed: int) -> TrainingEngine:
        model = tiny.model(seed).requires_grad_(True).bfloat16()
        return TrainingEngine(Policy(model).train(), of, "cpu")

    first, second = engine(0), engine(1)
    assert not first.save(tmp_path)().error
    second.load(tmp_path)
    pairs = zip(first.tensors(), second.tensors(), strict=True)
    assert all(torch.equal(weight, loaded) for (_, weight), (_, loaded) in pairs)
    with pytest.raises(SettingsError, match=r"grad_accum_dtype in trainer.deepspeed at stage 1"):
        second.load(tmp_path, of_others=True)


@pytest.mark.parametrize(
    ("before", "after", "spoil", "sentence"),
    [
        ({"zero_stage": 0}, 1, None, r"\(trainer.zero_stage = 0 wrote it\): change them back, or start a new run"),
        ({"zero_stage": 1}, 0, None, "0 cannot continue it: set trainer.zero_stage to 1 or more"),
        ({"zero_stage": 1}, 3, without_ranges, "an older Penstock, or .* wrote it"),
        ({"zero_stage": 1, "optimizer": "adamw_8bit"}, 3, None, 'it has no moments of trainer.optimizer = "adamw"'),
        (
            {"zero_stage": 1},
            3,
            without_half_of_a_range,
            r"expected [\d,]+ numbers of .* found [\d,]+: put an intact copy",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value))[:40],
)
def test_what_another_zero_stage_cannot_continue_is_refused_with_the_way_out(
    tmp_path: Path, before: dict[str, Any], after: int, spoil: Callable[[Path], None] | None, sentence: str
) -> None:
    if "optimizer" in before:
        need_module("bitsandbytes", "bitsandbytes")
    first = Stepper(settings(**before))
    first.step(1)
    first.engine.save(tmp_path)()
    if spoil is not None:
        spoil(next(tmp_path.rglob("*optim_states.pt")))
    with pytest.raises(SettingsError, match=sentence):
        Stepper(settings(**{**before, "zero_stage": after})).engine.load(tmp_path, of_others=True)


@pytest.fixture
def several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "_LARGE", 1)
    monkeypatch.setattr(optimizer, "GROUP_WEIGHTS", 4000)


def groups_of(stepper: Stepper) -> list[int]:
    return [
        sum(tensor.numel() for tensor in group["params"]) for group in stepper.engine._engine.optimizer.param_groups
    ]


@pytest.mark.usefixtures("several_groups")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_keeps_no_flat_copy_of_its_gradients_and_makes_the_same_steps_to_the_bit(dtype: Any) -> None:
    flat = settings(1, deepspeed={"zero_optimization": {"contiguous_gradients": True}})
    policy = {"policy": PolicySettings(dtype=dtype)}
    steppers = [Stepper(of.model_copy(update=policy)) for of in (settings(1), flat)]
    assert [stepper.engine.optimizer.contiguous_gradients for stepper in steppers] == [False, True]
    first, second = ([stepper.step(number)["grad_norm"] for number in (1, 2, 3)] for stepper in steppers)
    assert first == second
    weights, others = (stepper.weights() for stepper in steppers)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_large_model_in_groups_makes_the_steps_of_one_group(
    zero_stage: int, dtype: Any, request: pytest.FixtureRequest
) -> None:
    of = settings(zero_stage).model_copy(update={"policy": PolicySettings(dtype=dtype)})
    with smooth_adam():
        whole = Stepper(of)
        request.getfixturevalue("several_groups")
        parts = Stepper(of)
    assert len(groups_of(whole)) == 1
    assert len(groups_of(parts)) > 3
    assert sum(groups_of(parts)) == pytest.approx(sum(groups_of(whole)), abs=16)  # padded
    norms = [[stepper.step(number)["grad_norm"] for number in (1, 2)] for stepper in (whole, parts)]
    assert norms[1] == pytest.approx(norms[0], rel=GRADIENT)
    assert moved_apart(parts.weights(), whole.weights(), dict(tiny.model(0).named_parameters())) < MOVEMENT


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_loaded_optimizer_has_the_options_of_its_run(tmp_path: Path, zero_stage: int) -> None:
    def options_of(stepper: Stepper) -> list[tuple[Any, ...]]:
        groups: Any = stepper.engine.optimizer.param_groups
        return [(tuple(group["betas"]), group["eps"], group["weight_decay"]) for group in groups]

    first = Stepper(settings(zero_stage, weight_decay=0.1))
    first.step(1)
    first.engine.save(tmp_path)()
    second = Stepper(settings(zero_stage, weight_decay=0.2, adam_betas=(0.8, 0.9), adam_eps=1e-6))
    second.engine.load(tmp_path)
    assert options_of(second) == [((0.8, 0.9), 1e-6, 0.2), ((0.8, 0.9), 1e-6, 0.0)]
    with pytest.raises(SettingsError, match=r"with its trainer.weight_decay \(0 or not\)"):
        Stepper(settings(zero_stage)).engine.load(tmp_path)


@pytest.mark.parametrize("choice", ["adamw", "adamw_8bit"])
def test_a_checkpoint_holds_the_states_of_all_groups_and_one_of_other_groups_is_refused(
    tmp_path: Path, choice: str, request: pytest.FixtureRequest
) -> None:
    if choice == "adamw_8bit":
        need_module("bitsandbytes", "bitsandbytes")
    of = settings(zero_stage=1, optimizer=choice)
    whole = Stepper(of)
    request.getfixturevalue("several_groups")
    first, second = Stepper(of), Stepper(of)
    first.step(1)
    first.engine.save(tmp_path)()
    second.engine.load(tmp_path)
    first.step(2)
    second.step(2)
    again = second.weights()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.weights().items())
    with pytest.raises(SettingsError, match="in other groups than this run: continue with the version of Penstock"):
        whole.engine.load(tmp_path)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_more_weights_than_moments_of_eight_bits_can_count_are_refused(
    monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    need_module("bitsandbytes", "bitsandbytes")
    monkeypatch.setattr(optimizer, "_COUNTED", 8000)
    with pytest.raises(SettingsError, match=r"updates at most 8,000 weights at a time, found \d\d,\d+: raise trainer"):
        Stepper(settings(zero_stage, optimizer="adamw_8bit"))
    Stepper(settings(zero_stage, optimizer="adamw"))


def test_moments_of_eight_bits_are_refused_where_their_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(SettingsError, match=r"needs bitsandbytes, .* pip install .*adam-8bit.*, or set it to"):
        Stepper(settings(optimizer="adamw_8bit"))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_one_gradient_that_is_not_finite_leaves_all_weights_as_they_are(zero_stage: int, dtype: Any) -> None:
    of = settings(zero_stage).model_copy(update={"policy": PolicySettings(dtype=dtype)})
    model: Any = tiny.model(0).to(getattr(torch, dtype)).requires_grad_(True)
    engine = TrainingEngine(Policy(model).train(), of, "cpu")
    before = {name: tensor.clone() for name, tensor in engine.tensors()}
    parameter_: Any = next(
        parameter for name, parameter in engine.policy.named_parameters() if name.endswith("norm.weight")
    )
    hook = parameter_.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    norms = []
    for _ in range(2):
        engine.backward(engine.forward(micro_batch(rows(0))).policy_logprobs_N.mean(), last=True)
        norms.append(engine.step(0.1))
        unchanged = all(torch.equal(tensor, before[name]) for name, tensor in engine.tensors())
        assert unchanged == (len(norms) == 1)
        hook.remove()
    assert norms[0] == math.inf
    assert 0.0 < norms[1] < math.inf


def test_what_is_computed_again_is_still_measured_against_the_models_own_operations() -> None:
    actual, _ = step(settings(peak_tflops=1000.0))
    assert actual["mfu"] == pytest.approx(actual["model_tflops_per_s"] / 1000.0)
    assert actual["model_tflops_per_s"] > 0.0
    assert "mfu" not in step(settings())[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, about what DeepSpeed calls
def test_a_checkpointed_layer_in_parts_computes_all_but_its_last_product_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)  # as before any engine in this process
    of = settings(3, gradient_checkpointing=True, logits_chunk_tokens=0)
    stepper, batch = Stepper(of), micro_batch(rows(0))
    with FlopCounterMode(display=False) as counter:
        stepper.engine.backward(stepper.engine.forward(batch).policy_logprobs_N.mean(), last=True)
    products = {name: count for name, count in counter.get_flop_counts()["Global"].items() if "bmm" not in str(name)}
    trained, layers, width, inner = len(batch.targets_N), 2, 32, 64
    once = batch.tokens * stepper.engine.sizes.linear_weights
    last = batch.tokens * layers * width * inner
    # forward, recomputed, two backward products; the output layer is not checkpointed
    assert sum(products.values()) == 2 * (4 * once - last + 3 * trained * stepper.engine.sizes.output_weights)


@pytest.mark.parametrize("bonus", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_entropies_and_gradients_are_those_of_all_logits_at_once(
    bonus: float, temperature: float
) -> None:
    torch.manual_seed(0)
    output = torch.nn.Linear(16, 50)
    hidden = torch.randn(23, 16, requires_grad=True)
    targets = torch.randint(0, 50, (23,))
    collected = []
    for chunk in (0, 7):
        out = token_logprobs(
            hidden, output, targets, torch.full([len(targets)], temperature), chunk, entropy_gradient=bonus > 0
        )
        objective = out.policy_logprobs_N.square().sum() + (bonus * out.entropy_N).sum()
        gradients = torch.autograd.grad(objective, [hidden, output.weight, output.bias])
        assert out.entropy_N.requires_grad == (bonus > 0)
        collected.append([out.policy_logprobs_N.detach(), out.entropy_N.detach(), *gradients])
    for plain, chunked in zip(*collected, strict=True):
        assert gap([chunked], [plain]) < GRADIENT


def test_without_gradients_chunks_are_the_same_too() -> None:
    torch.manual_seed(0)
    output, hidden, targets = torch.nn.Linear(4, 9), torch.randn(5, 4), torch.randint(0, 9, (5,))
    with torch.no_grad():
        plain, chunked = (token_logprobs(hidden, output, targets, torch.ones(len(targets)), chunk) for chunk in (0, 2))
    assert torch.allclose(plain.policy_logprobs_N, chunked.policy_logprobs_N, atol=ULPS)
    assert torch.allclose(plain.entropy_N, chunked.entropy_N, atol=ULPS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fused_kernels_of_a_gpu_compute_what_torch_does() -> None:
    need_module("liger_kernel", "liger-kernel")
    collected, kinds = [], get_args(kernels.KernelKind)[1:]
    for kind in kinds:
        model = tiny.model(0).requires_grad_(True).to("cuda")
        assert kernels.install(model, kind, "cuda") == (kind == "liger")
        logprobs = Policy(model, kind="mask", fused_logits=kernels.fuses_logits(kind))(
            micro_batch(rows(0))
        ).policy_logprobs_N
        gradients = torch.autograd.grad(logprobs.mean(), list(model.parameters()))
        collected.append([logprobs.detach(), *gradients])
    for plain, fused in zip(*collected, strict=True):
        assert torch.allclose(plain, fused, atol=1e-5)


def test_fused_kernels_are_not_pretended_where_there_is_no_gpu() -> None:
    model = tiny.model(0)
    before = type(model.model.norm).forward
    assert not kernels.install(model, "auto", "cpu")
    assert "forward" not in vars(model.model.norm)
    assert type(model.model.norm).forward is before
    with pytest.raises(SettingsError, match="expected a GPU, found cpu"):
        kernels.install(model, "liger", "cpu")


def test_a_forward_pass_costs_its_products() -> None:
    # 2 · 10 · 100 + 4 · 30 · 8 + 2 · 5 · 50
    assert forward_flops(10, 30, 5, ModelSizes(100, 8, 50)) == 2000.0 + 960.0 + 500.0


def test_the_sizes_of_a_model_are_its_linear_layers_and_its_attention() -> None:
    sizes = Policy(tiny.model(0)).sizes
    # two layers: q 32·32, k and v 32·16, o 32·32, and three of 32·64
    assert sizes == ModelSizes(2 * (1024 + 2 * 512 + 1024 + 3 * 2048), 2 * 4 * 8, 48 * 32)


def test_a_row_sees_its_prompt_once_and_each_completion_its_own() -> None:
    row = PackedRow(np.arange(3, dtype=np.int32), (builders.unlike(0, 3), builders.unlike(1, 2)), (0, 1))
    assert row.visible_pairs == 6 + (2 * 3 + 3) + (1 * 3 + 1)


def lengths(plan: list[list[list[PackedRow]]]) -> list[list[list[int]]]:
    return [[[row.tokens for row in chunk] for chunk in share] for share in plan]


def long_row(tokens: int) -> PackedRow:
    return PackedRow(np.arange(tokens, dtype=np.int32), (builders.sample(tokens=1),), (0,))


def test_rows_fill_as_few_micro_batches_as_longest_first_finds_and_costs_are_even() -> None:
    # two full micro-batches
    assert lengths(assign_pieces([long_row(n) for n in (2, 3, 4, 5, 6)], 10, 1)) == [[[6, 4], [5, 3, 2]]]
    # first fit would be 6 with 4, and 5 with 3
    assert lengths(assign_pieces([long_row(n) for n in (3, 4, 5, 6)], 11, 1)) == [[[6, 3], [5, 4]]]


def test_a_row_that_fits_nowhere_is_split_so_that_costs_stay_even_unless_it_must_stay_whole() -> None:
    samples = tuple(builders.unlike(place, 7) for place in range(3))
    group = PackedRow(np.arange(2, dtype=np.int32), samples, (1, 2, 3))  # 2 + 3 · 6 tokens
    actual = [*[long_row(n) for n in (60, 50, 40, 30)], group]
    assert lengths(assign_pieces(actual, 105, 1)) == [[[60, 30, 14], [50, 40, 8]]]
    assert lengths(assign_pieces(actual, 105, 1, split=False)) == [[[60, 40], [50, 30, 20]]]


def group_row(prompt: int, samples: int, tokens: int) -> PackedRow:
    of_group = tuple(builders.unlike(place, tokens) for place in range(samples))
    return PackedRow(np.arange(prompt, dtype=np.int32), of_group, tuple(range(samples)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_more_than_half_a_micro_batch_are_split_where_prompts_are_short(ranks: int) -> None:
    groups = [group_row(4, 8, 65) for _ in range(32)]  # of 516 tokens, so two exceed 1,016
    shares = assign_pieces(groups, 1016, ranks)
    assert [len(share) for share in shares] == [18 // ranks] * ranks, "instead of 32"
    assert all(sum(row.tokens for row in chunk) <= 1016 for share in shares for chunk in share)
    pieces = [row for share in shares for chunk in share for row in chunk]
    assert sorted(place for row in pieces for place in row.places) == sorted(32 * list(range(8)))
    assert sum(row.tokens for row in pieces) <= 1.02 * 32 * 516
    long_prompts = [group_row(260, 4, 65) for _ in range(32)]  # as many tokens, half of them the prompt's
    assert sum(
        row.tokens for share in assign_pieces(long_prompts, 1016, ranks) for chunk in share for row in chunk
    ) <= (1.02 * 32 * 516)


def test_costs_are_balanced_where_tokens_alone_would_not_be() -> None:
    # by attention, a row of 8 costs 36 pairs, one of 2 only 3
    sizes = ModelSizes(linear_weights=0, attention_width=1)
    first, other = assign_pieces([long_row(8), *[long_row(2)] * 12], 100, 2, sizes=sizes)
    assert lengths([first, other]) == [[[8]], [[2] * 12]]


def test_costly_micro_batches_come_first_on_every_rank() -> None:
    assert lengths(assign_pieces([long_row(n) for n in (6, 5, 5)], 10, 1)) == [[[5, 5], [6]]]
    assert lengths(assign_pieces([long_row(n) for n in (9, 8, 5, 5)], 10, 2)) == [[[9], [5]], [[8], [5]]]


def test_no_position_is_padding() -> None:
    (share,) = plan(rows(0), 10_000, 1)
    assert sum(batch.tokens for batch in share) == sum(row.tokens for row in rows(0))


def test_a_known_gpu_has_a_peak_and_an_unknown_one_has_none() -> None:
    assert peak_tflops("NVIDIA H200") == 989.0
    assert peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert peak_tflops("Some GPU") == 0.0


def test_each_phase_has_its_seconds_and_its_memory() -> None:
    phases = Phases(torch.device("cpu"))
    with phases.measure("forward_backward"):
        pass
    memory = phases.take_memory()
    assert set(memory) == {"memory_bytes", "memory_forward_backward_bytes"}
    assert min(memory.values()) > 1e6
    assert set(phases.take()) == {"forward_backward"}
    assert set(phases.take_memory()) == {"memory_bytes"}


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"zero_stage": 0, "offload": "optimizer"}, 'expected trainer.zero_stage >= 1 with trainer.offload = "optimizer", found 0'),
        ({"zero_stage": 2, "offload": "all"}, 'expected trainer.zero_stage >= 3 with trainer.offload = "all", found 2'),
        ({"optimizer": "adamw_8bit", "zero_stage": 1, "offload": "optimizer"}, 'expected trainer.offload = "none" .* found "optimizer"'),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "expected no bf16 in trainer.deepspeed.*what decides it is policy.dtype"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "expected no zero_optimization.stage.*trainer.zero_stage"),
        ({"deepspeed": {"zero_optimization": 2}}, "expected a table in trainer.deepspeed.zero_optimization, found 2"),
        ({"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}, "expected no zero_optimization.zero_hpz_partition_size .* shard"),
        ({"deepspeed": {"zero_optimization": {"round_robin_gradients": True}}}, "expected no zero_optimization.round_robin_gradients"),
        ({"deepspeed": {"zero_optimization": {"zero_quantized_weights": True}}}, "expected no zero_optimization.zero_quantized_weights"),
        ({"deepspeed": {"gradient_allreduce_op": "sum"}}, "expected no gradient_allreduce_op in trainer.deepspeed"),
        ({"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}, "expected no tensor_parallel in trainer.deepspeed"),
        ({"deepspeed": {"data_types": {"param_dtype": "fp16"}}}, "expected no data_types.param_dtype in trainer.deepspeed"),
        ({"deepspeed": {"zero_optimisation": {}}}, "expected no zero_optimisation in trainer.deepspeed"),
    ],
)  # fmt: skip
def test_settings_of_the_engine_that_contradict_are_refused(trainer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings(**trainer)


def test_deepspeed_knows_the_settings_that_are_allowed() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = {field.alias or name for name, field in fields.items()}
    named = {key.partition(".")[2] for key in DEEPSPEED_ALLOWED if key.startswith("zero_optimization.")}
    assert named <= known
    assert not {"zero_hpz_partition_size", "round_robin_gradients", "parameter_alignment", "zenflow"} & named
