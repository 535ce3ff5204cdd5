"""Laws of the notices: shown whole, at once, on every surface."""

import dataclasses
import io
import re
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from penstock.services.client.views import Notice, ReplicaView, RunView, StreamDepth
from penstock.services.coordinator.api.app import make_app
from penstock.services.coordinator.evaluation.results import Evaluation
from penstock.services.coordinator.run.monitor import Monitor
from penstock.services.coordinator.run.notices import compose, notice, silent
from penstock.services.coordinator.run.replicas import Replicas
from penstock.services.coordinator.schemas.run import GuardView
from penstock.services.up.display import screen, view
from penstock.services.up.display.screen import PlainDisplay
from penstock.shared.bus.bus import Bus
from penstock.shared.bus.stores.policy.ledger import Ledger, RunState, RunStatus, read_status
from penstock.shared.bus.stores.policy.rollback import ON_REQUEST, ROLLED_BACK, ROLLING_BACK
from penstock.shared.bus.stores.replicas.heartbeats import SERVICE, Heartbeat, PartFailure, beat_once, note_left
from penstock.shared.bus.stores.replicas.live_settings import Live
from penstock.shared.process.telemetry import Status
from penstock.shared.settings import Settings
from tests.support.coordinator_players import make, settings
from tests.support.raw_redis import raw

REASON = "guard unscored: none of the last 16 groups could be scored; the newest: scorer 'mine' unavailable: KeyError: 'limit' (mine.py:4)"


def status(state: RunState, reason: str = "") -> RunStatus:
    return dataclasses.replace(read_status({}), state=state, reason=reason)


def beat(replica: str, **changed: object) -> Heartbeat:
    failure = PartFailure("scorer 'mine'", "KeyError: 'limit' (mine.py:4)", "train.jsonl:7", 3, 3, time.time())
    failure = dataclasses.replace(failure, **changed)  # type: ignore[arg-type]
    return Heartbeat("reward", replica, "degraded", None, "h", 1, "h:1", 0.0, 0.0, 0, "", {}, failures=(failure,))


def evaluation(answered: int) -> Evaluation:
    values: dict[str, object] = {field.name: None for field in dataclasses.fields(Evaluation)}
    return Evaluation(**{**values, "version": 0, "set": "heldout", "problems": 500, "answered": answered})  # type: ignore[arg-type]


def texts(*args: object) -> list[str]:
    return [f"{notice.level}: {notice.text}" for notice in compose(*args)]  # type: ignore[arg-type]


def test_why_a_run_is_paused_comes_first_and_the_guard_that_did_it_is_not_said_twice() -> None:
    guards = [
        GuardView(
            guard="unscored",
            action="pause",
            detail=REASON.removeprefix("guard unscored: ").split("; the")[0],
            since_s=0,
        ),
        GuardView(guard="lag", action="tell", detail="60% left as stale", since_s=0),
    ]
    paused = texts(status(RunState.PAUSED, REASON), guards, [], [], [notice("held-out data", "warning", "23 of 30")])
    stopped = f"error: paused: {REASON}; `penstock resume` continues"
    assert paused == [stopped, "warning: guard lag: 60% left as stale", "warning: 23 of 30"]
    assert texts(status(RunState.RUNNING, "autostart"), [], [], [], []) == []
    for reason, line in (
        (f"{ON_REQUEST}: maintenance", "paused on request: maintenance; `penstock resume` continues"),
        (f"{ROLLING_BACK} 3: reward fell", "paused: rolling back to version 3: reward fell"),
        (
            f"{ROLLED_BACK} 3, as version 9",
            "paused: rolled back to version 3, as version 9; `penstock resume` continues",
        ),
    ):
        (asked,) = compose(status(RunState.PAUSED, reason), [], [], [], [])
        assert view.notice_line(Notice.model_validate(asked, from_attributes=True)) == line


def test_what_fails_on_several_replicas_is_one_notice_with_cause_row_and_count() -> None:
    both = [beat("reward-0"), beat("reward-1", failed=2, in_a_row=2, problem="train.jsonl:9", at_s=time.time() + 1)]
    assert texts(status(RunState.RUNNING), [], [], both, []) == [
        "error: scorer 'mine' failed 5 times, the last 5 in a row; newest at train.jsonl:9: KeyError: 'limit' (mine.py:4)"
    ]


