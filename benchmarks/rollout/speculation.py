"""Guessing tokens from a group's texts: speed, and whether tokens are drawn from the policy's distribution.

    python -m benchmarks.rollout.speculation --policy examples/reasoning/policy --running 4 32 256 --rounds 5
    python -m benchmarks.rollout.speculation --draws 1000000 --rounds 0

On a GPU, with vLLM 0.26. Two engines of one policy take turns, with guesses up to ``--up-to`` running samples and
without; groups of 8 (or fewer) answer problems of arithmetic by ``--policy``, which ``examples/reasoning/prepare.py``
writes, at each of ``--temperatures``. Prints by temperature and running samples ``tokens_per_s`` of both (medians of
rounds) and ``ratio``, guessing / plain.

``draws``: a random policy of 64 tokens, whose probabilities transformers computes in float32 after the fact.
``chi_square`` compares places of drawn tokens in their cumulative distributions, most probable first, with equal shares
in 64 bins: its ``p`` is uniform if the distribution is right. ``logprobs`` are differences (nats) to transformers',
which ``plain`` has, too.
``keep`` and ``recompute`` (``weights.kv``): after an update of the weights, the first tokens of the new version, the
largest difference before them, and after them; with older keys and values instead the least at them to the older
weights, which is not small if the boundary is right.
"""

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.rollout.policy import put
from penstock.services.rollout.engines.engine import GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import check_version, gather
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.scheduling.guessing import GUESSING_UP_TO
from penstock.services.rollout.engines.vllm.start import open_vllm
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion, Sampling
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from penstock.shared.weights.transport.offer import Offer

_GROUP, _CACHE_BYTES = 8, 8 << 30
_VOCABULARY, _BINS = 64, 64
_RANDOM = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": _VOCABULARY, "tie_word_embeddings": False, "max_position_embeddings": 1024,
}  # fmt: skip


async def engine_of(policy: Path, dtype: str, up_to: int, arguments: argparse.Namespace) -> VllmEngine:
    """Return an engine that guesses up to ``up_to`` running samples; several may start at once."""
    more: dict[str, Any] = {"additional_config": {GUESSING_UP_TO: up_to}} if up_to else {}
    return await open_vllm(
        gather(
            str(policy),
            dtype=dtype,
            seed=0,
            max_num_seqs=256,
            max_model_len=1024,
            gpu_memory_utilization=0.2,
            enforce_eager=arguments.eager,
            arguments={"kv_cache_memory_bytes": _CACHE_BYTES, **json.loads(arguments.vllm), **more},
        )
    )


def offered(folder: Path, model: torch.nn.Module, dtype: torch.dtype, version: int) -> Offer:
    written = write_snapshot(folder / f"weights-{version}", PolicyVersion(version), 0, model.named_parameters(), dtype)
    return file_offer(PolicyRecord(PolicyVersion(version), None, 0, 0.0, written.digest, str(written.location)), 60.0)


# ---------------------------------------------------------------- speed


def problems(policy: Path, count: int) -> list[np.ndarray]:
    """Return prompts of arithmetic, as ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    lot = np.random.default_rng(0)
    prompts = []
    for _ in range(count):
        left, right, bags = (int(lot.integers(3, 60)) for _ in range(3))
        text = f"A shop has {bags} bags with {left} apples and {right} pears each. How many fruits are there? Think step by step."
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        prompts.append(np.array(ids["input_ids"] if hasattr(ids, "keys") else ids, dtype=np.int32))
    return prompts


async def rate(engine: VllmEngine, prompts: list[np.ndarray], running: int, temperature: float) -> float:
    """Return tokens per second of ``running`` samples, in groups of at most 8."""
    samples = min(running, _GROUP)
    sampling = Sampling(samples=samples, max_new_tokens=384, temperature=temperature)
    started_s = time.monotonic()
    groups = await asyncio.gather(
        *(engine.generate(GenerationRequest(prompt, sampling)) for prompt in prompts[: running // samples])
    )
    seconds = time.monotonic() - started_s
    return sum(len(sample.token_ids) for group in groups for sample in group.samples) / seconds


async def start(folder: Path, arguments: argparse.Namespace) -> dict[str, VllmEngine]:
    """Return an engine with guesses and one without."""
    from transformers import AutoModelForCausalLM

    model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, arguments.policy, dtype=torch.bfloat16)
    offer = offered(folder, model, torch.bfloat16, 0)
    engines = await asyncio.gather(
        *(engine_of(arguments.policy, "bfloat16", up_to, arguments) for up_to in (arguments.up_to, 0))
    )
    for engine in engines:
        await put(engine, offer)
    return dict(zip(("guessing", "plain"), engines, strict=True))


async def speeds(engines: dict[str, VllmEngine], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return rates of both engines, by temperature and running samples."""
    return {
        f"{temperature}": {
            f"{running}": await compare(engines, running, temperature, arguments) for running in arguments.running
        }
        for temperature in arguments.temperatures
    }


