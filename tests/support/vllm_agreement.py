"""Compare the trainer's logprobs with those of vLLM after updates, for tiny configurations of ``model_configurations``.

vLLM starts with a checkpoint of random weights. Every tensor of the trainer's policy then changes, as an update might change it, and is
put into the living engine by the replica's own :class:`WeightSwapper`, twice. After each time vLLM samples completions, and the policy
scores the same tokens in packed rows. ``python -m tests.support.vllm_agreement [names…]`` prints what it measured, one JSON line a model (the ones of the
table, without names).

Each model has a process of its own, a fork of one that has imported vLLM: see ``vllm_models``.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from services.rollout.engines.vllm.arguments import gather, serving
from services.rollout.engines.vllm.swap.weight_swap import WeightSwapper
from services.rollout.engines.vllm.windows import check_windows
from services.trainer.batch.packing import PackedRow, micro_batch
from services.trainer.model.named_tensors import published
from services.trainer.model.policy import Policy
from services.trainer.self_test import self_test
from shared.bus.messages import FinishReason, Int32Array, Sample
from shared.errors import SettingsError, WeightsError
from tests.support import model_zoo
from tests.support.model_configurations import VOCABULARY, WINDOW
from tests.support.model_page import Agreement, verdicts
from tests.support.tolerance import FORWARD

CONTEXT_TOKENS = 256
PROMPTS = (5, 2 * WINDOW, 150)
"""Tokens of each prompt: the completions of the first pass the window of 24, the others begin beyond it."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cohere2+swa(short) hf_overrides": {"arguments": {"hf_overrides": {"sliding_window": WINDOW - 1}}},
    "falcon_h1 enable_prefix_caching=false": {"enable_prefix_caching": False},
    "granitemoehybrid enable_prefix_caching=false": {"enable_prefix_caching": False},
    "lfm2_moe enable_prefix_caching=false": {"enable_prefix_caching": False},
}
"""Settings of ``rollout.vllm``, by the configuration's name and what they are."""
STALE = 0.1
"""Nats: an engine that did not take an update is further away than this, by far."""
Completions: TypeAlias = tuple[list[PackedRow], torch.Tensor]
SAMPLES, NEW_TOKENS, TEMPERATURE = 2, 32, 0.8


@dataclasses.dataclass(slots=True)
class Seen:
    """What was seen of one model."""

    name: str
    reason: str = ""
    """Why vLLM, or the trainer, does not serve it; "": it does."""
    path: str = ""
    """By which way weights were swapped."""
    before: float = 0.0
    """Nats: the largest gap of a token's logprobs, with the weights that vLLM started with."""
    stale: float = 0.0
    """The gap of an engine that still has the weights before the update."""
    after: list[float] = dataclasses.field(default_factory=list)
    """The gap after each update."""
    cut: str = ""
    """What the engine says to a version whose first query projection has twice the rows: loaders take the first ones."""
    seconds: float = 0.0
    """Of the processor, without the import of vLLM."""


def save(name: str, folder: Path) -> None:
    """Write configuration ``name`` with random weights, with heads as wide as vLLM's attention on the CPU wants them."""
    config = model_zoo.CONFIGURATIONS[name]()
    _widen(config.get_text_config())
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model_zoo.randomise(model)
    model.save_pretrained(folder)


def _widen(config: Any) -> None:
    """Give ``config`` heads of 32 instead of 16: fewer of them, where their width is not a field."""
    values = config.to_dict()  # of some families an attribute is that of one layer, and not to be read here
    for field in ("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim"):
        if values.get(field) == 16:
            setattr(config, field, 32)
    if (
        values.get("head_dim") is None or config.model_type == "cohere2"
    ):  # vLLM 0.26 divides the width of Cohere 2 by its heads
        config.num_attention_heads = 2


def measure(name: str) -> dict[str, Any]:
    """Return what is seen of configuration ``name``, as a dictionary."""
    began_s, seen = time.process_time(), Seen(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(name.split()[0], Path(folder))
            _measure(Path(folder), seen)
        except (SettingsError, WeightsError) as error:
            seen.reason = str(error).replace(folder, "model")
        except Exception as error:  # vLLM's, of whatever kind, in a step of the model
            place = traceback.extract_tb(error.__traceback__)[-1]
            seen.reason = f"{error!r} at {Path(place.filename).name}:{place.lineno}".replace(folder, "model")
    seen.seconds = round(time.process_time() - began_s, 1)
    return dataclasses.asdict(seen)


def _measure(folder: Path, seen: Seen) -> None:
    policy = model_zoo.open_policy(
        folder, [_row(np.arange(CONTEXT_TOKENS - 1, dtype=np.int32), [np.zeros(1, np.int32)])]
    )
    self_test.run(policy, "auto")
    with _started(folder, ARGUMENTS.get(seen.name, {})) as llm:
        for module in policy.model.modules():  # vLLM's transformers backend compiles the very classes
            module.do_not_compile = True
        worker = llm.llm_engine.model_executor.driver_worker.worker
        model, served = worker.model_runner.get_model(), worker.vllm_config.model_config
        check_windows(model, served.model, served.max_model_len)
        device = next(model.parameters()).device
        swapper = WeightSwapper(model, worker.vllm_config, device)
        completions = sampled(llm, "v0")
        seen.before = gap(policy, completions)
        model_zoo.randomise(policy.model, seed=1)
        seen.stale = gap(policy, completions)
        for version in (1, 2):
            model_zoo.randomise(policy.model, seed=version)
            swapper.prepare(tensors_of(policy, device))
            seen.path, _ = swapper.swap()
            seen.after.append(gap(policy, sampled(llm, f"v{version}")))
        seen.cut = offer_wide(swapper, tensors_of(policy, device))


@contextlib.contextmanager
def _started(folder: Path, arguments: dict[str, Any]) -> Iterator[Any]:
    """Start vLLM as a replica does, but in this process."""
    from vllm import LLM

    gathered = gather(
        str(folder),
        dtype="float32",
        seed=1,
        max_num_seqs=8,
        max_model_len=CONTEXT_TOKENS,
        enforce_eager=True,
        **arguments,
    )
    if torch.cuda.is_available():  # several models are measured side by side on one GPU
        gathered |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28}
    try:
        with serving(str(folder)):
            llm = LLM(**gathered)
    except (AssertionError, NotImplementedError, AttributeError, KeyError) as error:
        raise SettingsError(f"vLLM cannot start with it: {error!r}") from error
    yield llm


