"""Commands that list and change coordinator resources (docs/api.md)."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Annotated, Any
from urllib.parse import quote

import typer

from penstock.services.cli.connection import LATEST, AsJson, Connection, Most, Reason, connected
from penstock.shared.errors import SettingsError
from penstock.shared.preflight.finding import Finding

LOOK, OPERATE = "Look at a run", "Operate a run"
Version = Annotated[int, typer.Argument(metavar="VERSION", min=0)]
Replica = Annotated[str, typer.Argument(metavar="REPLICA")]
Stream = Annotated[str, typer.Argument(metavar="STREAM")]
RunId = Annotated[str, typer.Argument(metavar="RUN_ID")]
Entry = Annotated[str, typer.Argument(metavar="ENTRY")]

Undo = Annotated[bool, typer.Option("--undo", help="Take it back.")]

policies, services, dead, runs = (typer.Typer(invoke_without_command=True) for _ in range(4))


def add_to(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(rich_help_panel=LOOK)(events)
    app.command(rich_help_panel=LOOK)(page)
    app.command(rich_help_panel="Tools")(doctor)
    for name, group in (("policies", policies), ("services", services), ("dead", dead), ("runs", runs)):
        app.add_typer(group, name=name, rich_help_panel=OPERATE)


def _add_list(group: typer.Typer, name: str, path: str, sentence: str) -> None:
    def show(connection: Connection, context: typer.Context, most: Most = 1000) -> None:
        if context.invoked_subcommand is None:
            connection.print_list(name, connection.coordinator().items(path, most))

    group.callback(help=f"{sentence}\n\n**Example:** `penstock {name}`")(connected(show))


# ---------------------------------------------------------------- policies


@policies.callback()
@connected
def list_policies(connection: Connection, context: typer.Context, most: Most = 1000) -> None:
    """List the newest policy versions, oldest first, each with the version that it was trained from.

    **Example:** `penstock policies --most 20`
    """
    if context.invoked_subcommand is not None:
        return
    from penstock.services.cli import tables

    reader = connection.reader()
    before = (reader.run().newest_version or 0) - most
    items = reader.items("/v1/policies", most, **({} if before < 0 else {"cursor": before}))
    tables.show("policies", items if connection.as_json else list(map(_short, items)), as_json=connection.as_json)


def _short(item: dict[str, Any]) -> dict[str, Any]:
    """Return a version with its accuracy on the first set, and its checkpoint's name for a path."""
    accuracy = next((each["accuracy"] for each in item.get("evaluations", ())), None)
    return {**item, "accuracy": accuracy, "checkpoint": item["checkpoint"] and PurePath(item["checkpoint"]).name}


@policies.command("show")
@connected
def show_policy(
    connection: Connection,
    version: Version,
    other: Annotated[int | None, typer.Argument(metavar="[OTHER]", min=0, show_default=False)] = None,
) -> None:
    """Show one version, or two side by side.

    **Examples:** `penstock policies show 40` · `penstock policies show 40 80`
    """
    connection.get(f"/v1/policies/{version}" + ("" if other is None else f"/compare/{other}"))


def _add_mark(word: str, undone: str, sentence: str) -> None:
    def mark(connection: Connection, version: Version, undo: Undo = False) -> None:
        connection.post(f"/v1/policies/{version}/{undone if undo else word}")

    policies.command(word, help=f"{sentence}\n\n**Example:** `penstock policies {word} 40`")(connected(mark))


_add_mark("pin", "unpin", "Protect a version's checkpoint from cleanup.")
_add_mark("release", "withdraw", "Mark a version as released.")


# ---------------------------------------------------------------- services


_add_list(services, "services", "/v1/services", "List every replica.")


@services.command("cordon")
@connected
def cordon_service(connection: Connection, replica: Replica, reason: Reason = "", undo: Undo = False) -> None:
    """Give a replica no new work; it finishes the work it has.

    **Example:** `penstock services cordon rollout-0`
    """
    connection.post(f"/v1/services/{replica}/{'uncordon' if undo else 'cordon'}", reason=reason)


@services.command("drain")
@connected
def drain_service(connection: Connection, replica: Replica, reason: Reason = "") -> None:
    """Let a replica finish the work it has and exit, and wait for that. Its supervisor may start it again.

    **Example:** `penstock services drain rollout-0`
    """
    coordinator = connection.coordinator()
    operation = coordinator.post(f"/v1/services/{replica}/drain", {"reason": reason})
    connection.print_item(coordinator.finished(operation, _progress))


# ---------------------------------------------------------------- runs


