"""Laws of the addresses that processes listen on."""

import os
import socket
from datetime import timedelta

import psutil
import pytest

from penstock.shared.errors import SettingsError
from penstock.shared.peers.addresses import listen, rendezvous_address, use_interfaces
from penstock.shared.peers.tcp_store import connect_store, serve_store
from tests.conftest import PATIENCE_S
from tests.support.listeners import listeners

OTHER = "192.0.2.77"
"""A documentation address."""


@pytest.mark.parametrize(
    ("host", "own", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.1", "127.0.0.2"),
        ("[::1]", "::1", "::1"),
        (OTHER, "127.0.0.1", "127.0.0.1"),  # behind a Service
        ("no-such-name.invalid", "127.0.0.1", "127.0.0.1"),
        ("localhost", OTHER, OTHER),  # others cannot mean this machine's loopback
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_first_host_listens_where_the_others_connect_and_never_everywhere(
    host: str, own: str, expected: str
) -> None:
    assert rendezvous_address(host, own) == expected


def addresses(name: str) -> set[str]:
    return {entry.address for entry in psutil.net_if_addrs()[name]}


@pytest.mark.parametrize("spans", [False, True])
def test_on_loopback_gloo_and_nccl_stay_there(spans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_interfaces("127.0.0.2", spans_hosts=spans)
    assert "127.0.0.1" in addresses(os.environ["GLOO_SOCKET_IFNAME"])
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={os.environ['GLOO_SOCKET_IFNAME']}"


def outer_interface() -> tuple[str, str]:
    """Return an interface besides loopback, and its address."""
    outer = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family is socket.AF_INET and not entry.address.startswith("127.")
    ]
    if not outer:
        pytest.skip("needs an interface besides loopback")
    return outer[0]


@pytest.mark.parametrize("spans", [False, True])
def test_gloo_leaves_loopback_only_for_ranks_on_other_hosts(spans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    interface, address = outer_interface()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_interfaces(address, spans_hosts=spans)
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface}"
    assert (os.environ["GLOO_SOCKET_IFNAME"] == interface) == spans


def test_what_the_environment_says_of_interfaces_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interfaces("127.0.0.1", spans_hosts=True)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "ib0")


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
@pytest.mark.parametrize("wrong", ["eth77", "lo"])
def test_an_interface_that_other_hosts_cannot_reach_is_refused_by_name(
    variable: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = outer_interface()[1]
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, wrong)
    with pytest.raises(SettingsError, match=rf"expected {variable} to name an interface .* found '{wrong}': change it"):
        use_interfaces(address, spans_hosts=True)
    use_interfaces(address, spans_hosts=False)


def test_an_address_of_another_machine_is_refused_where_hosts_train_together() -> None:
    with pytest.raises(SettingsError, match=rf"found {OTHER}, which none of its interfaces has .*: change run\.host"):
        use_interfaces(OTHER, spans_hosts=True)


def test_a_store_listens_on_its_address_alone() -> None:
    patience = timedelta(seconds=PATIENCE_S)
    before = listeners(os.getpid())
    store = serve_store("127.0.0.2", 0, "trainer.rendezvous", patience)
    connect_store("127.0.0.2", store.port, patience).set("key", "value")
    assert store.get("key") == b"value"
    assert {listener.address for listener in listeners(os.getpid()) - before} == {"127.0.0.2"}


def test_a_port_that_is_taken_is_said_with_its_setting() -> None:
    with (
        listen("127.0.0.1", 0, "coordinator.port") as taken,
        pytest.raises(SettingsError, match=r"could not listen on 127\.0\.0\.1:\d+ .*: change coordinator\.port"),
    ):
        listen("127.0.0.1", taken.getsockname()[1], "coordinator.port")
