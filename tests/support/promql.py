"""Parse PromQL expressions and fill in Grafana's variables."""

import re
from collections import Counter

import promql_parser

VARIABLES = {"$__rate_interval": "20s", "$__interval": "20s", "$namespace": ".*", "$run": ".+", "$replica": ".+"}


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def series(expression: str) -> Counter[str]:
    return Counter(
        re.sub(r" offset \w+$", "", node.prettify())
        for node in _nodes(expression)
        if isinstance(node, promql_parser.VectorSelector)
    )


def metrics(expression: str) -> set[str]:
    return {str(node.name) for node in _nodes(expression) if isinstance(node, promql_parser.VectorSelector)}


def metrics_now(expression: str) -> set[str]:
    """Return the names of metrics used as instant values."""
    over_time = Counter(
        str(node.vector_selector.name) for node in _nodes(expression) if isinstance(node, promql_parser.MatrixSelector)
    )
    every = Counter(str(node.name) for node in _nodes(expression) if isinstance(node, promql_parser.VectorSelector))
    return set(every - over_time)


def _nodes(expression: str) -> list[object]:
    collected: list[object] = []
    promql_parser.walk(promql_parser.parse(expression), lambda node: collected.append(node))
    return collected
