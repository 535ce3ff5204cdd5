"""The trainer and the vLLM engine of ``benchmarks.runs.placement``."""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from benchmarks.shapes import SHAPES
from benchmarks.trainer.models import EitherPolicy, random_model
from benchmarks.trainer.packing import mix
from penstock.services.rollout.engines.engine import GenerationRequest
from penstock.services.rollout.engines.vllm.arguments import check_version
from penstock.services.trainer.batch.assignment import plan
from penstock.services.trainer.model.engine import TrainingEngine
from penstock.services.trainer.model.layers import kernels
from penstock.services.trainer.rank_group import start_ranks
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion, Sampling
from penstock.shared.settings import Settings
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Header, plan_layout
from penstock.shared.weights.format.snapshot import dtype_name
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.source.source import WeightSource

RUNGS = (0, 1, 2, 3, 4)
WARM_UPS = 2
_SECRET = b"the secret of a benchmark"
_DEADLINE_S = 120.0
_PROMPT_TOKENS, _GROUP = 64, 8


def configure(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a Hugging Face configuration without weights."""
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6, "torch_dtype": "bfloat16", **shape}))


class Trainer:
    """The training side; in a thread of its own, except for :meth:`publish`'s answers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.device = arguments.device
        self._version = 0

    def start(self) -> dict[str, Any]:
        """Build the model and its optimizer; return the components' bytes."""
        arguments, settings = self._arguments, self._settings()
        start_ranks(self.device)
        model = random_model(SHAPES[arguments.shape], settings, self.device)
        if arguments.trained_layers:
            model.requires_grad_(False)
            for layer in model.model.layers[-arguments.trained_layers :]:
                layer.requires_grad_(True)
        fused = kernels.fuses_logits(settings.trainer.kernels)
        policy = EitherPolicy(model, chunk_tokens=settings.internal.logits_chunk_tokens, fused_logits=fused).train()
        sizes = policy.sizes
        self.engine = TrainingEngine(policy, settings, self.device)
        samples = max(1, arguments.train_tokens // 512)
        rows = mix(1, samples, 512, median=256, vocabulary=self.engine.vocabulary)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # not for vLLM's processes
            os.environ.pop(name, None)
        self._batches = plan(rows, settings.trainer.micro_batch_tokens, 1, sizes=sizes)[0]
        self._tokens = sum(len(sample.token_ids) for row in rows for sample in row.samples)
        shapes = [(name, dtype_name(dtype), shape) for name, dtype, shape in self.engine.shapes()]
        self._snapshot = FlatSnapshot(plan_layout(shapes, 512 << 20), self.engine.device)
        self._source = WeightSource("127.0.0.1", 0, lambda: _SECRET, deadline_s=_DEADLINE_S)
        self.step()
        snapshot_bytes = float(sum(bucket.nbytes for bucket in self._snapshot.buckets))
        self.memory = {**self.engine.residency.memory(), "snapshot": snapshot_bytes}
        self._give_unused_back()
        return {"parameters": sum(p.numel() for p in policy.parameters()), "trainer_memory": self.memory}

    def _settings(self) -> Settings:
        arguments = self._arguments
        trainer = {
            "zero_stage": arguments.zero_stage,
            "optimizer": arguments.optimizer,
            "learning_rate": 1e-5,
            "micro_batch_tokens": arguments.train_tokens,
            "gradient_checkpointing": "true" if arguments.shape == "7b" else "auto",
            "deepspeed": json.loads(arguments.deepspeed),
        }
        dtype = "bfloat16" if self.device == "cuda" else "float32"
        return Settings.model_validate({"run": {"device": self.device}, "policy": {"dtype": dtype}, "trainer": trainer})

    def step(self) -> float:
        """Train one step; return its seconds."""
        started_s = time.perf_counter()
        for number, batch in enumerate(self._batches, start=1):
            mean = self.engine.forward(batch).policy_logprobs_N.sum() / self._tokens
            self.engine.backward(-mean, last=number == len(self._batches))
        self.engine.step(1e-5)
        self._synchronize()
        return time.perf_counter() - started_s

    def publish(self) -> PolicyRecord:
        """Fill the snapshot and serve it."""
        self._version += 1
        header: Header = self._snapshot.fill(self.engine.tensors(), PolicyVersion(self._version), self._version)
        self._source.offer(self._snapshot)
        version = PolicyVersion(self._version)
        return PolicyRecord(version, None, self._version, 0.0, header.digest, "", source=self._source.address)

    def free(self, rung: int) -> None:
        """Free memory down to ``rung``."""
        self.engine.residency.free(rung)

    def restore(self) -> None:
        """Reload what is away; optimizer states may arrive during the next step."""
        self.engine.residency.restore()

    def take_peak(self) -> float:
        """Return the allocator's peak since the last call, or resident memory."""
        if self.device != "cuda":
            return float(psutil.Process().memory_info().rss)
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return float(peak)

    def used(self) -> float:
        """Return used device memory, or this process's resident memory."""
        if self.device != "cuda":
            return float(psutil.Process().memory_info().rss)
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return float(total_bytes - free_bytes)

    def close(self) -> None:
        """Stop serving."""
        self._source.close()
        dist.destroy_process_group()

    def _give_unused_back(self) -> None:
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


class Player:
    """Trainer and engine, and the switches between them; on the event loop."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, log: Callable[[str], None]) -> None:
        self._arguments = arguments
        self._folder = folder
        self._log = log
        self._trainer = Trainer(arguments)
        self._training = ThreadPoolExecutor(1)
        """One thread, as in a run: each that multiplies matrices takes a workspace of its own on the device."""
        self._engine: Any = None
        self._requests: list[asyncio.Task[Any]] = []
        self._finished_tokens = 0
        self._random = np.random.default_rng(0)

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process ended."""
        return self._engine is None or self._engine._reports.died.done()

    async def start(self) -> dict[str, Any]:
        """Start both; return their sizes."""
        self._log("the trainer starts")
        described = await self._train(self._trainer.start)
        on_gpu = self._arguments.device == "cuda"
        # vLLM starts beside a trainer that is away, as in a run.
        await self._train(self._trainer.free, 4)
        self._log(f"vLLM starts beside {self._trainer.used() / 1e9:.1f} GB")
        self._engine = await self._open_engine()
        self._engine.share_secret(_SECRET)
        self._puller = Puller(self._engine.place, 1, _DEADLINE_S, lambda: _SECRET)
        await self._engine.suspend(2 if on_gpu else 0)
        await self._train(self._trainer.restore)
        record = await self._train(self._trainer.publish)
        await self._train(self._trainer.free, 4)
        await self._engine.resume()
        await self._pull(record)
        self._log("the first weights are live")
        described["engine_memory"] = self._engine.memory
        described["device_name"] = torch.cuda.get_device_name() if on_gpu else "cpu"
        return {**described, "torch": torch.__version__, "vllm": check_version()}

    async def _train(self, call: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._training, call, *arguments)

    async def _open_engine(self) -> Any:
        from penstock.services.rollout.engines.vllm import arguments as vllm_arguments
        from penstock.services.rollout.engines.vllm.start import open_vllm

        arguments, on_gpu = self._arguments, self._arguments.device == "cuda"
        vllm_arguments.NOT_SERVED.pop("load_format", None)  # the first version is pulled
        gathered = vllm_arguments.gather(
            str(self._folder),
            dtype="bfloat16" if on_gpu else "float32",
            seed=0,
            max_num_seqs=arguments.sequences,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            max_model_len=2048,
            enforce_eager=arguments.eager or not on_gpu,
            arguments={
                "load_format": "dummy",
                **({"enable_sleep_mode": True} if on_gpu else {}),
                # The size of the cache by itself, as vLLM's measurement fails where another process frees memory.
                **({"kv_cache_memory_bytes": int(arguments.kv_cache_gb * 1e9)} if arguments.kv_cache_gb else {}),
            },
        )
        return await open_vllm(gathered, shadow="bucketed", peer_host="127.0.0.1", deadline_s=_DEADLINE_S)

    async def measure(self, rung: int) -> dict[str, Any]:
        """Switch there and back ``--switches`` times; return figures."""
        rows: list[dict[str, float]] = []
        try:
            self._keep_busy()
            await asyncio.sleep(self._arguments.generate_s)
            for number in range(WARM_UPS + self._arguments.switches):
                rows.append(await self._pair(rung))
                if number < WARM_UPS or number % max(1, self._arguments.switches // 5) == 0:
                    self._log(f"rung {rung}, pair {number}: { ({k: round(v, 4) for k, v in rows[-1].items()}) }")
            differences = await self._differences()
            async with asyncio.timeout(_DEADLINE_S):
                await asyncio.wait(self._requests)
        finally:
            for request in self._requests:
                request.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)
        await self._train(self._trainer.free, 4)
        return {**self._figures(rows), "bytes_equal": None if differences is None else differences == 0}

    async def _pair(self, rung: int) -> dict[str, float]:
        """Training's turn, then generation's."""
        engine_rung = min(rung, 2) if self._arguments.device == "cuda" else 0
        row = {"used_generate_bytes": self._trainer.used()}
        began_s = time.perf_counter()
        await self._engine.suspend(engine_rung)
        suspended_s = time.perf_counter()
        await self._train(self._trainer.restore)
        row["to_train_s"] = time.perf_counter() - began_s
        row["restore_s"] = time.perf_counter() - suspended_s
        self._trainer.take_peak()
        row["step_s"] = await self._train(self._trainer.step)
        row["used_train_bytes"] = self._trainer.used()
        published_s = time.perf_counter()
        record = await self._train(self._trainer.publish)
        row["publish_s"] = time.perf_counter() - published_s
        row["trainer_peak_bytes"] = self._trainer.take_peak()
        began_s = time.perf_counter()
        await self._train(self._trainer.free, rung)
        row["free_s"] = time.perf_counter() - began_s
        resumed_s = time.perf_counter()
        await self._engine.resume()
        row["resume_s"] = time.perf_counter() - resumed_s
        pulled_s = time.perf_counter()
        if engine_rung >= 2:
            await self._pull(record)
        row["to_generate_s"] = time.perf_counter() - began_s
        if engine_rung < 2:  # an update as without switches
            await self._pull(record)
        row["pull_s"] = time.perf_counter() - pulled_s
        self._keep_busy()
        await asyncio.sleep(self._arguments.generate_s)
        return row

    async def _pull(self, record: PolicyRecord) -> None:
        offer = await self._puller.ask(record.source, record)
        self._transport = offer.transport
        self._record = record
        try:
            await self._engine.stage(offer)
            await self._engine.swap(record.version)
        except BaseException as error:
            await self._puller.finish(offer, str(error))
            raise
        await self._puller.finish(offer, None)

    async def _differences(self) -> int | None:
        """Return how many live tensors differ from the trainer's snapshot, or None without a copy plan."""
        if self._arguments.device != "cuda":
            return None
        offer = await self._puller.ask(self._record.source, self._record)
        answers = await self._engine._call("penstock_compare", offer.pack())
        differences: int | None = answers[0]
        await self._puller.finish(offer, "there is no copy plan" if differences is None else None)
        return differences

    def _keep_busy(self) -> None:
        self._requests = [request for request in self._requests if not request.done() or self._count(request)]
        for _ in range(self._arguments.sequences // _GROUP - len(self._requests)):
            prompt = self._random.integers(0, self._engine.vocabulary, _PROMPT_TOKENS, dtype=np.int32)
            sampling = Sampling(samples=_GROUP, max_new_tokens=self._arguments.new_tokens, temperature=1.0)
            self._requests.append(asyncio.create_task(self._engine.generate(GenerationRequest(prompt, sampling))))

    def _count(self, request: "asyncio.Task[Any]") -> bool:
        """Count a finished group's tokens; raises what the request raised."""
        self._finished_tokens += sum(len(sample.token_ids) for sample in request.result().samples)
        return False

    def _figures(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        for request in self._requests:
            self._count(request)
        self._requests, tokens, self._finished_tokens = [], self._finished_tokens, 0
        counted = rows[WARM_UPS:]
        middle = {name: statistics.median(row[name] for row in counted) for name in rows[0]}
        pairs = [row["to_train_s"] + row["to_generate_s"] for row in counted]
        before, after = rows[WARM_UPS - 1]["used_generate_bytes"], counted[-1]["used_generate_bytes"]
        engine = {name: nbytes for name, nbytes in self._engine.memory.items() if name != "capacity"}
        return {
            "switch_s": statistics.median(pairs),
            "switch_s_max": max(pairs),
            "first_switch_s": rows[0]["to_train_s"] + rows[0]["to_generate_s"],
            "switches": len(counted),
            **middle,
            "growth": after / before - 1.0,
            "trainer_memory": self._trainer.memory,
            "engine_memory": engine,
            "transport": self._transport,
            "finished_tokens": tokens,
        }

    async def close(self) -> None:
        """Stop both."""
        for request in self._requests:
            request.cancel()
        if self._engine is not None:
            await self._engine.close()
            await self._puller.close()
        await self._train(self._trainer.close)
