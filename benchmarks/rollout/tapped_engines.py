"""Real engines whose rows are noted as they leave the engine, for :mod:`benchmarks.rollout.exact_tokens`.

A tiny policy is taught to answer as the scripted engine does, reasoning and calls among it, so that its random draws are
histories of every kind. Its weights change every ``UPDATE_S`` seconds by what a step of training changes, through snapshots
and swaps as a replica's. The trainer's own model computes the logprobs of what was drawn, at each token's version.
"""

import asyncio
import collections
import dataclasses
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.rollout.exact_tokens import Draw, ScriptedEngine, drawn
from penstock.services.episodes.messages import Message
from penstock.services.episodes.renderer import Renderer
from penstock.services.rollout.engines.engine import Engine, GeneratedGroup, GenerationRequest
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion, Purpose, Sample, Sampling, no_ids
from penstock.shared.weights.format.snapshot import write_snapshot
from penstock.shared.weights.receiver.puller import file_offer
from tests.support import tiny
from tests.support.chat_tokenizers import STOP, family

VOCABULARY, CONTEXT = 448, 8192
UPDATE_S, CHANGE = 2.0, 1e-3
"""Seconds between versions, and how much of its size a weight changes."""
_STEPS, _ROWS, _LENGTH = 250, 2, 160
"""Of the policy's lesson; rows are of each family."""
_SWAP_S = 300.0
_JUDGED = 2
"""Versions of an episode whose logprobs the trainer's model computes."""


def stop_ids(names: Sequence[str]) -> tuple[int, ...]:
    return tuple(sorted({family(name).convert_tokens_to_ids(STOP[name]) for name in names}))


def build(names: Sequence[str]) -> Any:
    """Return a policy that has learnt, in part, to answer in the form of each family."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=list(stop_ids(names)),
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    openings = {name: Renderer(family(name)).whole([Message("user", "?")], ()).tolist()[-8:] for name in names}
    engines = [ScriptedEngine(name, seed) for seed, name in enumerate(names)]
    for step in range(_STEPS):
        rows = [[*openings[each.name], *each.text_ids(), each.stop] for each in engines for _ in range(_ROWS)]
        ids = torch.tensor([(row * 9)[:_LENGTH] for row in rows])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / _STEPS) + 1e-5
    print(f"taught: loss {loss.item():.3f}", flush=True)
    return model.eval().requires_grad_(False)


@dataclasses.dataclass(slots=True)
class Mismatch:
    """Sums over tokens of ``exp(d) − 1 − d``, d = trainer's − engine's logprob: its mean is KL(behavior ‖ trainer)."""

    tokens: int = 0
    total: float = 0.0
    most: float = 0.0
    """Largest |d|, nats."""

    def add(self, difference: Any) -> None:
        self.tokens += len(difference)
        self.total += float((np.expm1(difference) - difference).sum())
        self.most = max(self.most, float(np.abs(difference).max(initial=0.0)))

    @property
    def kl(self) -> float:
        return self.total / max(1, self.tokens)


class Versions:
    """The engine's weights, by version, and the trainer's model of each."""

    def __init__(self, model: Any, inner: Engine, folder: Path, update_s: float) -> None:
        self._model, self._folder, self._update_s = model, folder, update_s
        self.inner = inner
        self._base = {name: value.clone() for name, value in model.named_parameters()}
        self._policy = Policy(model, packing="rows").eval()
        self._judging = threading.Lock()
        self.swaps = 0
        self.swap_s: list[float] = []
        self.mismatches = {
            name: Mismatch() for name in ("turn 1", "turns 2+", "turn 1, after a swap", "turns 2+, after a swap")
        }

    def weights(self, version: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(version)
        scale = CHANGE if version else 0.0
        return {
            name: value * (1 + scale * torch.randn(value.shape, generator=generator))
            for name, value in self._base.items()
        }

    async def put(self, version: int) -> None:
        folder = self._folder / "versions"
        content = self.weights(version).items()
        written = await asyncio.to_thread(
            write_snapshot, folder, PolicyVersion(version), version, content, torch.float32
        )
        record = PolicyRecord(PolicyVersion(version), None, version, 0.0, written.digest, str(written.location))
        await self.inner.stage(file_offer(record, _SWAP_S))
        await self.inner.swap(PolicyVersion(version))

    async def update(self) -> None:
        """Swap until cancelled."""
        while self._update_s:
            await asyncio.sleep(self._update_s)
            started_s = time.monotonic()
            await self.put(self.swaps + 1)
            self.swaps += 1
            self.swap_s.append(time.monotonic() - started_s)

    def judge(self, sample: Sample) -> None:
        """Compare the engine's logprobs with the trainer's."""
        sampled, versions = sample.sampled, sample.token_versions
        turns, clean = _turns(sample)
        batch = micro_batch([PackedRow(no_ids(), (sample,), (0,), 1.0)])
        behavior = sample.behavior_logprobs[sampled].astype(np.float64)
        with self._judging:
            self._judge(batch, behavior, sampled, versions, turns, clean)

    def _judge(self, batch: Any, behavior: Any, sampled: Any, versions: Any, turns: Any, clean: Any) -> None:
        for version in np.unique(versions[sampled]).tolist()[:_JUDGED]:
            with torch.no_grad():
                for name, value in self.weights(version).items():
                    self._model.get_parameter(name).copy_(value)
                theirs = self._policy(batch).policy_logprobs_N.double().numpy()
            own = versions[sampled] == version
            for later in (False, True):
                for pure in (False, True):
                    chosen = own & ((turns[sampled] > 1) == later) & (clean[sampled] == pure)
                    name = f"{'turns 2+' if later else 'turn 1'}{'' if pure else ', after a swap'}"
                    self.mismatches[name].add((theirs - behavior)[chosen])


def _turns(sample: Sample) -> tuple[Any, Any]:
    """Return of each token the turn that it is of, and whether all sampled ones before it are of its version."""
    rows, versions = sample.segments.tolist(), sample.token_versions
    ends = [*(start for start, _, _ in rows[1:]), len(sample.token_ids)]
    turns, clean = np.zeros(len(versions), int), np.zeros(len(versions), bool)
    turn, only = [0] * len(rows), list[set[int]]()
    for row, ((start, parent, is_sampled), end) in enumerate(zip(rows, ends, strict=True)):
        before = set() if parent < 0 else only[parent]
        turn[row] = (0 if parent < 0 else turn[parent]) + is_sampled
        turns[start:end] = turn[row]
        own = versions[start:end]
        if is_sampled:
            clean[start:end] = (own == own[0]) & (before <= {int(own[0])})
        only.append(before | (set(own.tolist()) if is_sampled else set()))
    return turns, clean


class TappedEngine:
    """A family's view of an engine that several share; what it draws is noted as the engine returned it."""

    def __init__(self, name: str, seed: int, versions: Versions) -> None:
        self.name, self.lot, self._versions = name, random.Random(seed), versions
        self.tokenizer = family(name)
        self.draws = collections.Counter[Draw]()
        self.turns = self.other_tokens = 0

    @property
    def version(self) -> PolicyVersion | None:
        return self._versions.inner.version

    def sampling(self, given: Sampling, number: int) -> Sampling:
        """Restrict every second episode's draws."""
        restricted = {"top_k": 20, "top_p": 0.95} if number % 2 else {}
        return dataclasses.replace(given, max_new_tokens=160, **restricted)  # type: ignore[arg-type]

    async def draw(self, request: GenerationRequest, least: PolicyVersion, purpose: Purpose) -> GeneratedGroup:
        group = await self._versions.inner.generate(request)
        (sample,) = group.samples
        ids, spans = sample.token_ids, sample.version_spans
        versions = np.repeat(spans[:, 1], np.diff([*spans[:, 0], len(ids)]))
        self.turns += 1
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        self.other_tokens += ids.tolist() != self.tokenizer(text, add_special_tokens=False)["input_ids"]
        columns = sample.behavior_logprobs, versions, sample.support_sizes, sample.support_ids
        self.draws[drawn(request.prompt_token_ids, ids, *columns)] += 1
        return group

    def note(self, sample: Sample) -> None:
        if not len(sample.support_sizes):
            self._versions.judge(sample)


