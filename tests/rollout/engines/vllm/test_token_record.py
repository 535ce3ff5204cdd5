"""Laws of a worker's token records, with fake vLLM runners."""

import asyncio
import dataclasses
import math
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from penstock.services.plan.memory import record_bytes
from penstock.services.rollout.engines.vllm.runner_hooks import (
    _ROUTER_SHAPES,
    RunnerTap,
    can_listen,
    draw_alike,
    warm_up_own_routers,
)
from penstock.services.rollout.engines.vllm.token_record import Finished, TokenRecord, token_logprobs
from penstock.services.rollout.engines.vllm.worker_channel import Reporter, Reports, prove
from penstock.shared.errors import PeerError
from penstock.shared.peers import frames
from penstock.shared.process.children import reap
from tests.conftest import PATIENCE_S, until

CPU = torch.device("cpu")


def draw(record: TokenRecord, computed: dict[str, int], scheduled: dict[str, int], logprobs: list[float]) -> None:
    """Every request draws token 1 of 2 with the given probability."""
    names = list(scheduled)
    record.step(names, np.array([computed[name] for name in names]), np.array([scheduled[name] for name in names]))
    chosen = torch.tensor(logprobs)
    logits = torch.stack([torch.log1p(-chosen.exp()), chosen], dim=1)
    record.store(logits + 3.0, torch.ones(len(names), dtype=torch.int64))


def let_go(record: TokenRecord, *names: str) -> dict[str, tuple[list[float], list[tuple[int, int]]]]:
    finished = record.release(names)
    assert finished is not None
    return {
        name: ([round(float(value), 4) for value in np.frombuffer(logprobs, np.float32)], versions)
        for name, logprobs, versions, _ in finished.rows()
    }


@pytest.mark.parametrize(("requests", "tokens"), [(1, 16), (64, 1024), (70, 5000), (1024, 131_072)])
def test_the_plan_counts_a_record_and_the_one_from_which_it_grows(
    requests: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def zeros(count: int, **_: Any) -> torch.Tensor:
        sizes.append(4 * count)
        return torch.empty(count, device="meta")

    monkeypatch.setattr(torch, "zeros", zeros)
    record = TokenRecord(CPU)
    for number in range(requests):
        record.admit(str(number), 5, 5, tokens)
    has_grown = len(sizes) > 2  # the first is of no row
    most = max(sizes[-1] + sizes[-2] * has_grown, sizes[-1])
    assert most <= record_bytes(requests, tokens) + 8 <= 1.5 * sizes[-1] + 8


def test_a_logprob_is_that_of_the_softmax_of_the_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, -1.0, 0.0]], dtype=torch.bfloat16)
    logprobs = token_logprobs(logits, torch.tensor([2, 1]))
    torch.testing.assert_close(logprobs, torch.tensor([-0.4076, -6.0092]), atol=1e-4, rtol=0)  # the literals' digits
    assert logprobs.dtype == torch.float32


def test_every_request_has_its_row_whatever_the_batch_order() -> None:
    record = TokenRecord(CPU)
    record.swap(3)
    record.admit("a", 4, 4, 8)
    record.admit("b", 2, 2, 8)
    draw(record, {"a": 0, "b": 0}, {"a": 4, "b": 2}, [-0.1, -0.2])
    draw(record, {"a": 4, "b": 2}, {"b": 1, "a": 1}, [-0.4, -0.3])
    assert record.held == {"a": 2, "b": 2}
    assert let_go(record, "b", "unknown") == {"b": ([-0.2, -0.4], [(0, 3)])}
    assert let_go(record, "a") == {"a": ([-0.1, -0.3], [(0, 3)])}
    assert record.release(["a"]) is None


def test_a_prompt_that_is_read_in_pieces_draws_only_with_the_last() -> None:
    record = TokenRecord(CPU)
    record.swap(0)
    record.admit("a", 5, 5, 8)
    draw(record, {"a": 0}, {"a": 3}, [-0.9])
    assert record.held == {"a": 0}
    draw(record, {"a": 3}, {"a": 2}, [-0.1])
    draw(record, {"a": 5}, {"a": 1}, [-0.2])
    assert let_go(record, "a") == {"a": ([-0.1, -0.2], [(0, 0)])}