def offer_wide(swapper: WeightSwapper, tensors: dict[str, torch.Tensor]) -> str:
    """Return the refusal of ``tensors`` with a query projection of twice the rows; "" where it is taken, or none exists."""
    name = next((name for name in tensors if name.endswith("q_proj.weight")), "")
    if not name:
        return ""
    try:
        swapper.prepare({**tensors, name: tensors[name].repeat(2, 1)})
    except WeightsError as error:
        return str(error)
    return ""


def tensors_of(policy: Policy, device: torch.device) -> dict[str, torch.Tensor]:
    """Return what the trainer publishes of ``policy``, on the engine's device."""
    return {each.name: each.merged().to(device, copy=True) for each in published(policy.model)}


def sampled(llm: Any, version: str) -> Completions:
    """Return completions that vLLM samples now, and their logprobs (N) as a replica gives them to the trainer."""
    from vllm import SamplingParams

    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCABULARY, tokens).astype(np.int32) for tokens in PROMPTS]
    sampling = SamplingParams(
        n=SAMPLES, temperature=TEMPERATURE, max_tokens=NEW_TOKENS, logprobs=0, detokenize=False, ignore_eos=True
    )
    asked: list[Any] = [{"prompt_token_ids": prompt.tolist(), "cache_salt": version} for prompt in prompts]
    rows, behavior = list[PackedRow](), list[float]()
    for prompt, answer in zip(prompts, llm.generate(asked, sampling, use_tqdm=False), strict=True):
        rows.append(_row(prompt, [np.array(one.token_ids, np.int32) for one in answer.outputs], SAMPLES * len(rows)))
        behavior += [next(iter(place.values())).logprob for one in answer.outputs for place in one.logprobs]
    return rows, torch.tensor(behavior)


def gap(policy: Policy, completions: Completions) -> float:
    """Return the largest gap, in nats, between the logprobs of ``completions`` and those of ``policy`` in packed rows."""
    rows, behavior = completions
    with torch.no_grad():
        logprobs = policy(micro_batch(rows)).policy_logprobs_N
    return float((logprobs - behavior).abs().max())


def _row(prompt: Int32Array, completions: Sequence[Int32Array], first: int = 0) -> PackedRow:
    places = tuple(range(first, first + len(completions)))
    return PackedRow(prompt, tuple(_sample(token_ids) for token_ids in completions), places, TEMPERATURE)


def _sample(token_ids: Int32Array) -> Sample:
    return Sample(
        token_ids=token_ids,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        version_spans=np.zeros((1, 2), np.int32),
        finish_reason=FinishReason.LENGTH,
        text="",
    )


def objection(found: dict[str, Any], table: Agreement) -> str:
    """Return in which way what was seen of a model is not what ``table`` says; "" where it is."""
    expected = table.unserved.get(found["name"], "")
    if expected or found["reason"]:
        fits = bool(expected) and expected in found["reason"]
        return (
            "" if fits else f"expected {expected or 'that vLLM serves it'}, found {found['reason'] or 'that it does'}"
        )
    if found["stale"] < STALE:
        return f"expected that the update shows, found {found['stale']} nats"
    furthest = max(found["before"], *found["after"])
    return "" if furthest < FORWARD else f"expected logprobs within {FORWARD} nats, found {furthest}"


def main(names: Sequence[str]) -> int:
    """Print what is seen of each of ``names``, one JSON line a model; return 1 where one is not as the table says."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # products are tiny: threads would only wait for one another
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    import vllm.v1.engine.llm_engine  # noqa: F401

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as each:
        objections, table = list[str](), verdicts().vllm
        for name in names or table.names:
            found = each.apply(measure, (name,))
            objections.append(objection(found, table))
            print(json.dumps({**found, "objection": objections[-1]}), flush=True)
    return int(any(objections))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
