"""``penstock push``: upload a policy version and its model card, in one commit."""

import tempfile
from pathlib import Path

from penstock.services.cli import export
from penstock.services.cli.policy.card import card, copy_records
from penstock.services.up.display import console
from penstock.shared.errors import PenstockError, SettingsError
from penstock.shared.http.hub import bound_hub
from penstock.shared.settings import load_run


def push(repository: str, run: Path, version: str, *, private: bool, adapter: bool, as_json: bool) -> None:
    """Export, describe and upload. Raises PenstockError."""
    settings, number = load_run(run), export.number(version)
    with tempfile.TemporaryDirectory(prefix="penstock-push-") as place:
        folder = Path(place) / "policy"
        exported = export.make(run, number, folder, adapter=adapter)
        (folder / "penstock").mkdir()
        copy_records(settings.run_folder, folder / "penstock")
        text = card(settings, exported["version"], exported["step"])
        (folder / "README.md").write_text(text, encoding="utf-8")
        url = _upload(repository, folder, f"Version {exported['version']} of run {settings.run.id}", private=private)
    if as_json:
        console.say_json({"version": exported["version"], "step": exported["step"], "url": url})
    else:
        console.say(f"version {exported['version']} (step {exported['step']}): {url}")


def _upload(repository: str, folder: Path, message: str, *, private: bool) -> str:
    """Return the commit's address."""
    from huggingface_hub import HfApi

    bound_hub()
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        is_public = private and api.model_info(repository).private is False
        if is_public:
            raise SettingsError(f"{repository} is public on {api.endpoint}: give --public, or another OWNER/NAME")
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except SettingsError:
        raise
    except Exception as error:
        sentence = " ".join(str(error).split())[:300] or type(error).__name__
        raise PenstockError(
            f"the hub at {api.endpoint} did not take {repository}: {sentence}: check OWNER/NAME and HF_ENDPOINT, and give a "
            "token that may write by HF_TOKEN or `hf auth login`"
        ) from error
    return str(commit.commit_url)
