"""Pulls by shares into the real vLLM models of every rank of a replica, over gloo; prints one JSON line.

    python -m tests.support.vllm_shares FAMILY/TENSOR_PARALLEL/SOURCES …

Linear layers and experts are unpacked, as on a GPU. Each rank's model is loaded from the version's checkpoint by vLLM's own
loader beside, which is the reference.
"""

import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prometheus_client import Counter

from penstock.services.rollout.engines.vllm.swap.share_plan import SharesRefused, agree
from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper
from penstock.shared.bus.messages import PolicyRecord, PolicyVersion
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.flat import FlatSnapshot
from penstock.shared.weights.format.layout import Layout, plan_layout
from penstock.shared.weights.format.shares import Share, Sums, check_sums, decode, encode
from penstock.shared.weights.receiver.puller import Puller
from penstock.shared.weights.receiver.receiver import Receiver
from penstock.shared.weights.source import session
from penstock.shared.weights.source.source import WeightSource
from penstock.shared.weights.transport.offer import Offer
from penstock.shared.weights.transport.place import DeviceLocation
from tests.conftest import PATIENCE_S
from tests.support import weights

CPU = torch.device("cpu")
Tensors = Mapping[str, torch.Tensor]


class Rank:
    """A rank's model, swapper and receiver."""

    def __init__(self, config: Any, rank: int, ranks: int) -> None:
        from tests.support.vllm_models import as_rank, built

        self._pose = lambda: as_rank(rank, ranks)
        self._pose()
        self.live, self.loaded = built(config, 9.0), built(config, 5.0)
        self.swapper = WeightSwapper(self.live, config, CPU)
        self.receiver = Receiver(rank + 1, ranks, CPU)
        self.share: Share | None = None
        self.shadow: FlatSnapshot | None = None

    def pieces(self, layout: Layout) -> bytes:
        self._pose()
        return encode(self.swapper.pieces(layout))

    def receive(self, offer: Offer) -> Sums:
        if self.shadow is None:
            self.shadow = FlatSnapshot(offer.layout, CPU, packed=self.share)
        self.receiver.begin()
        return self.receiver.receive(Offer.unpack(offer.pack()), self.shadow, self.share)

    def swap(self, offer: Offer) -> str:
        self._pose()
        assert self.shadow is not None
        if self.share is not None:
            return self.swapper.swap_share(self.share, self.shadow)[0]
        self.swapper.prepare(self.shadow.tensors())
        return self.swapper.swap()[0]

    def is_as_loaded(self, checkpoint: Tensors) -> bool:
        from tests.support.vllm_models import same

        self._pose()
        self.loaded.load_weights(iter(checkpoint.items()))
        return same(self.live, self.loaded)


@contextlib.contextmanager
def served(snapshots: Sequence[FlatSnapshot]) -> Iterator[str]:
    """Serve each snapshot by a source of its own; yield the address of the first."""
    with contextlib.ExitStack() as until_served:
        sources = [until_served.enter_context(weights.serving(deadline_s=20.0)) for _ in snapshots]
        offer(sources, snapshots)
        yield sources[0].address


def offer(sources: Sequence[WeightSource], snapshots: Sequence[FlatSnapshot]) -> None:
    for source, snapshot in zip(sources, snapshots, strict=True):
        source.offer(snapshot, [other.address for other in sources[1:]] if source is sources[0] else ())


def layout_of(tensors: Tensors, bucket_bytes: int) -> Layout:
    return plan_layout(
        ((name, str(of.dtype).removeprefix("torch."), tuple(of.shape)) for name, of in tensors.items()), bucket_bytes
    )


def snapshots_of(layout: Layout, tensors: Tensors, version: int, sources: int) -> list[FlatSnapshot]:
    """Return a version as the snapshots of ``sources`` trainer ranks."""
    whole = FlatSnapshot(layout, CPU).fill(list(tensors.items()), PolicyVersion(version), version)
    shares = [FlatSnapshot(layout, CPU, (rank, sources)) for rank in range(sources)]
    for share in shares:
        share.fill(list(tensors.items()), PolicyVersion(version), version, lambda _: whole.checksums)
    return shares


def record_of(snapshot: FlatSnapshot) -> PolicyRecord:
    assert snapshot.header is not None
    return weights.record(int(snapshot.header.version), snapshot.header.digest)


def plan(ranks: Sequence[Rank], layout: Layout) -> str:
    """Give every rank its share; return the reason if there is none."""
    try:
        pieces = [decode(rank.pieces(layout), layout) for rank in ranks]
        for rank, share in zip(ranks, agree(layout, pieces), strict=True):
            rank.share = share
    except (SharesRefused, WeightsError) as refused:
        return str(refused)
    return ""


