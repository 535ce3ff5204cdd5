"""Names of other frameworks in a settings file: the message says what they are called here, and the page agrees."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from penstock.services.cli.settings_help import entries
from penstock.shared.errors import SettingsError
from penstock.shared.settings import loads
from penstock.shared.settings.reading.other_names import OTHER_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "from-trl.md"
ROWS = re.findall(r"^\| (`.+?) \| (`.+?) \|", PAGE.read_text(), re.MULTILINE)
SETTINGS = {entry.key: entry.default for entry in entries()}

COMMONEST = {
    "TRL": {
        "learning_rate": "trainer.learning_rate",
        "num_generations": "sampling.group_size",
        "max_completion_length": "sampling.max_new_tokens",
        "max_prompt_length": "rollout.vllm.max_model_len",
        "per_device_train_batch_size": "algorithm.groups_per_step",
        "gradient_accumulation_steps": "algorithm.groups_per_step",
        "num_train_epochs": "run.steps",
        "max_steps": "run.steps",
        "beta": "algorithm.kl.coefficient",
        "temperature": "sampling.temperature",
        "top_p": "sampling.top_p",
        "top_k": "sampling.top_k",
        "epsilon": "algorithm.clip",
        "epsilon_high": "algorithm.clip",
        "delta": "algorithm.clip",
        "loss_type": "algorithm.aggregation",
        "scale_rewards": "algorithm.advantage",
        "num_iterations": "algorithm.epochs",
        "reward_funcs": "reward.scorers",
        "reward_weights": "reward.scorers",
        "warmup_ratio": "trainer.warmup_steps",
        "warmup_steps": "trainer.warmup_steps",
        "lr_scheduler_type": "trainer.schedule",
        "optim": "trainer.optimizer",
        "weight_decay": "trainer.weight_decay",
        "max_grad_norm": "trainer.max_grad_norm",
        "bf16": "policy.dtype",
        "gradient_checkpointing": "trainer.gradient_checkpointing",
        "save_steps": "trainer.checkpoint_every_steps",
        "eval_steps": "evaluation.every_steps",
        "logging_steps": "every step is logged",
        "seed": "run.seed",
        "output_dir": "run.folder",
        "run_name": "run.id",
        "report_to": "tracking.sinks",
        "log_completions": "coordinator.sample_every_steps",
        "use_vllm": "rollout.engine",
        "vllm_mode": "rollout.gpus",
        "vllm_gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
        "vllm_tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
        "lora_r": "policy.lora.rank",
        "peft_config": "policy.lora.rank",
    },
    "verl": {
        "actor_rollout_ref.rollout.n": "sampling.group_size",
        "actor_rollout_ref.rollout.name": "rollout.engine",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.vllm.tensor_parallel_size",
        "actor_rollout_ref.model.path": "policy.model",
        "actor_rollout_ref.actor.optim.lr": "trainer.learning_rate",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.minibatches",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
        "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coefficient",
        "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_bonus",
        "actor_rollout_ref.actor.clip_ratio": "algorithm.clip",
        "actor_rollout_ref.actor.grad_clip": "trainer.max_grad_norm",
        "algorithm.adv_estimator": "algorithm.advantage",
        "algorithm.kl_ctrl.kl_coef": "algorithm.kl.coefficient",
        "data.train_files": "data.path",
        "data.val_files": "evaluation.path",
        "data.train_batch_size": "algorithm.groups_per_step",
        "data.max_response_length": "sampling.max_new_tokens",
        "data.max_prompt_length": "rollout.vllm.max_model_len",
        "data.prompt_key": "data.prompt_field",
        "trainer.total_epochs": "run.steps",
        "trainer.n_gpus_per_node": "trainer.ranks",
        "trainer.nnodes": "trainer.nodes",
        "trainer.save_freq": "trainer.checkpoint_every_steps",
        "trainer.test_freq": "evaluation.every_steps",
        "trainer.logger": "tracking.sinks",
        "trainer.project_name": "tracking.project",
        "trainer.experiment_name": "run.id",
        "custom_reward_function.path": "reward.scorers",
    },
    "OpenRLHF": {
        "pretrain": "policy.model",
        "prompt_data": "data.path",
        "input_key": "data.prompt_field",
        "label_key": "data.answer_field",
        "n_samples_per_prompt": "sampling.group_size",
        "rollout_batch_size": "algorithm.groups_per_step",
        "train_batch_size": "algorithm.groups_per_step",
        "micro_train_batch_size": "trainer.micro_batch_tokens",
        "actor_learning_rate": "trainer.learning_rate",
        "critic_learning_rate": "algorithm.critic.learning_rate",
        "init_kl_coef": "algorithm.kl.coefficient",
        "eps_clip": "algorithm.clip",
        "advantage_estimator": "algorithm.advantage",
        "generate_max_len": "sampling.max_new_tokens",
        "prompt_max_len": "rollout.vllm.max_model_len",
        "max_epochs": "algorithm.epochs",
        "num_episodes": "run.steps",
        "vllm_num_engines": "rollout.replicas",
        "vllm_tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
        "remote_rm_url": "reward.scorers",
        "async_train": "algorithm.max_lag",
        "packing_samples": "trainer.packing",
        "adam_offload": "trainer.offload",
    },
}


def message(key: str, flag: bool = False) -> str:
    with pytest.raises(SettingsError) as refused:
        loads("" if flag else f"{key} = 8", "run.toml", [f"--{key}=8"] if flag else [])
    return str(refused.value)


@pytest.mark.parametrize(("key", "ours"), [case for names in COMMONEST.values() for case in names.items()])
def test_the_message_about_another_frameworks_name_names_ours(key: str, ours: str) -> None:
    assert re.search(rf"{re.escape(ours)}(?![\w.])", message(key))
    assert re.search(rf"{re.escape(ours)}(?![\w.])", message(key, flag=True))


def test_trls_names_are_found_in_any_table() -> None:
    for name, ours in COMMONEST["TRL"].items():
        for table in ("algorithm", "trainer", "sampling"):
            if f"{table}.{name}" not in SETTINGS:
                assert ours in message(f"{table}.{name}")


def test_trl_has_these_names() -> None:
    """Those of GRPOConfig itself; the others are arguments of GRPOTrainer and LoraConfig, or of earlier releases."""
    trl = pytest.importorskip("trl")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    others = {"max_prompt_length", "warmup_ratio", "reward_funcs", "lora_r", "peft_config"}
    assert len(COMMONEST["TRL"].keys() - others) >= 30
    assert COMMONEST["TRL"].keys() - known == others


def test_every_setting_in_the_table_exists() -> None:
    tables = {key.partition(".")[0] for key in SETTINGS}
    named = [
        word for names in OTHER_NAMES.values() for text in names.values() for word in re.findall(r"\w+(?:\.\w+)+", text)
    ]
    assert named
    assert [word for word in named if word not in SETTINGS or word.partition(".")[0] not in tables] == []


def test_a_file_of_another_framework_is_answered_name_by_name() -> None:
    with pytest.raises(SettingsError) as refused:
        loads("[actor_rollout_ref]\nrollout = {n = 8}\nactor = {optim = {lr = 1e-6}}", "run.toml")
    assert "verl's 'n' is sampling.group_size; verl's 'lr' is trainer.learning_rate" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        *((f"{table}.epochs", "run.steps") for table in ("run", "data", "trainer")),
        ("grpo.max_num_epochs", "run.steps"),
        ("gconfig.n_samples", "sampling.group_size"),
        ("critic.optim.lr", "algorithm.critic.learning_rate"),
        ("critic.model.path", "algorithm.critic.model"),
        ("reward_model.model.path", "reward.scorers"),
        ("val_kwargs.n", "evaluation.samples"),
        ("val_kwargs.temperature", "evaluation.temperature"),
        ("reward.model", "reward.scorers"),
        ("policy.path", "policy.model"),
    ],
)
def test_a_name_with_two_meanings_has_that_of_its_table(key: str, ours: str) -> None:
    for text in (message(key), message(key, flag=True)):
        assert re.search(rf"'s '[\w.]+' is {re.escape(ours)}(?![\w.])", text)


@pytest.mark.parametrize(
    "key",
    ["evaluation.n", "evaluation.top_p", "evaluation.lr", "algorithm.critic.lr", "evaluation.limit", "run.timeout"]
    + ["rollout.max_tokens", "trainer.offload_optimizer", "optim.weight_decay", "optimizer.weight_decay"],
)
def test_no_setting_is_suggested_that_would_change_something_else(key: str) -> None:
    for text in (message(key), message(key, flag=True)):
        assert "; known here: " in text


def test_a_value_in_place_of_a_table_names_its_settings() -> None:
    assert "policy.lora.rank" in message("policy.lora")


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_the_page_and_the_message_agree(theirs: str, ours: str) -> None:
    name, first = re.search(r"`(\w+)", theirs), re.search(r"`([\w.]+)", ours)
    assert name is not None
    assert first is not None
    shown = {"functions": "reward.scorers", "algorithm.aggregation": "algorithm.preset"}.get(first[1], first[1])
    if name[1] != "load_dataset":
        assert shown in message(name[1])


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_defaults_on_the_page_are_those_of_both(theirs: str, ours: str) -> None:
    trl = pytest.importorskip("trl")
    for name, default in re.findall(r"`(\w+)` \(([^)]+)\)", theirs):
        field = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}[name]
        assert field.default == tomllib.loads(f"value = {default}")["value"]
    for key, default in re.findall(r"`([\w.]+)` \(([^)]+)\)", ours):
        assert tomllib.loads(f"value = {SETTINGS[key]}") == tomllib.loads(f"value = {default}")
