"""Enforce rendered NetworkPolicies between network namespaces with nftables.

::

    node namespace       forwards between pods by the compiled policies; holds 169.254.20.10, as NodeLocal DNSCache does
      └── one namespace a pod, a veth pair each; a process listens on every port that is tried

A refused connection is rejected with a TCP reset, so no test waits for a timeout. Not simulated: UDP, kube-proxy, IPv6.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.support.chart import Json

NODE_DNS = "169.254.20.10"
_LISTEN = """
import selectors, socket, sys
chosen = selectors.DefaultSelector()
for word in sys.argv[1:]:
    host, _, port = word.rpartition(":")
    server = socket.create_server((host, int(port)), backlog=64)
    chosen.register(server, selectors.EVENT_READ)
print("listening", flush=True)
while True:
    for key, _ in chosen.select():
        key.fileobj.accept()[0].close()
"""
_CONNECT = """
import json, socket, sys
opened = []
for host, port in json.load(sys.stdin):
    try:
        socket.create_connection((host, port), 60).close()
        opened.append((host, port))
    except ConnectionRefusedError:
        pass
print(json.dumps(opened))
"""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A pod, or what stands for something outside of the release."""

    name: str
    labels: Mapping[str, str]
    namespace: str = "release"
    """Empty: no pod."""
    address: str = ""


