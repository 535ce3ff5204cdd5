"""Scenes with real vLLM models on the CPU; prints one JSON line of results.

    loaders          the loaders of dense families and mixtures, whole and as one rank of two
    fp8              the same families where vLLM quantises linear layers when it loads them
    tied, untied     an engine whose weights are swapped while it lives
    mixtral          another, of a mixture whose checkpoint holds each expert's matrices under names of their own
    unpacked         another, of a mixture with shared experts and weights as on a GPU, which a plan writes

vLLM keeps parallel state in globals and its CPU layers repack weights, so each scene is a fork of a process that has
imported vLLM. Environment variables must be set before that import, hence the late imports.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.services.rollout.engines.vllm.swap.weight_swap import WeightSwapper
from penstock.shared.errors import WeightsError
from penstock.shared.weights.format.layout import Layout, plan_layout
from tests.support import forge

VOCABULARY = 48
"""Not a multiple of 64, so vLLM pads it."""
FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
SIZES = {
    "qwen3_moe": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Of engines. On a GPU: ``python -m tests.support.vllm_models untied qwen3_moe mixtral``."""


def reference(seed: int, tied: bool, family: str = "qwen2") -> Any:
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    return model(
        config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.3,
            **({"head_dim": 32} if family.startswith("qwen3") else {}),
            **SIZES.get(family, {}),
        )
    ).eval()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Return what a trainer sends: tied parameters once."""
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def on_device(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in tensors_of(model).items()}


def bucketed(tensors: dict[str, torch.Tensor]) -> tuple[Layout, list[torch.Tensor]]:
    """Split ``tensors`` into buckets, several per layer."""
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    layout = plan_layout(((name, kinds[name], tuple(tensor.shape)) for name, tensor in tensors.items()), 20_000)
    device = next(iter(tensors.values())).device
    buckets = [torch.zeros(size, dtype=torch.uint8, device=device) for size in layout.bucket_bytes]
    for entry in layout.tensors:
        flat = tensors[entry.name].flatten().view(torch.uint8)
        buckets[entry.bucket][entry.offset : entry.offset + entry.nbytes] = flat
    return layout, buckets


def through_one_buffer(buckets: list[torch.Tensor], stop_at: int = -1) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each bucket in the same memory; raise at bucket ``stop_at``."""
    buffer = torch.empty(max(len(bucket) for bucket in buckets), dtype=torch.uint8, device=buckets[0].device)
    for number, bucket in enumerate(buckets):
        if number == stop_at:
            raise WeightsError("the source died")
        buffer[: len(bucket)] = bucket
        yield number, buffer[: len(bucket)]
        buffer.fill_(0xFF)


# ---------------------------------------------------------------- loaders


def loaders(folder: Path) -> dict[str, Any]:
    """Swap models that were built but not loaded: their linear layers are unpacked, as on a GPU; then their experts too."""
    from tests.support.unpacked import unpack_experts

    seen: dict[str, Any] = {
        "packed experts": mixture(folder)
    }  # first, as its groups are made for mixtures and serve the others too
    unpack_experts()
    for family in ("qwen2", "qwen3", "llama", "qwen3_moe", "mixtral", "qwen2_moe"):
        for tied in (True, False):
            reference(0, tied, family).save_pretrained(folder / f"{family}-{tied}")
            for rank, ranks in ((0, 1), (0, 2), (1, 2)):
                name = f"{family}-{'tied' if tied else 'untied'}-{rank}of{ranks}"
                seen[name] = swapped_by_plan(str(folder / f"{family}-{tied}"), reference(1, tied, family), rank, ranks)
    return seen


def mixture(folder: Path) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    policy = reference(0, False, "qwen3_moe")
    policy.save_pretrained(folder / "mixture")
    path = str(folder / "mixture")
    config = EngineArgs(model=path, skip_tokenizer_init=True, dtype="float32", max_model_len=64).create_engine_config()
    with set_current_vllm_config(config):
        join_alone()
        swapper = WeightSwapper(built(config, 9.0), config, CPU)
        swapper.prepare(tensors_of(policy))
    return {"path": swapper.path, "reason": swapper.reason}


