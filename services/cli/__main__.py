"""penstock: the command line. Starts a whole run, and looks at, pauses and stops one that goes on.

Every command but ``up``, ``report`` and ``settings`` is a thin client of the coordinator's HTTP API; ``export`` is one while the run goes on.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from services.cli import commands
from services.cli.commands import LATEST, AsJson, Reason, Run, TokenFile, Url, Version, coordinator
from services.up.display import console
from shared.errors import PenstockError, SettingsError

if TYPE_CHECKING:
    from services.client.coordinator import CoordinatorClient

_EVENTS = 5
"""How many of the newest events `penstock status` shows."""

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help=(
        "Asynchronous RL post-training for language models, as a message-bus system.\n\n"
        "**Try it:** `penstock up config/arithmetic.toml` trains a tiny model on this machine's CPU; "
        "meanwhile, in another terminal, `penstock status`, `penstock pause`, `penstock resume`.\n\n"
        "**Your own data:** copy `config/own-data.toml`, set `policy.model` and `data.path`, and start it with `penstock up`. "
        "`penstock settings` explains every setting.\n\n"
        "Exit codes: 0 done, 1 no answer or refused, 2 wrong settings, 130 interrupted (go on with `up --resume`)."
    ),
)

commands.add_to(app)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        console.say(f"penstock {_version()}")
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": True})
def up(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [--TABLE.SETTING VALUE]...",
            help="The run's TOML file, and any settings to override.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN_FOLDER", help="Go on with the run in this folder instead.", show_default=False),
    ] = None,
    prometheus: Annotated[
        bool,
        typer.Option("--prometheus", help="Run the local Prometheus beside it, with its data in the run's folder."),
    ] = False,
) -> None:
    """Start a whole run on this machine and look after it until it ends.

    Starts an embedded Valkey (unless `bus.url` names a server), the coordinator, the rollout and reward replicas and the
    trainer, each as its own process; starts one again that dies; stops all in order on Ctrl-C (twice: at once).
    Everything the run leaves lies in `runs/<run id>/`, and `runs/latest` leads to the newest.

    **Examples**

    `penstock up config/arithmetic.toml`

    `penstock up config/arithmetic.toml --run.steps 50 --rollout.replicas 3`

    `penstock up --resume runs/latest`

    `penstock up config/arithmetic.toml --prometheus`

    `PENSTOCK__BUS__URL=rediss://:secret@host:6379 penstock up my-run.toml`
    """
    from services.up import prepare, run
    from services.up.display import summary
    from services.up.metrics.prometheus import find_program

    if prometheus:
        find_program()
    config, flags = _split(words or [])
    prepared = prepare.prepare(config, resume, flags)
    ending = run.go(prepared, run.plans_with_prometheus if prometheus else run.service_plans)
    if ending.sentence:
        console.warn(f"penstock up: {ending.sentence}")
        console.warn(f"logs: {prepared.folder / 'logs'}")
    else:
        interrupted = ending.code in (run.INTERRUPTED, run.TERMINATED)
        console.say(f"\n{summary.text(prepared.folder, interrupted)}")
    raise typer.Exit(ending.code)


@app.command()
def status(run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show what a run does now.

    **Examples:** `penstock status` · `penstock status --run runs/arithmetic-…` · `penstock status --json | jq .step`
    """
    from services.up.display import view

    asked = coordinator(run, url, token_file)
    if as_json:
        console.say(asked.run_json())
        return
    seen, replicas = asked.run(), asked.replicas()
    happened = [view.event_line(event) for event in asked.newest_events(_EVENTS)]
    rows = [view.row_of(replica) for replica in replicas]
    console.show(view.screen(f"penstock · {seen.run_id}", seen, rows, happened))


