r"""Baseline: TRL's AsyncGRPOTrainer on the same model, prompts, group size and lengths.

A GPU each: vLLM's server on the second (``benchmarks.peers.pipeline`` starts it), TRL on the first, weights by NCCL:
    CUDA_VISIBLE_DEVICES=1 VLLM_SERVER_DEV_MODE=1 python3 -m vllm.entrypoints.openai.api_server --model MODEL \
        --dtype bfloat16 --max-model-len 2304 --max-num-seqs 512 --weight-transfer-config '{"backend":"nccl"}' &
    CUDA_VISIBLE_DEVICES=0 python3 -m benchmarks.peers.trl_async --model MODEL --prompts prompts.jsonl --vllm-url URL
Both on one GPU at the same time: the server with VLLM_ALLOW_INSECURE_SERIALIZATION=1, ``--gpu-memory-utilization 0.4``
and '{"backend":"ipc"}', TRL with ``--same-gpu``. NCCL refuses two processes of a group on one GPU, so weights are
handed over by CUDA IPC, by vLLM's own engine for it and TRL's argument ``weight_transfer``.

Needs trl==1.16.0. What differs from TRL as installed: FlashAttention 3, which TRL fetches from a hub, is replaced by
the kernels that Penstock uses (FlashAttention 4 if installed, else torch's), and a tokenizer without a chat template
gets one and a response template that change nothing, as TRL refuses templates that it does not know.

``--turns``: an episode has that many answers, each of which calls the tool of ``benchmarks.peers.chains``, an
``environment_factory``. TRL parses them and renders the whole at every turn by Qwen2.5's template; it does not make the call of
the last one, which Penstock makes. Weights and AdamW's moments are bfloat16, without 32-bit copies.

``--staleness``: TRL's default, 4 weight updates (Penstock's runs: ``max_lag`` steps). Two steps' samples are in flight,
but no more than the server decodes at once, and no more than a step's wait for training, so that few are dropped as
stale. A step has ``--micro-batches`` rows of at most ``--row-tokens``, filled by TRL; the rate counts the samples that
were trained.
"""

import argparse
import base64
import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.chains import Places
from benchmarks.peers.trl_grpo import lot

SERVER_SEQUENCES = 512
"""That vLLM decodes at once."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_WARM = 2
"""Steps that are never measured."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": ".+",  # the whole prompt is before the response
    "fields": {"content": {"content": "text"}},
}
_FIGURES = {
    "staleness": "sample/staleness_mean",
    "stale_dropped": "sample/dropped_stale_total",
    "weight_sync_s": "perf/weight_sync_s",
    "rollout_wait_s": "perf/rollout_wait_s",
    "forward_backward_s": "perf/fwd_bwd_s",
    "mfu_forward_backward": "perf/mfu_fwd_bwd",
    "ratio": "ratio",
    "kl": "kl",
    "turns": "rollout/turns_mean",
    "forked": "rollout/fork_frac",
    "realigned": "rollout/realign_frac",
}
"""Printed name of each of TRL's metrics. ``ratio``: the trainer's probabilities over those of vLLM, 1 if both agree.
``forked``, ``realigned``: shares of turns after which TRL did not find its tokens again."""


class IpcWeightTransfer:
    """Hands weights over to a vLLM server on the same GPU, by CUDA IPC, for TRL's argument ``weight_transfer``.

    Args:
        client: TRL's ``VLLMClient``.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def init_weight_transfer(self) -> None:
        """Wait for the server."""
        self._client.wait_for_server_ready()
        self._client.init_weight_transfer_engine({})

    def pause(self) -> None:
        """Stop decoding; requests stay."""
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Let the server copy the named tensors from this process's memory."""
        import torch

        tensors = [(name, tensor.detach().contiguous()) for name, tensor in iterator]  # kept until all is copied
        torch.cuda.synchronize()
        self._client.start_weight_update()
        self._client.update_weights(update_of(tensors))
        self._client.finish_weight_update()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        """Continue decoding."""
        self._client.resume()

    def destroy(self) -> None:
        """Nothing is held between updates."""