def swapped_by_plan(path: str, policy: Any, rank: int, ranks: int) -> dict[str, Any]:
    """Return the swapper's path, and whether swap and stream agree with the loader."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=path, skip_tokenizer_init=True, dtype="float32", max_model_len=64).create_engine_config()
    tensors = tensors_of(policy)
    layout, buckets = bucketed(tensors)
    with set_current_vllm_config(config):
        as_rank(rank, ranks)
        live, streamed, loaded = built(config, 9.0), built(config, 7.0), built(config, 5.0)
        loaded.load_weights(iter(saved(policy).items()))
        swapper = WeightSwapper(live, config, CPU)
        swapper.prepare(tensors)
        untouched = all((parameter == 9.0).all() for parameter in live.parameters())
        taken, copied = swapper.swap()
        other = WeightSwapper(streamed, config, CPU)
        other.stream(through_one_buffer(buckets), layout)
    return {
        "path": taken,
        "reason": swapper.reason,
        "untouched": bool(untouched),
        "swapped": same(live, loaded),
        "streamed": same(streamed, loaded),
        "share": copied / sum(parameter.nbytes for parameter in live.parameters()),
    }


def saved(policy: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of ``policy``'s checkpoint, which vLLM's own loader reads."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        tensors: dict[str, torch.Tensor] = load_file(Path(folder) / "model.safetensors")
    return tensors


def built(config: Any, value: float) -> Any:
    """Return a model of ``value`` whose experts vLLM has processed, as after loading; linear layers are not."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config.compilation_config.static_forward_context.clear()
    model = initialize_model(config)
    for module in list(model.modules()):
        if hasattr(module, "w13_weight"):
            module.quant_method.process_weights_after_loading(module)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def quantised(folder: Path) -> dict[str, Any]:
    """Swap and stream versions into models whose linear layers vLLM holds in FP8, against its own load of each."""
    return {
        f"{family}-{'tied' if tied else 'untied'}": swapped_quantised(folder / f"{family}-{tied}", family, tied)
        for family in ("qwen2", "qwen3", "llama")
        for tied in (True, False)
    } | {"engine": quantised_engine(folder / "engine")}


def swapped_quantised(folder: Path, family: str, tied: bool) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    reference(0, tied, family).bfloat16().save_pretrained(folder)
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, quantization="fp8_per_channel"
    )
    config = arguments.create_engine_config()
    versions = [on_device(reference(seed, tied, family).bfloat16()) for seed in range(3)]
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            join_alone()
        live, streamed, *loaded = [loaded_quantised(config, versions[n]) for n in (0, 0, 1, 2)]
        swapper, other = WeightSwapper(live, config, DEVICE), WeightSwapper(streamed, config, DEVICE)
        swapper.check_quantised()
        swapper.prepare(versions[1])
        seen: dict[str, Any] = {
            "path": swapper.path,
            "reason": swapper.reason,
            "differences_before": swapper.differences(),
        }
        seen |= {"changed": unequal(live, loaded[0])}
        swapper.swap()
        seen |= {"swapped": unequal(live, loaded[0]), "differences": swapper.differences()}
        swapper.prepare(versions[2])
        swapper.swap()
        seen |= {"swapped_again": unequal(live, loaded[1])}
        layout, buckets = bucketed(versions[2])
        other.stream(through_one_buffer(buckets), layout)
        seen |= {"streamed": unequal(streamed, loaded[1]), "compared": other.compare(through_one_buffer(buckets))}
        live.model.layers[1].mlp.down_proj.weight_scale.data[3] *= 2
        return {**seen, "damaged": swapper.differences()}


