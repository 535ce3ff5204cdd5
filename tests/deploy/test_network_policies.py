"""The chart's NetworkPolicies, enforced: every needed connection opens and every other is refused."""

from collections.abc import Mapping

import pytest

from tests.conftest import need
from tests.support.chart import AGENTS, EPISODES, TRACKED, labels, render, values
from tests.support.policy_network import Peer, PolicyNetwork

pytestmark = pytest.mark.usefixtures("helm")
PORTS = (53, 5353, 6379, 6443, 8000, 8100, 9400, 9500, 29500, 41234)
NAME_SERVERS = {
    (name, port) for name in ("node-dns", "kube-dns", "agents", "stranger", "prometheus") for port in (53, 5353)
}
"""Any pod that no policy isolates may be one."""


def to(name: str, *ports: int) -> set[tuple[str, int]]:
    return {(name, port) for port in ports or PORTS}


SERVED = to("coordinator", 8000)
"""By default to all pods of the namespace."""
MEASURED = {
    (role, 9400)
    for role in ("coordinator", "rollout", "rollout-1", "reward", "trainer", "executor", "episodes", "tracking")
}
OUTSIDE = to("kube-dns") | to("node-dns") | to("internet") | to("prometheus") | to("agents") | to("stranger")
ENGINES = to("trainer") | to("rollout") | to("rollout-1")
EXPECTED = {
    "coordinator": NAME_SERVERS | to("bus", 6379) | {(name, 6443) for name, _ in OUTSIDE},  # an API server's port
    "rollout": NAME_SERVERS | to("bus", 6379) | ENGINES - to("rollout"),
    "rollout-1": NAME_SERVERS | to("bus", 6379) | ENGINES - to("rollout-1"),
    "trainer": NAME_SERVERS | to("bus", 6379) | ENGINES - to("trainer"),
    "reward": NAME_SERVERS | to("bus", 6379) | to("executor", 9500),
    "episodes": NAME_SERVERS | to("bus", 6379) | to("rollout") | to("rollout-1"),
    "agents": SERVED
    | MEASURED
    | to("episodes", 8100)
    | OUTSIDE - to("agents"),  # the last as any pod that is not of the run
    "tracking": NAME_SERVERS | to("bus", 6379) | {(name, 41234) for name, _ in OUTSIDE},  # a tracker's port
    "check": NAME_SERVERS | to("bus", 6379) | SERVED,
    "executor": set(),
    "bus": set(),
    "stranger": SERVED | MEASURED | OUTSIDE - to("stranger"),
    "prometheus": MEASURED | OUTSIDE - to("prometheus"),
}


HOLDERS = to("rollout") | to("rollout-1") | to("reward") | to("episodes")
SHELVED = EXPECTED | {
    name: EXPECTED[name] | HOLDERS - to(name)
    for name in ("coordinator", "trainer", "rollout", "rollout-1", "reward", "episodes")
}
"""Payloads are put on shelves of replicas, at ports that the system chooses, and read by all that handle groups."""


@pytest.mark.parametrize(("above_bytes", "expected"), [(0, EXPECTED), (65536, SHELVED)])
def test_every_needed_connection_opens_and_every_other_is_refused(
    above_bytes: int, expected: Mapping[str, set[tuple[str, int]]]
) -> None:
    need("ip", "iproute2")
    need("nft", "nftables")
    config = TRACKED + EPISODES[EPISODES.index("\n[episodes]") :]
    release = render(
        values(
            run={"config": config.replace("[bus]", f"[bus]\nshelve_above_bytes = {above_bytes}")},
            networkPolicy={"agentsFrom": [{"podSelector": {"matchLabels": AGENTS}}]},
            executor={"enabled": True},
            tracking={"port": 41234},
        )
    )
    pods = {role: labels(pod) for role, pod in release.pods()}
    peers = [
        *(Peer(role, own) for role, own in pods.items()),
        Peer("rollout-1", pods["rollout"]),
        Peer("stranger", {"app": "notebook"}),
        Peer("agents", AGENTS),
        Peer("prometheus", {"app": "prometheus"}, namespace="monitoring"),
        Peer("kube-dns", {"k8s-app": "kube-dns"}, namespace="kube-system"),
        Peer("internet", {}, namespace=""),
    ]
    with PolicyNetwork(peers, release.of("NetworkPolicy"), PORTS) as network:
        assert {name: network.opened(name) for name in expected} == expected
