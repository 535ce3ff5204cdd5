"""The commands of `penstock` that look at a run's lists and change what is in them: thin clients of the coordinator's HTTP API.

Each shows a table, or with ``--json`` what the API said; docs/api.md has what each resource is.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    from services.client.coordinator import CoordinatorClient

LATEST = Path("runs/latest")
Run = Annotated[Path, typer.Option("--run", metavar="RUN_FOLDER", help="The run's folder.")]
Url = Annotated[str, typer.Option("--url", metavar="URL", help="The coordinator's address, instead of --run.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="PENSTOCK_TOKEN_FILE",
        help="A file whose first line is the bearer token. Default: `token` in the run's folder, for that run's coordinator.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the API says, for scripts.")]
Most = Annotated[int, typer.Option("--most", min=1, metavar="N", help="At most so many.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept with it.")]
Version = Annotated[int, typer.Argument(metavar="VERSION", min=0)]
Replica = Annotated[str, typer.Argument(metavar="REPLICA")]
Stream = Annotated[str, typer.Argument(metavar="STREAM")]
RunId = Annotated[str, typer.Argument(metavar="RUN_ID")]
Entry = Annotated[str, typer.Argument(metavar="ENTRY")]

policies = typer.Typer(help="Policy versions: list, show, compare, pin, release.", invoke_without_command=True)
services = typer.Typer(help="Replicas: list, cordon, uncordon, drain.", invoke_without_command=True)
runs = typer.Typer(help="Runs on the bus: list, delete.", invoke_without_command=True)
dead = typer.Typer(help="Dead letters: list, show, requeue, discard.", invoke_without_command=True)


def coordinator(run: Path, url: str, token_file: Path | None) -> "CoordinatorClient":
    """Return the client of the coordinator that the options name."""
    from services.client.coordinator import CoordinatorClient, find, read_token

    found = find(url, run)
    return CoordinatorClient(found, read_token(token_file, found, run))


def add_to(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    for name, group in (("policies", policies), ("services", services), ("dead", dead), ("runs", runs)):
        app.add_typer(group, name=name)
    app.command()(events)
    app.command()(page)
    app.command()(tail)


def _listing(group: typer.Typer, name: str, path: str, sentence: str) -> None:
    """Add a list to ``group``: as ``penstock NAME list``, and as what ``penstock NAME`` alone does."""

    def show(
        run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False, most: Most = 1000
    ) -> None:
        from services.cli import tables

        tables.show(name, coordinator(run, url, token_file).items(path, most), as_json=as_json)

    def show_alone(
        context: typer.Context,
        run: Run = LATEST,
        url: Url = "",
        token_file: TokenFile = None,
        as_json: AsJson = False,
        most: Most = 1000,
    ) -> None:
        if context.invoked_subcommand is None:
            show(run, url, token_file, as_json, most)

    group.callback(help=f"{sentence} With a command: do something with one.")(show_alone)
    group.command("list", help=sentence)(show)


def _post(
    path: str, run: Path, url: str, token_file: Path | None, as_json: bool, body: dict[str, str] | None = None
) -> None:
    from services.cli import tables

    tables.show_one(coordinator(run, url, token_file).post(path, body), as_json=as_json)


def _get(path: str, run: Path, url: str, token_file: Path | None, as_json: bool) -> None:
    from services.cli import tables

    tables.show_one(coordinator(run, url, token_file).get(path), as_json=as_json)


# ---------------------------------------------------------------- policies


_listing(policies, "policies", "/v1/policies", "List every policy version with its parent.")


@policies.command("show")
def show_policy(
    version: Version, run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Show one version."""
    _get(f"/v1/policies/{version}", run, url, token_file, as_json)


