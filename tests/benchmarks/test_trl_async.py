"""What TRL's asynchronous trainer is given: prompts as they are, attention, weights on the same GPU, and a server."""

import argparse
import doctest
import importlib.util
import json
import subprocess
import sys
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peers import pipeline, trl_async
from benchmarks.peers import work as pipeline_work
from benchmarks.peers.pipeline import NotDone, VllmServer, _with_ray, environment_with, run_trl
from benchmarks.peers.trl_async import Attention, IpcWeightTransfer, figures, tokenizer_of, update_of
from benchmarks.peers.work import TAIL_TOKENS, Work, long
from penstock.services.trainer.model.layers import variable_length
from penstock.services.trainer.model.layers.variable_length import Ends


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return long(tmp_path_factory.mktemp("work"), "tiny", "cpu", "auto")


@pytest.fixture
def trainer(work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return TRL's trainer of the tiny model."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import async_grpo_trainer

        monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks the GPU's name
        monkeypatch.chdir(tmp_path)
        arguments = argparse.Namespace(
            model=work.model, prompts=work.settings["data"]["path"], prompts_per_step=4, group_size=2, max_new_tokens=8,
            steps=3, learning_rate=1e-12, staleness=4, micro_batches=2, row_tokens=256,
            vllm_url="http://127.0.0.1:1", same_gpu=True, turns=1, gradient_checkpointing=False,
        )  # fmt: skip
        return trl_async.build(arguments, [])


# ---------------------------------------------------------------- prompts and completions


def test_templates_leave_prompts_and_completions_as_they_are(work: Work) -> None:
    chat_template_utils = pytest.importorskip("trl.chat_template_utils")
    tokenizer = tokenizer_of(work.model)
    prompt = json.loads(Path(work.settings["data"]["path"]).read_text().partition("\n")[0])["prompt"]
    message = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(message, return_dict=False, add_generation_prompt=True)
    assert ids == tokenizer(prompt)["input_ids"]
    completion = tokenizer("{<tool_call>}")["input_ids"]
    parsed = chat_template_utils.parse_response(tokenizer, completion, prefix=ids)
    assert parsed == {"role": "assistant", "content": "{<tool_call>}"}


# ---------------------------------------------------------------- attention


def test_a_row_of_samples_that_share_a_prompt_has_the_logprobs_of_each_alone(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TRL's own metric: the trainer's probabilities over those of a model that TRL did not change are 1."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo.packing import TreeRow

    monkeypatch.setattr(variable_length, "choose", lambda *_, **__: "torch")  # torch's needs a GPU
    monkeypatch.setattr(variable_length, "attend", _attend)
    alone = AutoModelForCausalLM.from_pretrained(trainer.model.config._name_or_path)
    prompt, row = [10, 11, 12, 13], TreeRow()
    for completion in ([20, 21, 22], [20, 30], [40, 41, 42, 43]):
        row.add(_sample(alone, prompt, completion))
    inputs = {name: tensor[None] for name, tensor in row.pack().items()}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs |= {name: torch.tensor([9.0]) for name in ("global_n_tokens", "global_n_forward_tokens", "mean_seq_len")}
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, inputs)
    assert len(row.tokens) < 3 * len(prompt) + 9  # the prompt once
    assert trainer._metrics["train"]["ratio"] == [pytest.approx(1.0, abs=1e-5)]
    assert trainer._metrics["train"]["kl"] == [pytest.approx(0.0, abs=1e-5)]


def _attend(
    kind: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: Ends, *, scale: float, window: int
) -> torch.Tensor:
    """Return causal attention from the lower right, sequence by sequence."""
    assert (kind, window) == ("torch", 0)
    assert ends.longest_query == int(ends.query_ends.diff().max())
    assert ends.longest_key == int(ends.key_ends.diff().max())
    outputs = []
    for part in range(len(ends.query_ends) - 1):
        rows, columns = (slice(*bounds[part : part + 2].tolist()) for bounds in (ends.query_ends, ends.key_ends))
        of_part = (query[rows], key[columns], value[columns])
        queries, keys = len(of_part[0]), len(of_part[1])
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        heads_first = [tensor.transpose(0, 1) for tensor in of_part]
        output = scaled_dot_product_attention(
            heads_first[0], heads_first[1], heads_first[2], attn_mask=mask, scale=scale, enable_gqa=True
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@torch.no_grad()
def _sample(model: Any, prompt: list[int], completion: list[int]) -> dict[str, Any]:
    ids = torch.tensor([prompt + completion])
    logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    mask = torch.tensor([0] * len(prompt) + [1] * len(completion))
    old = torch.cat([torch.zeros(1), logprobs]) * mask
    return {
        "input_ids": ids[0].numpy(), "completion_mask": mask.numpy(), "old_log_probs": old.numpy(),
        "advantage": 1.0, "group_id": 0,
    }  # fmt: skip


def test_attention_on_a_cpu_is_refused() -> None:
    heads = torch.zeros(4, 2, 8)
    ends = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(SystemExit, match=r"on a GPU, found torch\.float32 on cpu"):
        Attention.flash_attn_varlen_func(heads, heads, heads, ends, ends, 4, 4, softmax_scale=1.0)


# ---------------------------------------------------------------- weights


@pytest.fixture
def _handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let handles be made without a GPU."""
    from torch.multiprocessing import reductions

    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (None, ("handle", tensor.numel())))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="a-gpu"))
    for name in ("synchronize", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


@pytest.mark.usefixtures("_handles")
def test_an_update_is_what_vllms_engine_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    tensors = [("a.weight", torch.zeros(2, 3, dtype=torch.bfloat16)), ("a.bias", torch.zeros(5))]
    read = engine.IPCWeightTransferUpdateInfo(**json.loads(json.dumps(update_of(tensors))))
    assert (read.names, read.dtype_names, read.shapes) == (
        ["a.weight", "a.bias"],
        ["bfloat16", "float32"],
        [[2, 3], [5]],
    )
    assert read.ipc_handles == [{"a-gpu": ("handle", 6)}, {"a-gpu": ("handle", 5)}]


@pytest.mark.usefixtures("_handles")
def test_weights_stay_until_the_server_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.multiprocessing import reductions

    sent: list[weakref.ref[torch.Tensor]] = []
    calls: list[tuple[str, int]] = []

    def reduce_tensor(tensor: torch.Tensor) -> tuple[None, int]:
        sent.append(weakref.ref(tensor))
        return None, tensor.numel()

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)

    class Client:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: calls.append((name, sum(tensor() is not None for tensor in sent)))

    across = torch.zeros(3, 2).t()  # a copy is sent, which only the transfer holds
    IpcWeightTransfer(Client()).send_weights((f"layer.{place}", across) for place in range(3))
    assert calls == [("start_weight_update", 0), ("update_weights", 3), ("finish_weight_update", 3)]
    assert sum(tensor() is not None for tensor in sent) == 0


def test_trl_uses_the_transfer_of_one_gpu(trainer: Any) -> None:
    from trl.experimental.async_grpo import packing

    assert isinstance(trainer.weight_transfer, IpcWeightTransfer)
    assert packing._flash_attn() is Attention
    assert trainer.model.config._attn_implementation == packing.TREE_ATTENTION


# ---------------------------------------------------------------- server


def test_a_run_ends_with_its_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("out of memory")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as process:
        process.wait()
    forever = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(SystemExit, match=r"(?s)server ended with 3:\nout of memory"):
        pipeline._run(forever, tmp_path, 600.0, watched=VllmServer("http://127.0.0.1:1", process, log))


def test_without_ray_an_empty_module_is_imported_and_offers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    program = "import ray\ntry:\n    import ray.util\nexcept ImportError:\n    print('no', hasattr(ray, 'init'))"
    environment = environment_with(_with_ray(tmp_path))
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout == "no False\n"


# ---------------------------------------------------------------- work and figures


def test_the_examples_in_its_docstrings_hold() -> None:
    results = doctest.testmod(trl_async)
    assert (results.attempted, results.failed) == (1, 0)


@pytest.mark.parametrize(("mean_tokens", "rows"), [(0, "4"), (TAIL_TOKENS["cuda"], "6")])
def test_a_step_has_the_rows_that_hold_its_samples(
    mean_tokens: int, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 samples of 512 + 8 tokens, and of 738 + 8 tokens, in rows of 32,768."""
    monkeypatch.setattr(pipeline_work, "_write_once", lambda *_: None)
    told = long(tmp_path, "0.5b", "cuda", "auto", mean_tokens=mean_tokens).asynchronous_arguments(8)
    assert told[told.index("--micro-batches") + 1] == rows
    assert told[told.index("--row-tokens") + 1] == "32768"


def test_the_rate_is_of_the_samples_that_were_trained_after_the_first_third() -> None:
    rows = [
        {"batch/samples_per_step": samples, "batch/trained_tokens_per_step": 10.0 * samples, "ratio": 1.0}
        for samples in (900.0, 900.0, 250.0, 260.0, 240.0, 250.0)
    ]
    told = figures([5.0, 10.0, 12.0, 14.0, 16.0, 20.0], rows)
    assert (told["samples_per_s"], told["samples_per_step"]) == (100.0, 250.0)
    assert (told["step_s"], told["tokens_per_sample"], told["ratio"]) == (2.5, 10.0, 1.0)
    assert told["measured_steps"] == 4


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_a_late_run_of_few_measured_steps_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The first ones train what was generated before them."""
    told = {"samples_per_s": 54.0, "measured_steps": steps, "begin_s": 1.0, "end_s": 2.0}

    def late(*_: object, **__: object) -> str:
        error = NotDone("not done")
        error.limit_s, error.output = 165.0, json.dumps(told)
        raise error

    monkeypatch.setattr(pipeline, "_run", late)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        server = VllmServer("http://127.0.0.1:1", process, tmp_path / "log")
    if steps < 4:
        with pytest.raises(SystemExit, match=f"expected 4 measured steps of TRL, found {steps} in 165 s"):
            pipeline._run_trl_async([], tmp_path, 165.0, {}, server)
    else:
        assert pipeline._run_trl_async([], tmp_path, 165.0, {}, server) == {**told, "gpus": {}}


def test_an_asynchronous_mode_without_a_server_is_refused(work: Work, tmp_path: Path) -> None:
    for mode in ("trl_async", "colocate_async"):
        with pytest.raises(SystemExit, match=f"{mode} needs vLLM's server: use --device cuda, and another --work"):
            run_trl(tmp_path, work, 3, 600.0, mode)