def loaded_quantised(config: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a model that vLLM has loaded from ``tensors``, quantised as it does."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with set_default_torch_dtype(torch.bfloat16), DEVICE:
        model = initialize_model(config)
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_processing(model, config.model_config)
    return model


def unequal(first: Any, other: Any) -> list[str]:
    """Return the parameters that differ in a byte."""
    others = dict(other.named_parameters())
    assert others.keys() == dict(first.named_parameters()).keys()
    return [name for name, held in first.named_parameters() if not torch.equal(bytes_of(held), bytes_of(others[name]))]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.contiguous().view(torch.uint8)


def join_alone() -> None:
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel(1)


def as_rank(rank: int, ranks: int) -> None:
    """Pose as rank ``rank`` of ``ranks``; vLLM's layers need no more than these numbers."""
    from vllm.distributed import parallel_state

    parallel_state._TP = SimpleNamespace(rank_in_group=rank, world_size=ranks)  # type: ignore[assignment, unused-ignore]


def same(first: Any, other: Any) -> bool:
    others = dict(other.named_parameters())
    return all(torch.equal(parameter, others[name]) for name, parameter in first.named_parameters())


# ---------------------------------------------------------------- engine


def unpacked(folder: Path) -> dict[str, Any]:
    from tests.support.unpacked import unpack_experts, unpack_linear_layers

    unpack_experts()
    unpack_linear_layers()
    return engine(folder, False, "qwen2_moe")


def engine(folder: Path, tied: bool, family: str = "qwen2") -> dict[str, Any]:
    reference(0, tied, family).save_pretrained(folder)
    llm, worker = opened(folder, dtype="float32")
    swapper = WeightSwapper(worker.model_runner.get_model(), worker.vllm_config, DEVICE)
    policies = [reference(seed, tied, family) for seed in (0, 1, 2, 3)]
    shadow = on_device(policies[1])
    seen: dict[str, Any] = {"before": gap(llm, policies[0])}
    swapper.prepare(shadow)
    seen |= {"path": swapper.path, "reason": swapper.reason, "unswapped": gap(llm, policies[0])}
    seen |= {"taken": swapper.swap(), "swapped": gap(llm, policies[1])}
    for name, tensor in on_device(policies[2]).items():
        shadow[name].copy_(tensor)
    seen |= {"again": swapper.swap(), "swapped_again": gap(llm, policies[2])}
    seen |= refused(swapper, llm, policies[2])
    seen |= streamed(swapper, llm, policies[3], reference(4, tied, family))
    swapper.prepare(on_device(policies[0]))
    seen |= {"last": swapper.swap(), "swapped_last": gap(llm, policies[0]), "torn_last": swapper.torn}
    return seen


def opened(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return an engine in this process, and its worker."""
    from vllm import LLM

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        enable_prefix_caching=False,
        num_gpu_blocks_override=forge.VLLM_BLOCKS,
        **options,
    )
    return llm, llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[attr-defined, unused-ignore]


def quantised_engine(folder: Path) -> dict[str, Any]:
    """Swap a version into an engine that quantised its weights: on a CPU by vLLM's reload, as its embeddings are packed."""
    from vllm.config import set_current_vllm_config

    reference(0, True).bfloat16().save_pretrained(folder)
    _, worker = opened(folder, dtype="bfloat16", quantization="fp8_per_channel")
    model, version = worker.model_runner.get_model(), on_device(reference(1, True).bfloat16())
    swapper = WeightSwapper(model, worker.vllm_config, DEVICE)
    swapper.check_quantised()
    swapper.prepare(version)
    swapper.swap()
    with set_current_vllm_config(worker.vllm_config):
        return {"path": swapper.path, "unequal": unequal(model, loaded_quantised(worker.vllm_config, version))}


def refused(swapper: WeightSwapper, llm: Any, serving: Any) -> dict[str, Any]:
    errors = []
    for name, tensor in (("model.norm.weight", torch.ones(63)), ("model.nothing.weight", torch.ones(4))):
        try:
            swapper.prepare({**on_device(serving), name: tensor.to(DEVICE)})
        except WeightsError as error:
            errors.append(str(error))
    return {"refusals": errors, "unchanged": gap(llm, serving)}


def streamed(swapper: WeightSwapper, llm: Any, policy: Any, other: Any) -> dict[str, Any]:
    """Stream a version, one whose source dies midway, and the first again."""
    layout, buckets = bucketed(on_device(policy))
    copied = swapper.stream(through_one_buffer(buckets), layout)
    seen: dict[str, Any] = {"stream_bytes": copied, "streamed": gap(llm, policy), "torn_before": swapper.torn}
    _, others = bucketed(on_device(other))
    try:
        swapper.stream(through_one_buffer(others, stop_at=len(others) // 2), layout)
    except WeightsError as error:
        seen |= {"broke": str(error), "torn": swapper.torn}
    swapper.stream(through_one_buffer(buckets), layout)
    return {**seen, "mended": gap(llm, policy)}


def gap(llm: Any, policy: Any) -> float:
    """Return the largest logprob gap (nats)."""
    from vllm import SamplingParams

    prompt = list(range(2, 30))
    sampling = SamplingParams(max_tokens=16, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    completion = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
    actual = torch.tensor([next(iter(place.values())).logprob for place in completion.logprobs])
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    logprobs = torch.log_softmax(policy(tokens).logits.double(), -1)[0, len(prompt) - 1 : -1]
    requested = logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return float((actual - requested).abs().max())


def play(scene: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if scene in ("loaders", "fp8", "unpacked"):
            return {"loaders": loaders, "fp8": quantised, "unpacked": unpacked}[scene](Path(folder))
        return engine(Path(folder), scene == "tied", scene if scene in FAMILIES else "qwen2")


def main() -> None:
    scenes = sys.argv[1:] or ("loaders", "fp8", "tied", "untied", "mixtral", "unpacked")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # needs a compiler, and a path without spaces
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # else a process that imports vLLM again looks at each model

    # CUDA does not survive a fork
    with multiprocessing.get_context("fork" if DEVICE == CPU else "spawn").Pool(1, maxtasksperchild=1) as each:
        print(json.dumps({scene: each.apply(play, (scene,)) for scene in scenes}))


if __name__ == "__main__":
    main()
