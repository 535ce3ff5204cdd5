"""How a replica opens vLLM: its settings, the import that takes long, and the workers of other hosts."""

import asyncio
from typing import Any

from penstock.services.rollout.engines.engine import Engine
from penstock.services.rollout.engines.opening import Opening, has_gpu
from penstock.services.rollout.engines.prompts import Codec
from penstock.services.rollout.engines.vllm.multihost.hosts import Hosts, hosts_of
from penstock.shared.process.importing import importing
from penstock.shared.settings import Settings

_CONTEXT_SHARE = 0.02
"""Share of a GPU for a process's CUDA context, before vLLM looks."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM has kernels for."""


async def load() -> None:
    """Import vLLM."""
    await asyncio.to_thread(_load)


def _load() -> None:
    with importing():
        from penstock.services.rollout.engines.vllm import start
        from penstock.services.rollout.engines.vllm.several import start as several  # noqa: F401

    start.start_server()
    start.load()


async def open_engine(opening: Opening) -> tuple[Engine, Codec]:
    """Return the engines of a replica as one; raises SettingsError if vLLM cannot serve the model."""
    from penstock.services.rollout.engines.transformers.loading import check_for_vllm
    from penstock.services.rollout.engines.vllm.arguments import release
    from penstock.services.rollout.engines.vllm.scheduling.plain_decoding import slower_decoder
    from penstock.services.rollout.engines.vllm.several.start import open_engines
    from penstock.shared.model.tokenizer import TokenizerCodec, check_stop_texts, open_tokenizer, stop_tokens

    settings, host, weights = opening.settings, opening.host, opening.settings.weights
    tokenizer = await asyncio.to_thread(open_tokenizer, settings.policy)
    check_stop_texts(tokenizer, settings.sampling, settings.reward.markers)
    await asyncio.to_thread(check_for_vllm, settings.policy)
    hosts = hosts_of(settings.rollout, host)
    engine, choice = await open_engines(
        settings.rollout.engines_per_gpu,
        vllm_settings(settings, opening.replica, hosts),
        hosts,
        beside_trainer=bool(settings.common_gpus),
        stop=stop_tokens(tokenizer),
        kv=weights.kv,
        update=weights.update,
        shadow="bucketed" if settings.shared_devices else weights.shadow,
        peer_host=host if weights.transport == "pull" else "",
        deadline_s=weights.deadline_s,
    )
    opening.secret.listen(engine.share_secret)
    await opening.explain(choice.engines, choice.reason, slower_decoder(release()))
    return engine, TokenizerCodec(tokenizer, engine, settings.data.chat_template, settings.reward)


def vllm_settings(settings: Settings, replica: str, hosts: Hosts | None) -> dict[str, Any]:
    """Return the vLLM settings of the hosts of ``replica``; may raise SettingsError."""
    from penstock.services.rollout.engines.transformers.smoke_test import seed_of
    from penstock.services.rollout.engines.vllm.arguments import ROUTING, gather

    vllm, shares = settings.rollout.vllm, bool(settings.shared_devices)
    arguments = gather(
        settings.policy.model,
        dtype=settings.policy.dtype,
        seed=seed_of(settings.run.seed, replica),
        max_num_seqs=settings.rollout.max_groups * settings.sampling.group_size,
        trust_remote_code=settings.policy.trust_remote_code,
        tensor_parallel_size=vllm.tensor_parallel_size,
        gpu_memory_utilization=_utilization(settings, shares=shares),
        max_model_len=settings.rollout.max_model_len,
        arguments=vllm_arguments(settings, shares=shares),
        hosts=hosts,
    )
    return {**arguments, "worker_extension_cls": ROUTING} if settings.trainer.router_replay else arguments


def vllm_arguments(settings: Settings, *, shares: bool = False) -> dict[str, Any]:
    """Return ``rollout.vllm.arguments`` plus those for quantised weights, adapters, and a replica that shares its device."""
    given = settings.rollout.vllm.arguments
    if settings.rollout.vllm.quantization == "fp8":
        given = {"quantization": "fp8_per_channel", **given}
    if shares and has_gpu(settings.run.device):
        given = {"enable_sleep_mode": True, **given}
    if not settings.publishes_adapters:
        return given
    rank = settings.policy.lora.rank
    fits = next((known for known in _RANKS if known >= rank), rank)
    return {"enable_lora": True, "max_lora_rank": fits, "max_loras": 1, **given}


def _utilization(settings: Settings, *, shares: bool) -> float:
    """Return vLLM's share of each of its GPUs, at most what the trainer leaves free of the fullest shared one."""
    vllm = settings.rollout.vllm
    if not shares or not has_gpu(settings.run.device):
        return vllm.gpu_memory_utilization
    from penstock.services.rollout.engines.vllm.several.gpu import NvmlGpu

    memories = [NvmlGpu(place).memory for place in range(vllm.tensor_parallel_size)]
    free = min(memory.free_bytes / memory.total_bytes for memory in memories)
    return min(vllm.gpu_memory_utilization, free - _CONTEXT_SHARE)


async def hold_workers(settings: Settings, replica: str, host: str) -> None:
    """Hold this host's workers of an engine that spans hosts, until it ends."""
    from penstock.services.rollout.engines.vllm.multihost import node

    hosts = hosts_of(settings.rollout, host)
    assert hosts is not None
    await node.hold_workers(settings, vllm_settings(settings, replica, hosts), hosts)
