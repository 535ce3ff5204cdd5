"""Work for ``benchmarks.peers.pipeline``.

::

    arithmetic   the example: 32 prompts × 16 samples a step, 4 new tokens each
    long         random Qwen2, 64-token prompts: 32 × 8 samples a step, 512 new tokens each (on a CPU: 8 × 4, 32 new
                 tokens), random rewards, weights that hardly change
    tail         the same, but completions end by themselves at lengths of a geometric distribution: 800 tokens on
                 average and 2,048 at most (on a CPU: 12 and 32)

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import random_weights
from benchmarks.shapes import ALL_SHAPES

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 64
MODEL_TOKENS = 2304
LEARNING_RATE = 1e-12
"""Keeps the weights, and so the lengths of the tail: at 1e-6 they are twice as long after two steps without lag."""
TAIL_TOKENS = {"cuda": 800, "cpu": 12}
"""Mean of the tail, by device."""
_MARK = "made.json"
"""Written last, beside a model and its prompts."""
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
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

    @property
    def model(self) -> str:
        """The policy's folder."""
        return str(ROOT / self.settings["policy"]["model"])

    def arguments(self, steps: int) -> list[str]:
        """Return the arguments of TRL's synchronous trainer."""
        return [*self._told(steps), *self.trl]

    def asynchronous_arguments(self, steps: int) -> list[str]:
        """Return those of the asynchronous one: as many full rows as hold a step's samples on average."""
        samples = self.settings["algorithm"]["groups_per_step"] * self.settings["sampling"]["group_size"]
        row_tokens = self.settings["trainer"]["micro_batch_tokens"]
        rows = max(1, round(samples * self.sample_tokens / row_tokens))
        return [*self._told(steps), "--micro-batches", str(rows), "--row-tokens", str(row_tokens)]

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
        return [word for name, value in told.items() for word in (f"--{name}", str(value))]


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


def long(folder: Path, shape: str, device: str, kernels: str, *, mean_tokens: int = 0, layers: int = 0) -> Work:
    """Create model and prompts in ``folder`` unless an earlier call did; return the work on two GPUs or the CPU.

    ``mean_tokens``: of completions that end by themselves, before their limit; 0: all reach it. ``layers``: of the
    shape's; 0: all.
    """
    gpu, sizes = device == "cuda", dict(ALL_SHAPES[shape])
    if layers:
        sizes["num_hidden_layers"], shape = layers, f"{shape}-{layers}-layers"
    folder = folder.absolute() / f"{f'tail-{mean_tokens}' if mean_tokens else 'long'}-{shape}-{device}"
    _write_once(folder, sizes, device, mean_tokens)
    groups, samples, tokens = (32, 8, 512) if gpu else (8, 4, 32)
    if mean_tokens and gpu:
        tokens = 2048
    settings: dict[str, Any] = {
        "run": {"device": device},
        "bus": {"url": "embedded"},
        "policy": {"model": str(folder / "model"), "dtype": "bfloat16" if gpu else "float32"},
        "data": {"path": str(folder / "prompts.jsonl")},
        "sampling": {"group_size": samples, "max_new_tokens": tokens, "temperature": 1.0},
        "rollout": {"replicas": 1, "max_groups": 2 * groups},
        "reward": {"expression": "random", "scorers": [{"kind": "random"}]},
        "algorithm": {"groups_per_step": groups},
        "guards": {"pause": [], "off": ["entropy"]},
        "trainer": {"zero_stage": 1, "learning_rate": LEARNING_RATE, "micro_batch_tokens": 32_768},
    }
    if gpu:
        settings["rollout"] |= {"engine": "vllm", "gpus": [1], "vllm": {"max_model_len": MODEL_TOKENS}}
        settings["trainer"] |= {"gpus": [0], "kernels": kernels}
    else:
        settings["rollout"] |= {"engine": "transformers"}
        settings["run"] |= {"threads": 1}
    name = f"long: {shape} on {device}, {groups} x {samples} samples, {tokens} new tokens"
    name += f" at most, {mean_tokens} on average before this limit" if mean_tokens else ""
    completion = mean_tokens * (1 - math.exp(-tokens / mean_tokens)) if mean_tokens else tokens
    return Work(
        name,
        settings,
        ["--reward", "lot", *(["--micro-batch", "16"] if gpu else [])],
        served=gpu,
        sample_tokens=completion + PROMPT_TOKENS / samples,
    )


def _write_once(folder: Path, shape: Mapping[str, Any], device: str, mean_tokens: int) -> None:
    """Write model and prompts, unless ``folder`` has those of the same shape as a whole."""
    mark = folder / _MARK
    told = {"shape": shape, "device": device, "mean_tokens": mean_tokens, "prompt_tokens": PROMPT_TOKENS}
    if mark.exists() and json.loads(mark.read_text()) == told:
        return
    if mark.exists():  # a folder that this module made, of another shape; else nothing is deleted
        shutil.rmtree(folder)
    _write_model(folder / "model", shape, device, mean_tokens)
    _write_prompts(folder / "prompts.jsonl")
    unfinished = mark.with_suffix(".tmp")
    unfinished.write_text(json.dumps(told))
    unfinished.replace(mark)


def _write_model(folder: Path, shape: Mapping[str, Any], device: str, mean_tokens: int) -> None:
    """Write a model and a tokenizer with one token per printable character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    dtype, words = (torch.bfloat16 if device == "cuda" else torch.float32), ["<eos>", "<pad>", *_CHARACTERS]
    ids = {"eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 4096}
    random_weights.write(folder, shape, dtype, device, mean_tokens=mean_tokens, **ids)
    if device == "cuda":
        torch.cuda.empty_cache()
    words += [f"unused {place}" for place in range(shape["vocab_size"] - len(words))]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    saved.chat_template = _TEMPLATE
    saved.save_pretrained(folder)


def _write_prompts(path: Path) -> None:
    lot = random.Random(0)
    prompts = ("".join(lot.choices(_CHARACTERS, k=PROMPT_TOKENS)) for _ in range(4096))
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "a"}) + "\n" for prompt in prompts))
