"""Laws of sizes and memory; literal figures are of Qwen2.5's shapes and of benchmarks/results."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.runs.plan_memory import recompared
from penstock.services.plan import memory
from penstock.services.plan.hardware import GIB, parse_cluster
from penstock.services.plan.memory import EngineOptions, TrainerOptions, engine_memory, peak, total, trainer_table
from penstock.services.plan.shapes import from_config, shape_of
from penstock.services.plan.workload import Lengths, Workload
from penstock.services.trainer.model import optimizer
from penstock.services.trainer.model.memory import offloading
from penstock.shared.errors import SettingsError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def workload(model: str, lora: int = 0) -> Workload:
    return Workload(shape_of(model), 2, 32, 8, 64, Lengths(512, 512, 0.0), 1, 100, 1.0, None, False, lora)


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("0.5b", 493_961_216),
        ("7b", 7_615_283_200),
        ("30b-a3b", 30_531_911_680),
        ("235b-a22b", 235_092_836_352),
        ("400b", 405_849_243_648),
    ],
)
def test_weights_are_those_of_the_shape(model: str, weights: int) -> None:
    assert shape_of(model).weights == weights


def test_a_token_uses_few_of_the_experts() -> None:
    assert round(shape_of("30b-a3b").active / 1e9, 2) == 2.73


def test_latent_attention_caches_its_latent_width() -> None:
    config = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    assert from_config(config, "latent").kv_per_token == 2 * 24


def test_the_cache_of_a_long_sequence_is_what_vllm_allots() -> None:
    """Of vLLM 0.32's specifications of one layer, bfloat16: 2 × heads × size × 2 bytes, or the latent, on every GPU."""
    sizes = {
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "vocab_size": 9,
        "intermediate_size": 64,
    }
    plain = {**sizes, "num_key_value_heads": 4, "head_dim": 32}
    kinds = [*["sliding_attention"] * 4, "linear_attention", "full_attention"]
    windows = {**plain, "sliding_window": 1024, "layer_types": kinds}
    latent = {**sizes, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 8, "v_head_dim": 8}
    tokens = 131_072

    def gpu_bytes(config: dict[str, Any], tensor_parallel: int) -> float:
        of = dataclasses.replace(workload("0.5b"), shape=from_config(config, "made"))
        return memory.kv_bytes(of, tensor_parallel, tokens) * tokens

    layer = 2 * 4 * 32 * 2
    assert [gpu_bytes(plain, gpus) for gpus in (1, 2, 8)] == [6 * layer * tokens / share for share in (1, 2, 4)]
    assert gpu_bytes(windows, 2) == (layer * tokens + 4 * layer * 1024) / 2
    assert gpu_bytes({**windows, "use_sliding_window": False}, 1) == 5 * layer * tokens
    patterned = {**plain, "sliding_window": 1024, "sliding_window_pattern": 3}  # every third one keeps all
    assert gpu_bytes(patterned, 1) == 2 * layer * tokens + 4 * layer * 1024
    assert [gpu_bytes(latent, gpus) for gpus in (1, 8)] == [6 * 576 * 2 * tokens] * 2


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected the sizes of a decoder"):
        from_config({"hidden_size": 8}, "odd")


@pytest.mark.parametrize(
    ("model", "options", "measured_gb"),
    [
        ("0.5b", TrainerOptions(1, 2, offload="optimizer", checkpointing=False, snapshots=0), 20.00),
        ("0.5b", TrainerOptions(1, 1, snapshots=0, micro_batch_tokens=15_261), 29.7),
        ("0.5b", TrainerOptions(1, 1, snapshots=0, micro_batch_tokens=46_103), 66.7),
        ("7b", TrainerOptions(1, 1, checkpointing=True, snapshots=0, micro_batch_tokens=8192), 128.2),
        ("7b", TrainerOptions(2, 3, checkpointing=True, snapshots=0), 72.59),
        ("7b", TrainerOptions(2, 3, checkpointing=True, snapshots=0, micro_batch_tokens=32_768), 76.68),
    ],
)
def test_peaks_are_within_three_percent_of_those_measured(
    model: str, options: TrainerOptions, measured_gb: float
) -> None:
    table, _ = trainer_table(workload(model), options, 140 * GIB)
    context = next(part.nbytes for part in table["wait"] if part.name == "context")  # not torch's
    assert (peak(table) - context) / 1e9 == pytest.approx(measured_gb, rel=0.03)


