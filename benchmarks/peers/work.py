"""Work for ``benchmarks.peers.pipeline``.

::

    arithmetic   the example: 32 prompts × 16 samples a step, 4 new tokens each
    long         random Qwen2, 64-token prompts: 32 × 8 samples a step, 512 new tokens each (on a CPU: 8 × 4, 32 new
                 tokens), random rewards, weights that hardly change
    tail         the same, but completions end by themselves at lengths of a geometric distribution: 800 tokens on
                 average and 2,048 at most (on a CPU: 12 and 32)
    spread       8 × 8 samples a step of about 1,024 to 4,096 new tokens, 2,560 on average (on a CPU: 4 × 4, 32 at most)
    tool         32 × 8 episodes a step of four answers of 128 tokens, each of which calls a tool (on a CPU: 4 × 4 of 16)

``spread`` and ``tool`` (``benchmarks.peers.chains``) have output weights of their own also where the shape ties them.
vLLM finds compiled code again only under the same path of the policy, so models that are kept between calls are always
at the same path of a folder.
"""

import contextlib
import dataclasses
import json
import math
import random
import shutil
import string
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import random_weights
from benchmarks.peers import chains
from benchmarks.shapes import ALL_SHAPES

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 64
_MODEL_TOKENS = 2304
LEARNING_RATE = 1e-12
"""Keeps the weights, and so the lengths of the tail: at 1e-6 they are twice as long after two steps without lag."""
TAIL_TOKENS = {"cuda": 800, "cpu": 12}
"""Mean of the tail, by device."""
_SPREAD_TOKENS = {"cuda": (2560, 4096), "cpu": (20, 32)}
"""Mean and limit of ``spread``, by device."""
_BETWEEN_TURNS_TOKENS = 100
"""What the chat template writes from one answer of a tool episode to the next."""
_MARK = "made.json"
"""Written last, beside a model and its prompts."""
_CONFIG = {"max_position_embeddings": 8192, "eos_token_id": 0, "pad_token_id": 1}
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation


@dataclasses.dataclass(frozen=True)
class Work:
    """A run's settings, and TRL's equivalent arguments."""

    name: str
    settings: dict[str, Any]
    """Without name, folder, steps and lag."""
    trl: list[str]
    served: bool = False
    """TRL's trainer and vLLM server have a GPU each."""
    sample_tokens: float = 0.0
    """That a sample adds to a row on average: its completion, and its share of the group's prompt."""
    trl_async: Sequence[str] = ()
    """More arguments of TRL's asynchronous trainer."""

    @property
    def model(self) -> str:
        """The policy's folder."""
        return str(ROOT / self.settings["policy"]["model"])

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its completion, for vLLM."""
        return int(self.settings["rollout"]["vllm"]["max_model_len"])

    def arguments(self, steps: int) -> list[str]:
        """Return the arguments of TRL's synchronous trainer."""
        return [*self._told(steps), *self.trl]

    def asynchronous_arguments(self, steps: int) -> list[str]:
        """Return those of the asynchronous one: as many full rows as hold a step's samples on average."""
        samples = self.settings["algorithm"]["groups_per_step"] * self.settings["sampling"]["group_size"]
        row_tokens = self.settings["trainer"]["micro_batch_tokens"]
        rows = max(1, round(samples * self.sample_tokens / row_tokens))
        return [*self._told(steps), *_flags({"micro-batches": rows, "row-tokens": row_tokens}), *self.trl_async]

    def _told(self, steps: int) -> list[str]:
        settings = self.settings
        told = {
            "model": self.model,
            "prompts": str(ROOT / settings["data"]["path"]),
            "prompts-per-step": settings["algorithm"]["groups_per_step"],
            "group-size": settings["sampling"]["group_size"],
            "max-new-tokens": settings["sampling"]["max_new_tokens"],
            "learning-rate": settings["trainer"]["learning_rate"],
            "steps": steps,
        }
        return _flags(told)


