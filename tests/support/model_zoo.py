"""Compare the trainer's policy with transformers' unmodified model for every tiny configuration of
``model_configurations``.

Random models are saved and loaded as in a run. Packed groups with shared prompts in training mode are compared with
eager float32 single sequences in eval mode: logprobs of trained tokens and gradients of all parameters.

``python -m tests.support.model_zoo [names…]`` prints verdicts.
"""

import contextlib
import dataclasses
import math
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy, load_model
from penstock.services.trainer.model.trunk import Packing
from penstock.services.trainer.self_test import random_rows, reached_weights, self_test
from penstock.shared.bus.messages import FinishReason, Sample
from penstock.shared.errors import SettingsError
from penstock.shared.settings import PolicySettings
from tests.support.model_configurations import VOCABULARY, configurations

TOLERANCE = 1e-5
"""Nats, and of the gradient's norm. Float32 rounds at 6e-8 per term of some hundred; 1e-6 to 5e-6 are observed."""
CONFIGURATIONS = configurations()

SHORT = ((9, 1.0, (1, 7, 20)), (5, 0.7, (2, 12)))
"""Per group: prompt tokens, temperature, tokens of each completion; under 128 tokens in total."""
LONG = ((100, 1.3, (70, 33, 1)), (70, 0.7, (40, 5)))
"""Beyond every window of 24, chunk of 64 and convolution."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Distance of the policy from the reference."""

    logprob_nats: float
    gradient: float
    """Norm of the difference over all parameters, relative to the reference's."""

    @property
    def equal(self) -> bool:
        return self.logprob_nats <= TOLERANCE and self.gradient <= TOLERANCE

    def __str__(self) -> str:
        return f"{self.logprob_nats:.1e} / {self.gradient:.1e}"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    """rows or sequences: equal that way; wrong, refused or crashed."""
    sentence: str = ""
    short: Gap | None = None
    long: Gap | None = None
    one_rank: bool = False
    """Refused with several ranks that share gradients: a short pass reaches fewer weights."""


def randomise(model: Any, seed: int = 0) -> None:
    """Randomise saved parameters and floating buffers, including biases and sinks, at scales that show differences."""
    generator = torch.Generator().manual_seed(seed)
    saved, tied = set(model.state_dict()), getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved and tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            with torch.no_grad():
                tensor.copy_(_drawn(name, tensor, noise, embedding_scale=0.125 if tied else 1.0))


def _drawn(name: str, tensor: Tensor, noise: Tensor, embedding_scale: float) -> Tensor:
    if "q_norm" in name or "k_norm" in name:  # small scores: attention to single tokens magnifies rounding
        return 0.4 * tensor + 0.1 * noise
    if "_decay" in name or "slope_rate" in name:  # lightning attention's buffers: noise would reveal later tokens
        return tensor
    if tensor.dim() < 2 or (
        min(tensor.shape) == 1 and "conv" not in name
    ):  # norms, biases, sinks, decays: near their initial values
        return tensor + 0.2 * noise
    if "embed" in name or "wte" in name:
        return noise * embedding_scale  # tied to the output layer: logits with deviation 1
    fan_in = float(tensor[0].numel() if tensor.dim() == 2 or "conv" in name else tensor.shape[-1])
    return 0.6 * noise / math.sqrt(fan_in)


def groups(shape: Sequence[tuple[int, float, Sequence[int]]], seed: int = 0) -> list[PackedRow]:
    """Return rows of random tokens, without the first three, which are special in ``SIZES``."""
    random, place, rows = np.random.default_rng(seed), 0, list[PackedRow]()
    for prompt, temperature, lengths in shape:
        ids = random.integers(3, VOCABULARY, prompt).astype(np.int32)
        samples = tuple(_sample(random.integers(3, VOCABULARY, length).astype(np.int32)) for length in lengths)
        rows.append(PackedRow(ids, samples, tuple(range(place, place + len(samples))), temperature))
        place += len(samples)
    return rows


def _sample(ids: Any) -> Sample:
    return Sample(
        token_ids=ids,
        behavior_logprobs=np.zeros(len(ids), np.float32),
        version_spans=np.array([[0, 0]], np.int32),
        finish_reason=FinishReason.STOP,
        text="",
    )


def save(name: str, folder: Path, seed: int = 0) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS[name](), attn_implementation="eager", dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder)


