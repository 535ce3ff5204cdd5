"""Write docs/models.md from ``model_verdicts.toml``: ``python -m tests.support.model_page``."""

import dataclasses
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.services.rollout.engines.vllm.routing.capture import FAMILIES
from penstock.services.trainer.model import experts

_TABLE = Path(__file__).with_name("model_verdicts.toml")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """\
# Models

Which models Penstock trains, and how that is known. `make models` writes this page.

Names are `model_type`s of transformers, with a suffix for a variant of the configuration. Of a tiny model with random weights, logprobs of all tokens
and gradients of all parameters in the trainer must be those of transformers' own model with its "eager" attention, one sequence at a time, to 1e-5 in
float32.

The self-test repeats this when the trainer starts, with the weights, number types, adapters and kernels of the run: to 1e-3 in float32, and within
the spread of roundings in half precision. If packed rows differ, sequences go one by one; if these differ too, the start is refused. Critics, reward
models and the reward service's reference are tested likewise. It does not cover longer sliding windows than 1024 tokens (on a CPU 160), nor gradients
of large matrices.
"""
_ROWS = """
## Packed rows

A group's prompt is computed once, and completions lie side by side (`trainer.packing = "auto"` chooses this). Trees of
episodes equal their branches, in float64 to 1e-12 (`tests/trainer/model/test_trees.py`).
"""
_SEQUENCES = """
## Sequence by sequence

Packed rows are not known to be right for these. The result is exact; each prompt is computed once for each of its completions, so long prompts cost
more.
"""
_ONE_RANK = """
## One training rank

With several ranks and `trainer.zero_stage` from 1 on each forward pass has to reach the same weights. The self-test refuses these models then, and
others of which a short pass reaches fewer weights, such as experts that are modules of their own.
"""
_EXPERTS = """
## Ranks that share experts

With `trainer.expert_parallel = N` each of N ranks keeps 1/N of every layer's experts, and tokens travel to them. Router,
shared experts and experts compute as transformers does. At ZeRO stage 3 the ranks that have the same experts divide
them once more. With adapters, name layers without experts in `policy.lora.target_modules`. A critic's experts are
shared likewise, so it is a mixture, too. `trainer.sequence_parallel` works beside it (not tried on GPUs), except for
`qwen3_5_moe_text` and `qwen3_next`, whose layers have a state. These model types are tested, at stages 1 to 3, on CPUs
with gloo, `qwen3_moe` also on two GPUs; others are refused.

"""
_REPLAY = """
## Router replay

Rounding may send a token to other experts in a replica than in the trainer. With `trainer.router_replay` replicas record the experts of each token; the
trainer sends the token there, with its own router's live scores and their gradients. The experts stay on the replicas' [shelves](reference/bus.md#shelves), a byte each, and need another replica or
reward service for the second copy. A sample whose experts are lost is routed live and counted (`routed_live`). Critics and references route live.

[Episodes](episodes.md) have the experts of the tokens from which each turn was drawn, on the shelves of the services that play them, in whatever branch the turn is. What agents and tools
give, and the last token of a turn, is routed live; so is a turn without a record, which `routed_live` counts alone.

It works with ranks that share experts, or rows, at all ZeRO stages, and with adapters that replicas receive merged.
Adapters that vLLM merges itself are refused.

With `rollout.engine = "transformers"`: the model types above. With `"vllm"` (0.26 or 0.32, `glm4_moe` with 0.32 only, unquantised) {families}, of which float32 weights on CPUs give the
experts that the trainer chooses by itself, and without kernels that choose experts themselves. vLLM records the experts of the tokens from which a
completion was drawn: the other tokens of prompts, which it may find in its cache, are routed live. Records stay on the GPU until their request ends, beside the memory that vLLM
plans: a byte a layer and expert of each running token, three times while the record grows. `penstock plan` counts this, and the memory of the trainer's host and GPUs.
"""
_REFUSED = """
## Refused

The trainer does not start, and says why.

| model | message |
| --- | --- |
"""


_VLLM = """
## Trainer and vLLM

vLLM computes the same model with code of its own. For the families below (`tests/support/vllm_agreement.py`; vLLM 0.32 for the CPU, float32) its
logprobs and those of the trainer's packed rows must agree to 1e-4 nats, after each of two updates of every tensor.

Tested at each change: {tested}

Measured with `python -m tests.support.vllm_agreement`, which exits with 1 where a model is not as this page says: {measured}

These are not served: Penstock refuses them, or vLLM 0.32 for the CPU does, in its own words. Change the setting that the message names, run them with
`rollout.engine = "transformers"`, or on a GPU, where the probe compares the weights of each version ([weights.md](weights.md)).

| model | message |
| --- | --- |
"""
_DISAGREE = """
These are served, but with other logprobs than the trainer's. Use `rollout.engine = "transformers"`; the guard `probe` pauses such a run.

| model | gap |
| --- | --- |
"""
_GPU = """
With vLLM 0.26 on an H200 (float32 weights, attention and experts multiply in TF32) these agree within {largest:g} nats; the largest gap of each is in
`tests/support/model_verdicts.toml`. Above 0.1 the two would disagree.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    tested: list[str]
    measured: list[str]
    """Agree, by ``python -m tests.support.vllm_agreement``."""
    unserved: dict[str, str]
    disagree: dict[str, str]
    gpu: dict[str, float]
    """Largest gap on a GPU in nats, by name."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.tested, *self.measured, *self.unserved)))


@dataclasses.dataclass(frozen=True, slots=True)
class Verdicts:
    rows: list[str]
    sequences: list[str]
    one_rank: list[str]
    refused: dict[str, str]
    vllm: Agreement


def verdicts() -> Verdicts:
    table = tomllib.loads(_TABLE.read_text())
    return Verdicts(**{**table, "vllm": Agreement(**table["vllm"])})


def text(table: Verdicts) -> str:
    lists = (_HEAD, _ROWS, _listed(table.rows), _SEQUENCES, _listed(table.sequences))
    shared = (_EXPERTS, _listed(sorted(experts.PROVEN)), _REPLAY.format(families=_listed(FAMILIES).strip("\n.")))
    rest = (_ONE_RANK, _listed(table.one_rank), *shared, _REFUSED, _messages(table.refused), _agreement(table.vllm))
    blocks = "".join((*lists, *rest)).strip().split("\n\n")
    return "\n\n".join(block if block.startswith(("|", "#")) else _wrapped(block) for block in blocks) + "\n"


def _wrapped(block: str) -> str:
    return textwrap.fill(block, 120, break_long_words=False, break_on_hyphens=False)


def _agreement(table: Agreement) -> str:
    agreeing = [name for name in table.tested if name not in table.unserved]
    lists = {"tested": _listed(agreeing).strip(), "measured": _listed(table.measured).strip()}
    apart = "".join(f"| `{name}` | {said} |\n" for name, said in sorted(table.disagree.items()))
    on_gpu = _GPU.format(largest=max(table.gpu.values())) + _listed(table.gpu)
    return _VLLM.format(**lists) + _messages(table.unserved) + _DISAGREE + apart + on_gpu


def _messages(parts: Mapping[str, str]) -> str:
    return "".join(f"| `{name}` | … {part} … |\n" for name, part in sorted(parts.items()))


def _listed(names: Iterable[str]) -> str:
    return "\n" + ", ".join(f"`{name}`" for name in sorted(names)) + ".\n"


if __name__ == "__main__":
    PAGE.write_text(text(verdicts()))
