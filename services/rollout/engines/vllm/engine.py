"""vLLM behind the engine protocol.

::

    generate ─▶ gate ─▶ AsyncLLM (engine process) ─▶ tokens ──┐
                                  │ worker: token record ─────┴▶ GeneratedGroup
    stage ──▶ every worker receives into its shadow, decoding continues ──▶ ok of each rank
    swap  ──▶ one call between two steps of the model: shadow ─▶ live parameters; boundaries are noted

Logprobs come from the worker's token record (``"captured"``); vLLM's (``"native"``, or unknown model runners) cost
nearly half of the throughput. ``bucketed`` streams weights into the live parameters behind a pause.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from prometheus_client import REGISTRY, Gauge

from penstock.services.rollout.engines.engine import (
    EngineDied,
    GeneratedGroup,
    GenerationRequest,
    SwapReport,
    UpdateMode,
)
from penstock.services.rollout.engines.vllm.ladder import FREED
from penstock.services.rollout.engines.vllm.requests import ROW_S, Requests
from penstock.services.rollout.engines.vllm.swap.share_plan import SharesRefused, agree
from penstock.services.rollout.engines.vllm.swap_gate import SwapGate
from penstock.services.rollout.engines.vllm.worker_channel import Reports
from penstock.shared.bus.messages import Float32Array, Int32Array, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.process.memory_timeline import Held
from penstock.shared.weights.format.shares import check_sums, decode
from penstock.shared.weights.format.snapshot import read_snapshot
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation, boot_id

log = logging.getLogger(__name__)

LOGPROBS_CAPTURED = Gauge(
    "penstock_rollout_logprobs_captured",
    "1 while vLLM's workers note logprobs on the device, 0 while vLLM returns them at the cost of much of the rate.",
)

_DRAWN_TOKENS = "vllm:generation_tokens_total"
"""What vLLM counts in this process at each step, of all engines."""
_CLOSE_S = 10.0
_WORD_S = 2.0
"""If vLLM reports the failure first, the worker's death follows within milliseconds."""

WorkerAnswer = dict[str, Any]
R = TypeVar("R")


