"""Prepare a run: resolve and check its settings, lock its folder.

Errors are one sentence, before any process starts.
"""

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from penstock.services.client.coordinator import TOKEN_FILE
from penstock.services.coordinator.admission import first_rows
from penstock.services.plan.certain import check_gpus, check_host, check_processes, visible_gpus
from penstock.services.plan.workload import workload_of
from penstock.services.up import run_folder
from penstock.services.up.continuation import check_steps_left, check_unchanged
from penstock.services.up.hub_revision import pinned
from penstock.services.up.plan import executor_address, is_own_executor, metrics_ports
from penstock.services.up.requirements import check_architecture, check_device, check_packages, functions_checked
from penstock.shared.bus.client import connection
from penstock.shared.dataset_source import absolute
from penstock.shared.errors import BusUnavailable, SettingsError
from penstock.shared.files import temporary
from penstock.shared.files.durable import write_whole
from penstock.shared.files.secret_file import make_secret, read_secret
from penstock.shared.inputs import ACCEPT, INPUTS, NEXT_INPUTS, settle_inputs
from penstock.shared.model.context import check_context, own_vocabulary, read_config
from penstock.shared.model.model_source import check_complete, check_tokenizer, check_trained
from penstock.shared.process.memory_timeline import host_bytes
from penstock.shared.process.service import own_host
from penstock.shared.settings import SETTINGS_FILE, Settings, dump, load, sources
from penstock.shared.settings.rewards.models import ModelScorer
from penstock.shared.settings.rewards.scorers import Scorer
from penstock.shared.settings.section import Section
from penstock.shared.text.redaction import HIDDEN, redact

EMBEDDED = "embedded"
_BUS_CHECK_S = 6.0


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    settings: Settings
    """Resolved; every path is absolute."""
    folder: Path
    config: Path
    resumed: bool
    lock: TextIO
    """Held while the run is ours."""
    before: str = ""
    """The run that `latest` named before this one."""

    def accept(self) -> None:
        """A failed resume changes nothing."""
        write_whole(self.folder / SETTINGS_FILE, self.config.read_text(encoding="utf-8"))
        if (noted := self.folder / NEXT_INPUTS).is_file():
            noted.replace(self.folder / INPUTS)


def prepare(
    config: Path | None, resume: Path | None, flags: Sequence[str], *, accept_changed_inputs: bool = False
) -> Prepared:
    """Prepare a new run, or resume one with its own settings or, if ``config`` is given too, with those of that file.

    ``accept_changed_inputs``: resume it although its data or models have changed.

    Raises:
        SettingsError: names the setting to change.
        RunEnded: the run to resume has no steps left.
    """
    if resume is not None:
        return _resumed(resume.absolute(), config, flags, accept=accept_changed_inputs)
    if accept_changed_inputs:
        raise SettingsError(f"{ACCEPT} belongs to a resume: expected --resume RUN_FOLDER")
    if config is None:
        raise SettingsError(
            "expected a settings file (penstock up config/arithmetic.toml) or --resume RUN_FOLDER, found neither"
        )
    settings = _resolved(load(config, flags))
    if not settings.run.id:
        settings = _with(settings, "run", id=run_folder.new_run_id(config))
    _check(settings)
    folder = run_folder.make_run_folder(settings)
    with run_folder.private_files(), _locked(folder) as held:
        return _placed(settings, folder, held, resumed=False, accept=False)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[TextIO]:
    held = run_folder.lock(folder)
    try:
        yield held
    except BaseException:
        held.close()
        raise


def _resumed(folder: Path, config: Path | None, flags: Sequence[str], *, accept: bool) -> Prepared:
    if not (folder / SETTINGS_FILE).is_file():
        raise SettingsError(f"no {SETTINGS_FILE} in {folder}: after --resume, give runs/<run id>")
    folder = folder.resolve()  # `latest` may change
    with run_folder.private_files(), _locked(folder) as held:
        run_folder.keep_private(folder)  # older versions left it open to all
        run_folder.end_leftovers(folder)
        (folder / NEXT_INPUTS).unlink(missing_ok=True)  # of a resume that was killed
        return _placed(_as_before(folder, config, flags), folder, held, resumed=True, accept=accept)


