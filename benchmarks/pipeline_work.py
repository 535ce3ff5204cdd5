"""Work for ``benchmarks.pipeline``.

::

    arithmetic   the example: 32 prompts × 16 samples a step, 4 new tokens each
    long         random Qwen2, 64-token prompts: 32 × 8 samples a step, 512 new tokens each (on a CPU: 8 × 4, 32 new
                 tokens), random rewards: speed depends on neither weights nor rewards
"""

import dataclasses
import json
import random
import string
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS = 64
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

    @property
    def model(self) -> str:
        """The policy's folder."""
        return str(ROOT / self.settings["policy"]["model"])

    def arguments(self, steps: int) -> list[str]:
        """Return the baseline's arguments."""
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
        return [*(word for name, value in told.items() for word in (f"--{name}", str(value))), *self.trl]


def arithmetic() -> Work:
    """Return the demo's work, without evaluations."""
    settings = tomllib.loads((ROOT / "config" / "arithmetic.toml").read_text())
    del settings["evaluation"]
    return Work("arithmetic", settings, [])


def long(folder: Path, shape: str, device: str, kernels: str) -> Work:
    """Create model and prompts; return the work on two GPUs or the CPU."""
    gpu = device == "cuda"
    _write_model(folder / "model", shape, device)
    _write_prompts(folder / "prompts.jsonl")
    groups, samples, tokens = (32, 8, 512) if gpu else (8, 4, 32)
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
        "trainer": {"zero_stage": 1, "learning_rate": 1e-6, "micro_batch_tokens": 32_768},
    }
    if gpu:
        settings["rollout"] |= {"engine": "vllm", "gpus": [1], "vllm": {"max_model_len": 2048}}
        settings["trainer"] |= {"gpus": [0], "kernels": kernels}
    else:
        settings["rollout"] |= {"engine": "transformers"}
        settings["run"] |= {"threads": 1}
    name = f"long: {shape} on {device}, {groups} x {samples} samples, {tokens} new tokens"
    return Work(name, settings, ["--reward", "lot", *(["--micro-batch", "16"] if gpu else [])], served=gpu)


def _write_model(folder: Path, shape: str, device: str) -> None:
    """Write a model and a tokenizer with one token per printable character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = SHAPES[shape]["vocab_size"]
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=2048, rope_theta=1e6, eos_token_id=0, pad_token_id=1)
    torch.manual_seed(0)
    with torch.device(device):
        Qwen2ForCausalLM._from_config(
            config, dtype=torch.bfloat16 if device == "cuda" else torch.float32
        ).save_pretrained(folder)
    if device == "cuda":
        torch.cuda.empty_cache()
    words = ["<eos>", "<pad>", *_CHARACTERS, *(f"unused {place}" for place in range(vocabulary - len(_CHARACTERS) - 2))]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def _write_prompts(path: Path) -> None:
    lot = random.Random(0)
    prompts = ("".join(lot.choices(_CHARACTERS, k=PROMPT_TOKENS)) for _ in range(4096))
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "a"}) + "\n" for prompt in prompts))