class VllmEngine:
    """An :class:`Engine` on vLLM; see :func:`penstock.services.rollout.engines.vllm.start.open_vllm`.

    Args:
        llm: an AsyncLLM with :class:`penstock.services.rollout.engines.vllm.worker.WorkerExtension`.
        workers: each rank's ``penstock_open`` answer.
        kv: keep or recompute running requests' key-value cache at a swap.
        bucketed: stream weights into the live parameters.
    """

    def __init__(
        self,
        llm: Any,
        reports: Reports,
        workers: list[WorkerAnswer],
        *,
        stop: tuple[int, ...],
        kv: Literal["keep", "recompute"],
        update: UpdateMode,
        bucketed: bool,
        adapters: bool,
    ) -> None:
        self._llm = llm
        self._reports = reports
        self._kv, self._update, self._adapters = kv, update, adapters
        self.bucketed = bucketed
        native = bool(workers[0]["refusal"])
        self._gate = SwapGate()
        self._stagings = itertools.count()
        self._version: PolicyVersion | None = None
        self._staged: Offer | None = None
        self._swapping = asyncio.Lock()
        self.streams_whole = False
        """Whether the shadow has room for shares alone, so that whole versions are streamed (``bucketed``)."""
        self.torn = False
        """Whether requests are held because a swap failed midway."""
        self._held_until_s = -math.inf
        self._is_paused = self._is_cleared = False
        self._rung = 0
        """Down to which the device is freed."""
        self.memory: dict[str, float] = {}
        """Bytes by component before the last suspension."""
        self._requests = Requests(llm, reports, stop=stop, native=native, held=self._is_held)
        self.receive_s = 0.0
        """The last staging's seconds, from the wait for the shadow to verified bytes."""
        self.ranks = len(workers)
        uuids = tuple(str(worker["gpu_uuid"]) for worker in workers if worker["gpu_uuid"])
        self.place = DeviceLocation(device="cuda" if uuids else "cpu", gpu_uuids=uuids, boot_id=boot_id())
        self._peer_addresses = [str(worker["peer_address"]) for worker in workers]
        self._planned = ""
        """The layout for which shares were planned."""
        self._shares = ""
        """Names the shares in which the ranks receive versions of that layout; "": whole versions."""
        self.peer_address: str = "" if bucketed else self._peer_addresses[0]
        """Where peers can pull; streamed weights leave no copy for them, nor do shares of several hosts."""
        self.stop = stop
        self.context_tokens = int(llm.model_config.max_model_len)
        self.vocabulary = int(llm.model_config.get_vocab_size())
        LOGPROBS_CAPTURED.set(not native)
        if native:
            log.warning("vLLM returns logprobs at the cost of much of the rate", extra={"why": workers[0]["refusal"]})

    def _is_held(self) -> bool:
        return self.torn or self._swapping.locked() or time.monotonic() < self._held_until_s

    def update_by(self, mode: UpdateMode) -> None:
        """Swap between two decoding steps or after running completions."""
        self._update = mode

    def share_secret(self, secret: bytes) -> None:
        self._reports.tell({"kind": "secret", "secret": secret})

    @property
    def held(self) -> Sequence[Held]:
        """What each rank holds, as of the newest staging, and of the rung if the device is freed."""
        return tuple(held.without(FREED[min(self._rung, max(FREED))]) for held in self._reports.held.values())

    @property
    def version(self) -> PolicyVersion | None:
        return self._version

    @property
    def drawn_tokens(self) -> int:
        counted = REGISTRY.restricted_registry([_DRAWN_TOKENS]).collect()
        return sum(int(sample.value) for metric in counted for sample in metric.samples if sample.name == _DRAWN_TOKENS)

    # ---------------------------------------------------------------- generating

    async def generate(self, request: GenerationRequest) -> GeneratedGroup:
        """Return completions; raises PermanentError if vLLM refuses the request, or EngineDied."""
        return await self._living(self._group(request))

    async def _group(self, request: GenerationRequest) -> GeneratedGroup:
        async with self._gate.passage():
            if self._version is None:
                raise EngineDied("expected weights before the first request: a bug")
            started_at_s = time.time()
            samples = await self._requests.samples(request, self._version)
            return GeneratedGroup(samples, started_at_s, time.time())

    async def logprobs(self, token_ids: Int32Array) -> Float32Array:
        return await self._living(self._requests.logprobs(token_ids))

    async def rehearse(self, request: GenerationRequest) -> None:
        """Generate and drop a group, for measurements."""
        await self._living(self._requests.rehearse(request))

    # ---------------------------------------------------------------- weights

    async def stage(self, offer: Offer) -> None:
        self._staged = None
        if _is_adapter(offer):
            await asyncio.to_thread(self._check_adapter, offer)
        else:
            await self._plan_shares(offer)
            if offer.shares not in ("", "" if self.bucketed else self._shares):
                raise WeightsError(f"{offer.source} has the shares of other ranks: their trainer has the whole version")
            if not self.bucketed:
                await self._receive(offer)
        self._staged = offer

    def _check_adapter(self, offer: Offer) -> None:
        if not self._adapters:
            raise WeightsError(
                f"expected weights of the whole policy, found the adapter {offer.source}: "
                'set rollout.vllm.arguments.enable_lora (weights.lora = "adapter" does)'
            )
        if not (Path(offer.source) / "adapter_model.safetensors").is_file():
            raise WeightsError(f"{offer.source} has no adapter_model.safetensors")
        if offer.manifest_digest:
            read_snapshot(Path(offer.source), offer.manifest_digest)  # raises if torn or another version's

    async def _receive(self, offer: Offer) -> None:
        staging = next(self._stagings)
        self._reports.tell({"kind": "stage", "offer": offer.pack(), "staging": staging})
        try:
            async with asyncio.timeout(2 * offer.deadline_s):  # the workers' waits have their own deadlines
                error, self.receive_s, sums = await self._living(self._reports.staged(staging, self.ranks))
        except TimeoutError as late:
            self._reports.tell({"kind": "abort"})
            raise WeightsError(
                f"expected version {offer.header.version} from {offer.source}, but it came late"
            ) from late
        except asyncio.CancelledError:
            self._reports.tell({"kind": "abort"})
            raise
        if error:
            raise WeightsError(error)
        if self._shares and offer.header.checksums:
            check_sums(sums, offer.header.checksums, offer.source)

    async def _plan_shares(self, offer: Offer) -> None:
        """With several ranks, let each receive its share alone from now on, if their plans divide the weights."""
        if self.ranks == 1 or self.bucketed or self._planned == offer.header.layout:
            return
        self._shares, layout = "", offer.layout.encode()
        answers = await self._call("penstock_pieces", layout)
        try:
            if errors := [answer["error"] for answer in answers if answer["error"]]:
                raise SharesRefused(errors[0])
            pieces = [answer["pieces"] for answer in answers]
            shares = agree(offer.layout, [decode(encoded, offer.layout) for encoded in pieces])
        except (SharesRefused, WeightsError) as refused:
            self.bucketed = self.bucketed or self.streams_whole
            self.peer_address = "" if self.bucketed else self.peer_address
            pauses = {"update_pauses": self.bucketed}
            log.warning("every rank will receive whole versions", extra={"reason": str(refused), **pauses})
        else:
            await self._call("penstock_share", layout, pieces, self._peer_addresses)
            self._shares = shares[0].digest
            if not self.bucketed and not all(self._peer_addresses):
                self.peer_address = ""
            log.info("every rank will receive its share", extra={"bytes": shares[0].nbytes, "of": offer.layout.nbytes})
        self._planned = offer.header.layout

    async def swap(self, version: PolicyVersion) -> SwapReport:
        offer = self._staged
        if offer is None or offer.header.version != version:
            raise WeightsError(f"policy version {version} is not staged")
        async with self._swapping:
            started_s = time.monotonic()
            async with self._quiet():
                answer = await self._put(offer)
            return SwapReport(time.monotonic() - started_s, answer["path"], answer["copied_bytes"])

    async def _put(self, offer: Offer) -> WorkerAnswer:
        streamed = self.bucketed and not _is_adapter(offer)
        if _is_adapter(offer):
            answers = await self._call("penstock_adapt", offer.source, int(offer.header.version))
        elif streamed:
            self.torn = True  # until the swap completes
            answers = await self._call("penstock_stream", offer.pack())
        else:
            answers = await self._call("penstock_swap", int(offer.header.version))
        errors = [answer for answer in answers if answer["error"]]
        torn = any(answer["torn"] for answer in errors) or 0 < len(errors) < len(answers)
        if torn and not streamed:
            raise EngineDied(f"a swap failed in the middle while requests run: {errors[0]['error']}")
        self.torn = torn
        _check(answers)
        self._version = offer.header.version
        if _is_adapter(offer):
            from penstock.services.rollout.engines.vllm.worker import adapter_request

            self._requests.adapter = adapter_request(offer.source)
        return answers[0]

    @contextlib.asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        pause = self.bucketed or self._kv == "recompute"
        try:
            if self._update == "drain":
                await self._gate.shut(empty=True)
            if pause:
                await self._pause(clear_cache=self._kv == "recompute")
            yield
        finally:
            if not self.torn and not self._reports.died.done():
                await self._continue()

    async def _pause(self, *, clear_cache: bool) -> None:
        """Freeze requests between two steps; without their cache, they are prefilled again."""
        await self._gate.shut()
        keeps_cache = self._is_paused and not self._is_cleared  # as after a torn stream
        if not self._is_paused or (clear_cache and keeps_cache):
            await self._control("pausing", self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
            self._is_paused, self._is_cleared = True, clear_cache

    async def _continue(self) -> None:
        if self._is_paused:
            await self._control("resuming", self._llm.resume_generation())
            self._is_paused = self._is_cleared = False
        await self._gate.open()

    # ---------------------------------------------------------------- a shared device

    async def suspend(self, rung: int) -> None:
        """Freeze requests between two steps, and free memory down to ``rung``; from rung 1 on they are prefilled again."""
        self._held_until_s = math.inf
        await self._pause(clear_cache=rung >= 1)
        answers = await self._call("penstock_suspend", rung, self._adapters)
        self._rung = rung
        self.memory = {name: float(nbytes) for name, nbytes in answers[0].items()}
        if rung >= 2 and not self._adapters:  # an adapter does not bring its base weights back
            self._version = None

    async def resume(self) -> None:
        """Take the memory back; requests continue, after the next swap if the weights were discarded."""
        await self._call("penstock_resume")
        self._rung = 0
        self._held_until_s = time.monotonic() + ROW_S
        if self._version is not None and not self.torn:
            await self._continue()

    async def _call(self, method: str, *arguments: Any) -> list[WorkerAnswer]:
        answers: list[WorkerAnswer] = await self._control(method, self._llm.collective_rpc(method, args=arguments))
        return answers

    async def _control(self, action: str, work: Coroutine[Any, Any, R]) -> R:
        try:
            return await self._living(work)
        except EngineDied:
            raise
        except Exception as error:  # vLLM raises bare exceptions
            raise EngineDied(f"{action} failed in a worker: {error}") from error

    # ---------------------------------------------------------------- living and dying

    async def _living(self, work: Coroutine[Any, Any, R]) -> R:
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._reports.died}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDied(self._reports.died.result())
            try:
                return task.result()
            except EngineDied as error:
                if word := await self._last_word():
                    raise EngineDied(word) from error
                raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_CLOSE_S)

    async def _last_word(self) -> str:
        died = self._reports.died
        await asyncio.wait({died}, timeout=_WORD_S)
        return died.result() if died.done() and not died.cancelled() else ""

    async def close(self) -> None:
        """End the engine's processes and cancel requests."""
        if self._llm is None:
            return
        dead = self._reports.died.done()
        self._reports.died.cancel()
        if dead:
            for pid in self._reports.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(self._llm.shutdown, 1.0 if dead else _CLOSE_S)
        self._llm = None  # else it shuts down again at interpreter exit, without needed modules
        await self._reports.close()


def _is_adapter(offer: Offer) -> bool:
    return offer.transport == "file" and (Path(offer.source) / "adapter_config.json").is_file()


def _check(answers: list[WorkerAnswer]) -> None:
    for answer in answers:
        if answer["error"]:
            raise WeightsError(answer["error"])