@runs.callback()
@connected
def list_runs(connection: Connection, context: typer.Context, most: Most = 1000) -> None:
    """List the runs in `runs/`, active or not, newest last. With `--url` or `--run`: those on that coordinator's bus.

    **Example:** `penstock runs`
    """
    if context.invoked_subcommand is not None:
        return
    if connection.url or connection.run != LATEST or not LATEST.parent.is_dir():
        items = connection.coordinator().items("/v1/runs", most)
    else:
        from penstock.services.cli.reports import local_runs

        items = local_runs.rows(LATEST.parent, most)
    connection.print_list("runs", items)


@runs.command("delete")
@connected
def delete_run(connection: Connection, run_id: RunId) -> None:
    """Delete a run that was registered over HTTP, with all its data on the bus. Its services must have ended.

    **Example:** `penstock runs delete my-run`
    """
    connection.coordinator().delete(f"/v1/runs/{quote(run_id, safe='')}")


# ---------------------------------------------------------------- dead letters


_add_list(dead, "dead", "/v1/dead-letters", "List dead letters: messages that could not be handled.")


@dead.command("show")
@connected
def show_dead(connection: Connection, stream: Stream, entry: Entry) -> None:
    """Show one dead letter, decoded.

    **Example:** `penstock dead show rollouts 1700000000000-0`
    """
    connection.get(f"/v1/dead-letters/{stream}/{entry}")


def _add_ending(word: str, sentence: str) -> None:
    def end(connection: Connection, stream: Stream, entry: Entry) -> None:
        connection.post(f"/v1/dead-letters/{stream}/{entry}/{word}")

    example = f"**Example:** `penstock dead {word} rollouts 1700000000000-0`"
    dead.command(word, help=f"{sentence}\n\n{example}")(connected(end))


_add_ending("requeue", "Put a dead letter back onto its stream, to be tried again.")
_add_ending("discard", "Remove a dead letter from the run and count it as lost.")


# ---------------------------------------------------------------- events


@connected
def events(
    connection: Connection,
    most: Most = 50,
    follow: Annotated[bool, typer.Option("--follow", help="Print new events until Ctrl-C.")] = False,
) -> None:
    """List events, newest first. Those of a run that has ended are read from its folder.

    **Examples:** `penstock events --most 20` · `penstock events --follow --json`
    """
    if follow:
        _follow(connection)
    else:
        connection.print_list("events", connection.reader().items("/v1/events", most))


def _follow(connection: Connection) -> None:
    from penstock.services.cli import tables
    from penstock.services.up.display import console

    for event in connection.coordinator().events():
        console.say(json.dumps(event) if connection.as_json else tables.event_line(event))


@connected
def page(connection: Connection) -> None:
    """Print a link to the page of a run. It opens the page once, within five minutes, without a token.

    The page of a run that has ended is served from its folder, on this machine only, until Ctrl-C.

    **Example:** `penstock page`
    """
    ended = connection.ended_run()
    if ended is not None:
        ended.show_page(connection.print_link)
    else:
        connection.print_link(connection.page_link())


def doctor(
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", metavar="RELEASE", help="Check this Helm release through kubectl, instead of this machine."
        ),
    ] = "",
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="The release's namespace. Default: kubectl's.")
    ] = "",
    links: Annotated[
        Path | None,
        typer.Option(
            "--links",
            metavar="TOML",
            help="Measure latency and bandwidth from here to the bus, trainer and replicas of this run.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, or a release in a cluster; each fault is one sentence with its fix.

    Of this machine: the NVIDIA driver, shared memory, and whether CUDA MPS runs. Of a release: pods that do not start; and, inside of those that
    run, the bus, its memory limit, clocks, and whether pods see one another's files.

    **Examples:** `penstock doctor` · `penstock doctor --links my-run.toml` · `penstock doctor --cluster my-run --namespace research`
    """
    from penstock.services.up.display import console
    from penstock.shared.preflight import node, release

    if cluster:
        findings: Iterable[Finding] = release.examine(release.Kubectl(namespace), cluster)
    elif links is not None:
        findings = _links(links)
    else:
        findings = [node.graphics(), node.shared_memory(1 << 30), node.sharing()]
    failures = 0
    for finding in findings:
        failures += not finding.ok
        mark = "ok  " if finding.ok else "FAIL"
        console.say(finding.line() if as_json else f"{mark} {finding.check}: {finding.sentence}")
    raise typer.Exit(1 if failures else 0)


def _links(config: Path) -> list[Finding]:
    import asyncio

    from penstock.shared.preflight.links import links
    from penstock.shared.settings import load

    settings = load(config)
    if not settings.run.id:
        raise SettingsError(f"expected run.id in {config} with --links, by which processes find their run: set it")
    return asyncio.run(links(settings.bus.url, settings.run.id))


def _progress(detail: str) -> None:
    if sys.stderr.isatty():
        from penstock.services.up.display import console

        console.warn(detail)
