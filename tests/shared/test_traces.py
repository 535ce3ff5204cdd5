"""Traces of groups, with a real OTLP receiver on loopback."""

import contextlib
import http.server
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.shared import traces
from penstock.shared.errors import SettingsError
from penstock.shared.traces import SPANS, Traces
from tests.conftest import PATIENCE_S, until
from tests.support import forge
from tests.support.http_server import served

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
STEPS, GROUPS, SIZE = 6, 4, 2


class Receiver(http.server.BaseHTTPRequestHandler):
    received: ClassVar[list[tuple[str, Any]]] = []
    """(service, span)"""

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for of_resource in request.resource_spans:
            resource = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.received.extend((resource["service.name"], span) for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
async def test_every_trained_group_of_a_run_has_its_five_spans_in_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Receiver.received.clear()
    with served(Receiver) as url:
        monkeypatch.setenv(ENDPOINT, url)
        words = ["config/arithmetic.toml", f"--run.folder={tmp_path}", f"--run.steps={STEPS}"]
        words += [
            f"--sampling.group_size={SIZE}",
            f"--algorithm.groups_per_step={GROUPS}",
            "--evaluation.every_steps=100000",
        ]
        await forge.up([*words, f"--evaluation.path={forge.FEW_PROBLEMS}"], tmp_path / "up.txt")
    by_trace: dict[bytes, list[tuple[str, Any]]] = defaultdict(list)
    for service, span in Receiver.received:
        by_trace[span.trace_id].append((service, span))
    trained = [spans for spans in by_trace.values() if any(span.name == "trained" for _, span in spans)]
    assert len(trained) == STEPS * GROUPS
    for spans in trained:
        assert {(service.removeprefix("penstock-"), span.name) for service, span in spans} == {
            ("coordinator", "admitted"),
            ("rollout", "generated"),
            ("reward", "scored"),
            ("trainer", "trained"),
            ("coordinator", "live"),
        }
        (root,) = [span for _, span in spans if span.name == "admitted"]
        assert {span.parent_span_id for _, span in spans} == {b"", root.span_id}
        assert root.parent_span_id == b""
        assert len({span.span_id for _, span in spans}) == len(spans)
        assert len({pair.value.int_value for _, span in spans for pair in span.attributes if pair.key == "group"}) == 1
        assert all(root.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans)


def _fail(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(400)
    handler.send_header("Content-Length", "3")
    handler.end_headers()
    handler.wfile.write(b"\xff\x00{")


def _redirect(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(307)
    handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
    handler.end_headers()


def _lost() -> float:
    return float(SPANS.labels("lost")._value.get())


@pytest.mark.parametrize("answer", [_fail, _redirect])
async def test_what_the_collector_does_not_take_is_counted(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    class Refusing(Receiver):
        def do_POST(self) -> None:
            answer(self)

    with served(Refusing) as url:
        sending = _started(monkeypatch, url)
        before = _lost()
        sending.add("scored", 1, 1.0, 2.0)
        await until(lambda: _lost() == before + 1)
        sending.stop()


async def test_the_body_of_an_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written, ended = [0], threading.Event()

    class Endless(Receiver):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            with contextlib.suppress(OSError):
                while written[0] < 1 << 30:
                    self.wfile.write(bytes(1 << 20))
                    written[0] += 1 << 20
            ended.set()

    with served(Endless) as url:
        sending = _started(monkeypatch, url)
        sending.add("scored", 1, 1.0, 2.0)
        await until(ended.is_set)
        sending.stop()
    assert written[0] < 1 << 28, "only what the sockets' buffers hold"


async def test_a_collector_that_hangs_stalls_nobody_and_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, asked = threading.Event(), threading.Event()

    class Hanging(Receiver):
        def do_POST(self) -> None:
            asked.set()
            ended.wait(PATIENCE_S)

    with served(Hanging) as url:
        sending = _started(monkeypatch, url)
        sending.add("scored", 0, 1.0, 2.0)
        await until(asked.is_set)
        before = _lost()
        for group in range(1, 3 * traces._MOST_WAITING):
            sending.add("scored", group, 1.0, 2.0)
        assert _lost() - before == 2 * traces._MOST_WAITING
        sending.stop()
        ended.set()


def _started(monkeypatch: pytest.MonkeyPatch, url: str) -> Traces:
    monkeypatch.setenv(ENDPOINT, url)
    sending = Traces()
    sending.start("test", "reward", "reward-0")
    return sending


def test_all_processes_trace_the_same_share_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    both = [_started(monkeypatch, "http://127.0.0.1:1") for _ in range(2)]
    taken, others = ([group for group in range(4000) if sending.takes(group)] for sending in both)
    assert taken == others
    assert 800 < len(taken) < 1200
    for sending in both:
        sending.stop()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("OTEL_TRACES_SAMPLER_ARG", "half", "expected a share of traced groups from 0 to 1, found 'half'"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan", "expected a share"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "expected http/protobuf for traces, found 'grpc'"),
    ],
)
def test_what_cannot_be_done_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=sentence):
        _started(monkeypatch, "http://127.0.0.1:1")


def test_nothing_is_sent_unless_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    silent = Traces()
    silent.start("test", "reward", "reward-0")
    assert not silent.takes(1)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not _started(monkeypatch, "http://127.0.0.1:1").takes(1)