@app.command()
def start(
    reason: Reason = "", run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Start a run that waits (`coordinator.autostart = false`)."""
    _steer("start", {"reason": reason}, coordinator(run, url, token_file), as_json)


@app.command()
def pause(
    drain: Annotated[bool, typer.Option("--drain", help="Wait until nothing is generated or scored any more.")] = False,
    reason: Reason = "",
    run: Run = LATEST,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Pause: nothing more is admitted, running groups finish. `penstock resume` goes on exactly there."""
    body = {"reason": reason, "mode": "drain" if drain else "admission"}
    _steer("pause", body, coordinator(run, url, token_file), as_json)


@app.command()
def resume(
    reason: Reason = "", run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Go on after a pause. (A run whose `penstock up` has ended goes on with `penstock up --resume`.)"""
    _steer("resume", {"reason": reason}, coordinator(run, url, token_file), as_json)


@app.command()
def stop(
    reason: Reason = "", run: Run = LATEST, url: Url = "", token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """End a run for good, before its last step; summary and report are written. Ctrl-C on `up` only interrupts it."""
    _steer("stop", {"reason": reason}, coordinator(run, url, token_file), as_json)


@app.command()
def rollback(
    version: Version,
    reason: Reason = "",
    run: Run = LATEST,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Take a run back to a version with a checkpoint: weights, optimizer, step and place in the dataset.

    Every later version of its branch is revoked, and nothing that it generated is trained on. `penstock policies` shows which
    versions have a checkpoint.

    **Example:** `penstock rollback 40 --reason "reward fell"`
    """
    asked = coordinator(run, url, token_file)

    def tell(detail: str) -> None:
        if detail and not as_json:
            console.warn(detail)

    done = asked.finished(asked.post(f"/v1/policies/{version}/rollback", {"reason": reason}), _once(tell))
    if as_json:
        console.say_json(done)
        return
    found = done["result"]
    console.say(
        f"version {version} is live again, as version {found['version']}: {found['revoked']} versions revoked, "
        f"{found['undone']} trained groups undone"
    )


@app.command()
def report(run: Run = LATEST) -> None:
    """Write the run's report.html anew from its records, also while it goes on.

    **Example:** `penstock report --run runs/latest`
    """
    from services.coordinator.records.report import write_report

    if not run.is_dir():
        raise PenstockError(f"expected a run's folder, found none at {run}: give --run RUN_FOLDER")
    try:
        console.say(str(write_report(run)))
    except OSError as error:
        raise PenstockError(f"expected to write the report in {run}, found: {error}") from error


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="[RUN]", help="The run's folder, its settings file, or `latest`.")
    ] = LATEST,
    version: Annotated[
        str,
        typer.Option(metavar="N|latest", help="Which version of the policy; `latest`: the newest that is there."),
    ] = "latest",
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write; new or empty. Default: exports/ of the run.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapter alone, not merged.")] = False,
    here: Annotated[bool, typer.Option("--here", help="From the run's files, whether or not the run goes on.")] = False,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a version of the policy in Hugging Face form (config, safetensors, tokenizer), as replicas got it.

    While the run goes on its trainer writes it, beside its steps; a run that is over is read from its files, here. For the versions that
    still have a snapshot or a checkpoint, and for 0.

    **Examples:** `penstock export latest` · `penstock export --version 40 --to my-model` · `penstock export runs/… --version 40 --to my-adapter --adapter`
    """
    from services.cli import export as exports

    wanted, run = exports.number(version), LATEST if str(run) == LATEST.name and not run.exists() else run
    if (asked := None if here else exports.find_alive(run, url, token_file)) is not None:
        found = exports.ask(asked, wanted, to, adapter=adapter)
    else:
        found = exports.make(run, wanted, to, adapter=adapter)
    if as_json:
        console.say_json(found)
    else:
        console.say(f"version {found['version']} (step {found['step']}): {found['folder']}")


@app.command("audit-rewards")
def audit_rewards(
    run: Annotated[
        Path, typer.Argument(metavar="[RUN]", help="The run's folder, its settings file, or `latest`.")
    ] = LATEST,
    sample: Annotated[int, typer.Option("--sample", min=1, metavar="N", help="Number of groups to look at.")] = 100,
    above: Annotated[
        float | None,
        typer.Option(
            "--above", metavar="R", help="Look at completions with at least this reward. Default: half of the largest."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the sample and of the order of tests.")] = 0,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Judge a sample of a run's rewarded completions again, more strictly, and list what the stricter scorers doubt.

    Programs run in an executor of the audit's own. Judges and reward models are not asked again. docs/rewards.md, "Audit", says how to
    read it. Exit codes: 0 no disagreement, 1 disagreements, 2 the audit could not be made.

    **Examples:** `penstock audit-rewards latest` · `penstock audit-rewards runs/math-… --sample 500 --above 0.9 --json`
    """
    from services.cli import audit_rewards as audits

    try:
        source = audits.source_of(LATEST if str(run) == LATEST.name and not run.exists() else run, url, token_file)
        found = audits.make(source, above=above, count=sample, seed=seed)
    except PenstockError as error:
        raise SettingsError(str(error)) from error
    if as_json:
        audits.say_json(found, source.settings)
    else:
        audits.show(found, source.settings)
    raise typer.Exit(1 if found.disagreements else 0)


@app.command()
def settings(
    name: Annotated[
        str, typer.Argument(metavar="[SECTION | NAME]", help="Explain this section, or these settings.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Explain all settings.")] = False,
) -> None:
    """Print the settings that most runs set, with their defaults, or explain others.

    **Examples:** `penstock settings` · `penstock settings trainer` · `penstock settings max_lag` · `penstock settings --all`
    """
    from services.cli import settings_help

    if not (name or every):
        settings_help.show_common(Console())
        return
    entries = settings_help.matching(name) if name else settings_help.entries()
    if not entries:
        raise PenstockError(f"no setting's name contains {name!r}: try `penstock settings --all`")
    settings_help.show(entries, Console())


def _steer(command: str, body: dict[str, str], asked: "CoordinatorClient", as_json: bool) -> None:
    answer = asked.post(f"/v1/run/{command}", body)
    if "kind" in answer:
        answer = asked.finished(answer, lambda detail: None)
    if as_json:
        console.say_json(answer)
        return
    seen = asked.run()
    console.say(f"{seen.run_id}: {seen.state}, step {seen.step} of {seen.steps}")


def _once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Tell each thing once, however often it is heard."""
    heard: set[str] = set()

    def tell_new(text: str) -> None:
        if text not in heard:
            heard.add(text)
            tell(text)

    return tell_new


def _split(words: list[str]) -> tuple[Path | None, list[str]]:
    """Part the settings file from the flags, wherever it stands among them."""
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


def _version() -> str:
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), "")
    try:
        app(args=words, prog_name="penstock")
    except PenstockError as error:
        console.warn(f"penstock {command}: {error}")
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def command_line() -> NoReturn:
    """Run the command line and end the process; a library that was loaded for an export adds no last words of its own."""
    code = main()
    if "torch" in sys.modules:
        from shared.process.service import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    command_line()
