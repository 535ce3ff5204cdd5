"""Compare logprobs of trainer and vLLM after weight updates, for tiny configurations of ``model_configurations``.

vLLM starts with random weights. Every policy tensor then changes and is swapped in by the replica's
:class:`WeightSwapper`, twice. After each, vLLM samples completions and the policy scores them in packed rows.
Of mixtures of experts, what the workers record is compared with the experts that the policy chooses for the same tokens.
``python -m tests.support.vllm_agreement [names…]`` prints one JSON line per model. Each model runs in a fork of a
process that has imported vLLM (see ``vllm_models``).
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
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

from penstock.services.rollout.engines.vllm.arguments import ROUTING, check_routers, check_windows, gather, serving
from penstock.services.rollout.engines.vllm.routing.capture import FAMILIES, RouteCapture, route_record
from penstock.services.rollout.engines.vllm.runner_hooks import RunnerTap
from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper
from penstock.services.rollout.engines.vllm.token_record import Finished, TokenRecord
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.named_tensors import published
from penstock.services.trainer.model.policy import Policy
from penstock.services.trainer.self_test import self_test
from penstock.shared.bus.messages import FinishReason, Int32Array, Sample
from penstock.shared.errors import SettingsError, WeightsError
from penstock.shared.model.routes import mixtures_of
from tests.support import forge, model_zoo
from tests.support.model_configurations import VOCABULARY, WINDOW
from tests.support.model_page import Agreement, verdicts
from tests.support.tolerance import FORWARD

CONTEXT_TOKENS = 256
PROMPTS = (5, 2 * WINDOW, 150)
"""Prompt tokens: completions of the first cross the window of 24, the others begin beyond it."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cohere2+swa(short) hf_overrides": {"arguments": {"hf_overrides": {"sliding_window": WINDOW - 1}}},
    "falcon_h1 enable_prefix_caching=false": {"enable_prefix_caching": False},
    "granitemoehybrid enable_prefix_caching=false": {"enable_prefix_caching": False},
    "lfm2_moe enable_prefix_caching=false": {"enable_prefix_caching": False},
}
"""Settings of ``rollout.vllm``, by configuration name."""
_SAMPLE = re.compile(r"(\d+)_(\d+)")
"""vLLM's name of a sample: its place, and its request."""
STALE = 0.1
"""Nats: an engine without the update differs by far more than this."""
Completions: TypeAlias = tuple[list[PackedRow], torch.Tensor]
SAMPLES, NEW_TOKENS, TEMPERATURE = 2, 32, 0.8


@dataclasses.dataclass(slots=True)
class Seen:
    name: str
    reason: str = ""
    path: str = ""
    before: float = 0.0
    """Largest gap of a token's logprobs in nats, with the initial weights."""
    stale: float = 0.0
    """Gap of an engine with the weights before the update."""
    after: list[float] = dataclasses.field(default_factory=list)
    routed: int = 0
    """Compared pairs of a token and a mixture layer; without ``trainer.router_replay`` for the family none."""
    misrouted: int = 0
    """Of these, pairs with other experts than the policy chooses."""
    cut: str = ""
    """Engine's message for a version whose first query projection has twice the rows; loaders take the first ones."""
    seconds: float = 0.0


def save(name: str, folder: Path) -> None:
    config = model_zoo.CONFIGURATIONS[name]()
    _widen(config.get_text_config())
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model_zoo.randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # which no update changes
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(folder)


def _widen(config: Any) -> None:
    """Use heads of 32 instead of 16; fewer of them if their width is not a field."""
    if config.model_type == "glm4_moe":
        config.head_dim = 16  # no field of transformers, but in its checkpoints, and vLLM asks for it
    values = config.to_dict()  # in some families an attribute is that of one layer, unusable here
    for field in ("head_dim", "global_head_dim", "swa_head_dim", "v_head_dim"):
        if values.get(field) == 16:
            setattr(config, field, 32)
    if (
        values.get("head_dim") is None or config.model_type == "cohere2"
    ):  # vLLM 0.26 divides the width of Cohere 2 by its heads
        config.num_attention_heads = 2


def measure(name: str) -> dict[str, Any]:
    began_s, seen = time.process_time(), Seen(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(name.split()[0], Path(folder))
            _measure(Path(folder), seen)
        except (SettingsError, WeightsError) as error:
            seen.reason = str(error).replace(folder, "model")
        except Exception as error:  # any error of vLLM in a step of the model
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
        for module in policy.model.modules():  # vLLM's transformers backend compiles these classes
            module.do_not_compile = True
        worker = llm.llm_engine.model_executor.driver_worker.worker
        model, served = worker.model_runner.get_model(), worker.vllm_config.model_config
        check_routers(model)
        check_windows(model, served.model, served.max_model_len)
        device = next(model.parameters()).device
        swapper = WeightSwapper(model, worker.vllm_config, device)
        routes = Routes(worker) if isinstance(worker.penstock_routes, RouteCapture) else None
        completions = sampled(llm, "v0")
        seen.before = gap(policy, completions)
        model_zoo.randomise(policy.model, seed=1)
        seen.stale = gap(policy, completions)
        for version in (1, 2):
            model_zoo.randomise(policy.model, seed=version)
            swapper.prepare(tensors_of(policy, device))
            seen.path, _ = swapper.swap()
            seen.after.append(gap(policy, sampled(llm, f"v{version}", routes)))
            if routes is not None:
                compared, others = routes.compared(policy.model)
                seen.routed, seen.misrouted = seen.routed + compared, seen.misrouted + others
        seen.cut = offer_wide(swapper, tensors_of(policy, device))


@contextlib.contextmanager
def _started(folder: Path, arguments: dict[str, Any]) -> Iterator[Any]:
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
    gathered["worker_extension_cls"] = ROUTING
    if torch.cuda.is_available():  # several models share one GPU
        gathered |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28}
    else:
        gathered["num_gpu_blocks_override"] = forge.VLLM_BLOCKS
    try:
        with serving(str(folder)):
            llm = LLM(**gathered)
    except (AssertionError, NotImplementedError, AttributeError, KeyError) as error:
        raise SettingsError(f"vLLM cannot start with it: {error!r}") from error
    yield llm