def test_what_works_again_is_a_warning_for_a_while() -> None:
    assert texts(status(RunState.RUNNING), [], [], [beat("reward-0", in_a_row=0)], []) == [
        "warning: scorer 'mine' failed 3 times and works again; newest at train.jsonl:7: KeyError: 'limit' (mine.py:4)"
    ]
    assert texts(status(RunState.RUNNING), [], [], [beat("reward-0", in_a_row=0, at_s=time.time() - 3600)], []) == []


def test_an_accuracy_over_a_part_of_the_problems_is_said_to_be_one() -> None:
    assert texts(status(RunState.RUNNING), [], [evaluation(37)], [], []) == [
        "warning: the evaluation of version 0 on heldout has answers to 37 of 500 problems"
    ]
    assert texts(status(RunState.RUNNING), [], [evaluation(37), evaluation(500)], [], []) == []


def run(*notices: Notice, reason: str = "") -> RunView:
    return RunView(state="paused" if notices else "running", reason=reason, notices=list(notices))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_screen_shows_a_notice_whole_however_narrow_it_is(width: int) -> None:
    file = io.StringIO()
    console = Console(width=width, file=file, force_terminal=True, color_system=None, legacy_windows=False)
    seen = run(Notice(about="paused", level="error", text=f"paused: {REASON}"), reason=REASON)
    console.print(view.screen("penstock · a-run", seen, [], ["12:00:00  " + "a long sentence " * 9]))
    shown = " ".join(line.strip("│╭╮╰╯─ ") for line in file.getvalue().splitlines())
    assert " ".join(REASON.split()) in " ".join(shown.split())
    assert ("a long sentence " * 9).strip() in " ".join(shown.split())
    assert shown.count("none of the last 16") == 1


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_long_note_of_a_process_takes_no_room_from_its_name_and_state(width: int) -> None:
    file = io.StringIO()
    console = Console(width=width, file=file, force_terminal=True, color_system=None, legacy_windows=False)
    row = view.ViewRow("coordinator-0", "degraded", 12, 2**30, 1, 4711, "scorer 'mine': ZeroDivisionError " * 9)
    console.print(view.screen("penstock · a-run", RunView(), [row]))
    (shown,) = [line for line in file.getvalue().splitlines() if "coordinator-0" in line]
    assert "coordinator-0  ● degraded       12  1.0 GiB       2  4711" in shown
    assert "scorer" in shown
    assert len(shown) == width


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_screen_of_a_live_run_cuts_no_word(width: int) -> None:
    """As seen in a real run: a long outcome of the self-test, and a journal of three digits at the edge."""
    outcome = (
        "logprobs differ by 1.1e-05 nats at most and 2.3e-06 on average, the gradient by 2.1e-06 of its norm (limit)"
    )
    names = ("prompts", "episodes", "rollouts", "experience", "journal")
    seen = RunView(self_tests={"policy": outcome}, streams={name: StreamDepth(entries=371) for name in names})
    row = view.ViewRow("rollout-0", "starting", 12, 2**30, 0, 4711, "capturing graphs of several batches " * 9)
    words = {}
    for columns in (1000, width):
        file = io.StringIO()
        console = Console(width=columns, file=file, force_terminal=True, color_system=None, legacy_windows=False)
        console.print(view.screen("penstock · a-run", seen, [row]))
        words[columns] = {word.strip("…") for word in re.findall(r"[^\s│╭╮╰╯─━]+", file.getvalue())}
    assert words[width] - words[1000] <= {""}
    assert words[1000] - words[width] <= set(row.note.split())


