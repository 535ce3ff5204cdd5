"""The embedded engine records the experts that a plain forward pass of each sequence chooses."""

from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.rollout.engines.engine import GeneratedSample, GenerationRequest
from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens
from penstock.services.rollout.engines.transformers.routes import RouteRecorder
from penstock.shared.bus.messages import PolicyVersion, Sampling
from penstock.shared.errors import SettingsError
from penstock.shared.model.routes import mixtures_of
from tests.support import tiny
from tests.support.expert_ranks import family

PROMPTS = ((3, 4, 5, 6, 7), (9,), (11, 12, 13))
STOP = tuple(range(0, 48, 5))


def requests(samples: int = 4, tokens: int = 12) -> list[GenerationRequest]:
    sampling = Sampling(samples=samples, max_new_tokens=tokens, temperature=1.0)
    return [GenerationRequest(np.array(ids, np.int32), sampling, seed) for seed, ids in enumerate(PROMPTS)]


@torch.inference_mode()
def decoded(model: Any, *, stop: tuple[int, ...] = STOP, interrupt: Any = None) -> list[tuple[GeneratedSample, ...]]:
    decoding = Batch(model, requests(), Tokens(stop), torch.device("cpu"), RouteRecorder(model))
    finished: dict[int, tuple[GeneratedSample, ...]] = {}
    steps = 0
    while not decoding.finished:
        if interrupt is not None and steps == 4:
            interrupt(decoding)
        finished.update(decoding.step(PolicyVersion(int(steps >= 4))))
        steps += 1
    return [finished[place] for place in range(len(PROMPTS))]


@torch.inference_mode()
def chosen(model: Any, ids: list[int]) -> np.ndarray:
    """The experts of each token in one pass, in ascending order (tokens × mixtures × experts per token)."""
    seen: list[torch.Tensor] = []
    mixtures = mixtures_of(model).values()
    hooks = [each.register_forward_pre_hook(lambda _, given: seen.append(given[1].clone())) for each in mixtures]
    model(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(seen, 1).numpy())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_recorded_experts_are_those_of_a_plain_pass_whatever_the_batch(name: str) -> None:
    model, lengths = family(name).eval(), set()
    layers = [
        place
        for place, layer in enumerate(model.model.layers)
        if hasattr(getattr(layer.mlp, "experts", None), "num_experts")
    ]
    for prompt, samples in zip(PROMPTS, decoded(model), strict=True):
        for sample in samples:
            lengths.add(len(sample.token_ids))
            assert sample.routes is not None
            assert sample.routes.dtype == np.uint8
            assert sample.routes.shape[:2] == (len(prompt) + len(sample.token_ids) - 1, len(model.model.layers))
            expected = chosen(model, [*prompt, *sample.token_ids.tolist()][:-1])
            assert np.array_equal(np.sort(sample.routes[:, layers]), expected)
    assert len(lengths) >= 4, "rows end at all lengths, and the batch is compacted"


def test_a_dropped_cache_changes_no_recorded_expert() -> None:
    whole, dropped = decoded(family("mixtral")), decoded(family("mixtral"), interrupt=Batch.drop_cache)
    for group, other in zip(whole, dropped, strict=True):
        for sample, again in zip(group, other, strict=True):
            assert sample.routes is not None
            assert again.routes is not None
            assert np.array_equal(np.sort(sample.routes), np.sort(again.routes))


def test_experts_are_those_of_the_version_that_read_the_token() -> None:
    model, new = family("mixtral"), family("mixtral")
    with torch.no_grad():
        for router in (layer.mlp.gate for layer in new.model.layers):
            router.weight.neg_()

    def swap(_: Batch) -> None:
        model.load_state_dict(new.state_dict())

    for prompt, samples in zip(PROMPTS, decoded(model, stop=(99,), interrupt=swap), strict=True):
        for sample in samples:
            ids, read = [*prompt, *sample.token_ids.tolist()][:-1], len(prompt) + 3
            assert sample.routes is not None
            assert sample.version_spans.tolist() == [[0, 0], [4, 1]]
            assert np.array_equal(np.sort(sample.routes[:read]), chosen(family("mixtral"), ids)[:read])
            # later tokens read a cache of two versions; the first layer's router sees no cache but through attention
            assert not np.array_equal(np.sort(sample.routes[read:]), chosen(family("mixtral"), ids)[read:])


def test_models_without_mixtures_have_nothing_to_record() -> None:
    with pytest.raises(SettingsError, match=r"expected a mixture of experts with trainer.router_replay, found 'qwen2'"):
        RouteRecorder(tiny.model())