@pytest.mark.parametrize(
    ("stored", "configurations", "bar"),
    [("2026-11-23-plan-memory-h200.json", 8, 0.02), ("2026-11-24-plan-memory-two-gpus-h200.json", 3, 0.03)],
)
def test_the_plan_is_near_every_stored_measurement(stored: str, configurations: int, bar: float) -> None:
    results = json.loads((RESULTS / stored).read_text())["result"]
    measured = [result for result in results if "error" not in result]
    assert len(measured) == configurations
    assert {name: off for name, off in map(deviation, measured) if abs(off) > bar} == {}


def test_the_plan_is_near_every_phase_of_the_whole_run() -> None:
    measured = json.loads((RESULTS / "2026-11-26-whole-run-h200.json").read_text())["memory"]
    options = TrainerOptions(2, 3, optimizer="adamw_8bit", sharded=True)
    table, _ = trainer_table(workload("7b"), options, 139.8 * GIB)
    for replica in ("trainer-0", "trainer-0.1"):
        for phase, parts in table.items():
            actual_bytes = measured[replica][phase]["measured"] * GIB
            assert total([part for part in parts if part.name != "context"]) == pytest.approx(actual_bytes, rel=0.07)


def test_a_rank_with_a_share_of_the_weights_keeps_gradients_and_their_bucket_between_steps() -> None:
    def kept(stage: int, **more: Any) -> dict[str, float]:
        table, _ = trainer_table(workload("7b"), TrainerOptions(2, stage, **more), 140 * GIB)
        return {part.name: part.nbytes for part in table["wait"] if part.name in ("gradients", "reduction")}

    assert kept(3) == {"gradients": shape_of("7b").weights, "reduction": 1e9}
    assert kept(2) == kept(3, offload="optimizer") == {}


def test_a_models_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"no config\.json of a model at '/nowhere/model': set policy.model"):
        shape_of("/nowhere/model")


def test_the_plan_knows_the_groups_of_the_optimizer() -> None:
    assert (memory._LARGE, memory._GROUP) == (optimizer._LARGE, optimizer.GROUP_WEIGHTS)
    table, _ = trainer_table(workload("7b"), TrainerOptions(1, 1, snapshots=0), 140 * GIB)
    copies = {part.name: part.nbytes for part in table["optimizer"]}["gradients in float32"]
    assert copies == 6 * 2**30


def deviation(result: dict[str, Any]) -> tuple[str, float]:
    compared = recompared(result)
    return compared["name"], compared["deviation"]


@pytest.mark.parametrize(
    ("model", "lora", "bucket", "gradients"),
    [("7b", 0, 0, 5e8), ("0.5b", 0, 0, 493_961_216), ("7b", 16, 0, 40_370_176), ("7b", 16, 10**9, 1e9)],
)
def test_the_bucket_of_gradients_has_room_for_those_of_all_weights(
    model: str, lora: int, bucket: int, gradients: float
) -> None:
    table, _ = trainer_table(workload(model, lora=lora), TrainerOptions(1, 1, bucket=bucket), 140 * GIB)
    reductions = {
        str(phase): [part.nbytes for part in parts if part.name == "reduction"] for phase, parts in table.items()
    }
    assert reductions == {"wait": [], "forward and backward": [2 * gradients], "optimizer": []}


