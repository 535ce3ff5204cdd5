"""The weights probe: planted loading faults are found, healthy models of other number types are not."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from penstock.services.rollout.probe_check import Finding, judge
from penstock.services.trainer.rank0 import probe
from penstock.services.trainer.rank0.probe import Prober
from penstock.shared.bus.messages import Int32Array, Probe
from penstock.shared.settings import loads
from tests.support import model_zoo
from tests.support.model_configurations import VOCABULARY
from tests.support.probed import FAULTS, ProbedTrainer, groups_of, in_fp8, moved, plant, scored

FAMILIES = ("llama", "qwen2_moe", "gemma3_text", "mixtral")
HEALTHY = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "mistral+swa(short)", "mixtral", "phi3", "olmo2",
    "granite", "glm4", "cohere2", "deepseek_v3", "falcon_h1", "mamba2", "gpt2", "bloom", "smollm3", "stablelm", "lfm2",
)  # fmt: skip
QUANTISED = ("llama", "qwen2", "qwen3", "mistral+swa(short)", "smollm3", "phi3")
SETTINGS = loads("policy.model = 'x'", "test")
MARGIN = SETTINGS.guards.limit("probe")
TEXTS, TOKENS = 8, 64
SCALE, SPREAD, HEAD = 1.5, 0.3, 3.0
_FOLDER = tempfile.TemporaryDirectory(prefix="probe-")


@functools.cache
def saved(family: str) -> Path:
    folder = Path(_FOLDER.name) / family
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_zoo.CONFIGURATIONS[family](), dtype=torch.float32)
    model_zoo.randomise(model)
    strengthen(model)
    model.save_pretrained(folder)
    return folder


def strengthen(model: Any) -> None:
    """Let the layers matter as in a trained model, in which each changes the next token's probabilities."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, part in model.named_parameters():
            if part is not head and part.dim() > 1 and "embed" not in name:
                part.mul_(SCALE)
            elif part.dim() == 1 and "norm" in name:
                part.add_(SPREAD * torch.randn(part.shape))
        if not model.config.get_text_config().tie_word_embeddings:
            head.mul_(HEAD)


@functools.cache
def texts(family: str) -> tuple[Int32Array, ...]:
    """Return completions that the model itself drew."""
    model = AutoModelForCausalLM.from_pretrained(saved(family), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCABULARY, (TEXTS, 4), generator=generator)
    with torch.no_grad():
        while ids.shape[1] < TOKENS:
            logits = model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return tuple(row.numpy().astype(np.int32) for row in ids)


def engine_of(family: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved(family), dtype=torch.bfloat16).eval()


@functools.cache
def probe_of(family: str) -> Probe:
    return probed(Prober(ProbedTrainer(str(saved(family))), SETTINGS), texts(family))  # type: ignore[arg-type]


def probed(prober: Prober, prompts: Sequence[Int32Array] = ()) -> Probe:
    probe = prober.next(prompts)
    assert probe is not None
    return probe


def judged(engine: Any, probe: Probe) -> Finding:
    return judge(scored(engine, probe), probe, MARGIN)


@pytest.mark.parametrize("family", HEALTHY)
def test_a_healthy_engine_in_bfloat16_is_no_alarm(family: str) -> None:
    finding = judged(engine_of(family), probe_of(family))
    assert not finding.problem, finding
    assert finding.gap > 0, "expected the rounding of bfloat16"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_an_alarm(family: str, fault: str) -> None:
    engine = engine_of(family)
    if not plant(fault, engine):
        pytest.skip("the model has no such part")
    finding = judged(engine, probe_of(family))
    assert finding.gap > finding.limit, finding
    assert "expected the trainer's logprobs within" in finding.problem


@pytest.mark.parametrize("family", QUANTISED)
def test_fp8_is_an_alarm_but_not_where_the_run_asks_for_it(family: str) -> None:
    """Its noise is of FP8 layers then, so larger faults are found and smaller ones are not."""
    settings = loads("policy.model = 'x'\nrollout.vllm.quantization = 'fp8'", "test")
    of_run = probed(Prober(ProbedTrainer(str(saved(family))), settings), texts(family))  # type: ignore[arg-type]
    engine = in_fp8(engine_of(family))
    assert judged(engine, probe_of(family)).problem
    finding = judged(engine, of_run)
    assert not finding.problem, finding
    plant("one_layer", engine)
    assert judged(engine, of_run).problem


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 2])
def test_an_engine_that_lacks_the_last_step_is_an_alarm_and_one_that_has_it_is_not(family: str, rank: int) -> None:
    """``rank``: of LoRA, whose adapter is left out."""
    trainer = ProbedTrainer(str(saved(family)))
    prober = Prober(trainer, SETTINGS)  # type: ignore[arg-type]
    prober.prepare(groups_of(texts(family)))
    moved(trainer.policy.model, 0.02, rank=rank)
    probe = probed(prober)
    assert [ids.tolist() for ids, _ in probe.sequences()] == sorted((ids.tolist() for ids in texts(family)), key=len)
    stale, current = engine_of(family), engine_of(family)
    assert judged(stale, probe).missing == pytest.approx(1, abs=0.35)
    assert "of what the last step changed" in judged(stale, probe).problem
    moved(current, 0.02, rank=rank)
    assert not judged(current, probe).problem