def test_plain_lines_say_a_notice_whole_at_once_and_not_again_while_only_its_figures_grow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = PlainDisplay(every_s=3600.0)
    warning = Notice(about="scorer 'mine'", level="warning", text="scorer 'mine' failed 1 times")
    for notices in ([warning], [warning.model_copy(update={"text": "scorer 'mine' failed 2 times"})]):
        lines.show(run(*notices), [])
    lines.show(run(Notice(about="scorer 'mine'", level="error", text=f"paused: {REASON}")), [])
    said = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in said if line.startswith(("warning", "error"))] == [
        "warning: scorer 'mine' failed 1 times",
        f"error: paused: {REASON}",
    ]


def test_plain_lines_come_less_and_less_often_without_a_step_and_not_without_news(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, said_s = [1000.0], list[float]()
    monkeypatch.setattr(screen, "time", SimpleNamespace(monotonic=lambda: now_s[0], strftime=time.strftime))
    lines, last = PlainDisplay(), RunView(state="running", step=7)

    def watch(seconds: int, answers: bool, steps: int = 0) -> list[float]:
        nonlocal last
        said_s.clear()
        begun_s = now_s[0]
        for _ in range(seconds):
            last = last.model_copy(update={"step": last.step + steps}) if answers else last
            lines.show(last, [])
            if capsys.readouterr().out:
                said_s.append(now_s[0] - begun_s)
            now_s[0] += 1.0
        return said_s

    assert watch(300, answers=True) == [0, 10, 30, 70, 130, 190, 250]
    assert watch(300, answers=False) == []
    assert watch(12, answers=True, steps=1) == [0, 5, 10]


def test_a_silent_replica_is_reported_until_the_run_ends() -> None:
    dead = dataclasses.replace(beat("reward-a"), seen_at_s=100.0)
    (told,) = silent([(dead, 7.4)], None, status(RunState.RUNNING))
    assert told.text == (
        "reward-a has sent no heartbeat for 7 s: process 1 on h is frozen, has died, or does not reach the bus"
    )
    assert silent([(dead, 7.4)], None, status(RunState.FINISHED)) == []


class Fleet:
    """Replicas with heartbeats every minute, on a clock of their own; the bus's own seconds do not matter."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.now_s = 0.0
        self.replicas = Replicas(bus, 60.0, lambda: self.now_s)

    async def live(self, minutes: int, *beating: str, takes_writes: bool = True) -> dict[str, int]:
        """Return which replicas are silent after ``minutes``, and for how many."""
        for _ in range(minutes):
            self.now_s += 60.0
            for name in beating if takes_writes else ():
                at_s = dataclasses.replace(beat(name), service=name.partition("-")[0], seen_at_s=self.now_s)
                await beat_once(self.bus, at_s, 60.0)
            await self.replicas.read()
        return {last.replica: round(silent_s / 60.0) for last, silent_s in self.replicas.silent()}

    async def expire(self, *names: str) -> None:
        await raw(self.bus).delete(*(self.bus.keys.of(SERVICE.of(name)) for name in names))


async def test_replicas_that_left_in_order_are_not_silent_and_those_that_ceased_are(bus: Bus) -> None:
    fleet = Fleet(bus)
    assert await fleet.live(2, "coordinator-0", "reward-1", "reward-2") == {}
    await note_left(bus, "reward-1")
    await fleet.expire("reward-2")
    assert await fleet.live(4, "coordinator-0") == {}
    assert await fleet.live(3, "coordinator-0") == {"reward-2": 7}
    assert await fleet.live(1, "coordinator-0", "reward-2") == {}


@pytest.mark.parametrize("host_s", [-1e6, 1e6])
async def test_a_replica_is_silent_until_another_of_its_service_joins_whatever_the_clock_of_its_host_says(
    bus: Bus, host_s: float
) -> None:
    fleet = Fleet(bus)
    await beat_once(bus, dataclasses.replace(beat("reward-a"), seen_at_s=host_s), 60.0)
    await fleet.live(2, "coordinator-0", "reward-b")
    await fleet.expire("reward-a")
    assert await fleet.live(6, "coordinator-0", "reward-b") == {"reward-a": 7}
    assert await fleet.live(1, "coordinator-0", "reward-b", "rollout-0") == {"reward-a": 8}
    assert await fleet.live(1, "coordinator-0", "reward-b", "reward-c") == {}


@pytest.mark.parametrize(("lived_s", "silent"), [(120.0, {}), (300.0, {"reward-a": 8})])
@pytest.mark.parametrize("host_s", [-1e6, 1e6])
async def test_a_new_coordinator_sees_whether_a_replica_started_after_anothers_last_heartbeat(
    bus: Bus, host_s: float, lived_s: float, silent: dict[str, int]
) -> None:
    fleet = Fleet(bus)
    await beat_once(bus, dataclasses.replace(beat("reward-a"), seen_at_s=host_s), 60.0)
    life_ms = await bus.ask("PTTL", SERVICE.of("reward-a"))
    await bus.write(SERVICE.of("reward-a"), "PEXPIRE", life_ms - 200_000)  # its heartbeat is 200 s old
    other = dataclasses.replace(beat("reward-b"), started_at_s=host_s, seen_at_s=host_s + lived_s)
    await beat_once(bus, other, 60.0)
    await fleet.live(1, "coordinator-0")
    await fleet.expire("reward-a")
    assert await fleet.live(5, "coordinator-0", "reward-b") == silent


async def test_no_replica_is_silent_while_the_bus_takes_no_heartbeat_nor_just_after(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(bus)
    names = ("coordinator-0", "reward-0", "reward-1")
    await fleet.live(2, *names)
    await fleet.expire(*names)
    assert await fleet.live(60, *names, takes_writes=False) == {}, "it answers, and refuses writes"
    (told,) = silent(fleet.replicas.silent(), fleet.replicas.bus_refuses_s(), status(RunState.RUNNING))
    assert told.text.startswith(
        "the bus has taken no heartbeat of any replica for 3600 s: it answers, but refuses writes"
    )
    monkeypatch.setattr("penstock.services.coordinator.run.monitor.no_space", lambda folder: f"{folder} is full")
    for url, why in (("unix:///tmp/bus.sock", "runs/a is full"), ("redis://elsewhere:6379", "see its log")):
        of = Settings.model_validate({"run": {"id": "a", "folder": "runs"}, "bus": {"url": url}})
        monitor = Monitor(bus, Live(bus, of), Status())
        monitor.replicas = fleet.replicas
        (told,) = monitor._silent(status(RunState.RUNNING))
        assert told.text.endswith(f"for 3600 s: it answers, but refuses writes: {why}")
    fleet.now_s += 600.0  # it does not answer
    assert await fleet.live(4, "coordinator-0", "reward-0") == {}
    assert fleet.replicas.bus_refuses_s() is None
    assert await fleet.live(3, "coordinator-0", "reward-0") == {"reward-1": 6}


async def test_a_heartbeat_is_not_new_because_a_replica_with_a_fast_clock_has_started(bus: Bus) -> None:
    fleet = Fleet(bus)
    fast = dataclasses.replace(beat("reward-1"), started_at_s=1e6)
    await beat_once(bus, fast, 60.0)
    await fleet.live(2, "coordinator-0", "reward-0")
    await fleet.live(9, takes_writes=False)
    assert fleet.replicas.bus_refuses_s() == 540.0


async def test_a_silent_replica_stays_in_the_table_until_the_run_ends(bus: Bus, tmp_path: Path) -> None:
    await Ledger(bus).create()
    parts = make(bus, settings(tmp_path))
    fleet = Fleet(bus)
    parts.monitor.replicas = fleet.replicas
    await fleet.live(2, "coordinator-0", "reward-0")
    await fleet.expire("reward-0")
    await fleet.live(7, "coordinator-0")
    transport = httpx.ASGITransport(make_app(parts.api))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        items = (await http.get("/v1/services")).json()["items"]
        assert [(item["replica"], item["state"], item["pid"], item["host"]) for item in items] == [
            ("coordinator-0", "degraded", 1, "h"),
            ("reward-0", "silent", 1, "h"),
        ]
        row = view.row_of(ReplicaView.model_validate(items[1]))
        assert (row.state, row.pid, row.note) == ("silent", 1, "no heartbeat for 7m00s")
        await http.post("/v1/run/stop")
        assert [item["replica"] for item in (await http.get("/v1/services")).json()["items"]] == ["coordinator-0"]
