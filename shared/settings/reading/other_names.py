"""What settings of other frameworks are called here, for the message about an unknown key.

Names and meanings are those of TRL 1.16 (`GRPOConfig`, and the arguments of `GRPOTrainer` and `LoraConfig`), verl 0.8
(`ppo_trainer.yaml`) and OpenRLHF 0.8 (`train_ppo_ray`); of the others, those that resemble another setting here.
docs/from-trl.md has TRL's with remarks.
"""

from collections.abc import Iterator, Mapping

_EPOCHS = "run.steps; the data repeat, and algorithm.epochs are passes over a batch"
_KL = "algorithm.kl.coefficient"
_LENGTH = "rollout.vllm.max_model_len, for prompt and completion together; prompts are never cut"
_PRECISION = "policy.dtype"
_SCORERS = "reward.scorers"
_VLLM = "rollout.vllm"
_WARMUP = "trainer.warmup_steps, in steps"

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "TRL": {
        "adam_beta1": "trainer.adam_betas",
        "adam_beta2": "trainer.adam_betas",
        "beta": f"{_KL}, or algorithm.dpo_beta",
        "bf16": _PRECISION,
        "chat_template_kwargs": "data.chat_template",
        "dataset": "data.path",
        "delta": "algorithm.clip, its third number",
        "entropy_coef": "algorithm.entropy_bonus",
        "epsilon": "algorithm.clip",
        "epsilon_high": "algorithm.clip",
        "eval_dataset": "evaluation.path",
        "eval_steps": "evaluation.every_steps",
        "fp16": _PRECISION,
        "generation_batch_size": "algorithm.groups_per_step, in groups",
        "gradient_accumulation_steps": "algorithm.groups_per_step, in groups; trainer.micro_batch_tokens bounds memory",
        "importance_sampling_level": 'algorithm.preset = "gspo"',
        "log_completions": "coordinator.sample_every_steps",
        "learning_rate": "trainer.learning_rate",
        "logging_steps": "not needed: every step is logged; coordinator.sample_every_steps is for rollouts",
        "lora_alpha": "policy.lora.alpha",
        "lora_dropout": "policy.lora.dropout",
        "lora_r": "policy.lora.rank",
        "loss_type": "algorithm.preset, or algorithm.loss and algorithm.aggregation",
        "lr_scheduler_type": "trainer.schedule",
        "mask_truncated_completions": "algorithm.overlong, or needs_stop of a scorer in reward.scorers",
        "max_completion_length": "sampling.max_new_tokens",
        "max_prompt_length": _LENGTH,
        "max_steps": "run.steps",
        "max_tool_calling_iterations": "episodes.max_turns, one more than the calls",
        "model": "policy.model",
        "model_name_or_path": "policy.model",
        "num_generations": "sampling.group_size",
        "num_generations_eval": "evaluation.samples",
        "num_iterations": "algorithm.epochs",
        "num_train_epochs": _EPOCHS,
        "optim": "trainer.optimizer",
        "output_dir": "run.folder",
        "peft_config": "policy.lora.rank",
        "per_device_eval_batch_size": "evaluation.problems",
        "per_device_train_batch_size": "algorithm.groups_per_step, in groups",
        "report_to": "tracking.sinks",
        "r": "policy.lora.rank",
        "reward_funcs": f'{_SCORERS}, with kind = "trl"',
        "reward_weights": f'weights of a table in {_SCORERS} with kind = "trl"',
        "run_name": "run.id",
        "save_steps": "trainer.checkpoint_every_steps",
        "save_total_limit": "trainer.keep_last",
        "scale_rewards": "algorithm.advantage",
        "shuffle_dataset": "data.shuffle",
        "steps_per_generation": "algorithm.minibatches, divided by gradient_accumulation_steps",
        "target_modules": "policy.lora.target_modules",
        "temperature": "sampling.temperature",
        "torch_dtype": _PRECISION,
        "train_dataset": "data.path",
        "use_cpu": 'run.device = "cpu"',
        "use_liger_kernel": "trainer.kernels",
        "use_vllm": "rollout.engine",
        "vllm_gpu_memory_utilization": f"{_VLLM}.gpu_memory_utilization",
        "vllm_importance_sampling_cap": "algorithm.correction_band",
        "vllm_importance_sampling_clip_max": "algorithm.correction_band",
        "vllm_importance_sampling_correction": "algorithm.correction",
        "vllm_importance_sampling_mode": "algorithm.correction",
        "vllm_max_model_length": f"{_VLLM}.max_model_len",
        "vllm_mode": "rollout.replicas and rollout.gpus, or placement.mode",
        "vllm_tensor_parallel_size": f"{_VLLM}.tensor_parallel_size",
        "warmup_ratio": _WARMUP,
        "warmup_steps": "trainer.warmup_steps",
    },
    "verl": {
        "adv_estimator": "algorithm.advantage",
        "clip_ratio": "algorithm.clip",
        "clip_ratio_c": "algorithm.clip, its third number",
        "clip_ratio_high": "algorithm.clip",
        "clip_ratio_low": "algorithm.clip",
        "critic.model.path": "algorithm.critic.model",
        "critic.optim.lr": "algorithm.critic.learning_rate",
        "custom_reward_function.name": f'{_SCORERS}, with kind = "python"',
        "custom_reward_function.path": f'{_SCORERS}, with kind = "python"',
        "default_local_dir": "run.folder",
        "entropy_coeff": "algorithm.entropy_bonus",
        "experiment_name": "run.id",
        "filter_groups.enable": "algorithm.dynamic_sampling",
        "gamma": "not needed: the discount is 1",
        "gpu_memory_utilization": f"{_VLLM}.gpu_memory_utilization",
        "grad_clip": "trainer.max_grad_norm",
        "kl_coef": _KL,
        "kl_loss_coef": _KL,
        "kl_loss_type": "algorithm.kl.estimator",
        "lam": "algorithm.critic.decay",
        "log_prob_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
        "logger": "tracking.sinks",
        "lora_rank": "policy.lora.rank",
        "loss_agg_mode": "algorithm.aggregation",
        "lr": "trainer.learning_rate",
        "lr_warmup_steps": _WARMUP,
        "lr_warmup_steps_ratio": _WARMUP,
        "max_response_length": "sampling.max_new_tokens",
        "model.path": "policy.model",
        "n": "sampling.group_size",
        "n_gpus_per_node": "trainer.ranks",
        "nnodes": "trainer.nodes",
        "norm_adv_by_std_in_grpo": "algorithm.advantage",
        "overlong_buffer.len": "algorithm.overlong",
        "ppo_epochs": "algorithm.epochs",
        "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
        "ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
        "ppo_mini_batch_size": "algorithm.minibatches, as a number of updates",
        "project_name": "tracking.project",
        "prompt_key": "data.prompt_field",
        "reward_model.model.path": f'{_SCORERS}, with kind = "model"',
        "response_length": "sampling.max_new_tokens",
        "rollout.name": "rollout.engine",
        "save_freq": "trainer.checkpoint_every_steps",
        "staleness_threshold": "algorithm.max_lag, in steps",
        "tensor_model_parallel_size": f"{_VLLM}.tensor_parallel_size",
        "test_freq": "evaluation.every_steps",
        "total_epochs": _EPOCHS,
        "total_training_steps": "run.steps",
        "train_batch_size": "algorithm.groups_per_step",
        "train_files": "data.path",
        "use_kl_in_reward": 'algorithm.kl.estimator = "k1"',
        "use_kl_loss": 'algorithm.kl.estimator = "k3"',
        "val_kwargs.n": "evaluation.samples",
        "val_kwargs.temperature": "evaluation.temperature",
        "val_files": "evaluation.path",
    },
    "OpenRLHF": {
        "actor_learning_rate": "trainer.learning_rate",
        "actor_num_gpus_per_node": "trainer.ranks",
        "actor_num_nodes": "trainer.nodes",
        "adam_offload": "trainer.offload",
        "advantage_estimator": "algorithm.advantage",
        "async_queue_size": "algorithm.max_lag, in steps",
        "async_train": "algorithm.max_lag; 0 is synchronous",
        "colocate_all_models": "placement.mode",
        "critic_learning_rate": "algorithm.critic.learning_rate",
        "critic_pretrain": "algorithm.critic.model",
        "dynamic_filtering": "algorithm.dynamic_sampling",
        "entropy_loss_coef": "algorithm.entropy_bonus",
        "eps_clip": "algorithm.clip",
        "eps_clip_low_high": "algorithm.clip",
        "eval_dataset": "evaluation.path",
        "generate_max_len": "sampling.max_new_tokens",
        "init_kl_coef": _KL,
        "input_key": "data.prompt_field",
        "input_template": "data.user, with {prompt}",
        "kl_estimator": "algorithm.kl.estimator",
        "kl_target": "algorithm.kl.coefficient, which stays as it is",
        "label_key": "data.answer_field",
        "lambd": "algorithm.critic.decay",
        "lr_scheduler": "trainer.schedule",
        "lr_warmup_ratio": _WARMUP,
        "max_ckpt_num": "trainer.keep_last",
        "max_epochs": "algorithm.epochs, passes over a batch; the data repeat until run.steps",
        "max_len": _LENGTH,
        "micro_rollout_batch_size": "rollout.max_groups, in groups",
        "micro_train_batch_size": "trainer.micro_batch_tokens",
        "n_samples_per_prompt": "sampling.group_size",
        "num_episodes": _EPOCHS,
        "packing_samples": "trainer.packing",
        "pretrain": "policy.model",
        "prompt_data": "data.path",
        "prompt_max_len": _LENGTH,
        "remote_rm_url": f'{_SCORERS}, with kind = "python"',
        "reward_pretrain": f'{_SCORERS}, with kind = "model"',
        "rollout_batch_size": "algorithm.groups_per_step",
        "save_path": "run.folder",
        "vllm_num_engines": "rollout.replicas",
    },
    "NeMo RL": {
        "max_num_epochs": _EPOCHS,
        "max_num_steps": "run.steps",
        "model_name": "policy.model",
        "num_generations_per_prompt": "sampling.group_size",
        "num_prompts_per_step": "algorithm.groups_per_step",
    },
    "AReaL": {
        "actor.path": "policy.model",
        "max_head_offpolicyness": "algorithm.max_lag, in steps",
        "n_samples": "sampling.group_size",
        "total_train_epochs": _EPOCHS,
    },
    "prime-rl": {
        "max_async_level": "algorithm.max_lag, in steps",
        "rollouts_per_example": "sampling.group_size",
    },
    "another trainer": {
        **dict.fromkeys(("epochs", "n_epochs", "num_epochs", "train_epochs"), _EPOCHS),
        "policy.path": "policy.model",
        "reward.model": f'{_SCORERS}, with kind = "model"',
    },
}
"""By framework and name, or the end of a dotted name: the setting here, and what differs."""
_APART = {
    "critic": "algorithm.critic.",
    "eval": "evaluation.",
    "evaluation": "evaluation.",
    "reward": "reward.",
    "reward_model": "reward.",
    "val_kwargs": "evaluation.",
}
"""Tables whose names, such as ``temperature`` and ``lr``, are not those of training: what they mean is in these tables."""


def fits(key: str, meaning: str) -> bool:
    """Return whether ``meaning`` may be what ``key`` means, by the table of each.

    >>> fits("evaluation.top_p", "sampling.top_p"), fits("trainer.seed", "run.seed")
    (False, True)
    """
    return all(_APART.get(table, "") in meaning for table in key.lower().split(".")[:-1])


def meaning_elsewhere(key: str) -> str:
    """Return which setting ``key``, which may be dotted, is by the framework that calls it so; "" if none does.

    >>> meaning_elsewhere("algorithm.beta")
    "TRL's 'beta' is algorithm.kl.coefficient"
    """
    for name in _endings(key.lower().replace("-", "_")):
        for framework, names in OTHER_NAMES.items():
            if name in names and fits(key, names[name]):
                return f"{framework}'s {name!r} is {names[name]}"
    return ""


def _endings(key: str) -> Iterator[str]:
    parts = key.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