class Routes:
    """Experts that a worker records, and the sequences that they are of."""

    def __init__(self, worker: Any) -> None:
        self._record = route_record(worker, "")
        record = TokenRecord(worker.device, True, self._record)
        self._tap = RunnerTap(worker.model_runner, record, self._deliver, True)
        self._recorded: dict[tuple[int, int], torch.Tensor] = {}
        self.sequences: dict[tuple[int, int], tuple[list[int], int]] = {}
        """Prompt and completion, and the length of the latter, by request and place."""

    def _deliver(self, finished: Finished) -> None:
        for (request, *_), routes in zip(finished.rows(), finished.routes, strict=True):
            if match := _SAMPLE.match(request):
                self._recorded[int(match[2]), int(match[1])] = routes

    def compared(self, model: Any) -> tuple[int, int]:
        """Return how many pairs of a token and a layer there are, and for how many the experts are others."""
        layers = [place for place, layer in enumerate(model.model.layers) if mixtures_of(layer)]
        pairs = others = 0
        for key, (ids, drawn) in self.sequences.items():
            recorded_TLK = np.sort(self._recorded[key].numpy()[:drawn, layers])
            differ_TL = (recorded_TLK != chosen(model, ids[:-1])[-drawn:]).any(-1)
            pairs, others = pairs + differ_TL.size, others + int(differ_TL.sum())
        self.sequences.clear()
        return pairs, others


@torch.inference_mode()
def chosen(model: Any, ids: list[int]) -> Any:
    """Return the experts of each token in a plain pass, in ascending order (tokens × mixtures × experts per token)."""
    seen: list[torch.Tensor] = []
    mixtures = mixtures_of(model).values()
    hooks = [each.register_forward_pre_hook(lambda _, given: seen.append(given[1].clone())) for each in mixtures]
    model(input_ids=torch.tensor([ids], device=next(model.parameters()).device))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(seen, 1).cpu().numpy())


def offer_wide(swapper: WeightSwapper, tensors: dict[str, torch.Tensor]) -> str:
    """Return the refusal of ``tensors`` with doubled query projection; "" if accepted, or there is none."""
    name = next((name for name in tensors if name.endswith("q_proj.weight")), "")
    if not name:
        return ""
    try:
        swapper.prepare({**tensors, name: tensors[name].repeat(2, 1)})
    except WeightsError as error:
        return str(error)
    return ""


def tensors_of(policy: Policy, device: torch.device) -> dict[str, torch.Tensor]:
    return {each.name: each.merged().to(device, copy=True) for each in published(policy.model)}


def sampled(llm: Any, version: str, routes: Routes | None = None) -> Completions:
    from vllm import SamplingParams

    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCABULARY, tokens).astype(np.int32) for tokens in PROMPTS]
    sampling = SamplingParams(
        n=SAMPLES, temperature=TEMPERATURE, max_tokens=NEW_TOKENS, logprobs=0, detokenize=False, ignore_eos=True
    )
    asked: list[Any] = [{"prompt_token_ids": prompt.tolist(), "cache_salt": version} for prompt in prompts]
    rows, behavior = list[PackedRow](), list[float]()
    for prompt, answer in zip(prompts, llm.generate(asked, sampling, use_tqdm=False), strict=True):
        rows.append(
            _row(prompt, [np.array(output.token_ids, np.int32) for output in answer.outputs], SAMPLES * len(rows))
        )
        if routes is not None:
            routes.sequences |= {
                (int(answer.request_id), int(output.index)): (
                    [*prompt.tolist(), *output.token_ids],
                    len(output.token_ids),
                )
                for output in answer.outputs
            }
        behavior += [next(iter(place.values())).logprob for output in answer.outputs for place in output.logprobs]
    if routes is not None:  # workers learn with the next step which requests are finished
        llm.generate(asked[:1], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return rows, torch.tensor(behavior)


def gap(policy: Policy, completions: Completions) -> float:
    """Return the largest logprob gap (nats)."""
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


def objection(actual: dict[str, Any], table: Agreement) -> str:
    """Return how results differ from ``table``, or ""."""
    expected = table.unserved.get(actual["name"], "")
    if expected or actual["reason"]:
        fits = bool(expected) and expected in actual["reason"]
        return (
            "" if fits else f"expected {expected or 'that vLLM serves it'}, found {actual['reason'] or 'that it does'}"
        )
    if actual["stale"] < STALE:
        return f"expected that the update shows, found {actual['stale']} nats"
    if actual["name"].split()[0].split("+")[0] in FAMILIES and not actual["routed"]:
        return "expected that workers record experts, found none"
    if actual["misrouted"]:
        return f"expected the policy's experts, found others for {actual['misrouted']} of {actual['routed']} pairs"
    furthest = max(actual["before"], *actual["after"])
    return "" if furthest < FORWARD else f"expected logprobs within {FORWARD} nats, found {furthest}"


def main(names: Sequence[str]) -> int:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # products are tiny: threads would only wait
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # else a process that imports vLLM again looks at each model

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as each:
        objections, table = list[str](), verdicts().vllm
        for name in names or table.names:
            actual = each.apply(measure, (name,))
            objections.append(objection(actual, table))
            print(json.dumps({**actual, "objection": objections[-1]}), flush=True)
    return int(any(objections))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