def test_tokens_drawn_before_a_swap_keep_their_version() -> None:
    record = TokenRecord(CPU)
    record.swap(7)
    record.admit("a", 1, 1, 8)
    record.admit("late", 3, 3, 8)
    draw(record, {"a": 0}, {"a": 1}, [-0.1])
    draw(record, {"a": 1}, {"a": 1}, [-0.2])
    record.swap(8)
    draw(record, {"a": 2, "late": 0}, {"a": 1, "late": 3}, [-0.3, -0.4])
    record.swap(9)
    record.swap(10)
    draw(record, {"a": 3, "late": 3}, {"a": 1, "late": 1}, [-0.5, -0.6])
    record.admit("new", 1, 1, 8)
    assert let_go(record, "a", "late", "new") == {
        "a": ([-0.1, -0.2, -0.3, -0.5], [(0, 7), (2, 8), (3, 10)]),
        "late": ([-0.4, -0.6], [(0, 8), (1, 10)]),
        "new": ([], [(0, 10)]),
    }


@pytest.mark.parametrize("by_slot", [True, False])
def test_a_token_that_is_drawn_again_after_a_preemption_has_its_new_logprob_and_version(by_slot: bool) -> None:
    record = TokenRecord(CPU)
    record.swap(1)
    record.admit("a", 2, 2, 8)
    draw(record, {"a": 0}, {"a": 2}, [-0.1])
    draw(record, {"a": 2}, {"a": 1}, [-0.2])
    draw(record, {"a": 3}, {"a": 1}, [-0.3])  # in flight, discarded
    record.swap(2)
    if by_slot:
        record.admit("a", 2, 4, 8)
    else:
        record.resume("a", 2)
    draw(record, {"a": 0}, {"a": 3}, [-0.9])
    draw(record, {"a": 3}, {"a": 1}, [-0.4])
    draw(record, {"a": 4}, {"a": 1}, [-0.5])
    assert let_go(record, "a") == {"a": ([-0.1, -0.2, -0.4, -0.5], [(0, 1), (2, 2)])}


def test_more_requests_and_longer_ones_than_expected_find_room() -> None:
    record = TokenRecord(CPU)
    record.swap(0)
    record.admit("first", 1, 1, 8)
    draw(record, {"first": 0}, {"first": 1}, [-0.1])
    for number in range(200):
        record.admit(f"r{number}", 1, 1, 3000)
    draw(record, {"first": 1, "r199": 2500}, {"first": 1, "r199": 1}, [-0.2, -0.7])
    taken = let_go(record, "first", "r199")
    assert taken["first"][0] == [-0.1, -0.2]
    assert taken["r199"][0][2500] == -0.7


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_repeat_the_last_one_are_recorded_as_all_others(seed: int) -> None:
    repeated: list[bool] = []

    class Noted(TokenRecord):
        def _repeat(self, *step: Any) -> bool:
            repeated.append(super()._repeat(*step))
            return repeated[-1]

    class Plain(TokenRecord):
        def _repeat(self, *_: Any) -> bool:
            return False

    lot, records = random.Random(seed), (Noted(CPU), Plain(CPU))
    prompts: dict[str, int] = {}
    for number in range(400):
        if lot.random() < 0.05 and len(prompts) < 90:
            name, prompt = f"r{number}", lot.randint(1, 9)
            prompts[name] = prompt
            for record in records:
                record.admit(name, prompt, prompt, 2000)
        if lot.random() < 0.02 and prompts:
            name, drawn = lot.choice(list(records[1].held.items()))
            for record in records:
                record.resume(name, drawn // 2)
        if lot.random() < 0.05:
            for record in records:
                record.swap(number)
        if lot.random() < 0.02 and prompts:
            name = lot.choice(list(prompts))
            del prompts[name]
            assert let_go(records[0], name) == let_go(records[1], name)
        names = [name for name in prompts if lot.random() < 0.999]
        drawn_by = records[1].held
        computed = {name: prompts[name] + drawn_by[name] - 1 if drawn_by[name] else 0 for name in names}
        scheduled = {name: 1 if drawn_by[name] else prompts[name] for name in names}
        chances = [-lot.random() - 0.01 for _ in names]
        for record in records:
            draw(record, computed, scheduled, chances)
        assert records[0].held == records[1].held
    for name in prompts:
        assert let_go(records[0], name) == let_go(records[1], name)
    assert sum(repeated) > 300


def test_a_token_past_the_end_of_its_row_is_not_written_into_the_next() -> None:
    """Asynchronous scheduling may draw one more."""
    record, tokens = TokenRecord(CPU), 1024
    for name in ("b", "a"):
        record.admit(name, 3, 3, tokens)
    draw(record, {"a": 0, "b": 0}, {"a": 3, "b": 3}, [-0.5, -0.75])
    for number in range(1, tokens + 1):
        draw(record, {"a": 2 + number, "b": 2 + number}, {"a": 1, "b": 1}, [-0.25, -0.125])
    rows = let_go(record, "a", "b")
    assert rows["a"][0] == [-0.5, *[-0.25] * (tokens - 1)]
    assert rows["b"][0] == [-0.75, *[-0.125] * (tokens - 1)]


def test_without_logprobs_tokens_are_counted_all_the_same() -> None:
    record = TokenRecord(CPU, logprobs=False)
    record.swap(0)
    record.admit("a", 1, 1, 8)
    draw(record, {"a": 0}, {"a": 1}, [-0.1])
    record.swap(1)
    assert let_go(record, "a") == {"a": ([], [(0, 0), (1, 1)])}


@dataclasses.dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[Any] = dataclasses.field(default_factory=list)
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    scheduled_cached_reqs: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), num_output_tokens=[], num_computed_tokens=[]
        )
    )


