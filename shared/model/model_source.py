"""Check that a policy is a Hugging Face folder or a reachable hub name.

Model libraries would retry for most of a minute, or read pickled weights (``.bin``).
"""

import re
from pathlib import Path

from shared.errors import SettingsError

_HUB_TIMEOUT_S = 5.0
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("*.bin", "*.pt", "*.pth")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_model(setting: str, source: str) -> None:
    check_source(setting, source, ("config.json",))
    folder = Path(source)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)) if folder.is_dir() else []
    if pickles and not any((folder / name).is_file() for name in _SAFETENSORS):
        raise SettingsError(
            f"expected weights as safetensors in {source!r}, found {pickles[0]}, a pickle, which can run code: "
            f"convert it by save_pretrained of transformers, or change {setting}"
        )


def check_source(setting: str, source: str, needed: tuple[str, ...]) -> None:
    """Raise SettingsError unless ``source`` is a folder with one of the files ``needed``, or a reachable hub name."""
    if not source:
        raise SettingsError(f"{setting} must be a folder in Hugging Face form or a hub name: set {setting}")
    folder = Path(source)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in needed):
            raise SettingsError(f"the folder {source!r} has no {needed[0]}: change {setting}")
    elif (folder.parent.is_dir() and "/" in source) or _HUB_NAME.fullmatch(source) is None or source.startswith("."):
        raise SettingsError(f"no folder in Hugging Face form at {source!r}: change {setting}")
    else:
        _check_hub(setting, source, needed)


def _check_hub(setting: str, name: str, needed: tuple[str, ...]) -> None:
    import httpx
    from huggingface_hub import constants, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in needed):
        return
    try:
        if constants.HF_HUB_OFFLINE:
            raise httpx.ConnectError("HF_HUB_OFFLINE is set")
        httpx.head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise SettingsError(
            f"there is no folder {name!r}, and the hub cannot be reached ({error}): change {setting}"
        ) from error
