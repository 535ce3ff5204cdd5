"""Texts of the run whose logprobs are published with a version, for replicas to verify their weights.

::

    batch of the step ──▶ a sample of some groups ──▶ logprobs before it (rounded)
                                                       step
    prompts of the data, before the first batch ────▶ logprobs after it, plain and rounded

``rounded``: every module's output is multiplied by 1 + ε, with ε drawn uniformly within half a unit in the last place
of the replicas' number type: what another order of the same computation may change. A replica judges its own distance
from the plain logprobs by it (``penstock.services.rollout.probe_check``).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.services.trainer.batch.packing import MicroBatch, PackedRow, micro_batch
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers.logits import forward_replaced
from penstock.services.trainer.self_test.random_rows import windows
from penstock.shared.bus.branches import longest_branch
from penstock.shared.bus.messages import Experience, FinishReason, Float32Array, Int32Array, Probe, Sample, no_logprobs
from penstock.shared.settings import Settings

SEQUENCES = 8
TOKENS = 256
"""Of a sequence but the longest, which may be as long as its logits or a window of the model require."""
MOST_TOKENS = 2048
MOST_LOGITS = 1 << 26
"""An engine holds the logits of a whole sequence at once, beyond the memory that it has planned."""
PAST_WINDOW = 128
_HALF_UNIT = {"bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Largest rounding of a number, relative to it."""
_FP8 = 2.0**-4
"""The same of float8 (e4m3). An output of a layer with rounded weights and inputs differs by about as much: its standard
deviation is 0.036 of the output's, as of a uniform number within this, and √2 of a rounding's."""
_TF32 = 2.0**-11
"""On GPUs, attention kernels for float32 multiply in this precision."""


class Prober:
    """Scores the probe of every n-th publication of this process, and of the first (``internal.probe_every_versions``;
    0: never), if the run has replicas; on the training thread, collectively.
    """

    def __init__(self, engine: TrainingEngine, settings: Settings) -> None:
        self._engine = engine
        self._every = settings.internal.probe_every_versions if settings.kind.generates else 0
        policy: Any = engine.policy
        self._most = settings.trainer.micro_batch_tokens
        longest = longest_tokens(policy.model.config, settings.rollout.max_model_len)
        self._longest = max(2, min(longest, self._most))
        self._merges = settings.policy.lora.rank > 0 and not settings.publishes_adapters
        """Whether rounding of the merged weights loses small changes, so that none can be missing."""
        dtype = settings.policy.dtype
        self._rounding = _TF32 if dtype == "float32" and engine.device.type == "cuda" else _HALF_UNIT[dtype]
        self._linear = _FP8 if settings.rollout.vllm.quantization == "fp8" else self._rounding
        self._publications = 0
        self._texts: list[Int32Array] = []
        self._before: Float32Array | None = None

    @property
    def _is_due(self) -> bool:
        return self._every > 0 and self._publications % self._every == 0

    def prepare(self, groups: Sequence[Experience], *, replays: bool = False) -> None:
        """Choose texts of the step's ``groups``, and score them before it, if its version carries a probe."""
        if self._is_due:
            self._texts = choose([_longest(experience) for experience in groups], self._longest)
            self._before = None if replays or self._merges else self._score(seed=1)

    def next(self, prompts: Sequence[Int32Array] = ()) -> Probe | None:
        """Return the probe of the next version, or None if it carries none; ``prompts``: before the first batch."""
        is_due, texts = self._is_due, self._texts or choose(prompts, self._longest)
        if is_due and not texts:
            return None  # the next version is due
        self._publications += 1
        if not is_due:
            return None
        self._texts = texts
        plain, rounded = self._score(), self._score(seed=2)
        change = no_logprobs() if self._before is None else rounded - self._before
        self._texts, self._before = [], None
        lengths = np.array([len(text) for text in texts], dtype=np.int32)
        return Probe(np.concatenate(texts), lengths, plain, noise=rounded - plain, change=change)

    def _score(self, seed: int | None = None) -> Float32Array:
        policy: Any = self._engine.policy
        scored = []
        for texts in portions(self._texts, self._most):
            with rounded(policy.model, 0.0 if seed is None else self._rounding, seed or 0, linear=self._linear):
                logprobs_N: Tensor = self._engine.evaluate(lay_out(texts)).policy_logprobs_N
            scored.append(logprobs_N.float().cpu().numpy())
        return np.concatenate(scored)


