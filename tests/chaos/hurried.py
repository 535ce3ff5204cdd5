"""The shipped alert rules with shorter minutes. Only durations change: ``for``, ranges, subquery steps, offsets, and
``THRESHOLDS_S``.
"""

import re
from collections.abc import Mapping
from typing import Any

THRESHOLDS_S = {"PenstockCheckpointNotStored": 1800}
"""Alerts that compare with seconds."""
_MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0, "d": 1440.0}
_PARTS = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")|\[(?P<range>\w+)(?::(?P<step>\w+))?\]|\boffset\s+(?P<offset>\w+)'
)  # a label's value may look like anything


def hurried(rules: dict[str, Any], minute_s: float, times: Mapping[str, float]) -> dict[str, Any]:
    """Return rules with minutes of ``minute_s`` seconds; ``times``: factor by alert or record name, without its ``for``."""

    def shorter(rule: dict[str, Any]) -> dict[str, Any]:
        name = rule.get("alert") or rule["record"]
        waits = {"for": duration(rule["for"], minute_s)} if "for" in rule else {}
        return {**rule, "expr": _expression(name, rule["expr"], minute_s * times.get(name, 1)), **waits}

    return {"groups": [{**group, "rules": [shorter(rule) for rule in group["rules"]]} for group in rules["groups"]]}


def _expression(name: str, text: str, minute_s: float) -> str:
    if name in THRESHOLDS_S:
        text, replaced = re.subn(rf"> {THRESHOLDS_S[name]}$", f"> {THRESHOLDS_S[name] / 60 * minute_s:g}", text)
        assert replaced == 1, f"expected {name} to end with > {THRESHOLDS_S[name]}: see THRESHOLDS_S"
    return expression(text, minute_s)


def expression(text: str, minute_s: float) -> str:
    """Return a PromQL expression whose minutes last ``minute_s`` seconds.

    >>> expression('rate(x{a="[5m]"}[5m] offset 1h)', 1.0)
    'rate(x{a="[5m]"}[5000ms] offset 60000ms)'
    """

    def shorter(match: re.Match[str]) -> str:
        if match["text"]:
            return match["text"]
        if match["offset"]:
            return f"offset {duration(match['offset'], minute_s)}"
        step = f":{duration(match['step'], minute_s)}" if match["step"] else ""
        return f"[{duration(match['range'], minute_s)}{step}]"

    return _PARTS.sub(shorter, text)


def duration(text: str, minute_s: float) -> str:
    """Return a Prometheus duration (one number, one unit) whose minutes last ``minute_s`` seconds.

    Raises:
        ValueError: another form.

    >>> duration("30s", 0.5)
    '250ms'
    """
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise ValueError(f"expected a duration such as 15m, found {text!r}")
    return f"{round(int(match[1]) * _MINUTES[match[2]] * minute_s * 1000)}ms"
