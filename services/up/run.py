"""One run from its first process to its last."""

import asyncio
import math
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.services.client.coordinator import page_link, read_token
from penstock.services.plan.certain import are_together, inputs_notice, visible_gpus
from penstock.services.up import plan, process_tree, run_folder
from penstock.services.up.disk_space import Room, checkpoint_notice
from penstock.services.up.display.screen import Screen, open_screen, shows_screen
from penstock.services.up.display.view import ViewRow, activity
from penstock.services.up.display.watch import RunSnapshot, Watch
from penstock.services.up.metrics import prometheus
from penstock.services.up.metrics.targets import Targets, targets_file
from penstock.services.up.plan import ProcessPlan
from penstock.services.up.prepare import EMBEDDED, Prepared
from penstock.services.up.process import Child, ChildState, Restarts
from penstock.services.up.supervisor import INTERRUPTED, TERMINATED, Ending, Supervisor
from penstock.shared.bus import embedded
from penstock.shared.files import temporary
from penstock.shared.files.durable import free_bytes
from penstock.shared.inputs import NEXT_INPUTS
from penstock.shared.preflight.node import mps_answers
from penstock.shared.process.memory_timeline import host_bytes
from penstock.shared.settings import SETTINGS_FILE, Settings
from penstock.shared.tasks import beside

_SHOW_EVERY_S = 0.5
_WORTH_TELLING_S = 5.0

Planner = Callable[[Prepared, str], Sequence[ProcessPlan]]


def service_plans(run: Prepared, bus_url: str) -> Sequence[ProcessPlan]:
    environment = plan.current_environment()
    executor = plan.executor(run.settings, run.config, environment)
    return [*executor, *plan.services(run.settings, run.config, bus_url, environment)]


def plans_with_prometheus(run: Prepared, bus_url: str) -> Sequence[ProcessPlan]:
    return [*service_plans(run, bus_url), prometheus.plan(run.settings, run.folder, plan.current_environment())]


@run_folder.private_files()
def go(run: Prepared, planner: Planner = service_plans, restarts: Restarts | None = None) -> Ending:
    socket = embedded.socket_path(run.settings.run.id) if run.settings.bus.url == EMBEDDED else None
    try:
        url = run.settings.bus.url if socket is None else embedded.url(socket)
        plans = list(planner(run, url))
        if socket is not None:
            plans.insert(0, plan.valkey(socket, run.folder / "valkey", plan.current_environment()))
        (run.folder / "coordinator.json").unlink(missing_ok=True)
        process_tree.inherit_orphans()
        return asyncio.run(_go(run, plans, url, restarts or Restarts(), _notices(run)))
    finally:
        for file in (run.folder / "coordinator.json", targets_file(run.folder)):
            file.unlink(missing_ok=True)  # the ports may be reused
        for next_file in (run_folder.NEXT_SETTINGS_FILE, NEXT_INPUTS):
            (run.folder / next_file).unlink(missing_ok=True)
        run_folder.remove_snapshots(run.settings.snapshot_folder)
        if socket is not None:
            temporary.remove(socket.parent)


def _notices(run: Prepared) -> list[str]:
    inputs = inputs_notice(run.settings, visible_gpus(), host_bytes()[0])
    checkpoints = checkpoint_notice(run.settings, run.folder, free_bytes)
    return list(filter(None, [time_slices(run.settings), checkpoints, inputs, _bus_notice(run)]))


def _bus_notice(run: Prepared) -> str:
    """Return the notice that the embedded bus writes to a network file system, or ""."""
    kind = embedded.slow_disk(run.folder) if run.settings.bus.url == EMBEDDED else ""
    if not kind:
        return ""
    return (
        f"the bus writes its append-only file to {kind} ({run.folder}), where a slow fsync stops all services for as long: "
        "move run.folder to a disk of this machine (Kubernetes: storage.runs.accessMode = ReadWriteOnce), or set bus.url to a server"
    )


def time_slices(settings: Settings) -> str:
    """Return the notice that processes which share a GPU at the same time run in time slices, or ""."""
    gpus = 0 if settings.run.device == "cpu" else len(visible_gpus())
    together = gpus > 0 and are_together(settings, gpus)
    several = gpus > 0 and settings.rollout.engines_per_gpu not in ("auto", 1)
    if not (together or several) or mps_answers():
        return ""
    who = "trainer and replicas" if together else "the engines of a replica"
    otherwise = ", or give rollout.gpus another GPU" if together and gpus > 1 else ""
    return (
        f"{who} share a GPU in time slices, which is slower than side by side: start CUDA MPS before the run "
        f"(nvidia-cuda-mps-control -d, docs/reference/rollout.md){otherwise}"
    )


async def _go(
    run: Prepared, plans: Sequence[ProcessPlan], bus_url: str, restarts: Restarts, notices: Sequence[str]
) -> Ending:
    with open_screen(f"penstock · {run.settings.run.id}") as screen:
        token = read_token(run.settings.coordinator.token_file)
        watch = Watch(run.folder, screen.tell, token)
        supervisor = Supervisor(run.folder, plans, bus_url, restarts, screen.tell, watch.finished, watch.step)
        screen.tell(f"run folder: {run.folder}")
        for notice in notices:
            screen.tell(notice)
        for child in (child for child in plans if child.service == plan.PROMETHEUS):
            screen.tell(f"Prometheus: {prometheus.url(child)}")
        targets = Targets(run.folder, run.settings.run.id, plans, screen.tell)
        acceptance, page = _Acceptance(run, supervisor, screen), _PageLink(run.folder, token, screen.tell)
        end = _End(supervisor, run.folder, screen.tell)
        _listen(supervisor, screen)
        async with beside(
            watch.run(lambda seen: _heed(supervisor, targets, acceptance, page, end, seen)),
            _show(supervisor, watch, screen),
            targets.run(),
            Room(run.folder, screen.tell, free_bytes).run(),
        ):
            ending = await supervisor.run()
        screen.show(watch.seen.run, _rows(supervisor.children, watch.seen))
        acceptance.close()
        if (seen := watch.seen.run) is not None and seen.ended:
            run_folder.remove_shelves(run.folder, has_letters=seen.has_letters)
        if ending.sentence and not (run.resumed or supervisor.was_ready):
            run_folder.unlink_latest(run.folder, run.before)
        return ending