def test_a_sharded_snapshot_is_the_bucket_of_the_embeddings_and_a_share_of_the_others() -> None:
    def snapshots(ranks: int, *, sharded: bool) -> float:
        table, _ = trainer_table(workload("70b"), TrainerOptions(ranks, 3, sharded=sharded), 140 * GIB)
        return next(round(part.nbytes / 1e9, 1) for part in table["wait"] if part.name == "snapshots")

    assert snapshots(8, sharded=False) == 282.2
    assert [snapshots(ranks, sharded=True) for ranks in (1, 8, 32)] == [282.2, 39.0, 12.9]


def test_states_are_cut_by_the_zero_stage() -> None:
    def states(stage: int) -> dict[str, float]:
        table, _ = trainer_table(workload("7b"), TrainerOptions(8, stage, snapshots=0), 140 * GIB)
        return {part.name: round(part.nbytes / 1e9, 1) for part in table["optimizer"]}

    assert [states(stage)["moments"] for stage in (0, 1, 2, 3)] == [60.9, 7.6, 7.6, 7.6]
    assert [states(stage)["gradients"] for stage in (0, 1, 2, 3)] == [15.2, 15.2, 1.9, 1.9]
    assert [states(stage)["weights"] for stage in (0, 1, 2, 3)] == [15.2, 15.2, 15.2, 1.9]


def test_an_adapter_has_small_states_and_no_snapshots() -> None:
    table, _ = trainer_table(workload("7b", lora=16), TrainerOptions(1, 1), 140 * GIB)
    parts = {part.name: part.nbytes for part in table["wait"]}
    assert parts["moments"] < 0.4e9
    assert "snapshots" not in parts


def test_as_many_layers_keep_their_activations_as_memory_allows() -> None:
    def kept(gib: float) -> int:
        return trainer_table(workload("7b"), TrainerOptions(2, 3, snapshots=0), gib * GIB)[1]

    assert (kept(79.6), kept(140.4), kept(1000)) == (1, 19, 28)


@pytest.mark.parametrize("checkpointing", [True, "auto"])
def test_a_row_of_131072_tokens_leaves_two_inputs_of_layers_on_the_gpu(checkpointing: Any) -> None:
    """28 layers × 131,072 tokens × 3,584 × 2 bytes."""

    def peaks(tokens: int, gpu_bytes: float) -> tuple[float, float]:
        options = TrainerOptions(
            1, 1, "adamw_8bit", snapshots=0, micro_batch_tokens=tokens, checkpointing=checkpointing, gpu_bytes=gpu_bytes
        )
        table, _ = trainer_table(workload("7b"), options, 133.4 * GIB)
        return round(total(table["forward and backward"]) / GIB, 1), memory.offloaded_bytes(workload("7b"), options)

    layer = 131_072 * 3584 * 2
    (here, nothing), (away, held) = peaks(131_072, float("inf")), peaks(131_072, 140.4 * GIB)
    assert (nothing, held) == (0.0, 28 * layer)
    kept = 0 if checkpointing is True else 1
    assert here - away == pytest.approx((28 - kept - 2) * layer / GIB, abs=0.1)
    assert away == 100.0
    assert peaks(262_144, 140.4 * GIB)[0] < 133.4 < peaks(262_144, float("inf"))[0]
    assert peaks(16_384, 140.4 * GIB) == peaks(16_384, float("inf")), "a small share of the GPU stays there"


def test_the_plan_is_near_the_measured_pass_of_131072_tokens() -> None:
    """Of a step of one pass, which lacks the gradients that the plan counts with the inputs of all layers."""
    measured = json.loads((RESULTS / "2026-11-29-long-samples-h200.json").read_text())["result"]
    for way, gpu_bytes, off in (("offloaded", 140.4 * GIB, 0.05), ("on the GPU", float("inf"), 0.15)):
        options = TrainerOptions(
            1, 1, "adamw_8bit", snapshots=0, micro_batch_tokens=131_072, checkpointing=True, gpu_bytes=gpu_bytes
        )
        table, _ = trainer_table(workload("7b"), options, 140 * GIB)
        planned = total([part for part in table["forward and backward"] if part.name != "context"])
        assert 0 <= planned / measured[f"pass of 131,072 {way}"]["peak_bytes"] - 1 < off


