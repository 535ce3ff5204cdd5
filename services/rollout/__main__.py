"""Start a rollout replica: ``python -m penstock.services.rollout --config run.toml --replica rollout-0``.

If the engine spans hosts (``rollout.nodes``), run this on each with the same name; the first is the replica.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.services.rollout.engines.engine import Engine
from penstock.services.rollout.engines.prompts import CharacterCodec, Codec
from penstock.services.rollout.engines.vllm.multihost.hosts import Hosts, hosts_of
from penstock.services.rollout.engines.vllm.start_report import followed
from penstock.shared.bus.stores.replicas.run_secret import RunSecret
from penstock.shared.errors import SettingsError
from penstock.shared.model.tokenizer import TokenizerCodec
from penstock.shared.peers.addresses import use_interfaces
from penstock.shared.placement.turns import replica_turns
from penstock.shared.process import service
from penstock.shared.process.importing import importing
from penstock.shared.process.telemetry import tell
from penstock.shared.settings import Settings, check_plain_engine, check_reproducible, check_shared_engine

Explain = Callable[[int, str, str], Awaitable[None]]

_CONTEXT_SHARE = 0.02
"""Share of a GPU for a process's CUDA context, before vLLM looks."""
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


async def open_engine(
    settings: Settings, replica: str, host: str, secret: RunSecret, explain: Explain
) -> tuple[Engine, Codec]:
    """Return the configured engine and its codec; heartbeats continue while a model loads.

    ``explain`` is called with the number of vLLM engines, the reason, and what the release of vLLM makes slower, or "".
    Raises SettingsError if unsupported.
    """
    name = await asyncio.to_thread(choose_engine, settings)
    if name == "vllm":
        return await _open_vllm(settings, replica, host, secret, explain)
    if name == "scripted":
        from penstock.services.rollout.engines.scripted import ScriptedEngine

        return ScriptedEngine(seed=settings.run.seed), CharacterCodec()
    return await _open_transformers(settings, host, secret)


def choose_engine(settings: Settings) -> str:
    """Return the engine that ``rollout.engine`` selects on this host; may raise SettingsError."""
    name: str = settings.rollout.engine
    if name == "auto":
        name = pick_engine(settings.run.device)
    try:
        check_reproducible(settings, name)
        check_shared_engine(settings, name, on_gpu=name == "vllm" and _has_gpu(settings.run.device))
        if name != "vllm":
            check_plain_engine(settings, name)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return name


def pick_engine(device: str) -> str:
    """Return ``vllm`` if installed and ``device`` is an available GPU, else ``transformers``."""
    return "vllm" if importlib.util.find_spec("vllm") is not None and _has_gpu(device) else "transformers"


def _has_gpu(device: str) -> bool:
    if device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


async def _open_vllm(
    settings: Settings, replica: str, host: str, secret: RunSecret, explain: Explain
) -> tuple[Engine, Codec]:
    from penstock.services.rollout.engines.transformers.loading import check_for_vllm
    from penstock.services.rollout.engines.vllm.arguments import release
    from penstock.services.rollout.engines.vllm.scheduling.plain_decoding import slower_decoder
    from penstock.services.rollout.engines.vllm.several.start import open_engines
    from penstock.services.rollout.engines.vllm.start import start_server
    from penstock.shared.model.tokenizer import check_stop_texts, open_tokenizer, stop_tokens

    await asyncio.to_thread(start_server)
    weights = settings.weights
    tokenizer = await asyncio.to_thread(open_tokenizer, settings.policy)
    check_stop_texts(tokenizer, settings.sampling, settings.reward.markers)
    await asyncio.to_thread(check_for_vllm, settings.policy)
    hosts = hosts_of(settings.rollout, host)
    engine, choice = await open_engines(
        settings.rollout.engines_per_gpu,
        vllm_settings(settings, replica, hosts),
        hosts,
        beside_trainer=bool(settings.common_gpus),
        stop=stop_tokens(tokenizer),
        logprobs=settings.internal.logprobs,
        kv=weights.kv,
        update=weights.update,
        shadow="bucketed" if settings.shared_devices else weights.shadow,
        peer_host=host if weights.transport == "pull" else "",
        deadline_s=weights.deadline_s,
    )
    secret.listen(engine.share_secret)
    await explain(choice.engines, choice.reason, slower_decoder(release()))
    return engine, TokenizerCodec(tokenizer, engine, settings.data.chat_template, settings.reward)


def vllm_settings(settings: Settings, replica: str, hosts: Hosts | None) -> dict[str, Any]:
    """Return the vLLM settings of the hosts of ``replica``; may raise SettingsError."""
    from penstock.services.rollout.engines.transformers.smoke_test import seed_of
    from penstock.services.rollout.engines.vllm.arguments import gather

    vllm, shares = settings.rollout.vllm, bool(settings.shared_devices)
    return gather(
        settings.policy.model,
        dtype=settings.policy.dtype,
        seed=seed_of(settings.run.seed, replica),
        max_num_seqs=settings.rollout.max_groups * settings.sampling.group_size,
        trust_remote_code=settings.policy.trust_remote_code,
        tensor_parallel_size=vllm.tensor_parallel_size,
        gpu_memory_utilization=_utilization(settings, shares=shares),
        max_model_len=vllm.max_model_len,
        arguments=vllm_arguments(settings, shares=shares),
        hosts=hosts,
    )


