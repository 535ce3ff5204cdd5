"""Laws of a process's HTTP endpoints: allowed hosts and limits."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.shared.process.endpoints import MAX_CONNECTIONS, Endpoints, admits
from tests.conftest import PATIENCE_S, until


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    endpoints = Endpoints("127.0.0.1", 0, "run.metrics_port", lambda: {"ready": True})
    host, _, port = endpoints.address.rpartition(":")
    yield host, int(port)
    endpoints.close()


def ask(address: tuple[str, int], path: str, *hosts: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    connection.putrequest("GET", path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9400", "10.1.2.3:9400", "[fd00::7]:9400", "localhost", socket.gethostname()]
)
def test_metrics_are_plain_prometheus_text_for_who_names_an_address_or_this_machine(
    address: tuple[str, int], host: str
) -> None:
    status, text = ask(address, "/metrics", host)
    assert status == 200
    assert "penstock_build_info" in {family.name for family in text_string_to_metric_families(text)}


@pytest.mark.parametrize(
    "hosts", [("evil.example:9400",), ("127.0.0.1.evil.example",), ("127.0.0.1", "evil.example"), ("",)]
)
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_a_page_of_another_name_reads_nothing(address: tuple[str, int], path: str, hosts: tuple[str, ...]) -> None:
    status, text = ask(address, path, *hosts)
    assert status == 421
    assert json.loads(text)["status"].endswith("set run.host to serve another name")
    assert "penstock" not in text


def test_probes_by_http_1_0_name_no_host_and_read_no_metrics(address: tuple[str, int]) -> None:
    assert [ask(address, path)[0] for path in ("/healthz", "/readyz", "/metrics")] == [200, 200, 421]


def test_the_name_that_others_reach_this_machine_by_is_answered() -> None:
    assert admits(["trainer.cluster.example:9400"], frozenset({"trainer.cluster.example"}))


def test_names_of_a_private_network_are_answered_where_others_reach_the_port() -> None:
    endpoints = Endpoints("0.0.0.0", 0, "run.metrics_port", lambda: {"ready": True})
    try:
        address = ("127.0.0.1", int(endpoints.address.rpartition(":")[2]))
        names = ["trainer:9400", "trainer.runs.svc", "Trainer.runs.svc.cluster.local:9400", "gpu-7.internal"]
        assert [ask(address, "/healthz", name)[0] for name in names] == [200, 200, 200, 200]
        strangers = ["evil.example:9400", "svc.evil.example", "local.", "trainer.svc.evil.example"]
        assert [ask(address, "/healthz", name)[0] for name in strangers] == [421, 421, 421, 421]
    finally:
        endpoints.close()


@pytest.mark.parametrize("name", ["trainer:9400", "trainer.runs.svc", "gpu-7.local"])
def test_on_loopback_no_name_of_a_network_is_answered(address: tuple[str, int], name: str) -> None:
    assert ask(address, "/healthz", name)[0] == 421


def requests() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "process_request_thread" in thread.name}


async def test_six_hundred_idle_connections_keep_nobody_out_and_hold_few_threads(address: tuple[str, int]) -> None:
    others = requests()
    with contextlib.ExitStack() as idle:
        for _ in range(600):
            idle.enter_context(socket.create_connection(address, PATIENCE_S))
        assert ask(address, "/healthz", "127.0.0.1")[0] == 200
        await until(lambda: len(requests() - others) <= MAX_CONNECTIONS)
    await until(lambda: not requests() - others)


def test_a_connection_that_says_nothing_is_closed(address: tuple[str, int]) -> None:
    with socket.create_connection(address, PATIENCE_S) as silent, socket.create_connection(address, PATIENCE_S) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127")
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""


@pytest.mark.parametrize(
    "said", [b"\xff\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000 + b"\r\n\r\n"]
)
def test_nonsense_is_answered_or_cut_off_and_the_next_request_answered(
    address: tuple[str, int], said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(address, PATIENCE_S) as peer, contextlib.suppress(ConnectionResetError):
        peer.sendall(said)
        while peer.recv(4096):
            pass
    assert ask(address, "/healthz", "localhost") == (200, '{"status": "ok"}')
    assert capfd.readouterr().err == ""
