"""Laws of an engine across hosts: two tensor-parallel ranks of real vLLM, over gloo on CPUs or NCCL on two GPUs."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from penstock.services.rollout.engines.engine import EngineDied
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.rollout.engines.vllm.entry import vllm_settings
from penstock.services.rollout.engines.vllm.multihost.hosts import Hosts, hosts_of, secret_of
from penstock.services.rollout.engines.vllm.multihost.node import outlast
from penstock.services.rollout.engines.vllm.start import check, open_vllm
from penstock.services.rollout.engines.vllm.worker_channel import prove
from penstock.shared.bus.messages import PolicyVersion
from penstock.shared.errors import SettingsError
from penstock.shared.peers import frames
from penstock.shared.process.children import reap
from penstock.shared.settings import Settings, load
from penstock.shared.weights.receiver.puller import Puller
from tests.conftest import PATIENCE_S, free_port, need_module, until
from tests.rollout.engines.vllm.test_engine import (
    MODELS,
    PROMPT,
    STOP,
    kept_cache,
    offer,
    put,
    reference,
    request,
    save,
    variant,
)
from tests.support import weights
from tests.support.forked_engines import forked
from tests.support.listeners import listeners
from tests.support.tolerance import FORWARD

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own imports warn
    pytest.mark.timeout(600),  # begins early: its engines start slowly
]

ROOT = Path(__file__).parents[4]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # both hosts are this one
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
START_S = 300.0
GPUS = torch.cuda.device_count()
EXACT = 2e-2 if GPUS else FORWARD
"""Nats. vLLM's attention on a GPU multiplies float32 in TF32."""


def environment(node: int) -> dict[str, str]:
    own = {"CUDA_VISIBLE_DEVICES": str(node), "NCCL_SOCKET_IFNAME": "lo"} if GPUS else {}
    return {**ENVIRONMENT, **own}


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder, self.metrics_port = folder, free_port()
        save(folder / "policy", MODELS[0])
        (folder / "secret").write_text("only the two of us know\n")
        (folder / "secret").chmod(0o600)
        self.config = folder / "run.toml"
        self.config.write_text(
            f"""
[run]
id = "span"
[bus]
url = "redis://127.0.0.1:1/0"  # nobody there: this host needs none
drain_s = 5.0
[policy]
model = "{folder}/policy"
dtype = "float32"
[sampling]
group_size = 4
[rollout]
engine = "vllm"
nodes = 2
rendezvous = "127.0.0.1:{free_port()}"
secret_file = "{folder}/secret"
max_groups = 4
[rollout.vllm]
tensor_parallel_size = 2
max_model_len = 256
arguments = {{ enforce_eager = true, block_size = 32, num_gpu_blocks_override = 24, disable_custom_all_reduce = true }}
"""
        )

    @property
    def settings(self) -> Settings:
        return load(self.config, environment={})

    async def start(self) -> None:
        command = ["-m", "penstock.services.rollout", "--config", str(self.config), "--replica", "rollout-0"]
        flags = ["--rollout.node", "1", "--run.metrics_port", str(self.metrics_port)]
        with (self.folder / "node.log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *command, *flags,
                cwd=ROOT, env={**os.environ, **environment(1)}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return (self.folder / "node.log").read_text()[-3000:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    need_module("vllm", "vllm-cpu")
    if GPUS == 1:
        pytest.skip("needs a GPU for each of two hosts, or none")
    made = Node(tmp_path_factory.mktemp("span"))
    await made.start()
    yield made
    made.kill()
    await made.process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(node: Node) -> AsyncIterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(0).items():
            patch.setenv(name, value)
        patch.delenv("VLLM_HOST_IP", raising=False)
        hosts = hosts_of(node.settings.rollout, "127.0.0.1")
        with forked():
            async with asyncio.timeout(START_S):
                opened = await open_vllm(vllm_settings(node.settings, "rollout-0", hosts), hosts, stop=(STOP,))
    await put(opened, offer(node.folder, 0, MODELS[0]))
    yield opened
    await opened.close()


async def test_an_engine_on_two_hosts_listens_on_the_address_of_its_hosts_alone(engine: VllmEngine, node: Node) -> None:
    below = [process.pid for process in psutil.Process().children() if process.pid != node.process.pid]
    listening = listeners(*below, node.process.pid)
    assert listening, "expected the workers' rendezvous at least"
    assert [listener for listener in listening if not listener.is_loopback] == []


async def test_an_engine_on_two_hosts_draws_what_one_process_would(engine: VllmEngine, node: Node) -> None:
    assert engine.ranks == 2
    group = await engine.generate(request(samples=2, temperature=0.0, new_tokens=16))
    greedy = await asyncio.to_thread(_greedy, 16)
    for sample in group.samples:
        assert sample.token_ids.tolist() == greedy[: len(sample.token_ids)]
        expected = reference(MODELS[0], PROMPT, sample.token_ids, 0.0)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=EXACT)
    drawn = await engine.generate(request(samples=4, new_tokens=12))
    for sample in drawn.samples:
        expected = reference(MODELS[0], PROMPT, sample.token_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=EXACT)
        assert sample.version_spans.tolist() == [[0, 0]]
    assert len({tuple(sample.token_ids.tolist()) for sample in drawn.samples}) == 4


def _greedy(new_tokens: int) -> list[int]:
    ids = torch.tensor([PROMPT.tolist()])
    generated = MODELS[0].generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    tokens: list[int] = generated[0, len(PROMPT) :].tolist()
    return tokens


async def test_ranks_whose_weights_are_packed_receive_whole_versions_and_say_so(
    engine: VllmEngine, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for has_room in (True, False):  # for a whole version beside the live one
        engine._planned, engine.streams_whole = "", not has_room
        offered = offer(node.folder / str(has_room), 0, MODELS[0])
        with caplog.at_level("WARNING"):
            await engine.stage(offered)
            report = await engine.swap(offered.header.version)
        entry = [entry for entry in caplog.records if "whole versions" in entry.message][-1]
        assert "its weight was repacked into another form" in vars(entry)["reason"]
        assert report.path == ("layerwise" if has_room else "bucketed")
    engine.bucketed = engine.streams_whole = False


async def test_weights_that_are_pulled_change_on_both_hosts_between_the_same_two_tokens(engine: VllmEngine) -> None:
    running = asyncio.ensure_future(variant_of(engine).generate(request(samples=1, new_tokens=60)))

    async def flows() -> bool:
        first, second = await engine._llm.collective_rpc("penstock_held")
        assert second == {}  # tokens are recorded at the replica
        return int(sum(first.values())) > 5

    await until(flows)
    snapshot = weights.fill(dict(MODELS[1].named_parameters()), 1)
    puller = Puller(engine.place, engine.ranks, PATIENCE_S, weights.secret)
    with weights.serving() as source:  # each rank is a party of the source's process group
        offered = await puller.ask(source.address, weights.offered(source, snapshot))
        await put(engine, offered)
        await puller.finish(offered, None)
        await puller.close()
    for sample in (await running).samples:
        (_, old), (border, new) = sample.version_spans.tolist()
        assert (old, new) == (0, 1)
        expected = kept_cache(MODELS[0], MODELS[1], sample.token_ids, border)
        np.testing.assert_allclose(sample.behavior_logprobs, expected, atol=EXACT)
    assert engine.version == PolicyVersion(1)


def variant_of(engine: VllmEngine) -> VllmEngine:
    made = variant(engine, stop=())
    made.ranks = engine.ranks
    return made


async def test_the_second_host_says_that_its_workers_are_there_and_nothing_of_a_replica(
    engine: VllmEngine, node: Node
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.metrics_port}", timeout=PATIENCE_S) as client:
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "state": "working"})
        assert (await client.get("/healthz")).status_code == 200
        exported = (await client.get("/metrics")).text
    assert "penstock_build_info{" in exported
    assert "penstock_rollout_" not in exported  # a second version, 0, would raise an alert