def _as_before(folder: Path, config: Path | None, flags: Sequence[str]) -> Settings:
    before = load(folder / SETTINGS_FILE, environment={})
    settings = load(config or folder / SETTINGS_FILE, flags)
    settings = settings if settings.run.id else _with(settings, "run", id=before.run.id)
    settings = _resolved(settings, [*before.data.sources, *(of.path for of in before.evaluation.held_out)])
    check_unchanged(before, settings, sources(flags, os.environ))
    check_steps_left(folder, settings.run.steps)
    if HIDDEN in settings.bus.url:
        raise SettingsError(
            f"expected the bus's password, found {settings.bus.url!r}: give the URL by PENSTOCK__BUS__URL on resume too"
        )
    settings = _with(settings, "run", folder=folder.parent, id=folder.name)
    if settings.coordinator.token_file == before.run_folder / TOKEN_FILE:
        settings = _with(settings, "coordinator", token_file=None)
    if settings.weights.folder is not None and run_folder.is_in_memory(settings.weights.folder):
        settings = _with(settings, "weights", folder=None)
    _check(settings)
    return settings


def _placed(settings: Settings, folder: Path, held: TextIO, *, resumed: bool, accept: bool) -> Prepared:
    inputs = settle_inputs(settings, folder, accept=accept)
    run_folder.remove_dead_snapshots()
    temporary.remove_abandoned()
    keep_free = run_folder.model_bytes(Path(settings.policy.model)) * (settings.weights.keep + 2)
    snapshots = run_folder.snapshot_folder(settings, keep_free)
    settings = _with(settings, "weights", folder=snapshots)
    settings = _with_executor(settings)
    run_folder.mark_in_memory(snapshots, folder)
    config = folder / (run_folder.NEXT_SETTINGS_FILE if resumed else SETTINGS_FILE)
    try:
        settings = _with_token(settings)
        dump(settings, config)
        inputs.write(folder / (NEXT_INPUTS if resumed else INPUTS))
    except OSError as error:
        raise SettingsError(
            f"could not write a run in {folder}: {error.strerror or error}: free disk space there, or change run.folder"
        ) from error
    return Prepared(settings, folder, config, resumed, held, run_folder.link_latest(folder))


# ---------------------------------------------------------------- settings


def _with(settings: Settings, table: str, **changes: object) -> Settings:
    section: Section = getattr(settings, table)
    return settings.model_copy(update={table: section.model_copy(update=changes)})


def _resolved(settings: Settings, known: Sequence[str] = ()) -> Settings:
    """Make paths absolute for other working directories, the run's folder without links, and pin datasets, as in the
    ``known`` ones of a resumed run.
    """
    settings = _with(settings, "run", folder=settings.run.folder.resolve())
    settings = _with(
        settings,
        "policy",
        model=_absolute(settings.policy.model),
        tokenizer=_absolute(settings.policy.tokenizer),
    )
    settings = _with_critic(settings)
    settings = _with(settings, "reward", scorers=tuple(map(_with_absolute_model, settings.reward.scorers)))
    by_dataset = {pinned(absolute(of), "data.path", known): its for of, its in settings.sampling.by_dataset.items()}
    settings = _with(settings, "sampling", by_dataset=by_dataset)
    settings = _with(settings, "data", path=_sources(settings.data.path, known))
    return _with_absolute_sets(settings, known)


def _sources(path: str | dict[str, float], known: Sequence[str]) -> str | dict[str, float]:
    if isinstance(path, dict):
        return {pinned(absolute(source), "data.path", known): weight for source, weight in path.items()}
    return pinned(absolute(path), "data.path", known)


def _with_absolute_sets(settings: Settings, known: Sequence[str]) -> Settings:
    sets = {name: pinned(absolute(path), "evaluation.path", known) for name, path in settings.evaluation.paths.items()}
    is_single = not isinstance(settings.evaluation.path, dict)
    return _with(settings, "evaluation", path=next(iter(sets.values()), None) if is_single else sets)