def new(name: str, prompt: int, prefill: int | None = None) -> Any:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=[0] * prompt,
        prefill_token_ids=None if prefill is None else [0] * prefill,
        num_computed_tokens=0,
        sampling_params=SimpleNamespace(max_tokens=8, top_k=0, temperature=1.0),
    )


class NewSampler:
    """As ``vllm.v1.worker.gpu.sample.sampler.Sampler``: returns the processed logits."""

    use_flashinfer = True

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> torch.Tensor:
        tokens, _ = self.sample(logits, input_batch.idx_mapping)
        return tokens

    def sample(self, logits: torch.Tensor, mapping: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), logits / 2.0


class NewRunner:
    """As ``vllm.v1.worker.gpu.model_runner.GPUModelRunner``."""

    def __init__(self) -> None:
        self.req_states = object()
        self.sampler = NewSampler()
        self.batch: Any = None

    def execute_model(self, scheduler_output: Any, intermediate: Any = None, dummy_run: bool = False) -> None:
        return None

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> torch.Tensor:
        return self.sampler(hidden_states, input_batch)


class OldRunner:
    """As ``vllm.v1.worker.gpu_model_runner.GPUModelRunner``: temperature is applied in place."""

    def __init__(self) -> None:
        self.sampler = SimpleNamespace(sample=lambda logits, metadata: (logits.div_(2.0).argmax(-1), None))
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(4, dtype=np.int32))

    def execute_model(self, scheduler_output: Any, intermediate: Any = None) -> None:
        return None


LOGITS = torch.tensor([[0.0, 2.0], [4.0, 0.0]])
HALVED = [-0.3133, -0.1269]


def run_new(runner: NewRunner, names: list[str], computed: list[int], scheduled: list[int]) -> None:
    batch = SimpleNamespace(
        req_ids=names,
        idx_mapping=None,
        num_computed_tokens_np=np.array(computed, dtype=np.int32),
        num_scheduled_tokens=np.array(scheduled, dtype=np.int32),
    )
    runner.sample(LOGITS[: len(names)].clone(), batch, None)


def test_every_tensor_parallel_rank_draws_as_the_first_one() -> None:
    newer = NewRunner()
    draw_alike(newer)
    assert newer.sampler.use_flashinfer is False
    draw_alike(OldRunner())


def test_the_newer_runner_is_heard_after_temperature() -> None:
    runner, record, rows = NewRunner(), TokenRecord(CPU), list[Finished]()
    assert can_listen(runner) == ""
    RunnerTap(runner, record, rows.append, logits=True)
    record.swap(0)
    runner.execute_model(Scheduled({}), dummy_run=True)
    runner.sampler(LOGITS, SimpleNamespace(idx_mapping=None))  # a profiling run
    runner.execute_model(Scheduled({"a": 3, "b": 2}, [new("a", 3, 3), new("b", 2, 2)]))
    run_new(runner, ["b", "a"], [0, 0], [2, 3])
    runner.execute_model(Scheduled({"b": 1}, [new("b", 2, 3)], {"a"}))
    run_new(runner, ["b"], [2], [1])
    runner.execute_model(Scheduled({}, finished_req_ids={"b"}))
    recorded = {
        name: np.frombuffer(values, np.float32).round(4).tolist() for row in rows for name, values, _, _ in row.rows()
    }
    assert recorded == {"a": pytest.approx([HALVED[1]]), "b": pytest.approx([HALVED[0], HALVED[0]])}


