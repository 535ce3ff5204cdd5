"""One run from Python: start it, follow it, steer it."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.inputs import Inputs, Reward
from penstock.process import UpProcess
from penstock.services.client.coordinator import CoordinatorClient, Unreachable, find, read_token
from penstock.services.client.policy import LivePolicy
from penstock.services.client.views import PolicyView, ReplicaView, RunView
from penstock.services.coordinator.records.jsonl import read
from penstock.shared.errors import PenstockError
from penstock.shared.files.durable import read_object
from penstock.shared.settings import Settings, load_run

if TYPE_CHECKING:
    from penstock.services.offline.policy import StoredPolicy

_POLL_S = 0.3
_SILENCE_S = 300.0
"""A restarted coordinator answers within seconds, a pod on another node within minutes."""
_PAGE = 100


class RunFailed(PenstockError):
    """The run's processes ended before the run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, as reported by the trainer."""

    step: int
    version: int
    """The policy version that it made."""
    samples: int
    finished_at_s: float
    """Unix seconds."""
    metrics: Mapping[str, float]
    """See docs/reference/metrics.md; not a number: not finite."""


class Run:
    """A run on this machine, or one whose coordinator is elsewhere (:meth:`connect`).

    ``config`` is the path of a TOML file, or settings by key: ``{"policy.model": "…", "run.steps": 10}``. The run
    continues when the script or notebook ends; ``Run.open("runs/<id>")`` finds it again and :meth:`close` ends its
    processes. In ``with``, they end with the block.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        data: Any = None,
        held_out: Any = None,
        rewards: Reward | Iterable[Reward] = (),
    ) -> None:
        """Check the settings; those of ``settings`` override ``config``, and objects override both.

        Args:
            model: a model of transformers, instead of ``policy.model``; ``start`` saves it in the run's folder.
            tokenizer: of transformers, instead of ``policy.tokenizer``.
            data: ``datasets.Dataset`` or dictionaries, instead of ``data.path``.
            held_out: the same, instead of ``evaluation.path``.
            rewards: functions with TRL's arguments (docs/rewards.md), also lambdas and those of a notebook's cell,
                instead of ``reward.scorers``.

        Raises:
            SettingsError: a setting is wrong, or an object cannot be written to a file.
        """
        inputs = Inputs.of(model, tokenizer, data, held_out, rewards)
        self._process: UpProcess | None = UpProcess.of_config(config, settings or {}, inputs)
        self.folder = self._process.folder
        self._client: CoordinatorClient | None = None

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Return the run in ``folder``, running or not. Raises SettingsError if the folder has no run."""
        path = Path(folder)
        load_run(path)
        run = cls.__new__(cls)
        run.folder, run._process, run._client = path.resolve(), None, None
        return run

    @classmethod
    def connect(cls, url: str, token_file: str | Path | None = None) -> "Run":
        """Return the run whose coordinator answers at ``url``. Raises PenstockError."""
        run = cls.__new__(cls)
        run.folder, run._process = Path(), None
        run._client = CoordinatorClient(url.rstrip("/"), read_token(None if token_file is None else Path(token_file)))
        run._client.run()
        return run

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    # ---------------------------------------------------------------- processes

    def start(self) -> "Run":
        """Start the run, or continue it; return once it is running.

        Raises:
            SettingsError: a setting is wrong.
            RunFailed: its processes ended.
        """
        if self._look() is None:
            self._here("start it there")
            if self._process is None or self._process.started:
                self._process = UpProcess.of_folder(self.folder)
            self._process.start()
            self._wait_for_coordinator()
        seen = self._look()
        waits = seen is not None and seen.state == "created"
        if waits and not (self.folder.parts and self.settings.coordinator.autostart):
            self._coordinator().post("/v1/run/start", {"reason": ""})
        return self

    def close(self) -> None:
        """End the run's processes in order, if this object started them. :meth:`start` continues it."""
        if self._process is not None:
            self._process.stop()
        self._client = None

    def wait(self, *, silence_s: float = _SILENCE_S) -> RunView:
        """Wait until the run has ended; return its last state.

        Args:
            silence_s: how long its coordinator may be away.

        Raises:
            RunFailed: the run's processes ended.
            Unreachable: it neither runs nor has ended, or its coordinator was away for longer.
        """
        seen = self.status()
        while not seen.ended:
            time.sleep(_POLL_S)
            seen = self._answered(silence_s)
        if self._process is not None:
            self._process.wait()
        return seen

    # ---------------------------------------------------------------- look

    @property
    def settings(self) -> Settings:
        """The run's settings. Raises Unreachable if its folder is not known."""
        return load_run(self._here("open its folder there"))

    def status(self) -> RunView:
        """Return the run's state, counts and newest metrics; state and step alone of a run that has ended.

        Raises:
            Unreachable: it neither runs nor has ended.
        """
        return self._look() or self._last() or self._coordinator().run()

    def replicas(self) -> list[ReplicaView]:
        """Return the live replicas of all services."""
        return self._coordinator().replicas()

    def steps(self, *, follow: bool = True, silence_s: float = _SILENCE_S) -> Iterator[Step]:
        """Yield every step, oldest first; with ``follow``, until the run ends. After a rollback, steps come again.

        Args:
            silence_s: how long the coordinator of a run that is followed may be away.

        Raises:
            RunFailed: the run's processes ended.
            Unreachable: the coordinator was away for longer.
        """
        last, seen = (0, 0), self._look()
        ended = not follow or (seen.ended if seen is not None else self._process is None)
        while True:
            ended = ended or self._answered(silence_s).ended
            for row in self._rows_after(last, ended):
                last = _place(row)
                yield _step(row)
            if ended:
                return
            time.sleep(_POLL_S)

    def rollouts(self, most: int = 20, *, search: str = "", problem: str = "") -> list[dict[str, Any]]:
        """Return trained groups, newest first, with prompt, completions and scores (``GET /v1/run/rollouts``)."""
        query = {name: value for name, value in (("search", search), ("problem", problem)) if value}
        return self._coordinator().items("/v1/run/rollouts", most, a_page=50, **query)

    def policies(self) -> list[PolicyView]:
        """Return every policy version, newest first."""
        return [PolicyView.model_validate(item) for item in self._coordinator().items("/v1/policies", 1_000_000)]

    # ---------------------------------------------------------------- steer

    def pause(self, reason: str = "", *, drain: bool = False) -> None:
        """Admit no new prompts; with ``drain``, wait until no group is generated or scored."""
        self._command("pause", reason=reason, mode="drain" if drain else "admission")

    def resume(self, reason: str = "") -> None:
        """Continue a paused run."""
        self._command("resume", reason=reason)

    def stop(self, reason: str = "") -> None:
        """End the run for good before its last step."""
        self._command("stop", reason=reason)

    def rollback(self, version: int, reason: str = "") -> int:
        """Return to a version with a checkpoint; return its new number. Raises RequestRefused."""
        client = self._coordinator()
        operation = client.post(f"/v1/policies/{version}/rollback", {"reason": reason})
        return int(client.finished(operation, lambda detail: None)["result"]["version"])

    def export(self, version: int | None = None, to: str | Path | None = None) -> Path:
        """Write a version (default: the newest) in Hugging Face form; return its folder."""
        from penstock.services.cli import export

        folder = None if to is None else Path(to)
        if self._look() is not None:
            return Path(export.ask(self._coordinator(), version, folder, adapter=False)["folder"])
        return Path(export.make(self._here("export there"), version, folder, adapter=False)["folder"])

    # ---------------------------------------------------------------- policies

    @property
    def policy(self) -> LivePolicy:
        """The policy that replicas serve now."""
        return LivePolicy(self._coordinator())

    def stored_policy(self, version: int | None = None) -> "StoredPolicy":
        """Return a stored version (default: the newest), computed in this process."""
        from penstock.services.offline.policy import StoredPolicy

        return StoredPolicy(self.settings, version)

    # ---------------------------------------------------------------- inside

    def _here(self, instead: str) -> Path:
        """Return the run's folder. Raises Unreachable: it is not known, as after :meth:`connect`."""
        if not self.folder.parts:
            raise Unreachable(f"the run's folder is not known by the address of its coordinator: {instead}")
        return self.folder

    def _coordinator(self) -> CoordinatorClient:
        if self._client is None:
            if self._process is not None and not self._process.started:
                raise Unreachable("the run has not been started: call start()")
            url = find(None, self.folder)
            self._client = CoordinatorClient(url, read_token(None, url, self.folder))
        return self._client

    def _look(self) -> RunView | None:
        """Return the run's state, or None if no coordinator answers."""
        try:
            return self._coordinator().run()
        except Unreachable:
            self._client = None if self.folder.parts else self._client
            return None

    def _wait_for_coordinator(self) -> None:
        """Return once it answers, or the run has ended."""
        while self._look() is None and not (self._process is not None and self._process.has_ended):
            time.sleep(_POLL_S)
        self._check_process()

    def _check_process(self) -> None:
        if self._process is not None and (reason := self._process.failure()):
            raise RunFailed(reason)

    def _last(self) -> RunView | None:
        """Return the last state of a run that has ended, by its files."""
        if not self.folder.parts:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            summary = read_object(self.folder / "summary.json")
            step, steps = summary["steps"], self.settings.run.steps
            seen = RunView(run_id=summary["run_id"], state=summary["state"], step=step, steps=steps)
            return seen if seen.ended else None
        return None

    def _answered(self, silence_s: float) -> RunView:
        """Return the run's state; its coordinator may be away for ``silence_s``."""
        since_s = time.monotonic()
        while True:
            try:
                return self.status()
            except Unreachable as error:
                self._check_process()
                if time.monotonic() - since_s >= silence_s:
                    raise Unreachable(f"the run has not answered for {silence_s:g} s: {error}") from error
            time.sleep(_POLL_S)

    def _rows_after(self, last: tuple[int, int], ended: bool) -> list[dict[str, Any]]:
        """Return reports of steps, oldest first: from the coordinator, or from the files of a run without one."""
        rows: list[dict[str, Any]] = []
        try:
            client, query = self._coordinator(), dict[str, str]()
            while True:
                page = client.get("/v1/run/steps", limit=_PAGE, **query)
                fresh = [row for row in page["items"] if _place(row) > last]
                rows += fresh
                if page["next"] is None or len(fresh) < len(page["items"]):
                    return rows[::-1]
                query = {"cursor": page["next"]}
        except Unreachable:
            if self.folder.parts:
                return [row for row in _recorded(self.folder / "metrics.jsonl") if _place(row) > last]
            if ended:
                raise
            return []

    def _command(self, name: str, **body: str) -> None:
        client = self._coordinator()
        answer = client.post(f"/v1/run/{name}", body)
        if "kind" in answer:
            client.finished(answer, lambda detail: None)


def _recorded(file: Path) -> list[dict[str, Any]]:
    rows = []
    for record in read(file):
        named = ("entry", "step", "version", "samples", "finished_at_s", "lag_counts")
        metrics = {name: value for name, value in record.items() if name not in named}
        rows.append({**record, "id": record["entry"], "metrics": metrics})
    return rows


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    at_ms, _, number = str(row["id"]).partition("-")
    return int(at_ms), int(number)


def _step(row: Mapping[str, Any]) -> Step:
    metrics = {name: math.nan if value is None else float(value) for name, value in row["metrics"].items()}
    return Step(int(row["step"]), int(row["version"]), int(row["samples"]), float(row["finished_at_s"]), metrics)
