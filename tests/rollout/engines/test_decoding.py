"""Laws of the embedded engine."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MambaConfig, MambaForCausalLM

from penstock.services.rollout.engines.engine import EngineDied, GeneratedGroup, GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.stop_texts import StopTexts
from penstock.services.rollout.engines.transformers.cache import make_room
from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens, seeds_of_rows, uniform
from penstock.services.rollout.engines.transformers.engine import TransformersEngine
from penstock.services.rollout.engines.transformers.smoke_test import seed_of, try_out
from penstock.shared.bus.messages import FinishReason, Int32Array, PolicyVersion, Sampling
from penstock.shared.errors import SettingsError, WeightsError
from tests.conftest import PATIENCE_S, until
from tests.support import tiny, truncated, weights
from tests.support.model_zoo import CONFIGURATIONS, randomise
from tests.support.tolerance import FORWARD

NEVER = (999,)


def request(
    *token_ids: int, samples: int = 1, max_new_tokens: int = 6, temperature: float = 1.0, seed: int = 0
) -> GenerationRequest:
    sampling = Sampling(samples=samples, max_new_tokens=max_new_tokens, temperature=temperature)
    return GenerationRequest(np.array(token_ids, dtype=np.int32), sampling, seed)


def batch(model: Any, requests: list[GenerationRequest], stop: tuple[int, ...] = NEVER) -> Batch:
    return Batch(model, requests, Tokens(stop), torch.device("cpu"))


@torch.inference_mode()
def decode(
    model: Any, requests: list[GenerationRequest], stop: tuple[int, ...] = NEVER
) -> list[tuple[GeneratedSample, ...]]:
    decoding = batch(model, requests, stop)
    finished: dict[int, tuple[GeneratedSample, ...]] = {}
    while not decoding.finished:
        finished.update(decoding.step(PolicyVersion(0)))
    return [finished[place] for place in range(len(requests))]


@torch.inference_mode()
def forward_logprobs(model: Any, prompt: list[int], sample: GeneratedSample, temperature: float) -> Any:
    ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs[torch.arange(len(sample.token_ids)), ids[0, len(prompt) :]].numpy()


def test_logprobs_are_those_of_a_plain_forward_pass_whatever_the_batch_and_its_padding() -> None:
    model = tiny.model()
    asked = [
        request(3, 4, 5, 6, 7, samples=5, max_new_tokens=12, temperature=1.0),
        request(9, samples=7, max_new_tokens=9, temperature=0.7),
        request(11, 12, 13, samples=1, max_new_tokens=12, temperature=0.0),
        request(2, 2, 2, 2, 2, 2, 2, 2, samples=4, max_new_tokens=1, temperature=1.3),
    ]
    # rows end at all lengths, and the batch is compacted several times
    groups = decode(model, asked, stop=tuple(range(0, 48, 3)))
    lengths = set()
    for generation, samples in zip(asked, groups, strict=True):
        assert len(samples) == generation.sampling.samples
        for sample in samples:
            lengths.add(len(sample.token_ids))
            expected = forward_logprobs(
                model, generation.prompt_token_ids.tolist(), sample, generation.sampling.temperature
            )
            np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=FORWARD)
            assert sample.token_ids.dtype == np.int32
            assert sample.behavior_logprobs.dtype == np.float32
    assert len(lengths) >= 4


TRUNCATIONS = [
    Sampling(5, 12, 1.0, top_k=256, top_p=0.9),
    Sampling(5, 12, 0.7, top_k=20),
    Sampling(5, 12, 1.3, top_k=256, min_p=0.05),
    Sampling(5, 12, 1.0, top_k=20, top_p=0.9, min_p=0.05),
    Sampling(5, 12, 1.0, top_k=1),
]


@pytest.mark.parametrize("sampling", TRUNCATIONS)
def test_truncated_samples_have_the_trainers_logprobs_over_what_could_be_drawn(sampling: Sampling) -> None:
    model, prompt = tiny.model(), np.array([3, 4, 5, 6, 7], dtype=np.int32)
    others = [request(9, samples=7, max_new_tokens=9), request(3, 4, 5, 6, 7, samples=1, temperature=0.0)]
    samples, whole, greedy = decode(model, [GenerationRequest(prompt, sampling), *others], stop=tuple(range(0, 48, 7)))
    for chunk_tokens in (0, 7):
        of_trainer = truncated.trainer_logprobs(model, prompt, samples, sampling.temperature, chunk_tokens)
        for sample, logprobs in zip(samples, of_trainer, strict=True):
            np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=FORWARD)
    for sample in samples:
        assert truncated.supports_of(sample) == truncated.expected_supports(model, prompt, sample, sampling)
    for sample in (*whole, *greedy):
        assert len(sample.support_sizes) == len(sample.support_ids) == 0
        assert sampling.top_k != 1 or samples[0].behavior_logprobs.tolist() == [0.0] * len(samples[0].token_ids)


def test_no_completion_stops_before_its_minimum_length_and_the_trainer_knows_that_it_could_not() -> None:
    model, prompt, stop = tiny.model(), np.array([3, 4, 5], dtype=np.int32), tuple(range(0, 48, 3))
    sampling = Sampling(6, 12, 1.0, min_new_tokens=5)
    (samples,) = decode(model, [GenerationRequest(prompt, sampling)], stop=stop)
    of_trainer = truncated.trainer_logprobs(model, prompt, samples, 1.0)
    for sample, logprobs in zip(samples, of_trainer, strict=True):
        assert len(sample.token_ids) >= 6 or sample.token_ids[-1] in stop
        assert not set(sample.token_ids[:5].tolist()) & set(stop)
        assert sample.support_sizes.tolist() == ([-16] * 5 + [0] * 12)[: len(sample.token_ids)]
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=FORWARD)
        whole = forward_logprobs(model, prompt.tolist(), sample, 1.0)
        assert (sample.behavior_logprobs[:5] - whole[:5] > FORWARD).any(), (
            "without the stop tokens the rest is likelier"
        )


def test_no_stop_text_ends_a_completion_before_its_minimum_length() -> None:
    model, prompt = tiny.model(), [3, 4, 5, 6, 7]
    (whole,) = decode(model, [request(*prompt, samples=1, max_new_tokens=12, seed=5)])[0]
    text = letters([whole.token_ids[2:3]])[0]
    ends = [n for n, token in enumerate(whole.token_ids.tolist(), 1) if token == whole.token_ids[2]]
    for minimum in (0, 2, 3):
        stop = StopTexts(letters, [text], minimum)
        asked = dataclasses.replace(request(*prompt, samples=1, max_new_tokens=12, seed=5), stop=stop)
        ((sample,),) = decode(model, [asked])
        assert len(sample.token_ids) == next((n for n in ends if n > minimum), 12)


def letters(completions: Sequence[Int32Array]) -> list[str]:
    """Return token n as the n-th letter."""
    return ["".join(chr(97 + int(token)) for token in ids) for ids in completions]


def test_a_completion_ends_at_the_token_that_completes_a_stop_text_and_includes_it() -> None:
    stop = StopTexts(letters, ["cde", "xy"])
    assert stop.end(np.array([0, 2, 3, 4, 5], dtype=np.int32)) == 4
    assert stop.end(np.array([0, 2, 3], dtype=np.int32)) == 0
    assert stop.end(np.array([0, 1, 2, 3, 4, 5], dtype=np.int32), searched=4) == 5


def test_the_engine_ends_each_sample_at_its_own_stop_text_with_the_logprobs_of_its_tokens() -> None:
    model, prompt = tiny.model(), [3, 4, 5, 6, 7]
    whole = decode(model, [request(*prompt, samples=6, max_new_tokens=12, seed=5)])[0]
    text = letters([whole[0].token_ids])[0][4:6]
    asked = dataclasses.replace(request(*prompt, samples=6, max_new_tokens=12, seed=5), stop=StopTexts(letters, [text]))
    (samples,) = decode(model, [asked])
    for before, sample in zip(whole, samples, strict=True):
        end = letters([before.token_ids])[0].find(text)
        length = 12 if end < 0 else end + 2
        assert sample.token_ids.tolist() == before.token_ids[:length].tolist()
        assert sample.finish_reason is (FinishReason.LENGTH if end < 0 else FinishReason.STOP)
        expected = forward_logprobs(model, prompt, sample, 1.0)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=FORWARD)
    assert len(samples[0].token_ids) < 12


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "granitemoehybrid", "qwen3_5_moe", "qwen3_next"])
def test_layers_with_a_state_give_the_logprobs_of_a_plain_forward_pass(name: str) -> None:
    """Of prompts of different lengths, one shorter than a convolution; rows leave the batch, and the cache is dropped twice."""
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS[name]()).eval()
    randomise(model)
    prompts = [np.random.default_rng(tokens).integers(3, 40, tokens).tolist() for tokens in (1, 9, 70)]
    asked = [request(*prompt, samples=3, max_new_tokens=24, seed=place) for place, prompt in enumerate(prompts)]
    decoding, finished, steps = batch(model, asked, stop=tuple(range(0, 256, 9))), dict[int, Any](), 0
    while not decoding.finished:
        with torch.inference_mode():
            finished.update(decoding.step(PolicyVersion(0)))
        if (steps := steps + 1) in (4, 9):
            decoding.drop_cache()
    samples = [(prompt, sample) for place, prompt in enumerate(prompts) for sample in finished[place]]
    assert len({len(sample.token_ids) for _, sample in samples}) > 2
    for prompt, sample in samples:
        expected = forward_logprobs(model, prompt, sample, 1.0)
        assert np.abs(sample.behavior_logprobs - expected).max() < FORWARD


def test_temperature_zero_writes_what_transformers_writes_greedily() -> None:
    model = tiny.model()
    prompts = [[3, 4, 5, 6, 7], [9], [11, 12, 13]]
    groups = decode(model, [request(*prompt, max_new_tokens=20, temperature=0.0) for prompt in prompts])
    for prompt, (sample,) in zip(prompts, groups, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert sample.token_ids.tolist() == expected[0, len(prompt) :].tolist()


def test_tokens_are_drawn_as_often_as_the_distribution_says() -> None:
    model = tiny.model()
    ((*samples,),) = decode(model, [request(5, 6, samples=20_000, max_new_tokens=1, temperature=0.8)])
    counts = np.bincount([sample.token_ids[0] for sample in samples], minlength=tiny.VOCABULARY)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[5, 6]])).logits[0, -1]
    expected = torch.softmax(logits / 0.8, -1).numpy() * 20_000
    deviation = (counts - expected) / np.sqrt(expected + 1)
    assert np.abs(deviation).max() < 5  # standard deviations


def test_the_stop_token_is_the_last_token_and_a_longer_completion_is_cut() -> None:
    model = tiny.model()
    ((*samples,),) = decode(model, [request(5, 6, samples=64, max_new_tokens=5)], stop=tuple(range(24, 48)))
    reasons = {sample.finish_reason for sample in samples}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for sample in samples:
        assert all(token < 24 for token in sample.token_ids[:-1])
        if sample.finish_reason is FinishReason.STOP:
            assert sample.token_ids[-1] >= 24
        else:
            assert sample.token_ids[-1] < 24
            assert len(sample.token_ids) == 5


def test_a_group_is_whole_before_longer_groups_of_its_batch_are() -> None:
    asked = [request(5, samples=2, max_new_tokens=2), request(6, samples=3, max_new_tokens=4)]
    with torch.inference_mode():
        decoding = batch(tiny.model(), asked)
        whole = [[place for place, _ in decoding.step(PolicyVersion(0))] for _ in range(4)]
    assert whole == [[], [0], [], [1]]
    assert decoding.finished


async def test_drawn_tokens_are_counted_at_each_step(engine: TransformersEngine) -> None:
    await weights.load(engine, tiny.model().named_parameters(), 0)
    long = asyncio.ensure_future(engine.generate(request(5, samples=2, max_new_tokens=400)))
    await until(lambda: engine.drawn_tokens > 20)
    assert not long.done()
    others = await asyncio.gather(*(engine.generate(request(6, samples=n, max_new_tokens=3 * n)) for n in (1, 4)))
    groups = [await long, *others]
    assert engine.drawn_tokens == sum(len(sample.token_ids) for group in groups for sample in group.samples) == 851


def test_a_prompt_is_prefilled_once_for_all_of_its_samples() -> None:
    model, rows = tiny.model(), []
    model.register_forward_pre_hook(lambda *call: rows.append(tuple(call[2]["input_ids"].shape)), with_kwargs=True)
    decode(model, [request(5, 6, 7, samples=4, max_new_tokens=3), request(8, 9, samples=2, max_new_tokens=3)])
    assert rows == [(2, 3), (6, 1), (6, 1)]


def test_finished_rows_leave_the_batch_when_half_of_it_is_finished() -> None:
    model, rows = tiny.model(), []
    model.register_forward_pre_hook(lambda *call: rows.append(call[2]["input_ids"].shape[0]), with_kwargs=True)
    asked = [request(5, samples=2, max_new_tokens=2), request(6, samples=2, max_new_tokens=4)]
    decode(model, asked)
    assert rows == [2, 4, 2, 2]


def test_the_numbers_of_a_seed_are_those_of_splitmix64() -> None:
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of Vigna's splitmix64.c, seed 1234567
    drawn = [uniform(np.array([7, 1234567], np.uint64), step)[1] for step in range(3)]
    assert drawn == [(number >> 11) / 2**53 for number in known]


def test_each_sample_of_a_request_has_numbers_of_its_own() -> None:
    seed_N = seeds_of_rows(
        [request(1, samples=3, seed=5), request(1, seed=5), request(1, samples=3, seed=(1 << 64) - 1)]
    )
    assert len(set(seed_N.tolist())) == 6
    assert seed_N[3] == seed_N[0] == 5


def test_the_same_seed_draws_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    model, stop = tiny.model(), tuple(range(0, 48, 3))
    seeded, other = (
        request(5, 6, samples=8, max_new_tokens=8, seed=1),
        request(5, 6, samples=8, max_new_tokens=8, seed=2),
    )
    longer, greedy = request(9, samples=3, max_new_tokens=12, seed=3), request(7, 8, 9, samples=2, temperature=0.0)
    alone, second = (_tokens(decode(model, [asked], stop)[0]) for asked in (seeded, other))
    assert alone != second
    assert _tokens(decode(model, [longer, seeded, greedy], stop)[1]) == alone
    assert _tokens(decode(model, [other, greedy, longer, seeded], stop)[3]) == alone


def _tokens(samples: tuple[GeneratedSample, ...]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


async def test_a_group_alone_in_its_batch_is_the_same_to_the_bit_whoever_asks_beside_it() -> None:
    """Shared batches may round differently on some CPUs, so shapes are checked too."""
    rows: set[int] = set()
    asked = [request(*range(2, 4 + n), samples=4, max_new_tokens=9, seed=n) for n in range(8)]
    answers = []
    for order in (list(range(8)), [3, 1, 7, 0, 2, 6, 5, 4]):
        model = tiny.model()
        model.register_forward_pre_hook(lambda *call: rows.add(len(call[2]["input_ids"])), with_kwargs=True)
        engine = TransformersEngine(tiny.opened(model, stop=tuple(range(0, 48, 3))), max_rows=64, alone=True)
        try:
            await weights.load(engine, tiny.model().named_parameters(), 1)
            groups = await asyncio.gather(*(engine.generate(asked[n]) for n in order))
        finally:
            await engine.close()
        answers.append([groups[order.index(n)] for n in range(8)])
    for first, second in zip(*answers, strict=True):
        for sample, other in zip(first.samples, second.samples, strict=True):
            assert sample.token_ids.tolist() == other.token_ids.tolist()
            assert sample.behavior_logprobs.tobytes() == other.behavior_logprobs.tobytes()
    assert max(rows) == 4, "no more than one group's samples at a time"


def test_replicas_of_a_run_draw_different_tokens() -> None:
    assert seed_of(0, "rollout-0") == seed_of(0, "rollout-0")
    assert len({seed_of(0, "rollout-0"), seed_of(0, "rollout-1"), seed_of(1, "rollout-0")}) == 3


def test_a_model_that_cannot_be_decoded_is_told_at_the_start() -> None:
    try_out(tiny.opened(tiny.model()))
    config = MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(SettingsError, match=r"found MambaForCausalLM, which failed to decode .*: change policy.model"):
        try_out(tiny.opened(MambaForCausalLM(config).eval().requires_grad_(False)))


@torch.inference_mode()
def test_tokens_before_a_swap_come_from_the_old_weights_and_later_ones_from_the_new_on_the_kept_cache() -> None:
    old, new, served = tiny.model(1), tiny.model(2), tiny.model(1)
    decoding, whole = batch(served, [request(5, 6, 7, samples=3, max_new_tokens=8)]), []
    for step in range(8):
        if step == 5:
            served.load_state_dict(new.state_dict())
        whole = decoding.step(PolicyVersion(7 if step < 5 else 8))
    ((_, samples),) = whole
    for sample in samples:
        assert sample.version_spans.tolist() == [[0, 7], [5, 8]]
        ids = torch.tensor([[5, 6, 7, *sample.token_ids.tolist()]])
        before = old(input_ids=ids[:, :7], use_cache=True)  # predicts tokens 0 to 4
        after = new(input_ids=ids[:, 7:10], past_key_values=before.past_key_values, use_cache=True)  # tokens 5 to 7
        logits = torch.cat([before.logits[0, 2:], after.logits[0]])
        expected = torch.log_softmax(logits, -1)[torch.arange(8), ids[0, 3:]]
        np.testing.assert_allclose(sample.behavior_logprobs, expected.numpy(), atol=FORWARD)


@torch.inference_mode()
def test_a_completion_that_ended_before_a_swap_does_not_name_the_new_version() -> None:
    decoding = batch(tiny.model(), [request(5, max_new_tokens=2), request(6, max_new_tokens=4)])
    spans = {}
    for version in (3, 3, 4, 5):
        for place, (sample,) in decoding.step(PolicyVersion(version)):
            spans[place] = sample.version_spans.tolist()
    assert spans == {0: [[0, 3]], 1: [[0, 3], [2, 4], [3, 5]]}


@pytest.fixture
async def engine() -> AsyncIterator[TransformersEngine]:
    opened = TransformersEngine(tiny.opened(tiny.model(1), stop=NEVER), max_rows=64)
    yield opened
    await opened.close()


async def test_a_swap_falls_between_two_steps_of_a_running_group() -> None:
    served, new = tiny.model(1), tiny.model(2)
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=64)
    await weights.load(engine, served.named_parameters(), 0)
    await weights.stage(engine, new.named_parameters(), 1)
    loop, steps = asyncio.get_running_loop(), 0
    swaps: list[Any] = []

    def swap_in_the_fifth_step(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            asked = threading.Event()

            async def swap() -> None:
                swapping = asyncio.ensure_future(engine.swap(PolicyVersion(1)))
                await asyncio.sleep(0)  # it is in the inbox now
                asked.set()
                await swapping

            swaps.append(asyncio.run_coroutine_threadsafe(swap(), loop))
            assert asked.wait(PATIENCE_S)

    served.register_forward_hook(swap_in_the_fifth_step)
    group = await engine.generate(request(5, 6, 7, samples=3, max_new_tokens=9))
    await asyncio.wrap_future(swaps[0])
    assert engine.version == 1
    assert [sample.version_spans.tolist() for sample in group.samples] == [[[0, 0], [5, 1]]] * 3
    await engine.close()


async def test_a_snapshot_of_the_trained_parameters_is_all_that_a_swap_needs(
    engine: TransformersEngine,
) -> None:
    new = tiny.model(2)
    report = await weights.load(engine, new.named_parameters(), 4)
    assert (report.path, report.copied_bytes) == ("copy", 4 * sum(p.numel() for p in new.parameters()))
    group = await engine.generate(request(5, 6, 7, max_new_tokens=4))
    expected = forward_logprobs(new, [5, 6, 7], group.samples[0], 1.0)
    np.testing.assert_allclose(group.samples[0].behavior_logprobs, expected, atol=FORWARD)
    assert group.samples[0].version_spans.tolist() == [[0, 4]]


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "found 1 missing and 0 unknown, 'model.norm.weight'"),
        (lambda tensors: tensors.update(other=torch.zeros(1)), "found 0 missing and 1 unknown, 'other'"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"of shape \(32,\), found \(3,\)"),
    ],
)
async def test_weights_of_another_model_are_refused_whole(engine: TransformersEngine, harm: Any, sentence: str) -> None:
    await weights.load(engine, tiny.model(1).named_parameters(), 3)
    tensors = dict(tiny.model(2).named_parameters())
    harm(tensors)
    with pytest.raises(WeightsError, match=sentence):
        await weights.stage(engine, tensors.items(), 4)
    with pytest.raises(WeightsError, match="expected version 4 to be received"):
        await engine.swap(PolicyVersion(4))
    assert engine.version == 3
    group = await engine.generate(request(5, 6, 7, max_new_tokens=4))
    expected = forward_logprobs(tiny.model(1), [5, 6, 7], group.samples[0], 1.0)
    np.testing.assert_allclose(group.samples[0].behavior_logprobs, expected, atol=FORWARD)


async def test_logprobs_of_a_probe_are_those_of_the_live_weights_also_while_a_group_runs(
    engine: TransformersEngine,
) -> None:
    new = tiny.model(2)
    await weights.load(engine, new.named_parameters(), 0)
    running = asyncio.ensure_future(engine.generate(request(5, 6, max_new_tokens=200)))
    ids = np.array([7, 3, 3, 40, 12], dtype=np.int32)
    logprobs = await engine.logprobs(ids)
    assert not running.done()
    with torch.inference_mode():
        logits = new(input_ids=torch.from_numpy(ids).long()[None]).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)[torch.arange(4), torch.from_numpy(ids).long()[1:]]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=FORWARD)
    assert logprobs.dtype == np.float32
    await running


async def test_an_engine_that_drains_swaps_once_the_running_batch_is_finished() -> None:
    served, new = tiny.model(1), tiny.model(2)
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=64, drain=True)
    await weights.load(engine, served.named_parameters(), 0)
    await weights.stage(engine, new.named_parameters(), 1)
    started = threading.Event()
    served.register_forward_hook(lambda *_: started.set())
    running = asyncio.ensure_future(engine.generate(request(5, 6, max_new_tokens=50)))
    await until(started.is_set)
    await engine.swap(PolicyVersion(1))
    assert (await running).samples[0].version_spans.tolist() == [[0, 0]]
    later = await engine.generate(request(5, 6))
    assert later.samples[0].version_spans.tolist() == [[0, 1]]
    await engine.close()


async def test_requests_that_wait_together_share_a_batch_up_to_the_cap() -> None:
    served, rows = tiny.model(1), []
    served.register_forward_pre_hook(lambda *call: rows.append(tuple(call[2]["input_ids"].shape)), with_kwargs=True)
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=20)
    await weights.load(engine, served.named_parameters(), 0)
    training = [request(5, 6, samples=8, max_new_tokens=2) for _ in range(2)]
    evaluation = [request(7, 8, max_new_tokens=2, temperature=0.0) for _ in range(8)]
    groups = await asyncio.gather(*(engine.generate(generation) for generation in training + evaluation))
    assert [len(group.samples) for group in groups] == [8, 8] + [1] * 8
    assert rows == [(2, 2), (20, 1), (1, 2), (4, 1)]  # 2 × 8 + 4 × 1 rows, then the last 4; equal prompts are read once
    await engine.close()


async def test_an_engine_that_dies_tells_whoever_waits_and_whoever_comes_later() -> None:
    served = tiny.model(1)
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=8)
    await weights.load(engine, served.named_parameters(), 0)

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    served.register_forward_pre_hook(fail)
    answers = await asyncio.gather(*(engine.generate(request(5, samples=8)) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [EngineDied] * 3
    with pytest.raises(EngineDied, match="no room"):
        await engine.generate(request(5))
    with pytest.raises(EngineDied, match="no room"):
        await engine.swap(PolicyVersion(1))
    await engine.close()


async def test_closing_stops_between_two_steps_and_cancels_what_waits() -> None:
    served = tiny.model(1)
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=1)
    await weights.load(engine, served.named_parameters(), 0)
    running = threading.Event()
    served.register_forward_hook(lambda *_: running.set())
    waiting = [asyncio.ensure_future(engine.generate(request(5, max_new_tokens=500))) for _ in range(2)]
    await until(running.is_set)
    await engine.close()
    await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)


async def test_a_request_that_is_taken_back_leaves_its_batch() -> None:
    served = tiny.model(1)
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=8)
    await weights.load(engine, served.named_parameters(), 0)
    tasks: list[asyncio.Task[GeneratedGroup]] = []
    loop, steps, cancelled = asyncio.get_running_loop(), [], threading.Event()

    def cancel_in_the_third_step(*call: Any) -> None:
        steps.append(call[2]["input_ids"].shape[0])
        if len(steps) == 3:
            loop.call_soon_threadsafe(lambda: (tasks[0].cancel(), loop.call_soon(cancelled.set)))
            assert cancelled.wait(PATIENCE_S)

    served.register_forward_pre_hook(cancel_in_the_third_step, with_kwargs=True)
    tasks += [asyncio.ensure_future(engine.generate(request(5, samples=n, max_new_tokens=6))) for n in (4, 2)]
    kept = await tasks[1]
    assert len(kept.samples) == 2
    assert tasks[0].cancelled()
    assert steps == [1, 6, 6, 6, 2, 2]  # withdrawn in the third, known before the fourth, which drops its rows
    await engine.close()


async def test_a_group_of_more_samples_than_are_decoded_at_a_time_is_made_in_parts() -> None:
    served, rows = tiny.model(1), []
    served.register_forward_pre_hook(lambda *call: rows.append(call[2]["input_ids"].shape[0]), with_kwargs=True)
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=4)
    await weights.load(engine, served.named_parameters(), 0)
    group = await engine.generate(request(5, 6, samples=10, max_new_tokens=2))
    assert len(group.samples) == 10
    assert max(rows) == 4
    await engine.close()


@pytest.mark.parametrize("rung", [0, 1, 2])
async def test_a_group_that_was_suspended_at_any_rung_ends_as_if_it_had_not_been(rung: int) -> None:
    prompts = (request(3, 4, 5, 6, samples=3, max_new_tokens=60), request(7, samples=2, max_new_tokens=50, seed=1))
    served = tiny.model(1)
    expected = decode(served, list(prompts))
    copies = {name: parameter.clone() for name, parameter in served.named_parameters()}
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=64)
    await weights.load(engine, copies.items(), 0)
    steps: list[int] = []
    served.register_forward_hook(lambda *_: steps.append(1))
    running = asyncio.gather(*(engine.generate(prompt) for prompt in prompts))
    await until(lambda: len(steps) > 20)
    await engine.suspend(rung)
    done = len(steps)
    assert (engine.version is None) == (rung == 2)
    assert all(parameter.numel() == 0 for parameter in served.parameters()) == (rung == 2)
    assert engine.memory["weights"] == sum(copy.nbytes for copy in copies.values())
    assert engine.memory["shadow"] >= engine.memory["weights"], "it is aligned"
    assert engine.memory["kv_cache"] > 0
    await engine.resume()
    if rung == 2:
        assert len(steps) == done
        await weights.load(engine, copies.items(), 1)
        assert torch.equal(served.lm_head.weight, copies["model.embed_tokens.weight"]), "it is tied"
    groups = await running
    assert not any(parameter.numel() == 0 for parameter in served.parameters())
    for group, samples in zip(groups, expected, strict=True):
        for sample, same in zip(group.samples, samples, strict=True):
            np.testing.assert_array_equal(sample.token_ids, same.token_ids)
            np.testing.assert_allclose(sample.behavior_logprobs, same.behavior_logprobs, atol=FORWARD)
            assert [version for _, version in sample.version_spans.tolist()] == ([0, 1] if rung == 2 else [0])
    await engine.close()


@pytest.mark.parametrize("rung", [0, 1, 2])
async def test_what_a_suspended_engine_drops_on_a_gpu_returns_to_the_driver_before_it_answers(
    rung: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, returned = tiny.model(1), list[tuple[bool, bool]]()
    engine = TransformersEngine(tiny.opened(served, stop=NEVER), max_rows=64)
    await weights.load(engine, tiny.model(1).named_parameters(), 0)
    steps: list[int] = []
    served.register_forward_hook(lambda *_: steps.append(1))
    generating = engine.generate(request(3, 4, max_new_tokens=1000))
    await until(lambda: len(steps) > 5)

    def empty_cache() -> None:
        assert engine._decoding is not None
        returned.append((engine._decoding.cache is None, all(not each.numel() for each in served.parameters())))

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(engine._ladder, "_device", torch.device("cuda"))
    await engine.suspend(rung)
    assert returned == {0: [], 1: [(True, False)], 2: [(True, True)]}[rung]
    await engine.close()
    await asyncio.gather(generating, return_exceptions=True)


async def test_a_suspended_engine_decodes_nothing_and_refuses_a_probe(engine: TransformersEngine) -> None:
    await weights.load(engine, tiny.model(1).named_parameters(), 0)
    await engine.suspend(0)
    waiting = asyncio.ensure_future(engine.generate(request(5, 6)))
    with pytest.raises(WeightsError, match="expected a running engine, found it suspended"):
        await engine.logprobs(np.array([7, 3], dtype=np.int32))
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting).samples) == 1


@torch.inference_mode()
def test_a_cache_with_room_has_the_tokens_of_transformers_own_and_copies_them_seldom() -> None:
    own, roomy = DynamicCache(), DynamicCache()

    def add(rows: int, tokens: int) -> None:
        states = torch.randn(2, rows, 2, tokens, 4)
        held = [cache.update(*states, 0) for cache in (own, roomy)]
        assert all(torch.equal(*pair) for pair in zip(*held, strict=True))

    add(3, 100)
    make_room(roomy)
    places = set()
    for rows in [3] * 60 + [2] * 140:
        if len(roomy.layers[0].keys) != rows:
            for cache in (own, roomy):
                cache.batch_select_indices(torch.tensor([2, 0]))
        add(rows, 1)
        places.add(roomy.layers[0].keys.data_ptr())
    assert roomy.get_seq_length() == 300
    assert len(places) <= 8  # a quarter of room each time, and once more for the rows that are left
