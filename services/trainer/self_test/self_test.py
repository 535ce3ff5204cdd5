"""The self-test at every start: policy and critic, as trained, against their unmodified models.

Two groups of random tokens, each with a tree of two branches, go through the policy as one micro-batch, and one
sequence at a time through ``unmodified_model``. Compared are logprobs (of a critic: normalised hidden states), and the
gradient of a weighted sum of them, with respect to token embeddings and parameters of up to ``SMALL`` numbers.

    float32         max |Δ logprob| ≤ 1e-3 nats, ‖Δ gradient‖ ≤ 1e-3 ‖gradient‖
    widened         mean |Δ logprob| ≤ max(0.005 nats, 4 × spread), ‖Δ gradient‖ ≤ max(0.02, 4 × spread) ‖gradient‖
    half precision  mean |Δ logprob| ≤ max(0.05 nats, 4 × spread), ‖Δ gradient‖ ≤ max(0.1, 4 × spread) ‖gradient‖

The last two are limited to 0.5; ``spread`` is the effect of rounding the unmodified model's embeddings once. Half
precision, which hides small mistakes, is also tested widened to float32 if memory allows.

If rows differ and ``trainer.packing`` is automatic, sequences go one by one; a model that still differs is refused.
At ZeRO stage 3 the model is not on the device as a whole yet (``memory/layerwise``).
With ``trainer.sequence_parallel`` the micro-batch also goes through the policy in parts, one on each rank of a group.
Gradients and random generators stay unchanged. Not covered: windows beyond ``random_rows.LONGEST_WINDOW``, gradients of
large matrices, ZeRO.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.batch import shards
from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.layers import ulysses
from penstock.services.trainer.model.memory import layerwise
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.trunk import Packing
from penstock.services.trainer.self_test import first_difference, random_rows, reached_weights
from penstock.services.trainer.self_test.numbers import (
    HIDDEN_STATES,
    LOGPROBS,
    Gap,
    Numbers,
    compute,
    gap_between,
    of_group,
)
from penstock.services.trainer.self_test.unmodified_model import (
    hidden_states,
    hidden_states_ahead,
    logprobs,
    sees_ahead_nats,
    unit_hidden_states,
    unmodified,
    without_dropout,
)
from penstock.shared.errors import SettingsError

log = logging.getLogger(__name__)

Subject = Policy | Critic
_EXACT = 1e-3
_WIDENED_NATS, _WIDENED_GRADIENT = 0.005, 0.02
_HALF_NATS, _HALF_GRADIENT = 0.05, 0.1
_SPREADS, _MOST = 4.0, 0.5
_HALF = (torch.bfloat16, torch.float16)
_ROOM_BYTES = 4 << 30
_DRAWS = 3


_BROKEN = Gap(math.inf, math.inf, math.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class SelfTestResult:
    of: str
    packing: str
    reason: str
    gap: Gap
    limit: Gap
    widened: Gap | None
    seconds: float

    @property
    def figures(self) -> dict[str, float]:
        widened = {} if self.widened is None else dataclasses.asdict(self.widened)
        numbers = {**dataclasses.asdict(self.gap), **{f"widened_{name}": value for name, value in widened.items()}}
        return numbers | {"seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        widened = "" if self.widened is None else f"; in float32: {self.widened.words(self.of)}"
        return f'{self.gap.words(self.of)} (limit {self.limit.gradient:.2g}){widened}; packing = "{self.packing}"; {self.seconds:.2f} s'


def run(
    policy: Subject, packing: Packing, seed: int = 0, *, is_sharded: bool = False, sequence_parallel: int = 1
) -> SelfTestResult:
    """Compare a policy or critic, in training mode, with the unmodified model; choose the packing.

    ``is_sharded``: several ranks share gradients or weights, so that each pass has to reach the same weights.
    ``sequence_parallel``: ranks that compute a long row together; then a row is compared that they hold in parts, too.

    Raises:
        SettingsError: no allowed packing passes, transformers cannot run the model, or passes reach different weights.
    """
    began = time.perf_counter()
    with _undisturbed(policy):
        if sequence_parallel > 1:
            policy.trunk.check_shards(sequence_parallel)
        widened = _compare_widened(policy, packing, seed, sequence_parallel)
        trial = _chosen(policy, packing, seed, _best(policy, seed, causal=widened is not None))
        if sequence_parallel > 1:
            _check_shards(policy, seed, sequence_parallel)
        if is_sharded:
            reached_weights.check(policy, trial.rows, _setting(policy))
    chosen, seconds = policy.trunk, time.perf_counter() - began
    return SelfTestResult(_compared(policy), chosen.packing, chosen.reason, trial.gap, trial.limit, widened, seconds)


def _compared(policy: Subject) -> str:
    return HIDDEN_STATES if isinstance(policy, Critic) else LOGPROBS


def _setting(policy: Subject) -> str:
    return "algorithm.critic.model" if isinstance(policy, Critic) else "policy.model"


def _check_shards(policy: Subject, seed: int, ranks: int, *, widened: bool = False) -> None:
    """Compare a row of which each of ``ranks`` ranks holds a part; raises SettingsError."""
    policy.trunk.check_shards(ranks)
    trial = _best(policy, seed, widened=widened, ranks=ranks)
    if not trial.passed:
        raise SettingsError(
            f"expected {_compared(policy)} and gradients of the unmodified {type(policy.model).__name__}, within {trial.limit.gradient:.2g}, "
            f"of a row that {ranks} ranks compute together, but {trial.gap.words(_compared(policy))}: set "
            "trainer.sequence_parallel to 1"
        )


def _packed(policy: Subject, rows: Sequence[PackedRow], ranks: int = 1) -> Tensor:
    batch: MicroBatch = micro_batch(rows)
    if ranks > 1:
        batch = shards.split(batch, ranks)[ulysses.index(ranks)]
    if isinstance(policy, Critic):
        if batch.shard is None:
            return unit_hidden_states(policy.trunk.hidden_states(batch))
        own_ND = policy.trunk.hidden_states(batch.shard.part)
        return unit_hidden_states(ulysses.to_first(own_ND, batch.shard))
    logprobs_N: Tensor = policy(batch).policy_logprobs_N
    return logprobs_N


def _plain(policy: Subject, rows: Sequence[PackedRow]) -> Tensor:
    device = next(policy.parameters()).device
    if isinstance(policy, Critic):
        return hidden_states(policy.model, rows, device)
    return logprobs(policy.model, rows, device)


def _chosen(policy: Subject, packing: Packing, seed: int, trial: "_Trial") -> "_Trial":
    if not trial.passed and packing == "auto" and policy.trunk.packing == "rows":
        policy.trunk.fall_back(_explain(policy, trial))
        trial = _best(policy, seed)
    if not trial.passed:
        raise SettingsError(
            f"expected {_compared(policy)} and gradients of the unmodified {type(policy.model).__name__}, within {trial.limit.gradient:.2g}, "
            f"but {_explain(policy, trial)}: change {_setting(policy)}{_advice(policy)}"
        )
    return trial


def _compare_widened(policy: Subject, packing: Packing, seed: int, ranks: int) -> Gap | None:
    """Compare a half-precision model in float32, and choose the packing; None if that is not possible."""
    narrow = [tensor for tensor in (*policy.parameters(), *policy.buffers()) if tensor.dtype in _HALF]
    if not narrow or not _has_room(narrow):
        return None
    with _widened(narrow), policy.trunk.attending_by("mask"):
        try:
            trial = _best(policy, seed, widened=True)
        except SettingsError as error:
            log.info("self-test in float32 skipped", extra={"detail": str(error)})
            return None
        if trial.failure:
            log.info("self-test in float32 skipped", extra={"detail": trial.failure})
            return None
        chosen = _chosen(policy, packing, seed, trial)
        if ranks > 1:
            _check_shards(policy, seed, ranks, widened=True)
        return chosen.gap


def _has_room(narrow: Sequence[Tensor]) -> bool:
    more = sum(tensor.numel() * (4 - tensor.element_size()) for tensor in narrow if not layerwise.is_away(tensor))
    largest = max(tensor.numel() for tensor in narrow) * 4
    on_gpu = narrow[0].is_cuda
    free = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
    has = torch.tensor([int(free >= more + largest + _ROOM_BYTES)], device=narrow[0].device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(has, op=dist.ReduceOp.MIN)
    return bool(has.item())


@contextlib.contextmanager
def _widened(narrow: Sequence[Tensor]) -> Iterator[None]:
    """Hold ``narrow`` in float32 within the block, exactly."""
    dtypes = [tensor.dtype for tensor in narrow]
    try:
        for tensor in narrow:
            tensor.data = layerwise.cast(tensor.data, torch.float32)
        yield
    finally:
        for tensor, dtype in zip(narrow, dtypes, strict=True):
            tensor.data = layerwise.cast(tensor.data, dtype)
        if narrow[0].is_cuda:
            torch.cuda.empty_cache()


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    rows: Sequence[PackedRow]
    gap: Gap
    limit: Gap
    failure: str

    @property
    def passed(self) -> bool:
        return self.gap.within(self.limit)


def _best(policy: Subject, seed: int, *, widened: bool = False, causal: bool = False, ranks: int = 1) -> _Trial:
    """Return the first trial that passes, else the last of ``_DRAWS``; the same on every rank.

    Rounding may change the routing of two equal experts in one draw; wrong packing fails all.
    """
    for number in range(_DRAWS):
        rows = random_rows.draw(policy.model, next(policy.parameters()).device, seed + number)
        reference = _reference(policy, rows, causal=causal)
        gap, failure = _attempt(policy, rows, reference, ranks)
        trial = _Trial(rows, gap, _least(policy, widened=widened), failure)
        if not trial.passed and not failure:
            trial = dataclasses.replace(trial, limit=_limit(policy, trial, reference))
        if trial.passed or failure:
            break
    return trial


def _least(policy: Subject, *, widened: bool) -> Gap:
    if widened:
        return Gap(math.inf, _WIDENED_NATS, _WIDENED_GRADIENT)
    half = any(parameter.dtype in _HALF for parameter in policy.parameters())
    return Gap(math.inf, _HALF_NATS, _HALF_GRADIENT) if half else Gap(_EXACT, _EXACT, _EXACT)


def _limit(policy: Subject, trial: _Trial, reference: Numbers) -> Gap:
    """Return the allowed gap, given the effect of rounding the embeddings."""
    if trial.limit.max_nats < math.inf:
        return trial.limit
    with unmodified(policy.model):
        spread = gap_between(compute(policy, trial.rows, lambda: _plain(policy, trial.rows), rounded=True), reference)
    nats = min(_MOST, max(trial.limit.mean_nats, _SPREADS * spread.mean_nats))
    return Gap(math.inf, nats, min(_MOST, max(trial.limit.gradient, _SPREADS * spread.gradient)))


def _advice(policy: Subject) -> str:
    return ' or trainer.packing to "sequences"' if policy.trunk.packing == "rows" else ', or trainer.kernels to "torch"'


def _explain(policy: Subject, trial: _Trial) -> str:
    if trial.failure:
        return trial.failure
    try:
        return f"{trial.gap.words(_compared(policy))}; {first_difference.first(policy, trial.rows)}"
    except Exception as error:  # noqa: BLE001 (a part of the message only)
        return f"{trial.gap.words(_compared(policy))} ({type(error).__name__} while looking for the layer)"


@contextlib.contextmanager
def _undisturbed(policy: Subject) -> Iterator[None]:
    devices = [torch.cuda.current_device()] if next(policy.parameters()).is_cuda else []
    with torch.random.fork_rng(devices), without_dropout(policy):
        yield


def _reference(policy: Subject, rows: Sequence[PackedRow], *, causal: bool) -> Numbers:
    """Return the unmodified model's numbers; refuse it if not ``causal``."""
    device, model = next(policy.parameters()).device, policy.model
    half = any(parameter.dtype in _HALF for parameter in policy.parameters())
    try:
        with unmodified(model):
            sees_ahead = hidden_states_ahead if isinstance(policy, Critic) else sees_ahead_nats
            ahead = 0.0 if causal else sees_ahead(model, rows[0], device)
            if ahead > (_HALF_NATS if half else _EXACT / 10):
                raise SettingsError(
                    f"expected a causal language model, found {type(model).__name__}, in which transformers lets what a token predicts depend on "
                    f"the tokens after it (by {ahead:.2g}{' nats' if isinstance(policy, Policy) else ''}): change {_setting(policy)}"
                )
            return compute(policy, rows, lambda: _plain(policy, rows))
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(
            f"expected a causal language model that transformers can run, but {type(model).__name__} raises "
            f"{type(error).__name__}: {_first_line(error)}: change {_setting(policy)}"
        ) from error


def _attempt(policy: Subject, rows: Sequence[PackedRow], reference: Numbers, ranks: int) -> tuple[Gap, str]:
    gap, failure = _BROKEN, ""
    try:
        numbers = compute(policy, rows, lambda: _packed(policy, rows, ranks))
        gap = gap_between(numbers if ranks == 1 else of_group(numbers, reference, ranks, policy.model), reference)
    except Exception as error:
        if ranks > 1:
            raise  # the others of its group wait for this rank
        failure = (
            _first_line(error) if isinstance(error, SettingsError) else f"{type(error).__name__}: {_first_line(error)}"
        )
    return _worst(gap, next(policy.parameters()).device), failure


def _worst(gap: Gap, device: torch.device) -> Gap:
    """Return the maximum over ranks; NaN counts as infinite."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return gap
    numbers = torch.tensor(dataclasses.astuple(gap), dtype=torch.float32, device=device).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return Gap(*numbers.tolist())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
