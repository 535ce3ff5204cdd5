"""What a replica generates: its metrics, and rates of the recent seconds."""

from collections import deque
from collections.abc import Sequence

from prometheus_client import Counter, Histogram

from penstock.services.rollout.engines.engine import Engine, GeneratedGroup
from penstock.shared.bus.messages import FinishReason, Purpose

GENERATED_TOKENS = Counter("penstock_rollout_generated_tokens_total", "Tokens generated, by purpose.", ["purpose"])
GENERATED_SAMPLES = Counter(
    "penstock_rollout_generated_samples_total", "Completions, or turns of episodes, generated, by purpose.", ["purpose"]
)
DRAWN_TOKENS = Counter(
    "penstock_rollout_drawn_tokens_total",
    "Tokens drawn, for any purpose, as of the newest report: also of unfinished samples.",
)
TRUNCATED_SAMPLES = Counter(
    "penstock_rollout_truncated_samples_total", "Completions cut at their length limit, by purpose.", ["purpose"]
)
GENERATE = Histogram(
    "penstock_rollout_generate_seconds",
    "Seconds that the engine spent on an entry, a sample in training, without waiting for its turn.",
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)

RATE_WINDOW_S = 10.0


class Throughput:
    """Counts what ``engine`` generates."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._samples = self._tokens = self._counted = 0
        self._reports: deque[tuple[float, int, int]] = deque()
        """Seconds, samples and tokens until then."""

    def count(self, purpose: Purpose, generated: Sequence[GeneratedGroup]) -> None:
        samples = [sample for each in generated for sample in each.samples]
        truncated = sum(sample.finish_reason is FinishReason.LENGTH for sample in samples)
        GENERATED_TOKENS.labels(purpose.value).inc(sum(len(sample.token_ids) for sample in samples))
        GENERATED_SAMPLES.labels(purpose.value).inc(len(samples))
        TRUNCATED_SAMPLES.labels(purpose.value).inc(truncated)
        for each in generated:
            GENERATE.observe(each.finished_at_s - each.started_at_s)
        self._samples += len(samples)

    def per_second(self, now_s: float) -> tuple[float, float]:
        """Return finished samples and drawn tokens per second, over about ``RATE_WINDOW_S`` monotonic seconds."""
        counted, self._counted = self._counted, self._engine.drawn_tokens
        drawn = max(0, self._counted - counted)  # vLLM's count is that of its process: a new engine may begin again
        DRAWN_TOKENS.inc(drawn)
        self._tokens += drawn
        self._reports.append((now_s, self._samples, self._tokens))
        while len(self._reports) > 2 and self._reports[1][0] <= now_s - RATE_WINDOW_S:
            self._reports.popleft()
        then_s, samples_then, tokens_then = self._reports[0]
        window_s = max(1e-3, now_s - then_s)
        return (self._samples - samples_then) / window_s, (self._tokens - tokens_then) / window_s
