"""``penstock chat``, ``penstock eval`` and ``penstock push``."""

import re
from typing import Annotated

import typer

from penstock.services.cli.connection import LATEST, AsJson, RunArgument, RunOption, TokenFile, Url, named, split
from penstock.shared.errors import SettingsError

_PANEL = "Use a policy"
VersionOption = Annotated[
    str, typer.Option("--version", metavar="N|latest", help="A stored policy version; `latest` is the newest.")
]


def add_to(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.command(rich_help_panel=_PANEL)(chat)
    app.command("eval", rich_help_panel=_PANEL, context_settings={"ignore_unknown_options": True})(evaluate)
    app.command(rich_help_panel=_PANEL)(push)


def chat(
    run: RunArgument = LATEST,
    run_option: RunOption = None,
    version: Annotated[
        str,
        typer.Option(
            "--version", metavar="N|latest", help="A stored version. Default: the live policy of an active run."
        ),
    ] = "",
    ask: Annotated[str, typer.Option("--ask", metavar="TEXT", help="Print the answer to this and exit.")] = "",
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="A system message.")] = "",
    plain: Annotated[
        bool, typer.Option("--plain", help="Send the text itself, without chat template and earlier messages.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, metavar="N", help="Default: the run's setting.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, metavar="T", help="Default: the run's setting.")
    ] = None,
    url: Url = "",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a policy: the live one of an active run, through its replicas, or a stored version, on this machine.

    Reads one message per line until the end of the input.

    `--plain` is for base models, which have no chat template.

    **Examples:** `penstock chat` · `penstock chat runs/math-… --version 40` · `penstock chat --plain --ask "12+34="`
    """
    from penstock.services.cli.policy import chat as chats

    asked = chats.Asked(system, plain, max_new_tokens, temperature, as_json)
    chats.talk(chats.open_policy(named(run_option or run), version, url, token_file), asked, ask)


def evaluate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | CONFIG] [--TABLE.SETTING VALUE]...",
            help="A run's folder or a TOML file, and settings to override.",
            show_default=False,
        ),
    ] = None,
    run_option: RunOption = None,
    version: VersionOption = "latest",
    problems: Annotated[
        int | None, typer.Option("--problems", min=1, metavar="N", help="Problems of a set. Default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a stored policy on held-out sets, with the run's scorers. No run is needed.

    With a run's folder: a version of its policy. With a TOML file: its `policy.model`. Completions are generated on this
    machine by transformers.

    **Examples**

    `penstock eval runs/latest --version 40`

    `penstock eval my-run.toml --policy.model my-model --evaluation.path heldout.jsonl --json`
    """
    from penstock.services.cli.policy import evaluate as evaluations

    source, flags = split(words or [])
    evaluations.run(named(run_option or source or LATEST), flags, version, problems, as_json=as_json)


def push(
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The model's repository on the hub.")],
    run: RunArgument = LATEST,
    run_option: RunOption = None,
    version: VersionOption = "latest",
    public: Annotated[
        bool, typer.Option("--public", help="Create a repository that everybody may read. Default: a private one.")
    ] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Upload the LoRA adapter alone, not merged.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a policy version to a Hugging Face hub, with a model card of its settings, curves and ledger.

    The token is the hub's own: `HF_TOKEN`, or `hf auth login`. `HF_ENDPOINT` names another hub. One commit holds all
    files. A new repository is private; one that exists stays as it is. Of the settings, numbers, choices and the names of
    model and data are uploaded.

    **Example:** `penstock push my-name/my-model runs/math-… --version 40`
    """
    from penstock.services.cli.policy import push as pushes

    if re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", repository, re.ASCII) is None:
        raise SettingsError(
            f"expected OWNER/NAME of a model on the hub, each of letters, digits, '-', '_' and '.', found {repository!r}: "
            "change it"
        )
    pushes.push(repository, named(run_option or run), version, private=not public, adapter=adapter, as_json=as_json)