def test_the_plan_knows_when_and_how_many_inputs_of_layers_are_offloaded() -> None:
    assert (memory.OFFLOADED, memory.AHEAD) == (offloading.SHARE, offloading._AHEAD)


def test_the_cache_is_what_weights_and_shadow_leave() -> None:
    memory = engine_memory(workload("7b"), EngineOptions(sequences=10_000), 75 * GIB, 79.6 * GIB)
    assert total(memory.components) == pytest.approx(75 * GIB)


@pytest.mark.parametrize(("words", "nodes", "per_node"), [("8xH200", 1, 8), ("4x80GiB", 1, 4), ("8x8xH100", 8, 8), ("32xH100", 4, 8)])  # fmt: skip
def test_clusters_are_read(words: str, nodes: int, per_node: int) -> None:
    cluster = parse_cluster(words)
    assert (cluster.nodes, cluster.per_node) == (nodes, per_node)


@pytest.mark.parametrize("words", ["", "H200", "0xH200", "8xZ9", "8 x H200"])
def test_clusters_that_cannot_be_read_are_refused(words: str) -> None:
    with pytest.raises(SettingsError, match="change --gpus"):
        parse_cluster(words)


@pytest.mark.parametrize("options", [TrainerOptions(8, 3), TrainerOptions(8, 3, offload="all")])
def test_the_reference_is_whole_on_each_gpu_and_a_replicas_second_copy_is_each_ranks_share(
    options: TrainerOptions,
) -> None:
    """Whatever DeepSpeed divides or offloads; with a bucket, in which a rank verifies its share."""
    work = dataclasses.replace(workload("7b"), reference=True)
    table, _ = trainer_table(work, options, 140 * GIB)
    assert {part.name: part.nbytes for part in table["wait"]}["reference"] == work.policy_bytes
    replica = engine_memory(work, EngineOptions(4, sequences=64), 130 * GIB, 140 * GIB)
    parts = {part.name: part.nbytes for part in replica.components}
    embeddings = 2 * work.shape.vocabulary * work.shape.hidden
    assert parts["weights"] == work.policy_bytes / 4
    assert parts["shadow"] == pytest.approx(parts["weights"] + embeddings)


def test_a_mixtures_second_copy_is_whole_on_each_gpu() -> None:
    work = workload("30b-a3b")
    replica = engine_memory(work, EngineOptions(4, sequences=64), 130 * GIB, 140 * GIB)
    assert {part.name: part.nbytes for part in replica.components}["shadow"] == work.policy_bytes


def test_what_a_token_keeps_for_each_chosen_expert_is_what_transformers_saves() -> None:
    def config(chosen: int) -> dict[str, Any]:
        return {
            "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_experts": 8, "num_experts_per_tok": chosen, "vocab_size": 50,
        }  # fmt: skip

    def saved(chosen: int) -> float:
        fields, seen, tokens = config(chosen), dict[int, int](), 40
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), attn_implementation="sdpa").model
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept = tensor.untyped_storage()
            if tensor.is_floating_point() and kept.data_ptr() not in weights:
                seen[kept.data_ptr()] = kept.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(input_ids=torch.arange(tokens)[None]).last_hidden_state
        assert hidden.requires_grad
        return sum(seen.values()) / 4 / tokens

    measured = (saved(4) - saved(2)) / 2
    planned = [from_config(config(chosen), "").saved_per_token for chosen in (2, 4)]
    assert (planned[1] - planned[0]) / 2 == pytest.approx(measured, rel=0.03)