def _with_critic(settings: Settings) -> Settings:
    critic = settings.algorithm.critic
    return _with(settings, "algorithm", critic=critic.model_copy(update={"model": _absolute(critic.model)}))


def _with_executor(settings: Settings) -> Settings:
    executor = settings.reward.executor
    if not settings.needs_executor or not is_own_executor(executor.address):
        return settings
    address = executor_address(settings.run_folder)
    return _with(settings, "reward", executor=executor.model_copy(update={"address": address}))


def _with_token(settings: Settings) -> Settings:
    coordinator = settings.coordinator
    if coordinator.token_file is not None:
        return settings
    token_file = settings.run_folder / TOKEN_FILE
    make_secret(token_file)
    read_secret(token_file, "coordinator.token_file", "token")
    return _with(settings, "coordinator", token_file=token_file)


def _with_absolute_model(scorer: Scorer) -> Scorer:
    if not isinstance(scorer, ModelScorer):
        return scorer
    return scorer.model_copy(update={"model": _absolute(scorer.model)})


def _absolute(model: str) -> str:
    return str(Path(model).absolute()) if model and Path(model).exists() else model


# ---------------------------------------------------------------- checks


def _check(settings: Settings) -> None:
    check_packages(settings)
    with functions_checked(settings):
        _check_inputs(settings)


def _check_inputs(settings: Settings) -> None:
    for name, nodes in (("trainer.nodes", settings.trainer.nodes), ("rollout.nodes", settings.rollout.nodes)):
        if nodes > 1:
            raise SettingsError(
                f"expected {name} = 1 with `penstock up`, which starts one host, found {nodes}: "
                "start the services by themselves on each host (docs/kubernetes.md), or change it"
            )
    check_trained("policy.model", settings.policy.model, generates=settings.kind.generates)
    check_architecture("policy.model", settings.policy.model)
    check_context(settings)
    if settings.trainer.expert_parallel * settings.trainer.sequence_parallel > 1 and read_config(settings.policy.model):
        workload_of(settings)  # refuses a model that ranks cannot divide
    gpus = visible_gpus()
    check_device(settings, len(gpus))
    check_processes(settings, len(gpus), host_bytes()[0])
    check_gpus(settings, gpus)
    check_host(settings, len(gpus), host_bytes()[0])
    if settings.algorithm.needs_critic and settings.algorithm.critic.model:
        check_trained("algorithm.critic.model", settings.algorithm.critic.model)
        check_architecture("algorithm.critic.model", settings.algorithm.critic.model)
    for scorer in settings.reward.scorers:
        if isinstance(scorer, ModelScorer):
            check_complete(scorer.model_setting, scorer.model)
    for teacher in settings.reward.teachers:
        if not teacher.url:
            check_complete(teacher.setting, teacher.model)
    check_tokenizer(
        *settings.policy.tokenizer_source,
        for_messages=first_rows.check(settings),
        vocabulary=own_vocabulary(read_config(settings.policy.model)),
    )
    _check_port(settings.coordinator.host, settings.coordinator.port, "coordinator")
    for port in metrics_ports(settings) or ([0] if settings.run.host else []):
        _check_port(own_host(settings), port, "run", "metrics_")
    if settings.bus.url != EMBEDDED:
        asyncio.run(_check_bus(settings.bus.url))


def _check_port(host: str, port: int, table: str, kind: str = "") -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise SettingsError(
                f"{host}:{port} cannot be used ({error}): change {table}.{kind}port (0: any free one) or {table}.host"
            ) from error


async def _check_bus(url: str) -> None:
    try:
        async with asyncio.timeout(_BUS_CHECK_S):
            await connection.probe(url, replication=True)
    except (BusUnavailable, TimeoutError) as error:
        reason = str(error.__cause__ or error) or "no answer"
        raise SettingsError(
            f"no Redis or Valkey server answers at {redact(url)} ({reason}): "
            "start one, change bus.url, or set it to 'embedded'"
        ) from error