class _Acceptance:
    """Accept a resume's settings once all were ready with them."""

    def __init__(self, run: Prepared, supervisor: Supervisor, screen: Screen) -> None:
        self._run, self._supervisor, self._screen = run, supervisor, screen
        self._is_open = run.resumed
        self._refused = ""

    def look(self, *, ended: bool) -> None:
        """Accept if all were ready or the run ended."""
        if not self._is_open or not (ended or self._supervisor.was_ready):
            return
        try:
            self._run.accept()
            self._is_open = False
        except OSError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._screen.tell(
                    f"{SETTINGS_FILE} keeps its old content for now: {error}: free disk space in run.folder"
                )

    def close(self) -> None:
        """Report settings of a resume that were not accepted."""
        settings, kept = self._run.config, self._run.folder / SETTINGS_FILE
        if self._is_open and settings.read_bytes() != kept.read_bytes():
            self._screen.tell(
                f"{SETTINGS_FILE} keeps its old content: the changes of this resume did not come into effect"
            )


class _PageLink:
    def __init__(self, run_folder: Path, token: str, tell: Callable[[str], None]) -> None:
        self._run_folder, self._token, self._tell = run_folder, token, tell
        self._told = ""

    def tell(self, url: str) -> None:
        """Report a new address. Links grant access: only to terminals, never to files."""
        if url == self._told:
            return
        self._told = url
        if shows_screen() or not self._token:
            self._tell(f"page: {page_link(url, self._token)}")
        else:
            self._tell(
                f"page: {url}/ (`penstock page --run {shlex.quote(str(self._run_folder))}` prints a link that opens it)"
            )


def _listen(supervisor: Supervisor, screen: Screen) -> None:
    """The first signal stops in order, the second at once."""
    told: list[int] = []

    def heard(number: signal.Signals) -> None:
        if told:
            supervisor.kill()
            return
        told.append(number)
        again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
        screen.tell(f"stopping in order{again}")
        supervisor.end(Ending(INTERRUPTED if number == signal.SIGINT else TERMINATED))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, heard, number)


class _End:
    """Ends the processes once the run has ended and its last checkpoint is written, or was refused."""

    def __init__(self, supervisor: Supervisor, folder: Path, tell: Callable[[str], None]) -> None:
        self._supervisor, self._folder, self._tell = supervisor, folder, tell
        self._tell_at_s: float | None = None

    def look(self, seen: RunSnapshot) -> None:
        if seen.run is None or not seen.run.ended:
            return
        if run_folder.has_checkpoint(self._folder, seen.run.step) or not self._is_owed(seen):
            self._supervisor.end(Ending(0))
            return
        self._tell_at_s = self._tell_at_s or time.monotonic() + _WORTH_TELLING_S
        if time.monotonic() > self._tell_at_s:
            self._tell_at_s = math.inf
            self._tell(f"the trainer writes the checkpoint of the last step, {seen.run.step}: the run ends afterwards")

    def _is_owed(self, seen: RunSnapshot) -> bool:
        """Whether a trainer is being started, or is alive and has yet to report that it has ended its work (``stored``)."""
        trainers = [child for child in self._supervisor.children if child.plan.service == "trainer"]
        beats = [seen.replicas.get(child.plan.name) for child in trainers if child.state is ChildState.READY]
        starts = any(child.state in (ChildState.STARTING, ChildState.WAITING) for child in trainers)
        return starts or any(beat is not None and "stored" not in beat.values for beat in beats)


def _heed(
    supervisor: Supervisor, targets: Targets, acceptance: _Acceptance, page: _PageLink, end: _End, seen: RunSnapshot
) -> None:
    page.tell(seen.url)
    targets.update(seen.replicas.values())
    for replica in seen.replicas.values():
        if replica.ready:
            supervisor.mark_ready(replica.replica, replica.started_at_s)
    acceptance.look(ended=seen.run is not None and seen.run.ended)
    end.look(seen)


async def _show(supervisor: Supervisor, watch: Watch, screen: Screen) -> None:
    while True:
        screen.show(watch.seen.run, _rows(supervisor.children, watch.seen))
        if not supervisor.is_ending:
            watch.look_for_silence()
        await asyncio.sleep(_SHOW_EVERY_S)


def _rows(children: Sequence[Child], seen: RunSnapshot) -> list[ViewRow]:
    return [_row(child, seen) for child in children]


def _row(child: Child, seen: RunSnapshot) -> ViewRow:
    replica = seen.replicas.get(child.plan.name)
    fresh = replica is not None and replica.started_at_s >= child.started_at_s
    if replica is None or not fresh or child.state is not ChildState.READY:
        used = 0 if child.pid is None else process_tree.memory_bytes(child.pid)
        note = activity(replica) if replica is not None and fresh else ""
        note = note if child.state is ChildState.STARTING else ""
        return ViewRow(
            child.plan.name, child.state.value, None, used, child.restarts, child.pid, note or child.last_death
        )
    died = f"was restarted: {child.last_death}" if child.last_death else ""
    note = replica.last_error or activity(replica) or died
    return ViewRow(
        child.plan.name, replica.state, replica.version, replica.memory_bytes, child.restarts, child.pid, note
    )