def _longest(experience: Experience) -> Int32Array:
    texts = [sample.token_ids[longest_branch(sample)] for sample in experience.group.samples]
    return np.concatenate([experience.group.prompt_token_ids, max(texts, key=len)])


def longest_tokens(config: Any, context_tokens: int = 0) -> int:
    """Return the tokens of the longest sequence, which passes the model's windows if ``context_tokens`` (0: the model's
    own) and ``MOST_TOKENS`` allow it.
    """
    text = config.get_text_config()
    own = int(getattr(text, "max_position_embeddings", None) or MOST_TOKENS)
    most = min(MOST_TOKENS, context_tokens or own, own) - 1  # an engine may need room for one more
    passing = [window + PAST_WINDOW for window in windows(config) if window + PAST_WINDOW <= most]
    return max(2, min(most, max([MOST_LOGITS // int(text.vocab_size), *passing])))


def choose(texts: Sequence[Int32Array], longest: int) -> list[Int32Array]:
    """Return up to ``SEQUENCES`` of ``texts``, spread over their lengths, cut to ``TOKENS``, or one to ``longest``."""
    by_length = sorted((text for text in texts if len(text) > 1), key=len)
    places = np.linspace(0, len(by_length) - 1, min(SEQUENCES, len(by_length)))
    chosen = [by_length[round(place)] for place in places]
    return [text[: min(TOKENS, longest)] for text in chosen[:-1]] + [text[:longest] for text in chosen[-1:]]


def portions(texts: Sequence[Int32Array], most: int) -> Iterator[list[Int32Array]]:
    """Yield the texts in order, in lists of at most ``most`` tokens.

    >>> [[len(text) for text in texts] for texts in portions([np.zeros(n, np.int32) for n in (3, 4, 8, 2)], 8)]
    [[3, 4], [8], [2]]
    """
    portion: list[Int32Array] = []
    for text in texts:
        if portion and sum(map(len, portion)) + len(text) > most:
            yield portion
            portion = []
        portion.append(text)
    if portion:
        yield portion


def lay_out(sequences: Sequence[Int32Array]) -> MicroBatch:
    """Return the forward pass that scores all tokens of ``sequences`` but their first."""
    return micro_batch([PackedRow(sequence[:1], (_sample(sequence[1:]),), (0,)) for sequence in sequences])


@contextlib.contextmanager
def rounded(model: Any, by: float, seed: int, linear: float = 0.0) -> Iterator[None]:
    """Round every module's output once more within the block, by up to ``by`` times each number, but those of linear
    layers by ``linear`` (0: ``by``); by 0: not.
    """
    if not by:
        yield
        return
    generators: dict[torch.device, torch.Generator] = {}

    def again(value: Any, by: float = by) -> Any:
        if type(value) is tuple:
            return tuple(again(part, by) for part in value)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        generator = generators.setdefault(value.device, torch.Generator(value.device).manual_seed(seed))
        noise = torch.rand(value.shape, generator=generator, device=value.device) * 2 - 1
        return (value + value * (by * noise)).to(value.dtype)

    head = model.get_output_embeddings()
    hidden = [module for module in model.modules() if module is not head]

    def rounded_output(module: Any, _inputs: Any, output: Any) -> Any:
        return again(output, linear or by if isinstance(module, torch.nn.Linear) else by)

    hooks = [module.register_forward_hook(rounded_output) for module in hidden]
    own = head.forward
    try:
        with forward_replaced(head, lambda hidden_ND: again(own(hidden_ND))):  # logprobs pass its hooks by
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _sample(token_ids: Int32Array) -> Sample:
    return Sample(
        token_ids=token_ids,
        behavior_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        version_spans=np.zeros((1, 2), dtype=np.int32),
        finish_reason=FinishReason.LENGTH,
        text="",
    )
