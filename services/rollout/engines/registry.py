"""The engines by name. Another one is a package with an entry, a line here, and its name in ``rollout.engine``."""

import importlib.util

from penstock.services.rollout.engines.opening import Entry, has_gpu
from penstock.shared.errors import SettingsError
from penstock.shared.settings.placement import check_shared_engine
from penstock.shared.settings.root import Settings, check_plain_engine, check_reproducible


def entry_of(name: str) -> Entry:
    """Return the entry of an engine; nothing of the others is imported."""
    if name == "vllm":
        from penstock.services.rollout.engines.vllm import entry as of_vllm

        return of_vllm
    if name == "scripted":
        from penstock.services.rollout.engines import scripted

        return scripted
    from penstock.services.rollout.engines.transformers import entry as of_transformers

    return of_transformers


def choose(settings: Settings) -> str:
    """Return the engine that ``rollout.engine`` selects on this host; ``auto``: vLLM if it is installed and there is a GPU.

    Raises:
        SettingsError: it does not support the run's other settings.
    """
    name: str = settings.rollout.engine
    on_gpu = name in ("auto", "vllm") and has_gpu(settings.run.device)
    if name == "auto":
        name = "vllm" if on_gpu and importlib.util.find_spec("vllm") is not None else "transformers"
    try:
        check_reproducible(settings, name)
        check_shared_engine(settings, name, on_gpu=name == "vllm" and on_gpu)
        if name != "vllm":
            check_plain_engine(settings, name)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return name
