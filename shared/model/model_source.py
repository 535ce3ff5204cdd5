"""Check that a policy is a Hugging Face folder or a reachable hub name.

Model libraries would retry for most of a minute, or read pickled weights (``.bin``).
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.shared.errors import SettingsError
from penstock.shared.http.answer import NoHttpAnswer
from penstock.shared.http.client import ask
from penstock.shared.http.hub import bound_hub

_HUB_TIMEOUT_S = 5.0
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "*.vocab", "*.tiktoken", "tekken.json", "*.bpe")
_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*", "tekken.json")
_LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header, as its library accepts them."""
_NAMED = 3
_PICKLES = ("*.bin", "*.pt", "*.pth")
_DEQUANTISED = ("mxfp4", "fp8")
"""Methods that transformers dequantises where it cannot compute with them."""
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
            files = needed[0] if len(needed) == 1 else f"tokenizer ({', '.join(needed[:-1])} or {needed[-1]})"
            raise SettingsError(f"the folder {source!r} has no {files}{_instead(folder, needed)}: change {setting}")
    elif (folder.parent.is_dir() and "/" in source) or _HUB_NAME.fullmatch(source) is None or source.startswith("."):
        shown = ", but a file: give the folder of a model in safetensors" if folder.is_file() else ""
        raise SettingsError(f"no folder in Hugging Face form at {source!r}{shown}: change {setting}")
    else:
        _check_hub(setting, source, needed)


def _instead(folder: Path, needed: tuple[str, ...]) -> str:
    """Return what a folder without a model has instead; "": nothing known."""
    if (folder / "adapter_config.json").is_file():
        base = (
            _read_object(folder / "adapter_config.json", "policy.model").get("base_model_name_or_path") or "its model"
        )
        code = f"from peft import AutoPeftModelForCausalLM as M; M.from_pretrained({str(folder)!r}).merge_and_unload()"
        merge = shlex.quote(f"{code}.save_pretrained('merged')")
        return (
            f", but a LoRA adapter of {str(base)[:200]!r}: `penstock export RUN` without --adapter writes a run's whole policy, and "
            f"`python -c {merge}` merges another's, to be used with the tokenizer of "
            "its model (policy.tokenizer)"
        )
    if any(folder.glob("*.gguf")):
        return ", but a GGUF file, of which nothing is read"
    inner = [path.parent for name in needed for path in folder.glob(f"*/{name}")]
    newest = max(inner, key=lambda path: path.stat().st_mtime, default=None)
    return f", but {newest.name!r} in it has one" if newest else ""


def check_trained(setting: str, source: str, *, generates: bool = True) -> None:
    """Raise SettingsError as :func:`check_complete`, or if a folder's weights are quantised, which cannot be trained. Without
    replicas, which would generate with them, the trainer decides on those that transformers may dequantise."""
    check_complete(setting, source)
    config = Path(source) / "config.json"
    quantised = _read_object(config, setting).get("quantization_config") if config.is_file() else None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if quantised and (generates or method not in _DEQUANTISED):
        raise SettingsError(
            f"expected a model to train in {source!r}, found a quantised one ({method or 'quantization_config'} in config.json): "
            f"save it dequantised, or change {setting}"
        )


def check_complete(setting: str, source: str) -> None:
    """Raise SettingsError as :func:`check_model`, or if a folder's config.json or weights are damaged or incomplete.

    Of the weights, the headers and sizes of their files are read.
    """
    check_model(setting, source)
    folder = Path(source)
    if folder.is_dir():
        _read_object(folder / "config.json", setting)
        for name in _weight_files(folder, setting):
            _check_safetensors(folder / name, setting)


def check_tokenizer(setting: str, source: str, *, for_messages: bool, vocabulary: int = 0) -> None:
    """Raise SettingsError if a folder has no tokenizer, a damaged one, ``for_messages`` one without chat template, or one
    of more tokens than the ``vocabulary`` of the model, if that is known.
    """
    check_source(setting, source, TOKENIZER_FILES)
    folder = Path(source)
    if not folder.is_dir():
        return
    own, fast = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config = _read_object(own, setting) if own.is_file() else {}
    whole = _read_object(fast, setting) if fast.is_file() else {}
    if "auto_map" in config:  # the code of the folder may need other files
        return
    model = whole.get("model")
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if vocabulary and isinstance(tokens, dict | list):
        check_vocabulary(len(tokens), vocabulary)
    if config.get("tokenizer_class") not in _WITHOUT_VOCABULARY and not _has(folder, _VOCABULARIES):
        raise SettingsError(
            f"the folder {source!r} has a tokenizer_config.json and no vocabulary (tokenizer.json, tokenizer.model, "
            f"vocab.json or vocab.txt): copy the whole tokenizer, or change {setting}"
        )
    if for_messages and not config.get("chat_template") and not _has(folder, _TEMPLATES):
        raise SettingsError(
            f"the tokenizer in {source!r} has no chat template (chat_template.jinja, or chat_template in "
            f"tokenizer_config.json), which chat messages need: change {setting}, or give texts in data.prompt_field "
            "and no data.user or data.system"
        )


def check_vocabulary(tokens: int, most: int) -> None:
    """Raise SettingsError if a tokenizer has, without added tokens, more than the model's ``most``."""
    if tokens > most:
        raise SettingsError(
            f"expected a tokenizer of at most the model's {most} tokens, found {tokens}: it is another model's; change "
            "policy.tokenizer or policy.model"
        )


def _has(folder: Path, patterns: Sequence[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _weight_files(folder: Path, setting: str) -> Sequence[str]:
    single, index = (folder / name for name in _SAFETENSORS)
    if single.is_file():
        return [single.name]
    if not index.is_file():
        raise SettingsError(
            f"the folder {str(folder)!r} has no weights ({' or '.join(_SAFETENSORS)}): change {setting}"
        )
    shards = _read_object(index, setting).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise _damaged(index, "no weight_map", setting)
    names = sorted(set(shards.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise SettingsError(
            f"the folder {str(folder)!r} has no {', '.join(missing[:_NAMED])}{more}, which its {index.name} names: "
            f"copy the whole model, or change {setting}"
        )
    return names


def _check_safetensors(path: Path, setting: str) -> None:
    """Raise SettingsError unless a file is as long as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(min(header_bytes, _LONGEST_HEADER)))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + header_bytes + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except OSError as error:
        raise SettingsError(f"could not read {path} ({error.strerror or error}): change {setting}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, "no header of safetensors", setting) from error
    if size != needed:
        raise _damaged(path, f"{size} bytes, expected {needed}", setting)


def _read_object(path: Path, setting: str) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"could not read {path} ({error.strerror or error}): change {setting}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "no JSON", setting) from error
    if not isinstance(fields, dict):
        raise _damaged(path, "no JSON object", setting)
    return fields


def _damaged(path: Path, reason: str, setting: str) -> SettingsError:
    return SettingsError(f"{path} is damaged or cut off ({reason}): copy it again, or change {setting}")


def _check_hub(setting: str, name: str, needed: tuple[str, ...]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    bound_hub()
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in needed):
        return
    try:
        if constants.HF_HUB_OFFLINE:
            raise NoHttpAnswer("HF_HUB_OFFLINE is set")
        ask("HEAD", constants.ENDPOINT, timeout_s=_HUB_TIMEOUT_S)
    except NoHttpAnswer as error:
        raise SettingsError(
            f"there is no folder {name!r}, and the hub cannot be reached ({error}): change {setting}"
        ) from error