def vllm_arguments(settings: Settings, *, shares: bool = False) -> dict[str, Any]:
    """Return ``rollout.vllm.arguments`` plus those for adapters, and for a replica that shares its device."""
    given = settings.rollout.vllm.arguments
    if shares and _has_gpu(settings.run.device):
        given = {"enable_sleep_mode": True, **given}
    if not settings.publishes_adapters:
        return given
    rank = settings.policy.lora.rank
    fits = next((known for known in _VLLM_RANKS if known >= rank), rank)
    return {"enable_lora": True, "max_lora_rank": fits, "max_loras": 1, **given}


def _utilization(settings: Settings, *, shares: bool) -> float:
    """Return vLLM's share of each of its GPUs, at most what the trainer leaves free of the fullest shared one."""
    vllm = settings.rollout.vllm
    if not shares or not _has_gpu(settings.run.device):
        return vllm.gpu_memory_utilization
    from penstock.services.rollout.engines.vllm.several.gpu import NvmlGpu

    memories = [NvmlGpu(place).memory for place in range(vllm.tensor_parallel_size)]
    free = min(memory.free_bytes / memory.total_bytes for memory in memories)
    return min(vllm.gpu_memory_utilization, free - _CONTEXT_SHARE)


async def _open_transformers(settings: Settings, host: str, secret: RunSecret) -> tuple[Engine, Codec]:
    with importing():
        from penstock.services.rollout.engines.transformers.engine import TransformersEngine
        from penstock.services.rollout.engines.transformers.loading import open_model
        from penstock.services.rollout.engines.transformers.smoke_test import try_out
        from penstock.shared.model.tokenizer import check_stop_texts, open_tokenizer

    tokenizer = await asyncio.to_thread(open_tokenizer, settings.policy)
    check_stop_texts(tokenizer, settings.sampling, settings.reward.markers)
    context = settings.rollout.vllm.max_model_len
    opened = await asyncio.to_thread(open_model, settings.policy, tokenizer, settings.run.device, context)
    await asyncio.to_thread(try_out, opened)
    engine = TransformersEngine(
        opened,
        max_rows=settings.rollout.max_groups * settings.sampling.group_size,
        alone=settings.run.deterministic == "run",
        threads=settings.run.threads,
        host=host if settings.weights.transport == "pull" else "",
        secret=secret,
        deadline_s=settings.weights.deadline_s,
        drain=settings.weights.update == "drain",
    )
    return engine, TokenizerCodec(tokenizer, opened, settings.data.chat_template, settings.reward)


async def run(settings: Settings, replica: str) -> None:
    """Serve until SIGTERM."""
    use_interfaces(service.own_host(settings), spans_hosts=settings.rollout.nodes > 1)
    if settings.rollout.node:
        await _hold_workers(settings, replica)
        return
    from penstock.services.rollout.service import Rollout

    async with contextlib.AsyncExitStack() as around:
        context = await around.enter_async_context(service.serve(settings, "rollout", replica))
        from penstock.services.rollout.plausibility import Plausibility
        from penstock.shared.weights.receiver.puller import Puller

        async def explain(engines: int, reason: str, slower: str) -> None:
            context.status.values["engines"] = float(engines)
            if settings.rollout.engines_per_gpu != 1:
                await tell(context.bus, replica, "engines per GPU", f"{engines}: {reason}", engines=engines)
            if slower:
                await tell(context.bus, replica, "decoder", slower)

        now = await context.live.refresh()
        if settings.shared_devices:
            name = await asyncio.to_thread(choose_engine, now)
            context.status.start.begin("importing the engine")
            await _load(name)
        context.status.start.begin("waiting for the device")
        turns = await around.enter_async_context(replica_turns(context))
        while not await turns.acquire(1.0):
            if context.stop.is_set():
                return
        context.status.start.begin("loading the model")
        async with followed(context.status.start.begin):
            engine, codec = await open_engine(now, replica, context.host, context.secret, explain)
        context.status.start.begin("waiting for weights")
        engine.update_by(context.live.settings.weights.update)  # may have changed during loading
        context.live.listen(lambda now: engine.update_by(now.weights.update))
        puller = Puller(engine.place, engine.ranks, settings.weights.deadline_s, context.secret)
        plausibility = Plausibility(context.bus, settings, context.live.refresh)
        rollout = Rollout(context, engine, codec, puller, turns, plausibility)
        await rollout.run(context.stop, settings.internal.heartbeat_s)


async def _load(engine: str) -> None:
    """Import ``engine`` before its device is held: others use it meanwhile, and the lease would lapse if imports stalled
    the event loop.
    """
    if engine == "vllm":
        from penstock.services.rollout.engines.vllm.several import start  # noqa: F401
        from penstock.services.rollout.engines.vllm.start import load, start_server

        await asyncio.to_thread(start_server)
        await asyncio.to_thread(load)
    else:
        with importing():
            import penstock.services.rollout.engines.transformers.engine  # noqa: F401


async def _hold_workers(settings: Settings, replica: str) -> None:
    from penstock.services.rollout.engines.vllm.multihost.node import hold_workers

    choose_engine(settings)
    hosts = hosts_of(settings.rollout, service.own_host(settings))
    assert hosts is not None
    await hold_workers(settings, vllm_settings(settings, replica, hosts), hosts)


if __name__ == "__main__":
    service.leave(service.main("rollout", run))
