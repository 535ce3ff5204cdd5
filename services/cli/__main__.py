"""The ``penstock`` command line: start, show and steer runs.

``up``, ``plan``, ``report``, ``settings``, ``audit-rewards`` and offline ``export`` work on files; other commands use the HTTP
API.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from penstock.services.cli import commands
from penstock.services.cli.cluster import commands as cluster_commands
from penstock.services.cli.commands import LOOK, OPERATE, Version
from penstock.services.cli.connection import (
    LATEST,
    AsJson,
    Connection,
    Reason,
    RunArgument,
    RunOption,
    TokenFile,
    Url,
    Words,
    WordsOrNone,
    connected,
    existing,
    named,
    split,
)
from penstock.services.cli.policy import commands as policy_commands
from penstock.services.up.display import console
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.extras import advice_on

if TYPE_CHECKING:
    from penstock.services.up.prepare import Prepared

_EVENTS = 5
_RUN, _TOOLS = "Run", "Tools"
_MOVED = {
    "dpo": "sft CONFIG --data.completion_field COLUMN --data.rejected_field COLUMN",
    "calibrate": "plan CONFIG --calibrate RUN",
    "memory": "plan --memory RUN",
    "start": "resume",
    "tail": "events --follow",
    "diff": "report RUN --against RUN",
    "policies compare": "policies show VERSION OTHER",
    "policies unpin": "policies pin VERSION --undo",
    "policies withdraw": "policies release VERSION --undo",
    "services uncordon": "services cordon REPLICA --undo",
    **{f"{group} list": group for group in ("policies", "services", "dead", "runs")},
}
"""Commands of earlier versions, or of other tools, and what to type instead."""

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help=(
        "Asynchronous RL post-training for language models.\n\n"
        "**Example:** `penstock up config/arithmetic.toml` trains a tiny model on this machine's CPU. For your own data "
        "begin with `penstock new my-run.toml`. `penstock COMMAND --help` has examples.\n\n"
        "Exit codes: 0 done, 1 failed or refused, 2 wrong usage, settings or RUN, 130 Ctrl-C (continue with `up --resume`)."
    ),
)
data = typer.Typer(help="Examine the data of a run.", no_args_is_help=True)
app.add_typer(data, name="data", rich_help_panel=_TOOLS)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        console.say(f"penstock {_version()}")
        raise typer.Exit


@app.command(rich_help_panel=_RUN, context_settings={"ignore_unknown_options": True})
def up(
    words: WordsOrNone = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Continue the run in this folder, with its settings or those of CONFIG.",
            show_default=False,
        ),
    ] = None,
    start_from: Annotated[
        str,
        typer.Option("--from", metavar="RUN[@STEP]", help="Begin with the weights of another run's checkpoint."),
    ] = "",
    optimizer: Annotated[bool, typer.Option("--optimizer", help="With --from: continue its optimizer too.")] = False,
    accept_changed_inputs: Annotated[
        bool,
        typer.Option("--accept-changed-inputs", help="With --resume: continue with data or models that have changed."),
    ] = False,
    prometheus: Annotated[
        bool,
        typer.Option("--prometheus", help="Also run the local Prometheus, with its data in the run's folder."),
    ] = False,
) -> None:
    """Start a run on this machine and supervise it until it ends.

    Starts an embedded Valkey (unless `bus.url` names a server), the coordinator, the rollout and reward replicas and the
    trainer, each as a process. Restarts a process that dies. Stops all of them in order on Ctrl-C (twice: at once).
    Everything is written to `runs/<run id>/`; `runs/latest` links to the newest run.

    **Examples**

    `penstock up config/arithmetic.toml`

    `penstock up config/arithmetic.toml --run.steps 50 --rollout.replicas 3`

    `penstock up --resume runs/latest`

    `penstock up my-run.toml --resume runs/latest`

    `penstock up stage-2.toml --from runs/stage-1@400 --optimizer`

    `penstock up config/arithmetic.toml --prometheus`

    `PENSTOCK__BUS__URL=rediss://:secret@host:6379 penstock up my-run.toml`
    """
    from penstock.services.up import leftovers, prepare
    from penstock.services.up.continuation import RunEnded
    from penstock.services.up.display import summary
    from penstock.services.up.metrics.prometheus import find_program

    if prometheus:
        find_program()
    config, flags = split(words or [])
    try:
        if start_from or optimizer:
            from penstock.services.cli.policy.start_from import prepared_from

            prepared = prepared_from(config, resume, flags, start_from, optimizer=optimizer)
        else:
            prepared = prepare.prepare(config, resume, flags, accept_changed_inputs=accept_changed_inputs)
    except RunEnded as error:
        console.say(f"{error}\n\n{summary.text(error.folder, resumable=False)}")
        leftovers.check_ended(error.folder)
        raise typer.Exit from error
    _supervise("up", prepared, prometheus=prometheus)


def _supervise(command: str, prepared: "Prepared", *, prometheus: bool = False) -> NoReturn:
    from penstock.services.up import leftovers, run
    from penstock.services.up.display import summary
    from penstock.services.up.supervisor import INTERRUPTED, TERMINATED

    ended = run.go(prepared, run.plans_with_prometheus if prometheus else run.service_plans)
    ending = leftovers.judge(prepared, ended)
    if not ended.sentence:
        interrupted = ending.code in (INTERRUPTED, TERMINATED)
        console.say(f"\n{summary.text(prepared.folder, interrupted)}")
    if ending.sentence:
        console.warn(f"logs: {prepared.folder / 'logs'}")
        console.warn(f"penstock {command}: {ending.sentence}")
    raise typer.Exit(ending.code)


@app.command(rich_help_panel=_RUN, context_settings={"ignore_unknown_options": True})
def sft(
    words: Words = None,
    epochs: Annotated[
        float | None,
        typer.Option("--epochs", min=0.0, metavar="N", help="Passes over the data, instead of `run.steps`."),
    ] = None,
) -> None:
    """Train on demonstrations, with the cross-entropy of completions, or on preference pairs, with DPO.

    Starts the coordinator and the trainer, no rollout and no reward service. Rows have a completion beside their prompt
    (`data.completion_field`). With `data.rejected_field`, the column of a worse completion, they are preference pairs,
    and the algorithm is the preset `dpo`. With `evaluation.path`, steps report the loss on held-out rows. Continue an
    interrupted run with `penstock up --resume`; start reinforcement learning with `penstock up CONFIG --from RUN`.

    **Examples**

    `penstock sft my-run.toml --data.path demonstrations.jsonl --epochs 2`

    `penstock sft my-run.toml --data.path pairs.jsonl --data.completion_field chosen --data.rejected_field rejected`
    """
    from penstock.services.cli import supervised

    config, flags = split(words or [])
    _supervise("sft", supervised.prepared(config, flags, epochs))


@app.command(rich_help_panel=_RUN, context_settings={"ignore_unknown_options": True})
def new(
    words: Annotated[
        list[str],
        typer.Argument(metavar="FILE [--TABLE.SETTING VALUE]...", help="The new TOML file, and its settings."),
    ],
    environment: Annotated[
        bool,
        typer.Option(
            "--environment", help="Write a folder: an environment of episodes, its test, rows and `run.toml`."
        ),
    ] = False,
) -> None:
    """Write a run's TOML file: the settings given, and the other common ones as comments.

    **Examples:** `penstock new my-run.toml --policy.model models/my-model --data.path hf://owner/name:train` ·
    `penstock new my-agent --environment`
    """
    from penstock.services.cli import new_run

    new_run.make(*split(words), environment=environment)


@app.command(rich_help_panel=_RUN)
@connected
def pause(
    connection: Connection,
    drain: Annotated[bool, typer.Option("--drain", help="Wait until no group is generated or scored.")] = False,
    reason: Reason = "",
) -> None:
    """Pause a run: no new prompts are admitted; groups under way finish.

    **Example:** `penstock pause --drain --reason "maintenance"`
    """
    _steer(connection, "pause", reason=reason, mode="drain" if drain else "admission")


@app.command(rich_help_panel=_RUN)
@connected
def resume(connection: Connection, reason: Reason = "") -> None:
    """Continue a paused run, or start one that waits (`coordinator.autostart = false`).

    If its `penstock up` has ended, use `penstock up --resume`.

    **Example:** `penstock resume`
    """
    waits = connection.coordinator().run().state == "created"
    _steer(connection, "start" if waits else "resume", reason=reason)


@app.command(rich_help_panel=_RUN)
@connected
def stop(connection: Connection, reason: Reason = "") -> None:
    """End a run for good before its last step, with checkpoint, summary and report; `penstock export` writes its policy.

    **Example:** `penstock stop --reason "good enough"`
    """
    _steer(connection, "stop", reason=reason)


@app.command(rich_help_panel=LOOK)
@connected
def status(connection: Connection) -> None:
    """Show a run: state, figures, replicas and newest events. Of a run that has ended: its summary, from its folder.

    **Examples:** `penstock status` · `penstock status --run runs/arithmetic-…` · `penstock status --json | jq .step`
    """
    from penstock.services.up.display import view

    if connection.as_json:
        console.say(connection.reader().run_json())
        return
    if (ended := connection.ended_run()) is not None:
        ended.show_status()
        return
    coordinator = connection.coordinator()
    seen, replicas = coordinator.run(), coordinator.replicas()
    lines = [view.event_line(event) for event in coordinator.newest_events(_EVENTS)]
    rows = [view.row_of(replica) for replica in replicas]
    console.show(view.screen(f"penstock · {seen.run_id}", seen, rows, lines))


cluster_commands.add_to(app, _RUN)
commands.add_to(app)
policy_commands.add_to(app)


@app.command(rich_help_panel=OPERATE)
@connected
def rollback(connection: Connection, version: Version, reason: Reason = "") -> None:
    """Return a run to a version with a checkpoint.

    Weights, optimizer, step and position in the dataset are restored. Every later version of its branch is revoked, and
    no group that they generated is trained on. `penstock policies` shows which versions have a checkpoint.

    **Example:** `penstock rollback 40 --reason "reward fell"`
    """
    coordinator, printed = connection.coordinator(), set[str]()

    def report_progress(detail: str) -> None:
        if detail and detail not in printed and not connection.as_json:
            console.warn(detail)
        printed.add(detail)

    operation = coordinator.post(f"/v1/policies/{version}/rollback", {"reason": reason})
    ended = coordinator.finished(operation, report_progress)
    if connection.as_json:
        console.say_json(ended)
        return
    result = ended["result"]
    console.say(
        f"version {version} is live again, as version {result['version']}: {result['revoked']} versions revoked, "
        f"{result['undone']} trained groups undone"
    )


@app.command(rich_help_panel=OPERATE)
def export(
    run: RunArgument = LATEST,
    run_option: RunOption = None,
    version: Annotated[
        str, typer.Option(metavar="N|latest", help="The policy version; `latest` is the newest available.")
    ] = "latest",
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A new or empty folder. Default: `exports/` of the run.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Export the LoRA adapter alone, not merged.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Read the run's files, even if the run is active.")] = False,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a policy version in Hugging Face form (config, safetensors, tokenizer).

    The trainer of an active run writes it beside its steps; this command reads the files of any other run. Available are
    version 0 and the versions that have a snapshot or a checkpoint.

    **Examples:** `penstock export latest` · `penstock export --version 40 --to my-model` · `penstock export runs/… --version 40 --to my-adapter --adapter`
    """
    from penstock.services.cli import export as exports

    number, run = exports.number(version), named(run_option or run)
    if (coordinator := None if here else exports.find_alive(run, url, token_file)) is not None:
        exported = exports.ask(coordinator, number, to, adapter=adapter)
    else:
        exported = exports.make(run, number, to, adapter=adapter)
    if as_json:
        console.say_json(exported)
    else:
        console.say(f"version {exported['version']} (step {exported['step']}): {exported['folder']}")


