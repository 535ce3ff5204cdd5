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
Gradients and random generators stay unchanged. Not covered: windows beyond ``random_rows.LONGEST_WINDOW``, gradients of large
matrices, ZeRO.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model.critic import Critic
from penstock.services.trainer.model.memory import layerwise
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.model.trunk import Packing
from penstock.services.trainer.self_test import first_difference, random_rows, reached_weights
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


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Distance between two computations of the same numbers."""

    max_nats: float
    mean_nats: float
    gradient: float
    """Relative norm, the larger one of embeddings and parameters."""

    def within(self, limit: "Gap") -> bool:
        """Whether every number is at most that of ``limit``; NaN is not."""
        mine, most = dataclasses.astuple(self), dataclasses.astuple(limit)
        return all(a <= b for a, b in zip(mine, most, strict=True))

    def words(self, of: str) -> str:
        """Describe the gap of "logprobs" or "hidden states" (unit: their root mean square)."""
        unit = " nats" if of == _LOGPROBS else ""
        return f"{of} differ by {self.max_nats:.2g}{unit} at most and {self.mean_nats:.2g} on average, the gradient by {self.gradient:.2g} of its norm"


_LOGPROBS, _HIDDEN_STATES = "logprobs", "hidden states"
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Numbers:
    """Logprobs or hidden states (N), and gradients of embeddings (K × D) and small parameters."""

    logprobs_N: Tensor
    embeddings_KD: Tensor
    parameters: Mapping[str, Tensor]


def run(policy: Subject, packing: Packing, seed: int = 0, *, is_sharded: bool = False) -> SelfTestResult:
    """Compare a policy or critic, in training mode, with the unmodified model; choose the packing.

    ``is_sharded``: several ranks share gradients or weights, so that each pass has to reach the same weights.

    Raises:
        SettingsError: no allowed packing passes, transformers cannot run the model, or passes reach different weights.
    """
    began = time.perf_counter()
    with _undisturbed(policy):
        widened = _compare_widened(policy, packing, seed)
        trial = _chosen(policy, packing, seed, _best(policy, seed, causal=widened is not None))
        if is_sharded:
            reached_weights.check(policy, trial.rows, _setting(policy))
    chosen, seconds = policy.trunk, time.perf_counter() - began
    return SelfTestResult(_compared(policy), chosen.packing, chosen.reason, trial.gap, trial.limit, widened, seconds)


def _compared(policy: Subject) -> str:
    return _HIDDEN_STATES if isinstance(policy, Critic) else _LOGPROBS


def _setting(policy: Subject) -> str:
    return "algorithm.critic.model" if isinstance(policy, Critic) else "policy.model"


def _packed(policy: Subject, rows: Sequence[PackedRow]) -> Tensor:
    batch: MicroBatch = micro_batch(rows)
    if isinstance(policy, Critic):
        return unit_hidden_states(policy.trunk.hidden_states(batch))
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


def _compare_widened(policy: Subject, packing: Packing, seed: int) -> Gap | None:
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
        return _chosen(policy, packing, seed, trial).gap


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


def _best(policy: Subject, seed: int, *, widened: bool = False, causal: bool = False) -> _Trial:
    """Return the first trial that passes, else the last of ``_DRAWS``; the same on every rank.

    Rounding may change the routing of two equal experts in one draw; wrong packing fails all.
    """
    for number in range(_DRAWS):
        rows = random_rows.draw(policy.model, next(policy.parameters()).device, seed + number)
        reference = _reference(policy, rows, causal=causal)
        gap, failure = _attempt(policy, rows, reference)
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


def _limit(policy: Subject, trial: _Trial, reference: _Numbers) -> Gap:
    """Return the allowed gap, given the effect of rounding the embeddings."""
    if trial.limit.max_nats < math.inf:
        return trial.limit
    with unmodified(policy.model):
        spread = _gap(_numbers(policy, trial.rows, lambda: _plain(policy, trial.rows), rounded=True), reference)
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


def _reference(policy: Subject, rows: Sequence[PackedRow], *, causal: bool) -> _Numbers:
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
            return _numbers(policy, rows, lambda: _plain(policy, rows))
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(
            f"expected a causal language model that transformers can run, but {type(model).__name__} raises "
            f"{type(error).__name__}: {_first_line(error)}: change {_setting(policy)}"
        ) from error


def _attempt(policy: Subject, rows: Sequence[PackedRow], reference: _Numbers) -> tuple[Gap, str]:
    gap, failure = _BROKEN, ""
    try:
        gap = _gap(_numbers(policy, rows, lambda: _packed(policy, rows)), reference)
    except Exception as error:  # noqa: BLE001 (of any model's code)
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


def _numbers(policy: Subject, rows: Sequence[PackedRow], compute: Any, *, rounded: bool = False) -> _Numbers:
    """Return the result of ``compute`` and its gradients; ``rounded``: for rounded embeddings."""
    model = policy.model
    small = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel() <= layerwise.SMALL
    }
    calls = list[tuple[Tensor, Tensor]]()

    def keep(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        embedded = output.detach()
        if rounded:
            noise = torch.rand(embedded.shape, generator=torch.Generator().manual_seed(len(calls))) * 2 - 1
            embedded = embedded * (1 + torch.finfo(embedded.dtype).eps * noise.to(embedded))
        calls.append((args[0] if args else kwargs["input"], embedded.requires_grad_()))
        return embedded.clone()  # some models change it in place

    hook = model.get_input_embeddings().register_forward_hook(keep, with_kwargs=True)
    try:
        logprobs_N = compute()
    finally:
        hook.remove()
    weights_N = torch.randn(len(logprobs_N), generator=torch.Generator().manual_seed(1)).to(logprobs_N.device)
    inputs = [embedded for _, embedded in calls] + list(small.values())
    gradients = torch.autograd.grad(logprobs_N @ weights_N, inputs, allow_unused=True)
    filled = [
        torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(inputs, gradients, strict=True)
    ]
    by_token = _by_token([ids for ids, _ in calls], filled[: len(calls)], rows)
    return _Numbers(logprobs_N.detach(), by_token, dict(zip(small, filled[len(calls) :], strict=True)))


def _by_token(ids: Sequence[Tensor], gradients: Sequence[Tensor], rows: Sequence[PackedRow]) -> Tensor:
    """Return the summed gradient of each distinct token (K × D, float32)."""
    distinct = np.unique(
        np.concatenate([np.r_[row.prompt_token_ids, *[sample.token_ids for sample in row.samples]] for row in rows])
    )
    known = torch.from_numpy(distinct).to(gradients[0].device)
    summed = torch.zeros(len(known), gradients[0].shape[-1], device=known.device)
    for ids_BT, gradient_BTD in zip(ids, gradients, strict=True):
        places = torch.searchsorted(known, ids_BT.flatten().to(known.dtype))
        summed.index_add_(0, places, gradient_BTD.flatten(0, -2).float())
    return summed


def _gap(measured: _Numbers, reference: _Numbers) -> Gap:
    apart_N = (measured.logprobs_N - reference.logprobs_N).abs()
    names = list(reference.parameters)
    return Gap(
        float(apart_N.max()),
        float(apart_N.mean()),
        max(
            _relative([measured.embeddings_KD], [reference.embeddings_KD]),
            _relative([measured.parameters[name] for name in names], [reference.parameters[name] for name in names]),
        ),
    )


def _relative(measured: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    apart = sum(float((a.float() - b.float()).square().sum()) for a, b in zip(measured, reference, strict=True))
    whole = sum(float(b.float().square().sum()) for b in reference)
    return math.sqrt(apart / whole) if whole else (0.0 if not apart else math.inf)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
