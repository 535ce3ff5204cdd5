"""Options of every command that talks to a coordinator."""

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer
from typer.models import ArgumentInfo

from penstock.shared.errors import SettingsError

if TYPE_CHECKING:
    from penstock.services.cli.reports.ended_run import EndedRun
    from penstock.services.client.coordinator import CoordinatorClient

P = ParamSpec("P")
LATEST = Path("runs/latest")
Url = Annotated[str, typer.Option("--url", metavar="URL", help="The coordinator's address, instead of a run's folder.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="PENSTOCK_TOKEN_FILE",
        help="A file whose first line is the bearer token. Default: `token` in the run's folder, for that run's coordinator.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="The reason, recorded with the change.")]
RunArgument = Annotated[Path, typer.Argument(metavar="[RUN]", help="The run's folder, its settings file, or `latest`.")]
RunOption = Annotated[Path | None, typer.Option("--run", metavar="RUN", help="The same as RUN.", show_default=False)]
_FOLDER = "run_folder"
_OF_RUNS = ("coordinator.json", "settings.toml", "deployment.json")
"""Of which a run's folder has one, from its start on."""
_RunFolder = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The same as --run.", show_default=False)]
_WORDS = "The run's TOML file, and settings to override."
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG [--TABLE.SETTING VALUE]...", help=_WORDS, show_default=False),
]
WordsOrNone = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [--TABLE.SETTING VALUE]...", help=_WORDS, show_default=False),
]
"""For commands that need no file."""
Most = Annotated[int, typer.Option("--most", min=1, metavar="N", help="The maximum number of rows.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """A command's coordinator and output format."""

    run: Annotated[Path, typer.Option("--run", metavar="RUN", help="The run's folder, or `latest`.")] = LATEST
    url: Url = ""
    token_file: TokenFile = None
    as_json: AsJson = False

    def coordinator(self) -> "CoordinatorClient":
        from penstock.services.client.coordinator import CoordinatorClient

        return CoordinatorClient(*self._address_and_token())

    def reader(self) -> "CoordinatorClient":
        """Return a client for questions, which the folder of a run that has ended answers too."""
        from penstock.services.client.coordinator import CoordinatorClient

        ended = self.ended_run()
        return self.coordinator() if ended is None else CoordinatorClient(*ended.serve())

    def page_link(self) -> str:
        """Return a single-use link to the run's page."""
        from penstock.services.client.coordinator import page_link

        return page_link(*self._address_and_token())

    def _address_and_token(self) -> tuple[str, str]:
        from penstock.services.cli.cluster import deployment
        from penstock.services.client.coordinator import find, read_token

        if not self.url and (deployed := deployment.find(existing(self.run))) is not None:
            return deployed.connect()
        address = find(self.url, self.run)
        return address, read_token(self.token_file, address, self.run)

    def ended_run(self) -> "EndedRun | None":
        """Return the run if it has ended and has no coordinator."""
        from penstock.services.cli.reports.ended_run import EndedRun
        from penstock.services.client.coordinator import how_ended

        return EndedRun(self.run) if not self.url and how_ended(self.run) else None

    def print_link(self, link: str) -> None:
        from penstock.services.up.display import console

        console.say_link(json.dumps({"url": link}) if self.as_json else link)

    def print_item(self, item: dict[str, Any]) -> None:
        from penstock.services.cli import tables

        tables.show_one(item, as_json=self.as_json)

    def print_list(self, command: str, items: list[dict[str, Any]]) -> None:
        """Print a list with the columns of ``command``."""
        from penstock.services.cli import tables

        tables.show(command, items, as_json=self.as_json)

    def get(self, path: str) -> None:
        """Get one item and print it."""
        self.print_item(self.reader().get(path))

    def post(self, path: str, **body: str) -> None:
        """Post a command and print the answer."""
        self.print_item(self.coordinator().post(path, body or None))


def connected(command: Callable[Concatenate[Connection, P], None]) -> Callable[..., None]:
    """Add the options of :class:`Connection` to ``command`` and, if it has no arguments of its own, the run's folder."""
    options = inspect.signature(Connection).parameters
    own = list(inspect.signature(command).parameters.values())[1:]
    if not any(map(_is_argument, own)):
        own.append(inspect.Parameter(_FOLDER, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_RunFolder))
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *options.values())]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        from penstock.services.cli.cluster.deployment import forwarding

        connection = Connection(**{name: given.pop(name) for name in options})
        connection = dataclasses.replace(connection, run=named(given.pop(_FOLDER, None) or connection.run))
        with forwarding():
            command(connection, **given)  # type: ignore[call-arg]  # typer gives every parameter by name

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Whether a command's parameter takes a word after its name; the context does in groups, whose word is a command."""
    notes = typing.get_args(parameter.annotation)[1:]
    return parameter.annotation is typer.Context or any(isinstance(note, ArgumentInfo) for note in notes)


def named(run: Path) -> Path:
    """Return the folder that ``latest`` names, else ``run``."""
    return LATEST if str(run) == LATEST.name and not run.exists() else run


def existing(run: Path) -> Path:
    """Return ``run``. Raises SettingsError: no run's folder is there."""
    if not any((run / name).is_file() for name in _OF_RUNS):
        raise SettingsError(
            f"no run at {run}: {_OF_RUNS[0]} is missing there: start one with `penstock up`, or give the folder of a run"
        )
    return run


def split(words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the file or folder among ``words``, and the settings that follow. Raises SettingsError."""
    files, flags = [], []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--"):
            files.append(word)
        elif "=" in word:
            flags.append(word)
        else:
            flags += [word, *(value for value in [next(rest, None)] if value is not None)]
    if len(files) > 1:
        raise SettingsError(
            f"expected one settings file, found {' '.join(files)}: settings are given as --run.steps 10"
        )
    return (Path(files[0]) if files else None), flags