@policies.command("compare")
def compare_policies(
    version: Version,
    other: Version,
    run: Run = LATEST,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show two versions side by side."""
    _get(f"/v1/policies/{version}/compare/{other}", run, url, token_file, as_json)


def _marking(word: str, sentence: str) -> None:
    def mark(
        version: Version, run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False
    ) -> None:
        _post(f"/v1/policies/{version}/{word}", run, url, token_file, as_json)

    policies.command(word, help=sentence)(mark)


_marking("pin", "Keep a version's checkpoint from cleanup.")
_marking("unpin", "Let cleanup take a version's checkpoint.")
_marking("release", "Say that people may use a version.")
_marking("withdraw", "Say that people may not use a version any more.")


# ---------------------------------------------------------------- services


_listing(services, "services", "/v1/services", "List every replica that is there.")


def _telling(word: str, sentence: str) -> None:
    def tell_replica(
        replica: Replica,
        reason: Reason = "",
        run: Run = LATEST,
        url: Url = "",
        token_file: TokenFile = None,
        as_json: AsJson = False,
    ) -> None:
        _post(f"/v1/services/{replica}/{word}", run, url, token_file, as_json, {"reason": reason})

    services.command(word, help=sentence)(tell_replica)


_telling("cordon", "Let a replica finish what it holds and take nothing new.")
_telling("uncordon", "Let a replica take work again.")


@services.command("drain")
def drain_service(
    replica: Replica,
    reason: Reason = "",
    run: Run = LATEST,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Let a replica finish what it holds and leave, and wait until it is gone. Who supervises it may start it again."""
    from services.cli import tables

    asked = coordinator(run, url, token_file)
    begun = asked.post(f"/v1/services/{replica}/drain", {"reason": reason})
    tables.show_one(asked.finished(begun, _progress), as_json=as_json)


# ---------------------------------------------------------------- runs


_listing(runs, "runs", "/v1/runs", "List every run on this bus.")


@runs.command("delete")
def delete_run(run_id: RunId, run: Run = LATEST, url: Url = "", token_file: TokenFile = None) -> None:
    """Take a run that was registered over HTTP off the bus, with all that it has there. Its services must have ended."""
    coordinator(run, url, token_file).delete(f"/v1/runs/{quote(run_id, safe='')}")


# ---------------------------------------------------------------- dead letters


_listing(dead, "dead", "/v1/dead-letters", "List what could not be handled.")


@dead.command("show")
def show_dead(
    stream: Stream,
    entry: Entry,
    run: Run = LATEST,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter, decoded."""
    _get(f"/v1/dead-letters/{stream}/{entry}", run, url, token_file, as_json)


def _ending(word: str, sentence: str) -> None:
    def end(
        stream: Stream,
        entry: Entry,
        run: Run = LATEST,
        url: Url = "",
        token_file: TokenFile = None,
        as_json: AsJson = False,
    ) -> None:
        _post(f"/v1/dead-letters/{stream}/{entry}/{word}", run, url, token_file, as_json)

    dead.command(word, help=sentence)(end)


_ending("requeue", "Put a dead letter back onto its stream, to be tried again.")
_ending("discard", "Let a dead letter leave the run for good, counted.")


# ---------------------------------------------------------------- events


def events(
    run: Run = LATEST,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
    most: Most = 50,
) -> None:
    """Show what happened, newest first. `penstock tail` follows it."""
    from services.cli import tables

    tables.show("events", coordinator(run, url, token_file).items("/v1/events", most), as_json=as_json)


def page(run: Run = LATEST, url: Url = "", token_file: TokenFile = None) -> None:
    """Print a link to the page of a run: it opens it once, within five minutes, without a token."""
    from services.client.coordinator import find, page_link, read_token
    from services.up.display import console

    found = find(url, run)
    console.say(page_link(found, read_token(token_file, found, run)))


def tail(run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show what happens, as it happens, until Ctrl-C; with `--json` one JSON object a line."""
    from services.cli import tables
    from services.up.display import console

    for event in coordinator(run, url, token_file).events():
        console.say(json.dumps(event) if as_json else tables.event_line(event))


def _progress(detail: str) -> None:
    if sys.stderr.isatty():
        from services.up.display import console

        console.warn(detail)
