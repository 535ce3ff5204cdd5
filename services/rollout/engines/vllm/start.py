"""Start vLLM as a :class:`VllmEngine`, or name the setting to change.

Its processes are forked from one that has imported vLLM and nothing else (``penstock.services.rollout.engines.fork_server``),
while this process imports it, too; a fork of this process would copy our threads' locks and sockets. On a CPU they are
spawned, as vLLM preloads libraries there. Metrics (``vllm:…``) and logs go through this process.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

from penstock.services.rollout.engines import fork_server
from penstock.services.rollout.engines.vllm import start_report
from penstock.services.rollout.engines.vllm.arguments import (
    check_quantization,
    engine_args,
    serving,
    set_environment,
)
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.multihost.hosts import Hosts, secret_of
from penstock.services.rollout.engines.vllm.worker_channel import Reports, held_of
from penstock.shared.errors import SettingsError
from penstock.shared.process.importing import importing
from penstock.shared.weights.format import BUCKET_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")

_configuring = threading.Lock()
"""vLLM configures itself through globals; engines may start together."""


PRELOADED = ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "penstock.services.rollout.engines.vllm.worker")
"""What an engine's process imports."""


def start_server() -> None:
    """Start the process that engines on a GPU are forked from; it imports vLLM in the background."""
    set_environment()
    if torch.cuda.is_available():
        fork_server.start(PRELOADED)


def _fork_engines() -> None:
    """Let vLLM fork its engines from the server, if that was started; their own workers are spawned.

    So is the process in which it looks at a model's class for the first time on a machine, which would import vLLM again.
    """
    if not fork_server.is_started():
        return
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    if hasattr(utils, "get_mp_context"):
        utils.get_mp_context = fork_server.Context
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = _call_with_plugins


def _call_with_plugins(function: Callable[[], T]) -> T:
    def with_plugins() -> T:
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # as vLLM's own process does
        return function()

    return fork_server.call(with_plugins)


def load() -> None:
    """Import what an engine's start imports, which takes seconds but no device memory."""
    with _configuring, importing():
        set_environment()
        import vllm.v1.engine.async_llm  # noqa: F401
        from transformers import AutoTokenizer  # noqa: F401


async def open_vllm(
    arguments: dict[str, Any],
    hosts: Hosts | None = None,
    *,
    stop: Sequence[int] = (),
    logprobs: Literal["captured", "native"] = "captured",
    kv: Literal["keep", "recompute"] = "keep",
    update: Literal["inflight", "drain"] = "inflight",
    shadow: Literal["auto", "full", "bucketed"] = "auto",
    peer_host: str = "",
    peer_port: int = 0,
    deadline_s: float = 30.0,
    stat_loggers: list[type] | None = None,
) -> VllmEngine:
    """Return an engine; the event loop continues meanwhile. If it spans hosts, the others run ``node``.

    Args:
        stop: token ids that end a completion, besides the model's own.
        peer_host: address at which to serve weights under ``share_secret``; "": none.
        stat_loggers: replace vLLM's own.

    Raises:
        SettingsError: vLLM cannot serve this.
    """
    reports = Reports(hosts.own, secret_of(hosts.secret_file)) if hosts else Reports()
    await reports.open()
    llm: Any = None
    try:
        llm = await asyncio.to_thread(_start, arguments, hosts, stat_loggers)
        reporting = [reports.address, str(hosts.secret_file) if hosts else ""]
        peers = [peer_host, peer_port, deadline_s]
        workers = await llm.collective_rpc("penstock_open", args=(reporting, logprobs == "captured", peers))
        check(workers)
        reports.held |= {worker["rank"]: held_of(worker["held"]) for worker in workers}
        engine = VllmEngine(
            llm,
            reports,
            workers,
            stop=_stop_tokens(llm, stop),
            kv=kv,
            update=update,
            bucketed=_is_bucketed(shadow, workers),
            adapters=bool(arguments.get("enable_lora")),
        )
        engine.streams_whole = shadow == "auto" and not _fits(workers, 1)
        return engine
    except BaseException:
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, 1.0)
        await reports.close()
        raise


def _start(arguments: dict[str, Any], hosts: Hosts | None, stat_loggers: list[type] | None) -> Any:
    start_report.note("importing vLLM")
    with _configuring, importing():
        engine_arguments = engine_args(arguments, hosts.own if hosts else "")
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from penstock.services.rollout.engines.vllm.scheduling.schedulers import hold_tokens

        check_quantization(arguments)
        _fork_engines()
        with serving(arguments["model"]):
            config = engine_arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        hold_tokens(config)
    start_report.note("starting the engine's process")
    with serving(arguments["model"]):
        return AsyncLLM.from_vllm_config(
            config,
            stat_loggers=stat_loggers,
            enable_log_requests=engine_arguments.enable_log_requests,
            disable_log_stats=engine_arguments.disable_log_stats,
        )


def check(workers: list[dict[str, Any]]) -> None:
    """Raise SettingsError for workers that cannot report or differ from the first."""
    for worker in workers:
        if worker["error"]:
            raise SettingsError(worker["error"])
        if worker["started_with"] != workers[0]["started_with"]:
            raise SettingsError(
                f"expected every host of the replica to start with the same settings and replica's name, found "
                f"{worker['started_with']} at rank {worker['rank']} and {workers[0]['started_with']} at rank 0"
            )


def _stop_tokens(llm: Any, stop: Sequence[int]) -> tuple[int, ...]:
    config = llm.model_config
    named = (
        config.try_get_generation_config().get("eos_token_id"),
        getattr(config.hf_text_config, "eos_token_id", None),
    )
    token_ids = {*stop}
    for value in named:
        token_ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(token_ids))


def _is_bucketed(shadow: str, workers: list[dict[str, Any]]) -> bool:
    if shadow != "auto":
        return shadow == "bucketed"
    fits = _fits(workers, len(workers))
    if not fits:
        figures = {key: [worker[key] for worker in workers] for key in ("free_bytes", "policy_bytes")}
        log.warning("no memory for the policy a second time: every update pauses generation", extra=figures)
    return not fits


def _fits(workers: list[dict[str, Any]], shares: int) -> bool:
    """Return whether each rank has memory for one of ``shares`` of a version, with a bucket to verify it."""
    aside = BUCKET_BYTES if shares > 1 else 0
    needed = {worker["rank"]: worker["policy_bytes"] / shares * 1.05 + aside for worker in workers}
    return all(worker["device"] == "cpu" or worker["free_bytes"] > needed[worker["rank"]] for worker in workers)
