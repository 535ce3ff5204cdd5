"""Settings of earlier versions, which no longer exist."""

from typing import Any

REPLACED = {
    "weights.probe_gap_nats": (
        0.05,
        "weights.probe_margin, a multiple of what rounding changes in the model's own logprobs",
    )
}
"""Each with its default, and what takes its place."""


def drop_defaults(values: dict[str, Any]) -> None:
    """Remove those with their default, which the settings file of an earlier run holds without anybody's choice.

    >>> values = {"weights": {"probe_gap_nats": 0.05, "keep": 4}}
    >>> drop_defaults(values)
    >>> values
    {'weights': {'keep': 4}}
    """
    for key, (default, _) in REPLACED.items():
        name, _, setting = key.partition(".")
        table = values.get(name)
        if isinstance(table, dict) and table.get(setting) == default:
            del table[setting]
