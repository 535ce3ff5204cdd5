"""Choose each request's engine: the least loaded, or the one that has read the prompt."""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from penstock.shared.bus.messages import Int32Array

_PROMPTS = 4096


class Router:
    """Counts outstanding samples per engine; an engine that has read the prompt may have ``slack`` more than others."""

    def __init__(self, engines: int, slack: int = 0) -> None:
        self._slack = slack
        self.outstanding = [0] * engines
        self._engine_of: OrderedDict[bytes, int] = OrderedDict()

    @contextlib.contextmanager
    def turn(self, prompt_token_ids: Int32Array, samples: int) -> Iterator[int]:
        """Yield the engine for a group, whose ``samples`` count as outstanding meanwhile."""
        engine = self._choose(hashlib.blake2b(prompt_token_ids.tobytes(), digest_size=16).digest(), samples)
        self.outstanding[engine] += samples
        try:
            yield engine
        finally:
            self.outstanding[engine] -= samples

    def forget_prompts(self) -> None:
        """Forget prompts, as new weights do not reuse the prefix cache."""
        self._engine_of.clear()

    def _choose(self, prompt: bytes, samples: int) -> int:
        least = min(self.outstanding)
        engine = self._engine_of.pop(prompt, None)
        if engine is None or self.outstanding[engine] > least + max(samples, self._slack):
            engine = self.outstanding.index(least)
        self._engine_of[prompt] = engine
        if len(self._engine_of) > _PROMPTS:
            self._engine_of.popitem(last=False)
        return engine