def open_policy(folder: Path, rows: Sequence[PackedRow], packing: Packing = "auto") -> Policy:
    longest = max(len(row.prompt_token_ids) + len(sample.token_ids) for row in rows for sample in row.samples)
    model = load_model(PolicySettings(model=str(folder)), torch.float32, longest)
    return Policy(model, packing=packing).train()


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def reference_logprobs(model: Any, rows: Sequence[PackedRow]) -> Tensor:
    parts = list[Tensor]()
    for row in rows:
        for sample in row.samples:
            ids = torch.from_numpy(np.concatenate((row.prompt_token_ids, sample.token_ids))).long()[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_token_ids) - 1 : -1].float()
            logprobs = torch.log_softmax(logits / row.temperature, -1)
            parts.append(logprobs.gather(-1, ids[0, len(row.prompt_token_ids) :, None])[:, 0])
    return torch.cat(parts)


def compare(policy: Policy, model: Any, rows: Sequence[PackedRow]) -> Gap:
    batch: MicroBatch = micro_batch(rows)
    requested = reference_logprobs(model, rows)
    logprobs = policy(batch).policy_logprobs_N
    weights = torch.randn(requested.shape, generator=torch.Generator().manual_seed(1))
    difference = float((logprobs.detach() - requested.detach()).abs().max())
    return Gap(difference, gradient_gap(policy.model, logprobs @ weights, model, requested @ weights))


def gradient_gap(trained: Any, loss: Tensor, model: Any, wanted_loss: Tensor) -> float:
    for left, its_loss in ((trained, loss), (model, wanted_loss)):
        left.zero_grad(set_to_none=True)
        its_loss.backward()
    mine, its = dict(trained.named_parameters()), dict(model.named_parameters())
    if mine.keys() != its.keys():
        raise AssertionError(f"expected parameters of the same names, found {sorted(mine.keys() ^ its.keys())[:4]}")
    square = whole = 0.0
    for name, parameter in its.items():
        theirs = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad = mine[name].grad
        square += float(((torch.zeros_like(theirs) if grad is None else grad) - theirs).double().square().sum())
        whole += float(theirs.double().square().sum())
    return math.sqrt(square / whole)


def check(name: str) -> Verdict:
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            save(name, Path(folder))
            model = reference(Path(folder))
        except Exception:
            return _unbuilt(name, Path(folder))
        try:
            policy = open_policy(Path(folder), groups(LONG))
            self_test.run(policy, "auto")
            packing, long = policy.trunk.packing, compare(policy, model, groups(LONG))
            short = compare(open_policy(Path(folder), groups(SHORT), packing), model, groups(SHORT))
            one_rank = _is_for_one_rank(policy)
        except SettingsError as error:
            return Verdict("refused", str(error))
        except Exception as error:
            return Verdict("crashed", _said(error))
    return Verdict(packing if short.equal and long.equal else "wrong", "", short, long, one_rank)


def _is_for_one_rank(policy: Policy) -> bool:
    try:
        reached_weights.check(policy, random_rows.draw(policy.model, torch.device("cpu"), 0), "policy.model")
    except SettingsError:
        return True
    return False


def _unbuilt(name: str, folder: Path) -> Verdict:
    """Return the trainer's verdict if transformers cannot build the configuration."""
    try:
        CONFIGURATIONS[name]().save_pretrained(folder)
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
        load_model(PolicySettings(model=str(folder)), torch.float32)
    except SettingsError as error:
        return Verdict("refused", str(error))
    except Exception as error:
        return Verdict("crashed", _said(error))
    return Verdict("wrong", "transformers could not build it, the trainer could")


def _said(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} at {Path(last.filename).name}:{last.lineno}".replace("\n", " ")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.set_verbosity(before)


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)  # tiny products: more threads only wait
    counts = dict[str, int]()
    for name in names or CONFIGURATIONS:
        verdict = check(name)
        counts[verdict.kind] = counts.get(verdict.kind, 0) + 1
        gaps = [str(gap or "") for gap in (verdict.short, verdict.long)]
        print(f"{name:27} {verdict.kind:9} {gaps[0]:17} {gaps[1]:17} {verdict.sentence[:200]}", flush=True)
    print(counts)


if __name__ == "__main__":
    main(sys.argv[1:])