def test_the_older_runner_is_heard_after_temperature() -> None:
    runner, record, rows = OldRunner(), TokenRecord(CPU), list[Finished]()
    assert can_listen(runner) == ""
    RunnerTap(runner, record, rows.append, logits=True)
    record.swap(0)
    runner.execute_model(Scheduled({"a": 3, "b": 2}, [new("a", 3), new("b", 4)]))
    runner.input_batch.req_ids = ["a", "b"]
    runner.sampler.sample(LOGITS.clone(), None)
    runner.execute_model(Scheduled({}, finished_req_ids={"a", "b"}))
    recorded = {
        name: np.frombuffer(values, np.float32).round(4).tolist() for row in rows for name, values, _, _ in row.rows()
    }
    assert recorded == {"a": pytest.approx([HALVED[0]]), "b": []}


def test_a_runner_of_an_unknown_kind_is_only_counted() -> None:
    runner, record, rows = SimpleNamespace(execute_model=lambda output: None), TokenRecord(CPU, False), list[Finished]()
    assert "no sampler" in can_listen(runner)
    RunnerTap(runner, record, rows.append, logits=False)
    record.swap(0)
    runner.execute_model(Scheduled({"a": 3}, [new("a", 3)]))
    record.swap(1)
    cached = SimpleNamespace(req_ids=["a"], resumed_req_ids=set(), num_output_tokens=[1], num_computed_tokens=[3])
    runner.execute_model(Scheduled({"a": 1}, scheduled_cached_reqs=cached))
    assert record.held == {"a": 2}
    runner.execute_model(Scheduled({}, finished_req_ids={"a"}))
    assert [versions for row in rows for _, _, versions, _ in row.rows()] == [[(0, 0), (1, 1)]]


def test_speculative_decoding_is_not_captured() -> None:
    assert "several tokens" in can_listen(SimpleNamespace(speculative_config=object()))


SECRET = b"only the two of us know"


@pytest.fixture(params=["within a host", "between hosts"])
async def reports(request: pytest.FixtureRequest) -> AsyncIterator[Reports]:
    opened = Reports("127.0.0.1", SECRET) if request.param == "between hosts" else Reports()
    await opened.open()
    yield opened
    await opened.close()


