"""Penstock in each vLLM worker: records tokens, receives weights and makes them live.

vLLM calls :class:`WorkerExtension`'s methods by name, between two steps, in the thread that steps the model::

    penstock_open                reports, token record, a source for peers
    penstock_pieces(layout)      what this rank needs of each version, and
    penstock_share(share)        what it receives from then on
    penstock_swap(version)       shadow ─▶ live parameters, in order of the steps' stream; boundaries are noted
    penstock_stream(offer)       bucket by bucket into the live parameters, while generation is paused
    penstock_adapt(folder)       an adapter instead
    penstock_suspend, _resume    free memory for training, and take it back
    penstock_held, _listen       what is recorded, and whether: for tests and measurements

They are collective: every rank runs them between the same steps. ``stage`` and ``abort`` use the replica's socket and
do not wait for a step.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.services.rollout.engines.vllm import start_report
from penstock.services.rollout.engines.vllm.arguments import check_routers, check_windows
from penstock.services.rollout.engines.vllm.decoding.several_steps import quick_sampler, split_less, take_several_steps
from penstock.services.rollout.engines.vllm.ladder import Ladder, storages, tensors
from penstock.services.rollout.engines.vllm.multihost.hosts import secret_of
from penstock.services.rollout.engines.vllm.multihost.stores import bind_stores
from penstock.services.rollout.engines.vllm.routing.capture import route_record
from penstock.services.rollout.engines.vllm.routing.route_record import RouteRecord
from penstock.services.rollout.engines.vllm.runner_hooks import RunnerTap, can_listen, draw_alike, warm_up_own_routers
from penstock.services.rollout.engines.vllm.swap.share_plan import agree
from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper
from penstock.services.rollout.engines.vllm.token_record import Finished, TokenRecord
from penstock.services.rollout.engines.vllm.worker_channel import Reporter
from penstock.shared.errors import PeerError, SettingsError, WeightsError, is_out_of_memory
from penstock.shared.peers.frames import Frame
from penstock.shared.process import memory_timeline
from penstock.shared.process.parent import die_with
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Layout, decode_layout
from penstock.shared.weights.format.shares import Pieces, Share, Sums, decode, encode
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import plain_uuid

log = logging.getLogger(__name__)

bind_stores()  # imported in each worker before the rendezvous

_SWITCH_S = 0.0005
"""Switch interval between stepping and receiving threads: Python's 5 ms cost as much per pull as the transfer.
"""


class PolicyWorker:
    """Weights and token record of one rank, for the thread that steps the model.

    Args:
        capture: keep logprobs on the device, else only count tokens.
        peers: (host, port, deadline in seconds) of rank 0's source, on whose host other ranks serve their shares; empty
            host: none.
    """

    def __init__(self, worker: Any, reporting: tuple[str, str], capture: bool, peers: tuple[str, int, float]) -> None:
        self._device: torch.device = worker.device
        self._rank: int = worker.rank
        self._ranks: int = worker.parallel_config.world_size
        self._model = worker.model_runner.get_model()
        self._config = worker.vllm_config
        self._caches: object = getattr(worker.model_runner, "kv_caches", [])
        served = worker.vllm_config.model_config
        trusted = served.trust_remote_code
        check_routers(self._model)
        check_windows(self._model, served.model, served.max_model_len, trust_remote_code=trusted)
        beside = worker.parallel_config.node_rank == 0
        # vLLM notices a dead parent only at the next step, which never comes.
        if not beside and not die_with(os.getppid(), signal.SIGKILL):
            raise PeerError("the process that started this worker has ended")
        address, secret_file = reporting
        self._reporter = Reporter(
            address,
            self._rank,
            self._obey,
            secret=secret_of(Path(secret_file)) if secret_file else b"",
            beside=beside,
        )
        self._swapper = WeightSwapper(self._model, worker.vllm_config, self._device)
        self._swapper.check_quantised()
        self.ladder = Ladder(worker)
        self._is_filled = False
        """Whether there are weights of a version."""
        self._receiver = Receiver(self._rank + 1, self._ranks, self._device)
        self._share: Share | None = None
        self._share_layout, self._relays = "", False
        self._others: list[str] = []
        """Sources of the other ranks' shares, at rank 0."""
        self._shadow: FlatSnapshot | None = None
        self._staged: int | None = None
        self._swapped: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._patience_s = peers[2]
        self._source: WeightSource | None = None
        self._secret = b""
        if peers[0] and beside:
            port = peers[1] if self._rank == 0 else 0
            self._source = WeightSource(peers[0], port, lambda: self._secret, deadline_s=peers[2])
        self.refusal = can_listen(worker.model_runner) if capture else "as asked for"
        self.record: TokenRecord | None = None
        if not self.refusal:
            draw_alike(worker.model_runner)
        self._routes: RouteRecord | None = None
        if self._rank == 0:  # tensor-parallel ranks draw the same tokens, and route them alike
            self._routes = route_record(worker, self.refusal)
            self.record = TokenRecord(self._device, not self.refusal, self._routes)
            quick = quick_sampler(worker)
            self.tap = RunnerTap(worker.model_runner, self.record, self._deliver, not self.refusal, quick)
        take_several_steps(worker)

    def describe(self) -> dict[str, Any]:
        """Return this rank's data; ``policy_bytes`` approximates the whole policy, as it is published."""
        on_gpu = self._device.type == "cuda"
        model = self._config.model_config
        held = sum(each.numel() * max(each.itemsize, model.dtype.itemsize) for each in self._model.parameters())
        return {
            "error": "",
            "rank": self._rank,
            "started_with": {"model": model.model, "seed": model.seed, "dtype": str(model.dtype)},
            "device": self._device.type,
            "gpu_uuid": plain_uuid(torch.cuda.get_device_properties(self._device).uuid) if on_gpu else "",
            "free_bytes": torch.cuda.mem_get_info(self._device)[0] if on_gpu else 0,
            "policy_bytes": held * self._ranks if on_gpu else 0,
            "refusal": self.refusal,
            "peer_address": self._source.address if self._source else "",
            "held": self._held(),
        }

    def _held(self) -> Frame:
        held = {
            "weights": storages(self._model.parameters()),
            "key-value cache": storages(tensors(self._caches)),
            "shadow": {} if self._shadow is None else storages(self._shadow.buckets),
        }
        return {
            "place": list(memory_timeline.place_of(self._device)),
            "components": {name: float(sum(sizes.values())) for name, sizes in held.items()},
            "total_bytes": memory_timeline.used_bytes(self._device),
        }

    # ---------------------------------------------------------------- weights beside the live ones

    def stage(self, offer: Offer, staging: int) -> None:
        """Receive ``offer`` into the shadow; report the end as ``staging``."""
        if self._thread is not None and self._thread.is_alive():
            raise WeightsError("the previous staging is still in progress")
        self._staged = None
        self._receiver.begin()
        self._thread = threading.Thread(target=self._receive, args=(offer, staging), name="staging", daemon=True)
        self._thread.start()

    def _obey(self, told: Frame) -> None:
        """Execute replica messages at any time, in its own thread."""
        if told["kind"] == "abort":
            self._receiver.abort()
            return
        if told["kind"] == "secret":
            self._secret = told["secret"]
            return
        try:
            self.stage(Offer.unpack(told["offer"]), told["staging"])
        except WeightsError as error:
            self._report(told["staging"], str(error), 0.0)

    def _report(self, staging: int, error: str, seconds: float, sums: Sums | None = None) -> None:
        message = {"kind": "staged", "staging": staging, "rank": self._rank, "error": error, "seconds": seconds}
        message["sums"] = {name: list(values) for name, values in (sums or {}).items()}
        message["held"] = self._held()
        self._reporter.send(lambda: [message])

    def _receive(self, offer: Offer, staging: int) -> None:
        error, began_s, sums = (
            "a bug, see the log of the engine's process",
            time.monotonic(),
            dict[str, Sequence[str]](),
        )
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            sums |= self._receiver.receive(offer, self._room(offer), self._share_of(offer))
            self._staged, error = int(offer.header.version), ""
        except WeightsError as refused:
            error = str(refused)
        except Exception as failed:
            if isinstance(failed, RuntimeError) and is_out_of_memory(failed):
                error = str(failed)
            else:
                log.exception("staging failed")
                error = f"{error}: {failed!r}"
        finally:
            self._report(staging, error, time.monotonic() - began_s, sums)

    def _share_of(self, offer: Offer) -> Share | None:
        return self._share if self._share_layout == offer.header.layout else None

    def _room(self, offer: Offer) -> FlatSnapshot:
        if self._source is not None:
            self._source.withdraw(self._patience_s)
        if self._swapped is not None:
            self._swapped.synchronize()
        share = self._share_of(offer)
        shares = "" if share is None else share.digest
        if self._shadow is None or self._shadow.layout != offer.layout or self._shadow.shares != shares:
            self._shadow = None
            self._shadow = FlatSnapshot(offer.layout, self._device, packed=share)
        relays = self._relays if shares else self._rank == 0
        if self._source is not None and relays:
            self._source.offer(self._shadow, self._others if shares else ())  # peers get buckets as they arrive
        return self._shadow

    # ---------------------------------------------------------------- weights into the model

    def swap(self, version: int) -> tuple[str, int]:
        """Enqueue the staged weights on the stepping stream; return the path and the bytes."""
        shadow = self._shadow
        if shadow is None or self._staged != version:
            raise WeightsError(f"expected policy version {version} to be staged, found {self._staged}")
        for bucket in range(len(shadow.buckets)):
            shadow.wait(bucket, self._patience_s)
        if shadow.shares and self._share is not None:
            path, copied_bytes = self._swapper.swap_share(self._share, shadow)
        else:
            self._swapper.prepare(shadow.tensors())
            path, copied_bytes = self._swapper.swap()
        if self._device.type == "cuda":
            self._swapped = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._swapped.record(torch.cuda.current_stream(self._device))
        self.note(version)
        return path, copied_bytes

    def pieces(self, layout: Layout) -> Pieces:
        """Return what this rank needs of ``layout``; raises WeightsError if it has no plan."""
        return self._swapper.pieces(layout)

    def share(self, layout: Layout, ranks: Sequence[bytes], sources: list[str]) -> None:
        """Receive versions of ``layout`` as the share that follows from all ``ranks``' pieces, and relay it if all ranks
        have ``sources``."""
        self._share = agree(layout, [decode(pieces, layout) for pieces in ranks])[self._rank]
        self._share_layout = layout.digest
        self._relays = all(sources)
        self._others = sources[1:] if self._rank == 0 else []

    def stream(self, offer: Offer) -> tuple[str, int]:
        """Receive ``offer`` into the live parameters; decoding must be paused."""
        copied_bytes = self._swapper.stream(self._buckets(offer), offer.layout)
        self.note(int(offer.header.version))
        return "bucketed", copied_bytes

    def _buckets(self, offer: Offer) -> Iterator[tuple[int, torch.Tensor]]:
        buffer = torch.empty(max(offer.layout.bucket_bytes), dtype=torch.uint8, device=self._device)
        self._receiver.begin()
        return self._receiver.receive_each(offer, buffer)

    def differences(self, offer: Offer | None) -> int | None:
        """Return how many live tensors differ from ``offer``, or from the shadow; None without a plan."""
        return self._swapper.differences() if offer is None else self._swapper.compare(self._buckets(offer))

    def suspend(self, rung: int, *, keep_weights: bool) -> dict[str, int]:
        """Free memory down to ``rung``; return the bytes by component before."""
        memory = self.ladder.measure()
        derived = self._is_filled and self._swapper.path == "layerwise"  # a reload may not restore all derived state
        self._receiver.unmap()
        self.ladder.free(rung, keep_weights=keep_weights or derived)
        return memory

    def note(self, version: int) -> None:
        """Record that later tokens are of ``version``."""
        self._is_filled = True
        if self.record is not None:
            self.record.swap(version)

    @property
    def torn(self) -> bool:
        """Whether live weights mix versions."""
        return self._swapper.torn

    def _deliver(self, finished: Finished) -> None:
        def rows() -> list[Frame]:
            made = list[Frame]()
            for number, (request, logprobs, versions, supports) in enumerate(finished.rows()):
                sizes = np.array([len(supports[place]) for place in sorted(supports)], dtype=np.int32).tobytes()
                ids = b"".join(supports[place].tobytes() for place in sorted(supports))
                routes = self._routes.frame(finished.routes[number], len(ids)) if self._routes else None
                row = {"kind": "row", "request": request, "logprobs": logprobs, "versions": versions, "sizes": sizes}
                made.append({**row, "ids": ids, "routes": routes})
            return made

        self._reporter.send(rows)


