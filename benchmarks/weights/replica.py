"""The receiving side of ``benchmarks.weights.update``."""

import asyncio
import dataclasses
import itertools
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.weights.players import SECRET, Answers, Options, layout_of, serve
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError

PROMPT_TOKENS, GROUP = 64, 16


async def opened(options: Options) -> Any:
    """Return an engine that has no weights yet."""
    from penstock.services.rollout.engines.vllm import arguments as vllm_arguments
    from penstock.services.rollout.engines.vllm import start as vllm_start

    vllm_arguments.NOT_SERVED.pop("load_format", None)  # no weights to load: the first version is pulled
    arguments: dict[str, Any] = {"load_format": "dummy"}
    if options.device == "cuda":
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    engine = await vllm_start.open_vllm(
        vllm_arguments.gather(
            str(options.folder),
            dtype=options.dtype,
            seed=0,
            max_num_seqs=options.sequences + 1,
            tensor_parallel_size=options.tensor_parallel_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_model_len=options.max_model_len,
            enforce_eager=options.device == "cpu",
            arguments=arguments,
        ),
        shadow=options.shadow,  # type: ignore[arg-type, unused-ignore]
        peer_host="127.0.0.1",
        deadline_s=options.deadline_s,
    )
    engine.share_secret(SECRET)
    return engine


async def replica(connection: Connection, options: Options) -> None:
    """Serve until the pipe closes."""
    player = Replica(await opened(options), options)
    answers: Answers = {
        "describe": player.describe,
        "pull": player.pull,
        "load": player.load,
        "seen": player.seen,
        "compare": player.compare,
        "join": player.join,
        "update": player.update,
    }
    try:
        await serve(connection, answers)
    finally:
        await player.close()


class Replica:
    """An engine that pulls; :meth:`close` it."""

    def __init__(self, engine: Any, options: Options) -> None:
        from penstock.shared.weights.receiver.puller import Puller

        self.engine = self._engine = engine
        self._options = options
        self._puller = Puller(engine.place, engine.ranks, options.deadline_s, lambda: SECRET)
        self._tasks: list[asyncio.Task[None]] = []
        self._random = np.random.default_rng(0)
        self._token_times_s: list[float] = []

    def describe(self) -> dict[str, Any]:
        """Return the replica's description."""
        return {"ranks": self._engine.ranks, "peer": self._engine.peer_address}

    async def pull(self, published: dict[str, Any], sources: list[str]) -> dict[str, Any]:
        """Pull a version from the first available source, and swap."""
        began_s = time.monotonic()
        errors: list[str] = []
        for source in sources:
            try:
                return {"began_s": began_s, "errors": errors, **await self._pulled(source, _record(published))}
            except WeightsError as error:
                errors.append(f"{source}: {error}")
        raise RuntimeError(f"expected version {published['version']} from a source, found {errors}")

    async def _pulled(self, source: str, record: PolicyRecord) -> dict[str, Any]:
        offer = await self._puller.ask(source, record)
        accepted_s = time.monotonic()
        try:
            await self._engine.stage(offer)
        except WeightsError as error:
            await self._puller.finish(offer, str(error))
            raise
        verified_s = time.monotonic()
        report = await self._engine.swap(record.version)
        live_s = time.monotonic()
        await self._puller.finish(offer, None)
        return {
            "source": source,
            "transport": offer.transport,
            "accepted_s": accepted_s,
            "verified_s": live_s if report.path == "bucketed" else verified_s,
            "live_s": live_s,
            "swap_s": report.seconds,
            "worker_s": self._engine.receive_s,
            "path": report.path,
            "copied_bytes": report.copied_bytes,
        }

    async def load(self) -> None:
        """Decode endlessly, and watch one more sequence."""
        for _ in range(self._options.sequences // GROUP):
            self._tasks.append(asyncio.create_task(self._decode()))
        self._tasks.append(asyncio.create_task(self._watch()))
        while len(self._token_times_s) < 32:
            await asyncio.sleep(0.05)
            for task in self._tasks:
                if task.done():
                    task.result()

    async def _decode(self) -> None:
        from penstock.services.rollout.engines.engine import GenerationRequest
        from penstock.shared.bus.messages import Sampling

        tokens = self._options.max_model_len - PROMPT_TOKENS - 1
        sampling = Sampling(samples=GROUP, max_new_tokens=tokens, temperature=1.0)
        while True:
            await self._engine.generate(GenerationRequest(self._prompt(), sampling))

    async def _watch(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=self._options.max_model_len - PROMPT_TOKENS - 1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for number in itertools.count():
            prompt = {"prompt_token_ids": self._prompt().tolist()}
            async for _ in self._engine._llm.generate(prompt, parameters, f"watched{number}"):
                self._token_times_s.append(time.monotonic())

    def _prompt(self) -> Any:
        return self._random.integers(10, 1000, PROMPT_TOKENS).astype(np.int32)

    def seen(self) -> dict[str, Any]:
        """Return the generated tokens, and the watched sequence's times."""
        return {"at_s": time.monotonic(), "tokens": generated_tokens(), "token_times_s": list(self._token_times_s)}

    async def compare(self) -> list[int | None]:
        """Return each rank's count of differing copies; None: no plan."""
        differences: list[int | None] = await self._engine._llm.collective_rpc("penstock_compare")
        return differences

    async def join(self, port: int, world: int) -> None:
        """Join the trainer in vLLM's own weight transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world}
        info |= {} if _packs_by_update() else {"packed": True}
        await self._engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def update(self, clear_cache: bool) -> dict[str, Any]:
        """Take an update by vLLM's own weight transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        entries = layout_of(self._options).tensors
        info: dict[str, Any] = {
            "names": [entry.name for entry in entries],
            "dtype_names": [entry.dtype for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
        }
        info |= {"packed": True} if _packs_by_update() else {}
        llm, began_s = self._engine._llm, time.monotonic()
        await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await llm.finish_weight_update()
        await llm.resume_generation()
        return {"began_s": began_s, "live_s": time.monotonic()}

    async def close(self) -> None:
        """Stop decoding and end the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._puller.close()
        await self._engine.close()


def _record(published: dict[str, Any]) -> PolicyRecord:
    return PolicyRecord(
        version=PolicyVersion(published["version"]),
        parent=None,
        step=published["version"],
        created_at_s=0.0,
        location="",
        manifest_digest=published["digest"],
    )


def _packs_by_update() -> bool:
    """vLLM up to 0.27 takes the packing with each update."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

    return "packed" in {field.name for field in dataclasses.fields(NCCLWeightTransferUpdateInfo)}


def generated_tokens() -> float:
    """Return the tokens that this process's engine has generated."""
    from prometheus_client import REGISTRY

    samples_of_metrics = (metric.samples for metric in REGISTRY.collect() if metric.name == "vllm:generation_tokens")
    return sum(sample.value for samples in samples_of_metrics for sample in samples if sample.name.endswith("_total"))
