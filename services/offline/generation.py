"""Generate with a policy on this thread, by the decoding of the transformers engine."""

import time
from collections.abc import Iterator, Sequence

from penstock.services.rollout.engines.engine import GeneratedSample, GenerationRequest, with_texts
from penstock.services.rollout.engines.stop_texts import StopTexts
from penstock.services.rollout.episode_turns import drawn_of, generation_of
from penstock.services.rollout.service import seed_of
from penstock.shared.bus.messages import PolicyVersion, Prompt, RolloutGroup, Sampling
from penstock.shared.errors import SettingsError
from penstock.shared.extras import advice_on
from penstock.shared.model.tokenizer import TokenizerCodec
from penstock.shared.peers.turns import DrawnTurn, TurnRequest
from penstock.shared.settings import Settings

ROWS = 256
"""Completions decoded at a time."""


class LocalPolicy:
    """A model and its tokenizer.

    Raises:
        SettingsError: the model cannot be loaded, or a dependency is not installed.
    """

    def __init__(self, settings: Settings, version: int = 0) -> None:
        try:
            from penstock.services.rollout.engines.transformers.loading import open_model
            from penstock.shared.model.tokenizer import check_stop_texts, open_tokenizer
        except ImportError as error:
            raise SettingsError(f"generation needs more packages: {error}: {advice_on(error)}") from error
        self._settings, self.version = settings, PolicyVersion(version)
        self.tokenizer = tokenizer = open_tokenizer(settings.policy)
        check_stop_texts(tokenizer, settings.sampling, settings.reward.markers)
        self._opened = open_model(settings.policy, tokenizer, settings.run.device, settings.rollout.max_model_len)
        self._codec = TokenizerCodec(tokenizer, self._opened, settings.data.chat_template, settings.reward)

    def check(self, prompt: Prompt) -> None:
        """Raise PermanentError if ``prompt`` cannot be generated."""
        self._codec.encode(prompt)

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[RolloutGroup]:
        """Yield the prompts' groups, in their order. Raises PermanentError: a prompt cannot be generated."""
        batch: list[Prompt] = []
        for prompt in prompts:
            if batch and sum(each.sampling.samples for each in (*batch, prompt)) > ROWS:
                yield from self._decode(batch)
                batch = []
            batch.append(prompt)
        if batch:
            yield from self._decode(batch)

    def _decode(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        started_at_s, seed = time.time(), self._settings.run.seed
        requests = [
            GenerationRequest(
                self._codec.encode(prompt), prompt.sampling, seed_of(seed, prompt), self._stop(prompt.sampling)
            )
            for prompt in prompts
        ]
        samples = self._generated(requests)
        return [
            self._group(prompt, request, samples[place], started_at_s)
            for place, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
        ]

    def turns(self, requests: Sequence[TurnRequest]) -> list[DrawnTurn]:
        """Draw turns of episodes, together."""
        asked = [generation_of(request, self._settings.run.seed, self._codec) for request in requests]
        samples = self._generated(asked)
        return [drawn_of(samples[place][0]) for place in range(len(asked))]

    def _generated(self, requests: Sequence[GenerationRequest]) -> dict[int, tuple[GeneratedSample, ...]]:
        import torch

        from penstock.services.rollout.engines.transformers.decoding import Batch, Tokens

        samples: dict[int, tuple[GeneratedSample, ...]] = {}
        with torch.inference_mode():
            batch = Batch(self._opened.model, requests, Tokens(self._opened.stop), self._opened.device)
            while not batch.finished:
                samples |= batch.step(self.version)
        return samples

    def _stop(self, sampling: Sampling) -> StopTexts | None:
        return StopTexts(self._codec.decode, sampling.stop, sampling.min_new_tokens) if sampling.stop else None

    def _group(
        self, prompt: Prompt, request: GenerationRequest, generated: Sequence[GeneratedSample], started_at_s: float
    ) -> RolloutGroup:
        texts = self._codec.texts(request.prompt_token_ids, [sample.token_ids for sample in generated])
        samples = with_texts(generated, texts, supports=False)
        return RolloutGroup(prompt, request.prompt_token_ids, samples, "local", started_at_s, time.time())
