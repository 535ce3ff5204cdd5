"""Laws of GPU-hours: each held GPU counts once, from its start, over restarts of the leader; limits end what they name."""

from pathlib import Path

import pytest

from penstock.services.coordinator.records import summary
from penstock.services.coordinator.run.gpu_hours import GpuHours
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState
from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.process.gpus import held_gpus
from penstock.shared.settings import Settings, loads

LONG_AGO_S = 1_000_000.0


def beat(host: str, gpus: tuple[str, ...], started_at_s: float = LONG_AGO_S) -> Heartbeat:
    return Heartbeat(
        "trainer", f"trainer-{host}", "working", None, host, 1, "", started_at_s, started_at_s, 0, "", {}, gpus=gpus
    )


def counting(bus: Bus, ledger: Ledger, beats: list[Heartbeat], deadline_s: float = 0.0, **run: float) -> GpuHours:
    live = Live(bus, Settings.model_validate({"run": {"id": bus.run_id, **run}}))
    return GpuHours(bus, ledger, live, lambda: beats, deadline_s, lambda: None)


async def test_a_gpu_counts_from_its_process_s_start_whoever_leads_and_once_for_all_that_share_it(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    beats = [beat("a", ("0", "1")), beat("b", ("0",), LONG_AGO_S + 1800)]
    await counting(bus, ledger, beats).look(LONG_AGO_S + 3600)
    status = await ledger.status()
    assert status.gpu_s == 2 * 3600 + 1800
    assert summary.summarize(Settings(), status, {}, [], [], "").gpu_hours == 2.5
    shared = [*beats, beat("a", ("1",), LONG_AGO_S + 3600)]
    await counting(bus, ledger, shared).look(LONG_AGO_S + 7200)  # another leader, an hour later
    assert (await ledger.status()).gpu_s == 2 * 7200 + 1800 + 3600
    await counting(bus, ledger, []).look(LONG_AGO_S + 9000)
    await counting(bus, ledger, beats).look(LONG_AGO_S + 9001)  # they were gone for 1,800 s
    assert (await ledger.status()).gpu_s == 2 * 7200 + 1800 + 3600 + 3


async def test_a_used_budget_pauses_the_run_with_its_reason_until_it_is_raised(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    await ledger.transition(RunState.RUNNING, "", [RunState.CREATED])
    beats = [beat("a", ("0", "1"))]
    counter = counting(bus, ledger, beats, gpu_hours=3.0)
    await counter.look(LONG_AGO_S + 3600)
    assert (await ledger.status()).state is RunState.RUNNING
    await counter.look(LONG_AGO_S + 5400)
    status = await ledger.status()
    assert (status.state, status.reason) == (
        RunState.PAUSED,
        "the budget run.gpu_hours = 3 is used: raise it (PATCH /v1/run/settings), then resume",
    )
    await ledger.transition(RunState.RUNNING, "", [RunState.PAUSED])
    await counting(bus, ledger, beats, gpu_hours=4.0).look(LONG_AGO_S + 5401)
    assert (await ledger.status()).state is RunState.RUNNING


async def test_a_run_older_than_its_deadline_is_stopped_even_if_it_never_began(bus: Bus) -> None:
    ledger = Ledger(bus)
    await ledger.create()
    created_at_s = (await ledger.status()).created_at_s
    counter = counting(bus, ledger, [], deadline_s=60.0)
    await counter.look(created_at_s + 59)
    assert (await ledger.status()).state is RunState.CREATED
    await counter.look(created_at_s + 60)
    status = await ledger.status()
    assert status.state is RunState.STOPPED
    assert status.reason == "activeDeadlineSeconds = 60 have passed since the run was created"


@pytest.mark.parametrize(
    ("service", "toml", "chosen", "expected"),
    [
        ("trainer", "", None, ("0", "1", "10")),
        ("trainer", "", "1, 3", ("1", "3")),
        ("trainer", "", "", ()),
        ("trainer", '[run]\ndevice = "cpu"', None, ()),
        ("trainer", "[trainer]\nnodes = 2\nnode = 0\nrendezvous = 'a:1'", "0", ("0", "1:0")),
        ("rollout", "", "2", ("2",)),
        ("reward", "", "2", ()),
        ("coordinator", "", "2", ()),
    ],
)
def test_a_replica_holds_the_gpus_that_it_sees_if_its_service_uses_any(
    tmp_path: Path, service: str, toml: str, chosen: str | None, expected: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    variables = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert held_gpus(loads(toml, "run.toml"), service, variables, tmp_path) == expected