def _flags(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def arithmetic() -> Work:
    """Return the demo's work, without evaluations."""
    settings = tomllib.loads((ROOT / "config" / "arithmetic.toml").read_text())
    del settings["evaluation"]
    return Work("arithmetic", settings, [])


@contextlib.contextmanager
def work_folder(folder: Path | None) -> Iterator[Path]:
    """Yield ``folder``, which is kept, or a temporary one."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-work-") as made:
        yield Path(made)


def long(
    folder: Path,
    shape: str,
    device: str,
    kernels: str,
    *,
    mean_tokens: int = 0,
    layers: int = 0,
    weights: bool = True,
) -> Work:
    """Create model and prompts in ``folder`` unless an earlier call did; return the work on two GPUs or the CPU.

    ``mean_tokens``: of completions that end by themselves, before their limit; 0: all reach it. ``layers``: of the
    shape's; 0: all. ``weights``: without them the model is a config.json, with which a run can be planned.
    """
    gpu, sizes = device == "cuda", dict(ALL_SHAPES[shape])
    if layers:
        sizes["num_hidden_layers"], shape = layers, f"{shape}-{layers}-layers"
    folder = folder.absolute() / f"{f'tail-{mean_tokens}' if mean_tokens else 'long'}-{shape}-{device}"
    if weights:
        _write_once(folder, sizes, device, {"mean_tokens": mean_tokens})
    else:
        _write_outline(folder, sizes, device)
    tokens = (2048 if mean_tokens else 512) if gpu else 32
    settings = _settings(folder, device, kernels, groups=32 if gpu else 8, new_tokens=tokens)
    name = _name("long", shape, settings)
    name += f" at most, {mean_tokens} on average before this limit" if mean_tokens else ""
    completion = mean_tokens * (1 - math.exp(-tokens / mean_tokens)) if mean_tokens else tokens
    return _work(name, settings, completion)


def is_made(work: Work) -> bool:
    """Return whether its model is there as a whole."""
    return Path(work.model).with_name(_MARK).exists()


def spread(folder: Path, shape: str, device: str, kernels: str) -> Work:
    """Return the work of completions of a quarter of their limit up to it, with what 7B need to fit on a GPU."""
    mean_tokens, most = _SPREAD_TOKENS[device]
    folder = folder.absolute() / f"spread-{shape}-{device}"
    _write_once(folder, ALL_SHAPES[shape], device, {"spread": mean_tokens})
    settings = _settings(folder, device, kernels, groups=8 if device == "cuda" else 4, new_tokens=most)
    settings["trainer"] |= {"micro_batch_tokens": 16_384}
    if device == "cuda":
        settings["trainer"] |= {"optimizer": "adamw_8bit"}
        settings["rollout"]["vllm"] |= {"max_model_len": 4352, "gpu_memory_utilization": 0.6}
    work = _work(f"{_name('spread', shape, settings)} at most, {mean_tokens} on average", settings, mean_tokens)
    return dataclasses.replace(work, trl_async=["--gradient-checkpointing"])


def tool(folder: Path, shape: str, device: str, kernels: str) -> Work:
    """Return the work of episodes whose every answer calls a tool, on two GPUs or the CPU."""
    turn_tokens = chains.TURN_TOKENS[device]
    folder = folder.absolute() / f"tool-{shape}-{device}"
    _write_once(folder, ALL_SHAPES[shape], device, {"turn_tokens": turn_tokens})
    settings = _settings(folder, device, kernels, groups=32 if device == "cuda" else 4, new_tokens=turn_tokens)
    settings["episodes"] = {"environment": "benchmarks.peers.chains:Places", "max_turns": chains.TURNS}
    settings["episodes"] |= {"max_episodes": 512}
    tokens = chains.TURNS * turn_tokens + (chains.TURNS - 1) * _BETWEEN_TURNS_TOKENS
    work = _work(f"{_name('tool', shape, settings)} in each of {chains.TURNS} turns", settings, tokens)
    return dataclasses.replace(work, trl_async=["--turns", str(chains.TURNS)])


def _settings(folder: Path, device: str, kernels: str, *, groups: int, new_tokens: int) -> dict[str, Any]:
    gpu = device == "cuda"
    settings: dict[str, Any] = {
        "run": {"device": device},
        "bus": {"url": "embedded"},
        "policy": {"model": str(folder / "model"), "dtype": "bfloat16" if gpu else "float32"},
        "data": {"path": str(folder / "prompts.jsonl")},
        "sampling": {"group_size": 8 if gpu else 4, "max_new_tokens": new_tokens, "temperature": 1.0},
        "rollout": {"replicas": 1, "max_groups": 2 * groups},
        "reward": {"expression": "random", "scorers": [{"kind": "random"}]},
        "algorithm": {"groups_per_step": groups},
        "guards": {"pause": [], "off": ["entropy"]},
        "trainer": {"zero_stage": 1, "learning_rate": LEARNING_RATE, "micro_batch_tokens": 32_768},
    }
    if gpu:
        settings["rollout"] |= {"engine": "vllm", "gpus": [1], "vllm": {"max_model_len": _MODEL_TOKENS}}
        settings["trainer"] |= {"gpus": [0], "kernels": kernels}
    else:
        settings["rollout"] |= {"engine": "transformers"}
        settings["run"] |= {"threads": 1}
    return settings


def _name(kind: str, shape: str, settings: Mapping[str, Any]) -> str:
    groups, sampling = settings["algorithm"]["groups_per_step"], settings["sampling"]
    samples, tokens = sampling["group_size"], sampling["max_new_tokens"]
    return f"{kind}: {shape} on {settings['run']['device']}, {groups} x {samples} samples, {tokens} new tokens"


def _work(name: str, settings: dict[str, Any], completion_tokens: float) -> Work:
    gpu = settings["run"]["device"] == "cuda"
    return Work(
        name,
        settings,
        ["--reward", "lot", *(["--micro-batch", "16"] if gpu else [])],
        served=gpu,
        sample_tokens=completion_tokens + PROMPT_TOKENS / settings["sampling"]["group_size"],
    )


def _write_once(folder: Path, shape: Mapping[str, Any], device: str, kind: Mapping[str, int]) -> None:
    """Write model and prompts, unless ``folder`` has those of the same shape as a whole."""
    mark = folder / _MARK
    told = {"shape": shape, "device": device, "prompt_tokens": PROMPT_TOKENS, **kind}
    if mark.exists() and json.loads(mark.read_text()) == told:
        return
    if mark.exists():  # a folder that this module made, of another shape; else nothing is deleted
        shutil.rmtree(folder)
    _write_model(folder / "model", shape, device, kind)
    _write_prompts(folder / "prompts.jsonl")
    unfinished = mark.with_suffix(".tmp")
    unfinished.write_text(json.dumps(told))
    unfinished.replace(mark)


def _write_outline(folder: Path, shape: Mapping[str, Any], device: str) -> None:
    """Write the model's config.json and prompts, unless the model is there as a whole."""
    if not (folder / _MARK).exists():
        random_weights.write_config(folder / "model", shape, _dtype(device), **_CONFIG)
        _write_prompts(folder / "prompts.jsonl")


def _dtype(device: str) -> Any:
    import torch

    return torch.bfloat16 if device == "cuda" else torch.float32


def _write_model(folder: Path, shape: Mapping[str, Any], device: str, kind: Mapping[str, int]) -> None:
    """Write a model and a tokenizer."""
    import torch

    dtype = _dtype(device)
    tokenizer = _build_tokenizer(shape["vocab_size"], kind.get("turn_tokens", 0))
    if "mean_tokens" in kind:
        random_weights.write(folder, shape, dtype, device, mean_tokens=kind["mean_tokens"], **_CONFIG)
    else:
        _write_chain(folder, shape, dtype, device, tokenizer, kind)
    if device == "cuda":
        torch.cuda.empty_cache()
    tokenizer.save_pretrained(folder)


def _write_chain(
    folder: Path, shape: Mapping[str, Any], dtype: Any, device: str, tokenizer: Any, kind: Mapping[str, int]
) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**{**shape, "tie_word_embeddings": False}, rope_theta=1e6, **_CONFIG)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype)
        if "spread" in kind:
            chains.end_after(model, kind["spread"])
        if "turn_tokens" in kind:
            chains.call_in_every_turn(model, tokenizer, kind["turn_tokens"])
        model.save_pretrained(folder)


def _build_tokenizer(size: int, turn_tokens: int) -> Any:
    """Return Qwen2's tokenizer with one token per printable character, and for episodes of such answers what these need."""
    from transformers import Qwen2Tokenizer

    end, pad = (chains.END, "<|endoftext|>") if turn_tokens else ("<eos>", "<pad>")
    more, merges = chains.vocabulary(turn_tokens) if turn_tokens else ([], [])
    words = [end, pad, *_CHARACTERS, *more]
    words += [f"unused {place}" for place in range(size - len(words))]
    numbered = {word: place for place, word in enumerate(words)}
    tokenizer = Qwen2Tokenizer(numbered, merges, unk_token=pad, eos_token=end, pad_token=pad)
    if turn_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": [chains.START]})
        tokenizer.add_tokens([chains.OPENING, chains.CLOSING])
        tokenizer.chat_template = chains.chat_template()
    return tokenizer


def _write_prompts(path: Path) -> None:
    lot = random.Random(0)
    prompts = ("".join(lot.choices(_CHARACTERS, k=PROMPT_TOKENS)) for _ in range(4096))
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "a"}) + "\n" for prompt in prompts))