async def pull(puller: Puller, ranks: Sequence[Rank], address: str, record: PolicyRecord) -> Offer:
    """Let all ranks receive, in parallel, and verify."""
    offered = await puller.ask(address, record)
    error: str | None = "the receive did not end"
    try:
        tasks = [asyncio.to_thread(rank.receive, offered) for rank in ranks]
        sums = await asyncio.gather(*tasks, return_exceptions=True)
        if errors := [sum_ for sum_ in sums if isinstance(sum_, BaseException)]:
            raise errors[0]
        if ranks[0].share is not None:
            check_sums(
                [sum_ for sum_ in sums if not isinstance(sum_, BaseException)], offered.header.checksums, address
            )
        error = None
    except WeightsError as failure:
        error = str(failure)
        raise
    finally:
        await puller.finish(offered, error)
    return offered


async def case(
    ranks: Sequence[Rank],
    versions: Sequence[Tensors],
    checkpoints: Sequence[Tensors],
    sources: int,
    bucket_bytes: int,
    *,
    whole: bool,
) -> dict[str, Any]:
    """Pull and swap every version; return what was seen."""
    layout = layout_of(versions[0], bucket_bytes)
    refused = plan(ranks, layout) if len(ranks) > 1 and not whole else ""
    puller = Puller(DeviceLocation(), len(ranks), PATIENCE_S, weights.secret)
    sent: Counter = session.SENT_BYTES
    right, path, before, seconds = [], "", sent._value.get(), []
    for version, (tensors, checkpoint) in enumerate(zip(versions, checkpoints, strict=True), 1):
        shots = snapshots_of(layout, tensors, version, sources)
        with served(shots) as address:
            began_s = time.monotonic()
            offered = await pull(puller, ranks, address, record_of(shots[0]))
            seconds.append(round(time.monotonic() - began_s, 3))
            paths = {rank.swap(offered) for rank in ranks}
            (path,) = paths
            right.append(all(rank.is_as_loaded(checkpoint) for rank in ranks))
    await puller.close()
    for rank in ranks:
        rank.receiver.close()
    per_rank = sum(bucket.numel() for bucket in ranks[0].shadow.buckets) if ranks[0].shadow is not None else 0
    policy_bytes = sum(tensor.nbytes for tensor in versions[0].values())
    return {
        "path": path, "refused": refused, "right": right, "buckets": len(layout.bucket_bytes), "pull_s": seconds,
        "rank_bytes": per_rank, "policy_bytes": policy_bytes, "of_fair_share": per_rank * len(ranks) / policy_bytes,
        "sent_bytes": int(sent._value.get() - before),
    }  # fmt: skip


def play(
    folder: Path,
    policies: Sequence[Any],
    parallel: int,
    sources: int,
    dtype: str = "float32",
    *,
    whole: bool = False,
    by_expert: bool = False,
) -> dict[str, Any]:
    """Pull the weights of ``policies`` (transformers models) into a replica of ``parallel`` ranks, as shares or ``whole``.

    ``by_expert``: each rank holds whole experts instead of a part of every expert.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from tests.support.unpacked import unpack_experts
    from tests.support.vllm_models import saved

    unpack_experts()
    policies[0].save_pretrained(folder)
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=64,
        enable_expert_parallel=by_expert,
    ).create_engine_config()
    versions = [{name: of.data.clone() for name, of in policy.named_parameters()} for policy in policies]
    largest = max(tensor.nbytes for tensor in versions[0].values())
    with set_current_vllm_config(config), torch.no_grad():
        _join()
        ranks = [Rank(config, rank, parallel) for rank in range(parallel)]
        checkpoints = [saved(policy) for policy in policies]
        return asyncio.run(case(ranks, versions, checkpoints, sources, 2 * largest, whole=whole))


@functools.cache
def _join() -> None:
    from tests.support.vllm_models import join_alone

    join_alone()


SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Two key-value heads, so that four ranks hold each of them twice; vLLM pads the vocabulary to 64."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "phi3": {"tie_word_embeddings": False},
    "gemma2": {},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {},
    "starcoder2": {},
    "gpt_neox": {},
    "qwen3_moe": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64, "num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
}
RANKS: defaultdict[str, tuple[int, ...]] = defaultdict(lambda: (1, 2, 4), {"gpt_oss": (1,)})
"""On other ranks GPT-OSS's loader writes zeros into the biases that it is given, so these ranks have no plan."""


def policy(family: str, seed: int, **sizes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family] | sizes)).eval()


def seen(name: str) -> dict[str, Any]:
    """Play FAMILY/TENSOR_PARALLEL/SOURCES, or FAMILY+ep/… with whole experts per rank; return what was seen, or the error."""
    family, parallel, sources = name.split("/")
    by_expert = family.endswith("+ep")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            policies = [policy(family.removesuffix("+ep"), seed) for seed in (1, 2)]
            return {"case": name, **play(Path(folder), policies, int(parallel), int(sources), by_expert=by_expert)}
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            return {"case": name, "error": f"{error!r} at {Path(place.filename).name}:{place.lineno}"[:500]}


@contextlib.contextmanager
def forks() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls another in a fork of this process, which imports vLLM: it keeps state in globals."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1"}
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # else a process that imports vLLM again looks at each model
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        yield lambda call, *arguments, **named: pool.apply(call, arguments, named)


def main(cases: Sequence[str]) -> None:
    with forks() as call:
        print(json.dumps({name: call(seen, name) for name in cases}))


if __name__ == "__main__":
    main(sys.argv[1:])