@pytest.mark.parametrize("stranger", ["silent", "babbling", "with another secret", "proving another rank"])
async def test_nobody_is_let_in_who_does_not_know_the_secret(engine: VllmEngine, node: Node, stranger: str) -> None:
    host, _, port = engine._reports.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    challenge = await frames.receive_async(reader)
    secret = secret_of(node.folder / "secret")
    if stranger == "babbling":
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
    elif stranger != "silent":
        proof = prove(b"something else entirely" if "secret" in stranger else secret, challenge["nonce"], 1)
        writer.write(frames.pack({"kind": "hello", "rank": 0, "pids": [os.getpid()], "proof": proof}))
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    assert not engine._reports.died.done()
    assert len((await engine.generate(request(samples=1, new_tokens=2))).samples) == 1


async def test_the_replica_ends_when_a_worker_of_another_host_does(engine: VllmEngine, node: Node) -> None:
    running = asyncio.ensure_future(variant_of(engine).generate(request(new_tokens=200)))
    await asyncio.sleep(0)
    node.process.kill()
    with pytest.raises(EngineDied, match="worker 1 went away"):
        await asyncio.wait_for(running, PATIENCE_S)
    await asyncio.wait_for(engine.close(), PATIENCE_S)


async def test_a_host_that_holds_workers_hears_that_the_first_is_gone() -> None:
    port = free_port()
    rendezvous = f"127.0.0.1:{port}"
    code = (
        "import sys, time; from torch.distributed import TCPStore\n"
        "host, port = sys.argv[1].split(':'); store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)\n"
        "print('there', flush=True); time.sleep(600)\n"
    )
    first = await asyncio.create_subprocess_exec(sys.executable, "-c", code, rendezvous, stdout=asyncio.subprocess.PIPE)
    assert first.stdout is not None
    await first.stdout.readline()
    outlasting = asyncio.ensure_future(asyncio.to_thread(outlast, rendezvous))

    def joined() -> bool:
        return any(
            connection.raddr and connection.raddr.port == port for connection in psutil.Process().net_connections("tcp")
        )

    await until(joined)
    assert not outlasting.done()
    first.kill()
    assert await asyncio.wait_for(outlasting, PATIENCE_S)
    await reap(first)


def test_a_secret_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"change rollout\.secret_file"):
        secret_of(tmp_path / "secret")
    (tmp_path / "secret").write_text("short\n" + "x" * 40)
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(SettingsError, match=r"at least 16 characters .* found 5"):
        secret_of(tmp_path / "secret")


def test_a_host_that_was_started_otherwise_is_refused() -> None:
    answers = [
        {"error": "", "rank": rank, "started_with": {"model": "m", "seed": seed, "dtype": "torch.float32"}}
        for rank, seed in enumerate((5, 6))
    ]
    check(answers[:1])
    with pytest.raises(SettingsError, match=r"the same settings and replica's name, found .*'seed': 6.* at rank 1"):
        check(answers)
    with pytest.raises(SettingsError, match="no such secret"):
        check([{"error": "no such secret"}])


def test_every_host_starts_vllm_with_the_same_but_its_number() -> None:
    both = [Hosts(2, node, "leader.span:29500", f"10.0.0.{node}", Path("/secret")).arguments for node in (0, 1)]
    assert both[0] | {"node_rank": 1} == both[1]
    assert (both[0]["nnodes"], both[0]["master_addr"], both[0]["master_port"]) == (2, "leader.span", 29500)