class PolicyNetwork:
    """Namespaces of ``peers``; ``policies`` are those of the namespace `release`. Use as a context manager."""

    def __init__(self, peers: Sequence[Peer], policies: Sequence[Json], ports: Sequence[int]) -> None:
        self._prefix = f"penstock{os.getpid()}"
        self.peers = {
            peer.name: dataclasses.replace(peer, address=f"10.77.0.{number}") for number, peer in enumerate(peers, 1)
        }
        self._policies, self._ports = policies, ports
        self._listeners: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "PolicyNetwork":
        try:
            self._make_namespaces()
            self._in(self._node, ["nft", "-f", "-"], "\n".join(compiled(list(self.peers.values()), self._policies)))
            self._listen(self._node, NODE_DNS)
            for peer in self.peers.values():
                self._listen(self._of(peer), peer.address)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.kill()
            listener.wait()
            assert listener.stdout is not None
            listener.stdout.close()
        for name in [*map(self._of, self.peers.values()), self._node]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def opened(self, source: str) -> set[tuple[str, int]]:
        """Return to whom, and at which ports, ``source`` can connect."""
        names = {peer.address: peer.name for peer in self.peers.values()} | {NODE_DNS: "node-dns"}
        del names[self.peers[source].address]
        targets = list(itertools.product(names, self._ports))
        answer = self._in(self._of(self.peers[source]), [sys.executable, "-c", _CONNECT], json.dumps(targets))
        return {(names[host], port) for host, port in json.loads(answer)}

    @property
    def _node(self) -> str:
        return f"{self._prefix}-node"

    def _of(self, peer: Peer) -> str:
        return f"{self._prefix}-{peer.name}"

    def _make_namespaces(self) -> None:
        made = subprocess.run(["ip", "netns", "add", self._node], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"this system lets nobody make a network namespace: {made.stderr.strip()}")
        self._in(self._node, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        self._in(self._node, ["ip", "link", "set", "lo", "up"])
        self._in(self._node, ["ip", "address", "add", f"{NODE_DNS}/32", "dev", "lo"])
        for number, peer in enumerate(self.peers.values(), 1):
            own, here = self._of(peer), f"veth{number}"
            subprocess.run(["ip", "netns", "add", own], check=True)
            self._in(self._node, ["ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", own])
            self._in(self._node, ["ip", "link", "set", here, "up"])
            self._in(self._node, ["ip", "route", "add", f"{peer.address}/32", "dev", here])
            self._in(self._node, ["ip", "link", "set", here, "address", f"02:00:00:00:00:{number:02x}"])
            self._in(own, ["ip", "address", "add", f"{peer.address}/32", "dev", "eth0"])
            self._in(own, ["ip", "link", "set", "eth0", "up"])
            self._in(own, ["ip", "route", "add", "169.254.1.1", "dev", "eth0"])
            gateway = ["ip", "neighbour", "add", "169.254.1.1", "lladdr", f"02:00:00:00:00:{number:02x}"]
            self._in(own, [*gateway, "dev", "eth0"])
            self._in(own, ["ip", "route", "add", "default", "via", "169.254.1.1"])

    def _listen(self, namespace: str, address: str) -> None:
        ports = [f"{address}:{port}" for port in self._ports]
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", _LISTEN, *ports]
        listener = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._listeners.append(listener)
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"

    def _in(self, namespace: str, command: Sequence[str], text: str = "") -> str:
        done = subprocess.run(["ip", "netns", "exec", namespace, *command], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{text}"
        return done.stdout


def compiled(peers: Sequence[Peer], policies: Sequence[Json]) -> Iterator[str]:
    """Yield nftables rules: a packet needs a rule of its source's egress and of its destination's ingress."""
    yield "table ip policies {"
    for direction, field, then in (("egress", "saddr", "goto ingress"), ("ingress", "daddr", "accept")):
        yield f"  chain {direction} {{"
        for policy in (
            compiled["spec"] for compiled in policies if direction.capitalize() in compiled["spec"]["policyTypes"]
        ):
            own = addresses(policy["podSelector"], [peer for peer in peers if peer.namespace == "release"])
            for rule in policy.get(direction) or ():
                for others, ports in itertools.product(sides(rule, direction, peers), tcp_ports(rule)):
                    other_field = "daddr" if field == "saddr" else "saddr"
                    if own and others:
                        yield f"    ip {field} {{ {own} }} ip {other_field} {{ {others} }} {ports} {then}"
        isolated = [
            compiled["spec"]["podSelector"]
            for compiled in policies
            if direction.capitalize() in compiled["spec"]["policyTypes"]
        ]
        for selector in isolated:
            if own := addresses(selector, [peer for peer in peers if peer.namespace == "release"]):
                yield f"    ip {field} {{ {own} }} meta l4proto tcp reject with tcp reset"
        yield f"    {then}" if then != "accept" else "    accept"
        yield "  }"
    for hook in ("forward", "input"):
        yield f"  chain {hook} {{ type filter hook {hook} priority 0; policy accept;"
        yield "    ct state established,related accept"
        yield "    iifname veth* goto egress"
        yield "  }"
    yield "}"


def sides(rule: Json, direction: str, peers: Sequence[Peer]) -> Iterator[str]:
    """Yield the addresses of each entry of a rule's from or to; no entry means anybody."""
    entries = rule.get({"egress": "to", "ingress": "from"}[direction])
    if not entries:
        yield "0.0.0.0/0"
    for entry in entries or ():
        if "ipBlock" in entry:
            if ":" not in entry["ipBlock"]["cidr"]:
                yield entry["ipBlock"]["cidr"]
        else:
            assert entry.get("namespaceSelector", {}) == {}, "only selectors of every namespace are simulated"
            anywhere = "namespaceSelector" in entry
            yield addresses(
                entry.get("podSelector", {}),
                [peer for peer in peers if peer.namespace == "release" or (anywhere and peer.namespace)],
            )


def addresses(selector: Json, peers: Sequence[Peer]) -> str:
    item = selector.get("matchLabels", {}).items()
    return ", ".join(peer.address for peer in peers if item <= peer.labels.items())


def tcp_ports(rule: Json) -> Iterator[str]:
    if "ports" not in rule:
        yield "meta l4proto tcp"
    for port in rule.get("ports", ()):
        if port.get("protocol", "TCP") == "TCP":
            yield f"tcp dport {port['port']}"