@app.command(rich_help_panel=_TOOLS, context_settings={"ignore_unknown_options": True})
def plan(
    words: WordsOrNone = None,
    gpus: Annotated[
        str,
        typer.Option("--gpus", "--nodes", metavar="GPUS", help="Such as 4x80GiB or 8x8xH100.", show_default="8xH200"),
    ] = "",
    model: Annotated[
        str, typer.Option("--model", metavar="SHAPE", help="A known shape such as 70b, instead of policy.model.")
    ] = "",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate", metavar="RUN", help="Correct the rates by an earlier run on such GPUs: its folder."
        ),
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            "--memory", metavar="RUN", help="Show what a run held on its devices, beside what is planned for it."
        ),
    ] = None,
    turns: Annotated[
        str, typer.Option("--turns", metavar="N,TOKENS,SECONDS", help="Of an episode (docs/plan.md).")
    ] = "",
    sft: Annotated[bool, typer.Option("--sft", help="Plan what `penstock sft` starts.")] = False,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write the fastest layout as a run's TOML file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what fits on GPUs and how fast it is, and compare layouts. Needs no GPU and no weights.

    **Examples**

    `penstock plan my-run.toml --gpus 8xH200,2000GiB` (with the memory of a host)

    `penstock plan --model 70b --gpus 8x8xH100 --sampling.max_new_tokens 8192 --json`

    `penstock plan my-run.toml --gpus 4x80GiB --calibrate runs/latest --write planned.toml`

    `penstock plan --memory runs/latest`
    """
    from penstock.services.cli import plan as plans
    from penstock.shared.settings import load

    if memory is not None:
        from penstock.services.cli.reports import memory as memories

        memories.show(named(memory), words or gpus or model or calibrate or turns or sft or write, as_json=as_json)
        return
    config, flags = split(words or [])
    if sft:
        from penstock.services.cli.supervised import as_supervised

        flags = as_supervised(config, flags)
    made = plans.make(load(config, flags), plans.with_host_memory(gpus or "8xH200"), model, calibrate, turns)
    plans.show(made, as_json=as_json)
    if write is not None:
        plans.write(made, config, flags, write)
    raise typer.Exit(0 if made.candidates else 1)


@app.command(rich_help_panel=_TOOLS)
def report(
    run: RunArgument = LATEST,
    run_option: RunOption = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            "--against", metavar="RUN", help="Compare with this run instead; again for more.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write `report.html` of a run from its records, at any time, or compare runs.

    `--against` compares settings, curves over the steps that all have, and recorded rollouts for the same prompts, and
    writes `overlay.html`, in which the runs' curves are drawn over one another.

    **Examples:** `penstock report runs/latest` · `penstock report runs/math-a --against runs/math-b`
    """
    run = named(run_option or run)
    if against:
        from penstock.services.cli.reports import diff

        diff.compare([run, *map(named, against)], as_json=as_json)
        return
    from penstock.services.coordinator.records.report import write_report

    try:
        console.say(str(write_report(existing(run))))
    except OSError as error:
        raise PenstockError(f"could not write the report in {run}: {error}") from error