class Worker:
    """A process that reports what it reads from standard input."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, reports: Reports, rank: int = 0) -> "Worker":
        code = (
            "import sys, msgpack\n"
            "from penstock.services.rollout.engines.vllm.worker_channel import Reporter\n"
            f"reporter = Reporter(sys.argv[1], {rank}, print, secret={reports._secret!r})\n"
            "for message in msgpack.Unpacker(sys.stdin.buffer.raw, max_buffer_size=0): reporter.send(lambda m=message: [m])\n"
            "import time; time.sleep(60)\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, reports.address, stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )  # fmt: skip
        await until(lambda: process.pid in reports.pids)
        return cls(process)

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgpack.packb(message))

    def row(self, request: str, logprob: float, **more: object) -> None:
        logprobs = np.array([logprob], dtype=np.float32).tobytes()
        self.say({"kind": "row", "request": request, "logprobs": logprobs, "versions": [[0, 5]], **more})


async def test_rows_find_their_samples_by_whatever_name_vllm_gave_them(reports: Reports) -> None:
    worker = await Worker.start(reports)
    reports.expect("g7")
    reports.expect("g8")
    worker.row("g70", -9.0)
    worker.row("probe7", -9.0)
    worker.row("1_g7-0f3a", -0.25)
    worker.row("0_g7-0f3a", -0.5)
    worker.row("g8", -0.75)
    rows = await asyncio.wait_for(reports.rows("g7", 2), PATIENCE_S)
    assert [(row.logprobs.tolist(), row.versions) for row in rows] == [([-0.5], ((0, 5),)), ([-0.25], ((0, 5),))]
    assert [row.logprobs.tolist() for row in await asyncio.wait_for(reports.rows("g8", 1), PATIENCE_S)] == [[-0.75]]
    worker.process.kill()
    await reap(worker.process)


async def test_the_tokens_that_could_be_drawn_of_the_longest_sample_arrive(reports: Reports) -> None:
    """131,072 tokens with sampling.top_k = 256, which the settings allow in groups of two."""
    worker = await Worker.start(reports)
    reports.expect("g7")
    sizes, ids = (np.full(length, 256, np.int32).tobytes() for length in (131_072, 131_072 * 256))
    worker.row("g7", -0.5, sizes=sizes, ids=ids)
    (row,) = await asyncio.wait_for(reports.rows("g7", 1), PATIENCE_S)
    assert (len(row.support_sizes), len(row.support_ids)) == (131_072, 131_072 * 256)
    assert not reports.died.done()
    worker.process.kill()
    await reap(worker.process)


async def test_a_worker_that_goes_away_is_noticed(reports: Reports) -> None:
    worker = await Worker.start(reports)
    worker.process.kill()
    assert "worker 0 went away" in await asyncio.wait_for(asyncio.shield(reports.died), PATIENCE_S)
    await reap(worker.process)


async def test_a_worker_does_not_outlive_its_replica(reports: Reports) -> None:
    worker = await Worker.start(reports)
    await reports.close()
    assert await asyncio.wait_for(worker.process.wait(), PATIENCE_S) == 1
    await reap(worker.process)


async def test_a_worker_that_does_not_know_the_secret_is_told_which_setting_to_change() -> None:
    reports = Reports("127.0.0.1", SECRET)
    await reports.open()
    with pytest.raises(PeerError, match=r"did not accept rank 1: it refused: rollout\.secret_file must hold the same"):
        await asyncio.to_thread(Reporter, reports.address, 1, print, secret=b"something else entirely")
    assert not reports.died.done()
    await reports.close()


async def test_silent_strangers_keep_no_worker_out() -> None:
    reports = Reports("127.0.0.1", SECRET)
    await reports.open()
    host, _, port = reports.address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
    worker = await Worker.start(reports, rank=1)
    for reader, _ in silent[: 200 - 64]:
        await reader.read()  # a challenge, then the end
    await until(lambda: len(reports._readers) <= 65)
    for _, writer in silent:
        writer.close()
    worker.process.kill()
    assert "worker 1 went away" in await reports.died
    await reap(worker.process)
    await reports.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": math.inf}, {"rank": math.nan}, {"rank": -1}, {"rank": 1 << 16}, {"rank": "0"}, {"rank": True}, {"rank": None},
        {"pids": 7}, {"pids": [math.inf]}, {"pids": [0]}, {"pids": [True]}, {"pids": list(range(1, 100))},
        {"proof": "text"}, {"proof": None},
    ],
    ids=str,
)  # fmt: skip
async def test_a_greeting_that_is_nonsense_is_refused_and_breaks_nothing(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reports = Reports("127.0.0.1", SECRET)
    await reports.open()
    host, _, port = reports.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    challenge = await frames.receive_async(reader)
    hello = {"kind": "hello", "rank": 0, "pids": [1], "proof": prove(SECRET, challenge["nonce"], 0), **changed}
    writer.write(frames.pack(hello))
    assert await reader.read() == b""
    writer.close()
    await until(lambda: not reports._readers)
    assert reports.pids == set()
    assert not reports.died.done()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    await reports.close()


async def test_within_a_host_only_the_owner_may_connect() -> None:
    reports = Reports()
    await reports.open()
    folder = Path(reports.address.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o077 == 0
    await reports.close()
    assert not folder.exists()


def _with_warm_up(monkeypatch: pytest.MonkeyPatch, **names: object) -> SimpleNamespace:
    """Stand in for the module of vLLM, whose import takes seconds and warns."""
    kernel_warmup = SimpleNamespace(**names)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.warmup", SimpleNamespace(kernel_warmup=kernel_warmup))
    return kernel_warmup


def test_kernels_are_compiled_for_routers_of_the_own_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_warmup = _with_warm_up(monkeypatch, **{_ROUTER_SHAPES: ((6144, 264), (8, 3))})  # as in vLLM 0.26
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 3))
    compiled = list[tuple[int, int]]()

    def warm_up() -> float:
        compiled.extend(getattr(kernel_warmup, _ROUTER_SHAPES))
        return 1.5

    worker = SimpleNamespace(get_model=lambda: model, compile_or_warm_up_model=warm_up)
    warm_up_own_routers(worker)
    assert (worker.compile_or_warm_up_model(), compiled) == (1.5, [(8, 3)])


def test_a_release_that_names_no_routers_warms_up_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_warmup = _with_warm_up(monkeypatch)
    worker = SimpleNamespace(compile_or_warm_up_model=lambda: 1.5)
    warm_up_own_routers(worker)
    assert worker.compile_or_warm_up_model() == 1.5
    assert not vars(kernel_warmup)
