"""``penstock chat``: a conversation with the live policy or a stored version."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.services.cli import export
from penstock.services.client.policy import LivePolicy, Policy
from penstock.services.offline.policy import StoredPolicy
from penstock.services.up.display import console
from penstock.shared.errors import PenstockError
from penstock.shared.settings import load_run


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """How messages are sent, and answers printed."""

    system: str
    plain: bool
    max_new_tokens: int | None
    temperature: float | None
    as_json: bool


def open_policy(run: Path, version: str, url: str, token_file: Path | None) -> Policy:
    """Return the live policy, or a stored version if one is named or the run is not active.

    Raises:
        PenstockError: neither is available.
    """
    client = None if version else export.find_alive(run, url, token_file)
    if client is not None:
        return LivePolicy(client)
    stored = StoredPolicy(load_run(run), export.number(version or "latest"))
    console.warn(f"version {stored.version} (step {stored.step}) of {run}")
    return stored


def talk(policy: Policy, asked: Asked, ask: str) -> None:
    """Answer ``ask``, or each line of standard input.

    Raises:
        PenstockError: ``ask``, or, at the end of an input that is no terminal, a line of it could not be answered.
    """
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    if ask:
        _answer(policy, asked, messages, ask)
        return
    unanswered = 0
    for line in _lines():
        try:
            _answer(policy, asked, messages, line)
        except PenstockError as error:
            unanswered += 1
            console.warn(f"penstock chat: {error}")
    if unanswered and not sys.stdin.isatty():
        raise PenstockError(f"{unanswered} lines were not answered: see above")


def _answer(policy: Policy, asked: Asked, messages: list[dict[str, str]], text: str) -> None:
    turns = [*messages, {"role": "user", "content": text}]
    try:
        (made,) = policy.generate(
            text if asked.plain else turns, max_new_tokens=asked.max_new_tokens, temperature=asked.temperature
        )
    except PenstockError as error:
        if "has no chat template" not in str(error):
            raise
        raise PenstockError(
            "the policy has no chat template: add --plain, which sends each line by itself as a text to complete"
        ) from error
    messages[:] = [*turns, {"role": "assistant", "content": made.text}]
    if asked.as_json:
        console.say_json(dataclasses.asdict(made), indent=None)
    else:
        console.say(made.text)


def _lines() -> Iterator[str]:
    shown = sys.stdin.isatty()
    while True:
        if shown:
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
