"""Traces of groups for an OpenTelemetry collector, if the environment names one (docs/operations.md, "Traces").

::

    admitted ─┬─ generated (each part that was handed over) ── scored ── trained ── live

All but the first are its children. Ids are digests of run, group and name, so no context travels with the messages.
Spans wait in a bounded queue for the exporter's thread; what the collector does not take is lost, and counted.
"""

import hashlib
import os
import threading
from typing import Any

from prometheus_client import Counter

from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_command

SPANS = Counter("penstock_trace_spans_total", "Spans of groups, by outcome: sent or lost.", ["outcome"])

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SHARE = "OTEL_TRACES_SAMPLER_ARG"
_MOST_WAITING, _BATCH = 8192, 512
_EVERY_S, _LEAVE_S = 1.0, 2.0
_ROOT = "admitted"


class Traces:
    """A process's spans; without a collector every call does nothing."""

    def __init__(self) -> None:
        self._sender: _Sender | None = None
        self._run, self._share = "", 1.0

    def start(self, run: str, service: str, replica: str) -> None:
        """Send spans if the environment names a collector. Raises SettingsError: it asks for what cannot be done."""
        endpoint = _first(_ENDPOINTS)
        if not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return
        if protocol := _first(_PROTOCOLS).replace("http/protobuf", ""):
            raise SettingsError(f"expected http/protobuf for traces, found {protocol!r}: change {_PROTOCOLS[1]}")
        self._run, self._share = run, _share(os.environ.get(_SHARE) or "1")
        try:
            self._sender = _Sender({"service.name": f"penstock-{service}", "service.instance.id": replica, "run": run})
        except ImportError as error:
            raise SettingsError(
                f"{_ENDPOINTS[1]} asks for traces, which need OpenTelemetry: {install_command('traces')}, or set "
                "OTEL_SDK_DISABLED=true"
            ) from error

    def takes(self, group: int) -> bool:
        """Whether the group is traced; all processes agree."""
        return self._sender is not None and _digest(16, self._run, group) % (1 << 64) < self._share * (1 << 64)

    def add(self, name: str, group: int, start_s: float, end_s: float, part: str = "", **notes: str | int) -> None:
        """Send a span of a group; ``part`` tells several of one name apart."""
        if self._sender is None or not self.takes(group):
            return
        trace, own = _digest(16, self._run, group), _digest(8, self._run, group, name, part)
        parent = None if name == _ROOT else _digest(8, self._run, group, _ROOT, "")
        self._sender.add(name, (trace, own, parent), (start_s, max(start_s, end_s)), {"group": int(group), **notes})

    def stop(self) -> None:
        """Send what waits, for two seconds at most."""
        sender, self._sender = self._sender, None
        if sender is not None:
            closing = threading.Thread(target=sender.processor.shutdown, daemon=True)  # it waits for a request
            closing.start()
            closing.join(_LEAVE_S)


TRACES = Traces()
"""Of this process."""


def _first(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _digest(length: int, *parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(map(str, parts)).encode()).digest()[:length], "big") or 1


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SettingsError(f"expected a share of traced groups from 0 to 1, found {text!r}: change {_SHARE}")
    return share


class _Sender:
    """OpenTelemetry's exporter. Raises ImportError: it is not installed."""

    def __init__(self, attributes: dict[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = OTLPSpanExporter(session=_session())
        self._resource = Resource.create(attributes)
        self._waiting, self._lock = 0, threading.Lock()
        self.processor = BatchSpanProcessor(self, 2 * _MOST_WAITING, _EVERY_S * 1000, _BATCH)

    def add(self, name: str, ids: tuple[int, int, int | None], times_s: tuple[float, float], notes: Any) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        with self._lock:
            if self._waiting >= _MOST_WAITING:
                SPANS.labels("lost").inc()
                return
            self._waiting += 1
        own, parent = (span and SpanContext(ids[0], span, False, TraceFlags(TraceFlags.SAMPLED)) for span in ids[1:])
        start_ns, end_ns = (int(time_s * 1e9) for time_s in times_s)
        self.processor.on_end(
            ReadableSpan(name, own, parent, self._resource, notes, start_time=start_ns, end_time=end_ns)
        )

    def export(self, spans: Any) -> Any:
        """Called by the processor's thread."""
        result = self._exporter.export(spans)
        SPANS.labels("sent" if result.name == "SUCCESS" else "lost").inc(len(spans))
        with self._lock:
            self._waiting -= len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _session() -> Any:
    """Return a session that reads no answer's body, which may have any size."""
    import requests

    def unread(answer: Any, **_: Any) -> Any:
        answer.close()
        bare = requests.Response()
        bare.status_code = answer.status_code if answer.status_code // 100 != 3 else 400  # a redirect is not followed
        return bare

    session = requests.Session()
    session.stream, session.hooks["response"] = True, [unread]
    return session