class WorkerExtension:
    """vLLM worker methods; arguments and answers are msgpack."""

    _policy: PolicyWorker

    def __new__(cls, *_: Any, **__: Any) -> "WorkerExtension":
        worker = super().__new__(cls)
        warm_up_own_routers(worker)
        split_less()
        start_report.report(worker)
        return worker

    def penstock_open(self, reporting: list[str], capture: bool, peers: list[Any]) -> dict[str, Any]:
        """Connect to the replica and start recording."""
        sys.setswitchinterval(_SWITCH_S)
        (address, secret_file), (host, port, deadline_s) = reporting, peers
        try:
            self._policy = PolicyWorker(self, (address, secret_file), capture, (host, port, deadline_s))
        except (PeerError, SettingsError) as error:
            return {"error": str(error)}
        return self._policy.describe()

    def penstock_pieces(self, layout: bytes) -> dict[str, Any]:
        """Return the encoded pieces that this rank needs, or the reason why it needs the whole."""
        try:
            return {"error": "", "pieces": encode(self._policy.pieces(decode_layout(layout)))}
        except WeightsError as error:
            return {"error": str(error), "pieces": b""}

    def penstock_share(self, layout: bytes, ranks: list[bytes], sources: list[str]) -> None:
        """Receive a share of versions of ``layout`` from now on."""
        self._policy.share(decode_layout(layout), ranks, sources)

    def penstock_swap(self, version: int) -> dict[str, Any]:
        """Make the staged version live."""
        return self._answer(lambda: self._policy.swap(version))

    def penstock_stream(self, offer: dict[str, Any]) -> dict[str, Any]:
        """Make ``offer`` live bucket by bucket."""
        return self._answer(lambda: self._policy.stream(Offer.unpack(offer)))

    def penstock_adapt(self, folder: str, version: int) -> dict[str, Any]:
        """Load or replace the adapter by ``folder`` as ``version``."""

        def adapt() -> tuple[str, int]:
            self.add_lora(adapter_request(folder, in_place=True))  # type: ignore[attr-defined]
            self._policy.note(version)
            return "adapter", 0

        return self._answer(adapt)

    def penstock_suspend(self, rung: int, keep_weights: bool) -> dict[str, int]:
        """Free memory down to ``rung`` of the ladder; return the bytes by component before."""
        return self._policy.suspend(rung, keep_weights=keep_weights)

    def penstock_resume(self) -> None:
        """Allocate what was freed."""
        self._policy.ladder.take_back()

    def penstock_held(self) -> dict[str, int]:
        """Return tokens drawn so far, per held request."""
        return self._policy.record.held if self._policy.record is not None else {}

    def penstock_compare(self, offer: dict[str, Any] | None = None) -> int | None:
        """Return how many live tensors differ from ``offer`` or the shadow, or None without a plan; for measurements."""
        return self._policy.differences(None if offer is None else Offer.unpack(offer))

    def penstock_listen(self, on: bool) -> None:
        """Set whether later requests are recorded; for measurements."""
        if self._policy.record is not None:
            self._policy.tap.listening = on

    def _answer(self, call: Callable[[], tuple[str, int] | None]) -> dict[str, Any]:
        try:
            path, copied_bytes = call() or ("", 0)
        except WeightsError as error:
            return {"error": str(error), "torn": self._policy.torn}
        return {"error": "", "torn": False, "path": path, "copied_bytes": copied_bytes}


def adapter_request(folder: str, in_place: bool = False) -> Any:
    """Return vLLM's request for our single adapter; ``in_place`` rereads its folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=1, lora_path=folder, load_inplace=in_place)