@asynccontextmanager
async def opened(
    kind: str, names: Sequence[str], folder: Path, policy: Path | None, update_s: float
) -> AsyncIterator[Versions]:
    """Yield an engine with a taught policy, whose weights change meanwhile."""
    policy = policy or folder / "policy"
    if policy.exists():
        model = Qwen2ForCausalLM.from_pretrained(policy).eval().requires_grad_(False)
    else:
        model = build(names)
        model.save_pretrained(policy)
        tiny.tokenizer().save_pretrained(policy)
    inner = await (_vllm(policy, names) if kind == "vllm" else _transformers(model, names))
    versions = Versions(model, inner, folder, update_s)
    await versions.put(0)
    updating = asyncio.create_task(versions.update())
    try:
        yield versions
    finally:
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        await inner.close()


async def _transformers(model: Any, names: Sequence[str]) -> Engine:
    from penstock.services.rollout.engines.transformers.engine import TransformersEngine

    own = Qwen2ForCausalLM(model.config).eval().requires_grad_(False)
    own.load_state_dict(model.state_dict())
    given = dataclasses.replace(tiny.opened(own, stop=stop_ids(names)), context_tokens=CONTEXT, vocabulary=VOCABULARY)
    return TransformersEngine(given, max_rows=64, threads=1)


async def _vllm(policy: Path, names: Sequence[str]) -> Engine:
    from penstock.services.rollout.engines.vllm.arguments import gather
    from penstock.services.rollout.engines.vllm.start import open_vllm

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments = gather(str(policy), dtype="float32", seed=1, max_num_seqs=64, max_model_len=CONTEXT, enforce_eager=True)
    return await open_vllm(arguments, stop=stop_ids(names))