@data.command("check", context_settings={"ignore_unknown_options": True})
def check_data(
    words: Words = None,
    shown: Annotated[int, typer.Option("--prompts", min=0, metavar="N", help="Prompts to show.")] = 3,
) -> None:
    """Show what a run will be trained on: bad rows, rendered prompts, their lengths, and what the scorers say of a few.

    Judges and reward models are not asked. Exit codes: 0 the data can be used, 1 a prompt cannot be generated or scored,
    2 the settings, the data or a scorer are refused.

    **Examples**

    `penstock data check my-run.toml --prompts 5`

    `penstock data check my-run.toml --data.path demonstrations.jsonl --algorithm.loss cross_entropy`
    """
    from penstock.services.cli.reports import data_check
    from penstock.shared.settings import load

    config, flags = split(words or [])
    if config is None:
        raise SettingsError("the settings file is missing: penstock data check my-run.toml")
    raise typer.Exit(0 if data_check.check(load(config, flags), shown) else 1)


@app.command("audit-rewards", rich_help_panel=_TOOLS)
def audit_rewards(
    run: RunArgument = LATEST,
    run_option: RunOption = None,
    sample: Annotated[int, typer.Option("--sample", min=1, metavar="N", help="The number of groups to sample.")] = 100,
    above: Annotated[
        float | None,
        typer.Option("--above", metavar="R", help="The minimum reward of a completion. Default: half of the maximum."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="The seed of the sample and of the tests' order.")
    ] = 0,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Score a sample of rewarded completions again with stricter scorers, and list the disagreements.

    Programs run in a separate executor. Judges and reward models are not asked again. docs/rewards.md, "Audit", explains
    the result. Exit codes: 0 no disagreement, 1 disagreements, 2 the audit could not be made.

    **Examples:** `penstock audit-rewards latest` · `penstock audit-rewards runs/math-… --sample 500 --above 0.9 --json`
    """
    from penstock.services.cli.reports import audit_rewards as audits
    from penstock.shared.settings import load_run

    try:
        settings = load_run(named(run_option or run))
        audited = audits.make(settings, url, token_file, above=above, count=sample, seed=seed)
    except PenstockError as error:
        raise SettingsError(str(error)) from error
    if as_json:
        audits.say_json(audited, settings)
    else:
        audits.show(audited, settings)
    raise typer.Exit(1 if audited.disagreements else 0)


@app.command(rich_help_panel=_TOOLS)
def settings(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION | NAME]...", help="Explain these sections, or these settings.", show_default=False
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Explain all settings.")] = False,
) -> None:
    """Print the settings that most runs set, with their defaults, or explain others.

    **Examples:** `penstock settings` · `penstock settings trainer` · `penstock settings max_lag group_size` · `penstock settings --all`
    """
    from penstock.services.cli import settings_help

    if not (names or every):
        settings_help.show_common(Console())
        return
    matching = {name: settings_help.matching(name) for name in names or ()}
    if unknown := next((name for name, entries in matching.items() if not entries), None):
        raise SettingsError(f"no setting's name contains {unknown!r}: try `penstock settings --all`")
    entries = [entry for entries in matching.values() for entry in entries] if matching else settings_help.entries()
    settings_help.show(entries, Console())


def _steer(connection: Connection, command: str, **body: str) -> None:
    coordinator = connection.coordinator()
    answer = coordinator.post(f"/v1/run/{command}", body)
    if "kind" in answer:
        answer = coordinator.finished(answer, lambda detail: None)
    if connection.as_json:
        console.say_json(answer)
        return
    seen = coordinator.run()
    console.say(f"{seen.run_id}: {seen.state}, step {seen.step} of {seen.steps}")


def _refuse_moved(words: list[str]) -> None:
    """Raise SettingsError with what to type instead of a command of an earlier version."""
    for count in (1, 2):
        if (now := _MOVED.get(" ".join(words[:count]))) is not None:
            raise SettingsError(f"there is no such command: use `penstock {now}`")


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
        _refuse_moved(words)
        app(args=words, prog_name="penstock")
    except PenstockError as error:
        console.warn(f"penstock {command}: {error}")
        return 2 if isinstance(error, SettingsError) else 1
    except ImportError as error:
        if not (advice := advice_on(error)):
            raise
        console.warn(f"penstock {command}: {error}: {advice}")
        return 2
    except OSError as error:
        if error.filename is None:  # not about a file that the user named
            raise
        console.warn(f"penstock {command}: could not use {error.filename}: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def command_line() -> NoReturn:
    """Run, and exit at once without libraries' exit output."""
    code = main()
    if "torch" in sys.modules:
        from penstock.shared.process.service import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    command_line()
