"""Settings of earlier versions, which no longer exist."""

from collections.abc import Iterator, Sequence
from typing import Any

REPLACED: dict[str, tuple[object, str]] = {
    "algorithm.critic.clip": (0.2, "nothing: a value changes by at most 0.2 in a step"),
    "algorithm.critic.discount": (1.0, "algorithm.critic.decay; the discount is 1"),
    "algorithm.dual_clip": (0.0, "a third number in algorithm.clip"),
    "algorithm.kl.where": (
        "loss",
        'algorithm.kl.estimator: "k1" is subtracted from rewards, "k2" and "k3" are in the loss',
    ),
    "algorithm.kl.target": (0.0, "algorithm.kl.coefficient, which stays as it is"),
    "algorithm.wait_s": (600.0, "algorithm.on_stale: a step waits at most ten minutes"),
    "bus.payload_copies": (2, "nothing: two replicas keep each payload"),
    "coordinator.generate_token": (True, "nothing: `penstock up` makes a token, which its commands read"),
    "episodes.agent_url": ("", "episodes.agent, which also takes a URL"),
    "episodes.openenv": ("", "episodes.environment, which also takes a URL"),
    "episodes.verifiers": ("", "episodes.agent, which also takes an EnvServer's address"),
    "guards.kl_nats": (1.0, "kl in guards.limits"),
    "guards.reference_kl_nats": (0.0, "reference_kl in guards.limits"),
    "guards.entropy_nats": (0.0001, "entropy in guards.limits"),
    "guards.stale_share": (0.25, "lag in guards.limits"),
    "guards.throughput_share": (0.5, "throughput in guards.limits"),
    "guards.starving_share": (0.8, "starving in guards.limits"),
    "guards.unscored_groups": (16, "unscored in guards.limits"),
    "guards.stalled_s": (600.0, "stalled in guards.limits"),
    "reward.models.offload_after_s": (0.0, "nothing: models stay, or share the trainer's device by placement.mode"),
    "reward.scorers[format].characters": ((0, 0), "tokens"),
    "reward.scorers[format].weights": ({}, "several format scorers, weighed in reward.expression"),
    "reward.scorers[judge].on_unparsable": ("unavailable", "pattern and scale, with a verdict for every answer"),
    "reward.scorers[judge].requests_per_s": (0.0, "concurrency; the endpoint's Retry-After is obeyed"),
    "reward.scorers[judge].system": ("", "template"),
    "reward.scorers[python].memory_mib": (0, "resource.setrlimit in your function's module"),
    "reward.scorers[trl].memory_mib": (0, "resource.setrlimit in your functions' module"),
    "reward.scorers[verifiers].memory_mib": (0, "resource.setrlimit in your functions' module"),
    "reward.scorers[model].head": ("classifier", "nothing: the checkpoint tells"),
    "reward.scorers[model].max_tokens": (0, "max_position_embeddings in the model's config.json"),
    "reward.scorers[model].tokenizer": ("", "a folder of the model with this tokenizer's files"),
    "reward.scorers[model].normalise": ("none", "reward.expression"),
    "trainer.max_skipped_steps": (3, "nothing: after three skipped batches in a row the run pauses"),
    "weights.keep": (4, "nothing: the newest four snapshots are kept"),
    "weights.probe_gap_nats": (0.05, "probe in guards.limits, a multiple of what rounding changes in logprobs"),
    "weights.probe_margin": (3.0, "probe in guards.limits"),
}
"""Each with its default, and what takes its place. A scorer's has the kind for its place in the list."""
_SCORERS = "reward.scorers"


def replacement(key: str, kinds: Sequence[str]) -> str:
    """Return what takes the place of ``key``, in a scorer of one of ``kinds``; "" if it never existed.

    >>> replacement("algorithm.dual_clip", ())
    'a third number in algorithm.clip'
    """
    name = key.rpartition(".")[2]
    names = [f"{_SCORERS}[{kind}].{name}" for kind in kinds] if key.startswith(f"{_SCORERS}.") else [key]
    return next((REPLACED[each][1] for each in names if each in REPLACED), "")


def drop_defaults(values: dict[str, Any]) -> None:
    """Remove those with their default, which the settings file of an earlier run holds without anybody's choice.

    >>> values = {"weights": {"probe_gap_nats": 0.05, "kv": "keep"}}
    >>> drop_defaults(values)
    >>> values
    {'weights': {'kv': 'keep'}}
    """
    is_k1 = any(table.get("estimator") == "k1" for table in _tables(values, "algorithm.kl"))
    for key, (default, _) in REPLACED.items():
        if is_k1 and key == "algorithm.kl.where":  # whose default was refused with it
            continue
        path, _, name = key.rpartition(".")
        for table in _tables(values, path):
            given = table.get(name)
            if given == default or (isinstance(given, list) and isinstance(default, tuple) and tuple(given) == default):
                del table[name]


def _tables(values: Any, path: str) -> Iterator[dict[str, Any]]:
    """Yield the tables at ``path``, several if it is in a list."""
    for part in path.partition("[")[0].split("."):
        values = values.get(part) if isinstance(values, dict) else None
    kind = path.partition("[")[2].rstrip("]")
    tables = values if isinstance(values, list) else [values]
    yield from (table for table in tables if isinstance(table, dict) and (not kind or table.get("kind") == kind))