async def compare(
    engines: dict[str, VllmEngine], running: int, temperature: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the medians of rounds in which ``engines`` take turns."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    groups = max(1, running // _GROUP)
    every = problems(arguments.policy, groups * (arguments.rounds + 1))
    for number in range(arguments.rounds + 1):
        prompts = every[number * groups :]
        for name in list(engines)[:: 1 if number % 2 else -1]:
            rates[name].append(await rate(engines[name], prompts, running, temperature))
    medians = {name: statistics.median(of_engine[1:]) for name, of_engine in rates.items()}
    print(temperature, running, rates, flush=True)
    return {
        "tokens_per_s": {name: round(median) for name, median in medians.items()},
        "ratio": round(medians["guessing"] / medians["plain"], 3),
    }


# ---------------------------------------------------------------- distribution


def random_policy(folder: Path, seed: int, dtype: torch.dtype) -> Any:
    """Return a random policy, which is written to ``folder``, with an entropy of about half a nat at temperature 1."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**_RANDOM, bos_token_id=None, eos_token_id=None)).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(25)
        model.model.embed_tokens.weight.mul_(10)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def exact(model: Any, prompt: np.ndarray, samples: list[GeneratedSample], temperature: float) -> torch.Tensor:
    """Return log probabilities [samples, tokens, vocabulary] in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.tensor(np.stack([np.concatenate([prompt, sample.token_ids]) for sample in samples]).astype(np.int64))
    logits = model.to(device)(rows.to(device)).logits[:, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = (logits.float() / temperature).log_softmax(-1).cpu()
    return logprobs


def places(logprobs: torch.Tensor, tokens: torch.Tensor, lot: np.random.Generator) -> np.ndarray:
    """Return a uniform place of each token within its share of the cumulative distribution, most probable first."""
    probabilities = logprobs.double().exp()
    own = probabilities.gather(-1, tokens[..., None])
    before = (probabilities * (probabilities > own)).sum(-1)
    return (before + torch.from_numpy(lot.random(tokens.shape)) * own[..., 0]).numpy().ravel()


def chi_square(place_n: np.ndarray) -> dict[str, float]:
    """Return χ² of ``place_n`` in equal bins, and its p, by Wilson and Hilferty."""
    counts = np.histogram(place_n, bins=_BINS, range=(0.0, 1.0))[0]
    mean, freedom = len(place_n) / _BINS, _BINS - 1
    value = float(((counts - mean) ** 2 / mean).sum())
    normal = ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return {"value": round(value, 1), "freedom": freedom, "p": round(0.5 * math.erfc(normal / math.sqrt(2)), 4)}


async def draws(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how tokens of a random policy are distributed, with guesses, and 30,000 of them without."""
    dtype = getattr(torch, arguments.dtype)
    models = [random_policy(folder / f"policy-{version}", version, dtype) for version in (0, 1)]
    offers = [offered(folder / "random", models[version % 2], dtype, version) for version in range(3)]
    references = [model.float() for model in models]
    limits = {"guessing": (arguments.up_to, arguments.draws), "plain": (0, min(arguments.draws, 30_000))}
    engines = await asyncio.gather(
        *(engine_of(folder / "policy-0", arguments.dtype, up_to, arguments) for up_to, _ in limits.values())
    )
    made: dict[str, Any] = {}
    for (name, (_, count)), engine in zip(limits.items(), engines, strict=True):
        await put(engine, offers[0])
        made[name] = await drawn(engine, references[0], count, arguments)
        first, second = references
        made[name]["keep"] = await updated(engine, first, second, offers[1], "keep")
        made[name]["recompute"] = await updated(engine, second, first, offers[2], "recompute")
        print(name, json.dumps(made[name]), flush=True)
        await engine.close()
    return made


async def drawn(engine: VllmEngine, model: Any, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the test of ``count`` tokens at temperatures of 0.7 and 1, or of fewer in ``--draws-s``."""
    lot = np.random.default_rng(1)
    parts: list[np.ndarray] = []
    differences: list[float] = []
    largest, seconds, made = 0.0, 0.0, 0
    ends_s = time.monotonic() + arguments.draws_s
    while made < count and time.monotonic() < ends_s:
        temperature = 1.0 if len(parts) % 2 else 0.7
        prompts = [lot.integers(0, _VOCABULARY, 12, dtype=np.int32) for _ in range(arguments.up_to // 16)]
        sampling = Sampling(samples=16, max_new_tokens=480, temperature=temperature)
        started_s = time.monotonic()
        groups = await asyncio.gather(*(engine.generate(GenerationRequest(prompt, sampling)) for prompt in prompts))
        seconds += time.monotonic() - started_s
        for prompt, group in zip(prompts, groups, strict=True):
            logprobs = exact(model, prompt, list(group.samples), temperature)
            tokens = torch.tensor(np.stack([sample.token_ids for sample in group.samples]).astype(np.int64))
            recorded = np.stack([sample.behavior_logprobs for sample in group.samples])
            difference = np.abs(logprobs.gather(-1, tokens[..., None])[..., 0].numpy() - recorded)
            largest = max(largest, float(difference.max()))
            differences.append(float(difference.mean()))
            parts.append(places(logprobs, tokens, lot))
            made += tokens.numel()
    return {
        "draws": made,
        "chi_square": chi_square(np.concatenate(parts)),
        "logprobs": {"largest": round(largest, 5), "mean": round(statistics.fmean(differences), 6)},
        "tokens_per_s": round(made / seconds),
    }


async def updated(
    engine: VllmEngine, before: Any, after: Any, offer: Offer, kv: Literal["keep", "recompute"]
) -> dict[str, Any]:
    """Update the weights of ``before`` to those of ``after`` while samples run; return where, and the differences."""
    prompt = np.random.default_rng(2).integers(0, _VOCABULARY, 12, dtype=np.int32)
    sampling = Sampling(samples=16, max_new_tokens=900, temperature=1.0)
    engine._kv = kv
    await engine.stage(offer)
    running = asyncio.create_task(engine.generate(GenerationRequest(prompt, sampling)))
    await asyncio.sleep(0.06)
    await engine.swap(offer.header.version)
    firsts, older, newer = list[int](), list[float](), list[float]()
    for sample in (await running).samples:
        tokens = np.arange(len(sample.token_ids))
        of_before, of_after = (
            exact(model, prompt, [sample], 1.0)[0, tokens, sample.token_ids] for model in (before, after)
        )
        first = {int(version): int(first) for first, version in sample.version_spans}.get(offer.header.version)
        if first is None:  # it ended before
            continue
        firsts.append(first)
        older.append(float(np.abs(of_before.numpy() - sample.behavior_logprobs)[:first].max(initial=0.0)))
        if kv == "recompute":
            newer.append(float(np.abs(of_after.numpy() - sample.behavior_logprobs)[first:].max(initial=0.0)))
        else:  # keys and values are older
            newer.append(float(np.abs(of_before.numpy() - sample.behavior_logprobs)[first]))
    return {
        "first_tokens": sorted(firsts),
        "before": round(max(older, default=0.0), 5),
        **(
            {"after": round(max(newer, default=0.0), 5)}
            if kv == "recompute"
            else {"changed_at_once": round(min(newer, default=0.0), 5)}
        ),
    }


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result. Tokens are drawn while the engines of the speeds start."""
    result: dict[str, Any] = {"up_to": arguments.up_to, "vllm": check_version()}
    starting = asyncio.create_task(start(folder, arguments)) if arguments.rounds else None
    if arguments.draws:
        result["draws"] = await draws(folder, arguments)
    if starting is not None:
        engines = await starting
        result["speed"] = await speeds(engines, arguments)
        for engine in engines.values():
            await engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("examples/reasoning/policy"))
    parser.add_argument("--running", type=int, nargs="+", default=[4, 32, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--rounds", type=int, default=5, help="of the speeds; 0: none")
    parser.add_argument("--draws", type=int, default=0)
    parser.add_argument("--up-to", type=int, default=64)
    parser.add_argument("--draws-s", type=float, default=math.inf)
    parser.add_argument("--dtype", default="float32", help="of the policy whose draws are compared")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--vllm", default="{}", help="more arguments of vLLM, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-speculation-") as scratch:
        print(json.dumps(asyncio.run(measure(Path(scratch), arguments))))


if __name__ == "__main__":
    main()