def test_a_step_that_changes_less_than_rounding_does_cannot_be_told() -> None:
    trainer = ProbedTrainer(str(saved("llama")))
    prober = Prober(trainer, SETTINGS)  # type: ignore[arg-type]
    prober.prepare(groups_of(texts("llama")))
    moved(trainer.policy.model, 1e-5)
    finding = judged(engine_of("llama"), probed(prober))
    assert not finding.problem
    assert not finding.missing > 0


def test_a_fault_of_some_tokens_or_of_one_engine_shows_in_its_part() -> None:
    ids = np.zeros(8 * 600, np.int32)
    noise = np.full(8 * 599, 0.01, np.float32)
    probe = Probe(ids, np.full(8, 600, np.int32), np.full(8 * 599, -1.0, np.float32), noise=noise)
    rows = [np.full(599, -1.01, np.float32) for _ in range(8)]
    assert judge(rows, probe, 3.0).problem == ""
    rows[3][480:] = -1.2  # beyond a window
    assert "one 2.7 times beyond its limit" in judge(rows, probe, 3.0).problem
    rows[3][400:] = np.nan
    assert "found a gap of inf" in judge(rows, probe, 3.0).problem


def test_a_gap_that_harms_nothing_is_no_alarm_however_small_the_noise() -> None:
    probe = Probe(
        np.zeros(5, np.int32), np.array([5], np.int32), np.full(4, -1.0, np.float32), np.full(4, 1e-7, np.float32)
    )
    assert judge([np.full(4, -1.001, np.float32)], probe, 3.0).problem == ""
    assert judge([np.full(4, -1.003, np.float32)], probe, 3.0).problem


def test_every_nth_publication_and_the_first_with_texts_carry_a_probe() -> None:
    prober = Prober(ProbedTrainer(str(saved("llama"))), loads("internal.probe_every_versions = 2", "test"))  # type: ignore[arg-type]
    assert prober.next() is None
    carried = []
    for _ in range(4):
        prober.prepare(groups_of(texts("llama")))
        carried.append(prober.next() is not None)
    assert carried == [True, False, True, False]


def test_a_replayed_step_leaves_its_texts_but_no_change() -> None:
    prober = Prober(ProbedTrainer(str(saved("llama"))), SETTINGS)  # type: ignore[arg-type]
    prober.prepare(groups_of(texts("llama")))
    prober.prepare(groups_of(texts("llama")), replays=True)
    probe = probed(prober)
    assert (len(probe.change), len(probe.noise)) == (0, len(probe.logprobs))


def test_texts_are_spread_over_lengths_and_the_longest_may_pass_a_window() -> None:
    texts = [np.zeros(length, np.int32) for length in (*range(10, 29), 300, 5000, 1)]
    assert [len(text) for text in probe.choose(texts, 2047)] == [10, 13, 16, 19, 21, 24, 27, 2047]
    assert [len(text) for text in probe.choose(texts[-4:], 20)] == [20, 20, 20]
    assert [len(text) for text in probe.choose(texts[-3:], 600)] == [256, 600]
    assert probe.choose([], 64) == []
    windowed = functools.partial(MistralConfig, max_position_embeddings=4096, vocab_size=1 << 20)
    assert probe.longest_tokens(windowed(sliding_window=1024)) == 1024 + 128
    assert probe.longest_tokens(windowed(sliding_window=1024), context_tokens=1000) == 64
    assert probe.longest_tokens(windowed(sliding_window=None)) == 64, "logits"
    assert probe.longest_tokens(MistralConfig(vocab_size=256, max_position_embeddings=64)) == 63


def test_rounding_leaves_the_model_as_it_was() -> None:
    trainer = ProbedTrainer(str(saved("gemma3_text")))
    batch_of = probe.lay_out(texts("gemma3_text"))
    plain = trainer.evaluate(batch_of).policy_logprobs_N
    with probe.rounded(trainer.policy.model, 2**-8, seed=1):
        noisy = trainer.evaluate(batch_of).policy_logprobs_N
    with probe.rounded(trainer.policy.model, 2**-8, seed=1):
        again = trainer.evaluate(batch_of).policy_logprobs_N
    assert not torch.equal(noisy, plain)
    assert torch.equal(noisy, again), "the same seed, the same rounding"
    assert torch.equal(trainer.evaluate(batch_of).policy_logprobs_N, plain)


def test_no_forward_pass_of_the_probe_has_more_tokens_than_a_micro_batch() -> None:
    trainer, passes = ProbedTrainer(str(saved("llama"))), []
    score = trainer.evaluate

    def evaluate(batch: Any) -> Any:
        passes.append(int(batch.input_ids_BT.size))
        return score(batch)

    trainer.evaluate = evaluate  # type: ignore[method-assign]
    whole = Prober(trainer, SETTINGS).next(texts("llama"))  # type: ignore[arg-type]
    at_once = passes.copy()
    passes.clear()
    small = loads("policy.model = 'x'\ntrainer.micro_batch_tokens = 80", "test")
    parts = Prober(trainer, small).next(texts("llama"))  # type: ignore[arg-type]
    assert whole is not None
    assert parts is not None
    assert at_once == [TEXTS * (TOKENS - 1)] * 2  # the last token has no next one
    assert passes == [TOKENS - 1] * TEXTS * 2
    np.testing.assert_allclose(parts.logprobs, whole.logprobs, atol=1e-5)  # other shapes of the same float32 products
