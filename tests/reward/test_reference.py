"""The reward service's reference logprobs equal the trainer's own, and the trainer requires them."""

import dataclasses
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from penstock.services.reward.models import frozen_policy
from penstock.services.reward.models.frozen_policy import FrozenPolicy, TokenSequence
from penstock.services.reward.service import make_scoring
from penstock.services.trainer.batch.packing import PackedRow, micro_batch
from penstock.services.trainer.model.policy import Policy, load_reference
from penstock.shared.bus.encoding import wire
from penstock.shared.bus.messages import Experience, Prompt, Purpose, RolloutGroup
from penstock.shared.errors import SettingsError, TemporaryError
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings, load
from tests.support import builders, tiny, trees
from tests.support.tolerance import FORWARD

TEMPERATURE = 0.7
LENGTHS = (5, 1, 9, 3)


def settings(folder: Path, **models: Any) -> Settings:
    return Settings.model_validate(
        {
            "policy": {"model": str(folder), "dtype": "float32"},
            "sampling": {"temperature": TEMPERATURE},
            "reward": {
                "models": {"device": "cpu", **models},
                "scorers": [{"kind": "format", "needs_stop": True}],
            },
            "algorithm": {"reference": "reward", "kl": {"coefficient": 0.1}},
        }
    )


def group(group_id: int = 0, prompt_tokens: int = 4) -> RolloutGroup:
    generator = np.random.default_rng(group_id)
    made = builders.group(group_id, tuple("abcd"))
    samples = tuple(
        dataclasses.replace(
            sample,
            token_ids=generator.integers(2, 40, length).astype(np.int32),
            behavior_logprobs=np.full(length, -1.0, np.float32),
        )
        for sample, length in zip(made.samples, LENGTHS, strict=True)
    )
    return dataclasses.replace(
        made,
        prompt=_sampled(made.prompt),
        prompt_token_ids=generator.integers(2, 40, prompt_tokens).astype(np.int32),
        samples=samples,
    )


def _sampled(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, temperature=TEMPERATURE))


def trainers_own(policy: Policy, of: RolloutGroup, temperature: float = TEMPERATURE) -> Any:
    with torch.no_grad():
        policy_logprobs = policy(
            micro_batch([PackedRow(of.prompt_token_ids, of.samples, tuple(range(len(of.samples))), temperature)])
        )
    return policy_logprobs.policy_logprobs_N.numpy()


async def test_what_travels_with_a_group_is_what_the_trainer_would_have_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_policy, "CHUNK_TOKENS", 4)
    of = settings(tiny.save(tmp_path), batch_tokens=32)
    reference = load_reference(of.policy, torch.float32, "cpu")
    scoring = make_scoring(of, Status())
    await scoring.start()
    try:
        for made in (group(0, 4), group(1, 1), group(2, 11)):
            experience = await scoring(made)
            sent = wire.decode(wire.encode(experience), Experience).reference_logprobs
            assert sent is not None
            assert sent.dtype == np.float32
            assert sent.shape == (18,)
            np.testing.assert_allclose(sent, trainers_own(reference, made), atol=FORWARD)
    finally:
        await scoring.close()


async def test_evaluations_have_no_reference(tmp_path: Path) -> None:
    scoring = make_scoring(settings(tiny.save(tmp_path)), Status())
    await scoring.start()
    try:
        made = group()
        held_out = dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, purpose=Purpose.EVALUATE))
        assert (await scoring(held_out)).reference_logprobs is None
    finally:
        await scoring.close()


async def test_a_reference_without_memory_leaves_the_group_and_says_degraded(tmp_path: Path) -> None:
    status = Status()
    scoring = make_scoring(settings(tiny.save(tmp_path)), status)
    await scoring.start()
    model: Any = scoring._reference
    whole = model._batcher._computation._placed.module.get_decoder().forward

    def full(**inputs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    try:
        model._batcher._computation._placed.module.get_decoder().forward = full
        with pytest.raises(TemporaryError, match=r"reference unavailable: no memory for a sample of (4|6|8|12) tokens"):
            await scoring(group())
        assert status.state == "degraded"
        model._batcher._computation._placed.module.get_decoder().forward = whole
        assert (await scoring(group())).reference_logprobs is not None
        assert status.state == "working"
    finally:
        await scoring.close()


def test_a_prompt_of_one_token_and_completions_of_one_token_are_sequences_too(tmp_path: Path) -> None:
    policy = FrozenPolicy(settings(tiny.save(tmp_path)))
    token_sequence = TokenSequence(np.array([5], np.int32), np.array([7], np.int32), TEMPERATURE)
    (actual,) = policy.compute([token_sequence])
    with torch.no_grad():
        logits = tiny.model()(input_ids=torch.tensor([[5]])).logits[0, -1] / TEMPERATURE
    assert actual.logprobs_N.tolist() == pytest.approx([float(torch.log_softmax(logits, -1)[7])], abs=FORWARD)


def test_experience_written_before_references_travelled_stays_readable() -> None:
    fields = msgpack.unpackb(wire.encode(builders.experience(3)), ext_hook=wire._read_array)
    assert fields.pop("reference_logprobs") is None
    old = msgpack.packb(fields, default=wire._plain)
    assert wire.decode(old, Experience).reference_logprobs is None


def test_a_reference_that_costs_nothing_in_the_trainer_is_not_held_in_the_reward_service(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[algorithm]\nreference = "reward"\nkl = { coefficient = 0.1 }\n[policy.lora]\nrank = 4\n')
    with pytest.raises(SettingsError, match=r'expected algorithm.reference = "trainer" with policy\.lora'):
        load(file, environment={})


def episodes(seed: int, prompt: int, temperature: float = TEMPERATURE) -> RolloutGroup:
    """Return a group of trees, with a plain completion if it has a prompt."""
    row, made = trees.group(seed, 40, prompt), builders.group(seed, tuple("abcd"))
    sampling = dataclasses.replace(made.prompt.sampling, temperature=temperature)
    prompt_of = dataclasses.replace(made.prompt, sampling=sampling)
    return dataclasses.replace(made, prompt=prompt_of, prompt_token_ids=row.prompt_token_ids, samples=row.samples)


def at_sampled(group: RolloutGroup, logprobs: Any) -> Any:
    return logprobs[np.concatenate([sample.sampled for sample in group.samples])]


async def test_of_trees_every_branch_is_read_as_the_trainer_reads_it(tmp_path: Path) -> None:
    of = settings(tiny.save(tmp_path), batch_tokens=64)
    reference = load_reference(of.policy, torch.float32, "cpu")
    scoring = make_scoring(of, Status())
    await scoring.start()
    try:
        for made in (episodes(0, 4), episodes(1, 0), episodes(2, 11)):
            sent = wire.decode(wire.encode(await scoring(made)), Experience).reference_logprobs
            assert sent is not None
            np.testing.assert_allclose(at_sampled(made, sent), trainers_own(reference, made), atol=FORWARD)
    finally:
        await scoring.close()
