"""Addresses and network interfaces of this machine."""

import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil

from penstock.shared.errors import SettingsError

_ANY = ("", "0.0.0.0", "::")  # noqa: S104 - named to tell them apart, not bound here


def listen(host: str, port: int, setting: str) -> socket.socket:
    """Return a socket listening on ``host``:``port`` (0: any free one); raises SettingsError, naming ``setting``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"could not listen on {host}:{port} ({error}): change {setting}, or set run.host to an address of this machine"
        ) from error
    return listener


def reachable(host: str) -> str:
    """Return the name of a listener on ``host`` for others: this host's own for "any"."""
    return socket.gethostname() if host in _ANY else host


def rendezvous_address(host: str, own: str) -> str:
    """Return the listening address for other hosts that connect to ``host``.

    It is ``own`` if ``host`` is not local (e.g. a Service), or locally resolves to loopback, as Debian's own name does.
    """
    try:
        resolved = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except OSError:
        return own
    addresses = sorted(address for address in resolved if _is_own(address))
    if not is_loopback(own):
        addresses = [address for address in addresses if not is_loopback(address)]
    return addresses[0] if addresses else own


def use_interfaces(own: str, *, spans_hosts: bool) -> None:
    """Bind gloo and NCCL to the interface of ``own``, unless the environment sets it.

    ``spans_hosts`` is whether gloo groups do; otherwise gloo uses loopback.

    Raises:
        SettingsError: other hosts cannot reach this one there.
    """
    loopback = _interface_of("127.0.0.1")
    interface = loopback if is_loopback(own) else _interface_of(own)
    if spans_hosts and not is_loopback(own):
        _check_interfaces(own, interface, loopback)
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    gloo = interface if spans_hosts else loopback
    if gloo:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", gloo)


def _check_interfaces(own: str, interface: str, loopback: str) -> None:
    others = sorted(name for name in psutil.net_if_addrs() if name != loopback)
    if not interface:
        raise SettingsError(
            f"expected run.host to be an address of this machine, at which the other hosts reach it, found {own}, which none of its "
            f"interfaces has ({', '.join(others)}): change run.host"
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        named = [name for name in os.environ.get(variable, "").split(",") if name]
        if named and not named[0].startswith("^") and not any(_names(name, others) for name in named):
            raise SettingsError(
                f"expected {variable} to name an interface by which the other hosts reach this one ({', '.join(others)}), found "
                f"{','.join(named)!r}: change it, or unset it to use that of run.host, {interface}"
            )


def _names(name: str, interfaces: Sequence[str]) -> bool:
    """Whether ``name`` is one of ``interfaces``, or of NCCL's ``=name`` and prefixes."""
    return name.removeprefix("=") in interfaces or any(each.startswith(name) for each in interfaces)


def _interface_of(host: str) -> str:
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if addresses & {entry.address for entry in entries}), "")


def _is_own(address: str) -> bool:
    if address in _ANY:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