def update_of(tensors: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the request of vLLM's ``ipc`` backend for tensors on one device."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    device = str(torch.cuda.get_device_properties(tensors[0][1].device).uuid)
    handles = [{device: reduce_tensor(tensor)[1]} for _, tensor in tensors]  # type: ignore[no-untyped-call]
    return {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


class Attention:
    """In place of the module of FlashAttention 3 that TRL fetches from a hub."""

    @staticmethod
    def flash_attn_varlen_func(query: Any, key: Any, value: Any, *ends: Any, softmax_scale: float, **_: Any) -> Any:
        """Return causal attention over sequences of ``ends``: of queries, of keys, the longest of each."""
        from penstock.services.trainer.model.layers.variable_length import Ends, attend, choose

        kind = choose(query, key.shape[-2], query.shape[-1], windowed=False, flash4=True)
        if kind is None:
            raise SystemExit(f"expected bfloat16 or float16 on a GPU, found {query.dtype} on {query.device}")
        return attend(kind, query, key, value, Ends(*ends), scale=softmax_scale, window=0)


def tokenizer_of(model: str) -> Any:
    """Return the model's tokenizer; one without a chat template with those that TRL needs, which leave prompts and
    completions as they are."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def in_flight(samples: int) -> int:
    """Return how many samples are generated at a time for steps of ``samples``.

    >>> [in_flight(samples) for samples in (64, 256, 1024)]
    [128, 512, 1024]
    """
    return max(samples, min(SERVER_SEQUENCES, 2 * samples))


def build(arguments: argparse.Namespace, callbacks: list[Any]) -> Any:
    """Return TRL's trainer."""
    import torch
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    packing._flash_attn = lambda: Attention
    gpu, samples = torch.cuda.is_available(), arguments.prompts_per_step * arguments.group_size
    config = AsyncGRPOConfig(
        output_dir="trl-async-baseline",
        gradient_accumulation_steps=arguments.micro_batches,
        token_budget=arguments.row_tokens,
        num_generations=arguments.group_size,
        max_completion_length=arguments.max_new_tokens,
        max_steps=arguments.steps,
        max_staleness=arguments.staleness,
        max_inflight_tasks=in_flight(samples),
        queue_maxsize=samples,
        vllm_server_base_url=arguments.vllm_url,
        save_strategy="no",
        disable_tqdm=True,  # a bar and the figures would share lines
        report_to=[],
        learning_rate=arguments.learning_rate,
        temperature=1.0,
        bf16=gpu,
        use_cpu=not gpu,
        dtype="bfloat16" if gpu else "float32",
        gradient_checkpointing=arguments.gradient_checkpointing,
        max_tool_calling_iterations=arguments.turns - 1,
    )
    with Path(arguments.prompts).open() as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    return AsyncGRPOTrainer(
        model=arguments.model,
        reward_funcs=lot,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]),
        processing_class=tokenizer_of(arguments.model),
        callbacks=callbacks,
        environment_factory=Places if arguments.turns > 1 else None,
        weight_transfer=IpcWeightTransfer(VLLMClient(arguments.vllm_url)) if arguments.same_gpu else None,
    )


def figures(ends_s: list[float], rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the rate and means of the steps after the first third, at least two.

    Args:
        ends_s: when each step ended, in Unix seconds.
        rows: TRL's metrics of each step.
    """
    warm = max(_WARM, len(rows) // 3)
    measured, seconds = rows[warm:], ends_s[-1] - ends_s[warm - 1]
    samples = sum(round(log["batch/samples_per_step"]) for log in measured)

    def mean(name: str) -> float:
        return sum(log.get(name) or 0.0 for log in measured) / len(measured)

    return {
        "system": "trl_async",
        "measured_steps": len(measured),
        "step_s": seconds / len(measured),
        "samples_per_s": samples / seconds,
        "samples_per_step": samples / len(measured),
        "tokens_per_sample": sum(log["batch/trained_tokens_per_step"] for log in measured) / samples,
        "begin_s": ends_s[warm - 1],
        "end_s": ends_s[-1],
        **{name: round(mean(metric), 4) for name, metric in _FIGURES.items()},
    }


def end_rollouts(worker: Any) -> None:
    """End the process of TRL's worker, which would decode what is in flight for 15 s."""
    worker._stop_event_mp.set()  # first: set, as TRL does after this, waits for ever for a waiter that was killed
    worker._process.join(1.0)
    worker._process.terminate()


def main() -> None:
    """Train, and print the figures so far after each step that is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-12)
    parser.add_argument("--staleness", type=int, default=4, help="weight updates")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
    parser.add_argument("--row-tokens", type=int, default=32_768, help="at most in a micro-batch, shared prompts once")
    parser.add_argument("--turns", type=int, default=1, help="of an episode, which call a tool if there are several")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--vllm-url", required=True)
    parser.add_argument("--same-gpu", action="store_true", help="as the server's: weights by CUDA IPC")
    arguments = parser.parse_args()

    from transformers import TrainerCallback

    ends_s: list[float] = []
    rows: list[dict[str, float]] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            ends_s.append(time.time())

        def on_log(self, *_: object, logs: dict[str, float] | None = None, **__: object) -> None:
            if logs and "batch/samples_per_step" in logs:
                rows.append(dict(logs))
                if len(rows) > _WARM:
                    print(json.dumps(figures(ends_s, rows)), flush=True)

        def on_train_end(self, *_: object, **__: object) -> None:
            end_rollouts(trainer.rollout_worker)

    trainer = build(arguments, [Clock()])
    trainer.train()


if __name__ == "__main__":
    main()
