"""Laws of what the plan accepts and refuses, for random shapes, GPUs and settings."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.plan.hardware import GIB, GPUS, Cluster
from penstock.services.plan.layouts import Planner, Preferences
from penstock.services.plan.memory import TrainerOptions, peak, total, trainer_table
from penstock.services.plan.shapes import Shape, from_config
from penstock.services.plan.workload import Lengths, Workload


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    heads = draw(st.sampled_from([2, 8, 16, 64]))
    config = {
        "hidden_size": heads * draw(st.sampled_from([32, 64, 128])),
        "intermediate_size": draw(st.integers(64, 40_000)),
        "num_hidden_layers": draw(st.integers(1, 100)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, heads])),
        "vocab_size": draw(st.integers(32, 260_000)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        config |= {
            "num_experts": draw(st.sampled_from([4, 64])),
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
        }
    return from_config(config, "random")


@st.composite
def works(draw: st.DrawFn) -> Workload:
    shape, most = draw(shapes()), draw(st.integers(2, 16_384))
    return Workload(
        shape=shape,
        weight_bytes=draw(st.sampled_from([2, 4])),
        groups=draw(st.integers(1, 16)),
        group_size=draw(st.integers(1, 16)),
        prompt_tokens=draw(st.integers(1, 4096)),
        lengths=Lengths(draw(st.floats(1.0, float(most))), most),
        max_lag=draw(st.integers(0, 3)),
        steps=10,
        passes=1.0,
        critic=shape if draw(st.booleans()) else None,
        reference=draw(st.booleans()),
        lora_rank=draw(st.sampled_from([0, 0, 16])),
    )


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    gpu = dataclasses.replace(GPUS["A100"], memory_bytes=draw(st.floats(4.0, 180.0)) * GIB)
    cluster = Cluster(gpu, draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4, 8])))
    trainer = TrainerOptions(
        ranks=1,
        zero_stage=draw(st.integers(1, 3)),
        optimizer=draw(st.sampled_from(["adamw", "adamw_8bit"])),
        micro_batch_tokens=draw(st.sampled_from([512, 16_384, 65_536])),
        checkpointing=draw(st.sampled_from([True, False, "auto"])),
    )
    return Planner(draw(works()), cluster, Preferences(trainer, draw(st.integers(1, 64))))


@given(planners())
@settings(max_examples=40, derandomize=True)
def test_whatever_is_accepted_fits_in_every_phase_and_whatever_is_refused_does_not(planner: Planner) -> None:
    candidates, problems = planner.compare()
    for candidate in candidates:
        for table in candidate.memory.values():
            assert all(part.nbytes >= 0 for parts in table.values() for part in parts)
            assert peak(table) <= planner.limit_bytes * 1.0001
        assert candidate.max_groups >= 1
    for problem in problems:
        assert problem.needed_bytes > problem.limit_bytes or problem.layout.startswith("an engine")
    assert candidates or problems


@given(works(), st.integers(1, 3), st.integers(2, 64))
@settings(max_examples=60, derandomize=True)
def test_more_ranks_never_need_more_memory(work: Workload, zero_stage: int, ranks: int) -> None:
    def needed(count: int) -> list[float]:
        options = TrainerOptions(count, zero_stage, checkpointing=True)
        return [total(parts) for parts in trainer_table(work, options, 80 * GIB)[0].values()]

    assert all(more <= fewer * 1.0001 for more, fewer in zip(needed(ranks * 2), needed(ranks), strict=True))
