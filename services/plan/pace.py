"""A layout, and the seconds of its step in closed form: the longest of what bounds it.

::

    training      its passes and update                            what rank 0 does of every step
    throughput    groups of a step / groups per second of all replicas, with as many under way as slots and room allow
    latency       (a batch from admission to its last token, then training) / (max_lag + 1), which overlap

On GPUs that trainer and replicas use in turn, training and generation add up; at once, generation continues at the
speed ``Rates.beside`` while the trainer trains. Against the runs in benchmarks/results, this is as near as a simulation of
every group was (docs/plan.md).
"""

import dataclasses
from typing import Literal

from penstock.services.plan.memory import TrainerOptions
from penstock.services.plan.rates import FAN_OUT, SLOWED, Rates
from penstock.services.plan.workload import Lengths, Workload

_QUANTILES, _ROUNDS = 256, 4
Placement = Literal["separate", "shared", "at once", "alone"]
"""``at once`` is ``placement.mode = "separate"`` with the same GPUs in trainer.gpus and rollout.gpus."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLayout:
    placement: Placement
    trainer: TrainerOptions
    tensor_parallel: int
    replicas: int
    engines: int = 1
    mps: bool = False
    """Whether several processes use a GPU under CUDA MPS instead of in time slices."""
    rung: int = 0
    shadow: bool = True

    @property
    def copies(self) -> int:
        """Copies of a version that rank 0 sends where weights are pulled: replicas with a shadow relay, each engine without
        one pulls from rank 0.
        """
        return min(FAN_OUT, self.replicas) if self.shadow else self.replicas * self.engines

    @property
    def gpus(self) -> int:
        return self.trainer.ranks + (self.replicas * self.tensor_parallel if self.placement == "separate" else 0)

    @property
    def words(self) -> str:
        if self.placement == "alone":
            return f"train on {trainer_words(self.trainer)}"
        each = f" of {self.tensor_parallel} GPUs" if self.tensor_parallel > 1 else ""
        each += f", {self.engines} engines{' each' * (self.replicas > 1)}" if self.engines > 1 else ""
        where = "" if self.placement == "separate" else ", on the same GPUs"
        mps = ", under CUDA MPS" if self.mps else ""
        return f"train on {trainer_words(self.trainer)}; {counted(self.replicas, 'replica')}{each}{where}{mps}"


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas, and how they share GPUs with the trainer."""

    count: int
    max_groups: int
    """Of one replica."""
    in_turn: bool = False
    at_once: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a steady step."""

    step_s: float
    train_s: float
    generate_s: float
    """Of its groups, on all replicas."""

    @property
    def waits(self) -> float:
        """Share of the step in which the trainer does not train."""
        return max(0.0, 1 - self.train_s / self.step_s)


def pace(work: Workload, rates: Rates, replicas: Replicas) -> Pace:
    train_s = rates.train_s + rates.token_s * work.step_tokens
    if not replicas.count:
        return Pace(train_s, train_s, 0.0)
    if replicas.at_once:
        train_s *= SLOWED if work.max_lag else 1.0
        generate_s = max(_generation(work, rates, replicas, work.slots))
        return Pace(train_s + max(0.0, generate_s - rates.beside * train_s * bool(work.max_lag)), train_s, generate_s)
    if replicas.in_turn:
        generate_s = max(_generation(work, rates, replicas, work.slots))
        return Pace(train_s + rates.switch_s + generate_s, train_s, generate_s)
    slots = float(work.slots)
    for _ in range(_ROUNDS):
        throughput_s, latency_s = _generation(work, rates, replicas, slots)
        step_s = max(train_s, throughput_s, latency_s + (train_s + rates.transfer_s) / (work.max_lag + 1))
        slots = work.slots - work.groups * min(1.0, train_s / step_s) * bool(work.max_lag)
    return Pace(step_s, train_s, max(throughput_s, latency_s))


def _generation(work: Workload, rates: Rates, replicas: Replicas, slots: float) -> tuple[float, float]:
    """Return the seconds of a step's groups at the replicas' speed with ``slots`` groups under way, and a batch's latency over
    the batches that overlap; decoding steps get shorter as its samples end."""
    under_way = max(1.0, min(replicas.max_groups, slots / replicas.count))
    throughput_s = group_seconds(work, rates, under_way) * work.groups / (replicas.count * under_way)
    longest = longest_of(work.lengths, work.samples)
    tokens = under_way * work.group_size * work.lengths.mean
    latency_s = rates.decode_s * longest + rates.sequence_s * max(0.0, tokens - longest)
    return throughput_s, (latency_s + _waits(work, longest)) / (work.max_lag + 1)


def _waits(work: Workload, tokens: float) -> float:
    """Return the seconds that a sample of ``tokens`` waits for its tools: the longer, the more turns."""
    return work.episode.wait_s * tokens / work.lengths.mean if work.episode else 0.0


def group_seconds(work: Workload, rates: Rates, groups: float) -> float:
    """Return the seconds from a group's first token to its longest sample's last, with ``groups`` under way."""
    longest = longest_of(work.lengths, work.group_size)
    decoding, wait_s, share = groups * work.group_size * work.lengths.mean / longest, _waits(work, longest), 1.0
    for _ in range(_ROUNDS):  # while some wait for their tools, the others' steps are shorter
        generating_s = longest * rates.decoding(decoding * share) + share * groups * rates.prefill_s
        share = generating_s / (generating_s + wait_s)
    return generating_s + wait_s


def longest_of(lengths: Lengths, samples: int) -> float:
    """Return the expected tokens of the longest of ``samples`` completions.

    >>> round(longest_of(Lengths(100.0, 100, 0.0), 8), 6)
    100.0
    """
    ordered, count = sorted(lengths.quantiles(_QUANTILES)), _QUANTILES
    shares = (((place + 1) / count) ** samples - (place / count) ** samples for place in range(count))
    return sum(length * share for length, share in zip(ordered, shares, strict=True))


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def trainer_words(options: TrainerOptions) -> str:
    more = ", 8-bit Adam" if options.optimizer == "adamw_8bit" else ""
    more += f", offload {options.offload}" if options.offload != "none" else ""
    more += f", experts over {options.expert_parallel}" if options.expert_parallel > 1 else ""
    return f"{options.ranks}, ZeRO {options.zero_stage}{more}"
