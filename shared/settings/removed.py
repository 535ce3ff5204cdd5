"""Settings that no longer exist: dotted key → what replaced it. Scorers' keys are written `reward.scorers[KIND].NAME`."""

from collections.abc import Mapping, Sequence

_DEVICE = "run.device holds for all services (reward.models.device for the models of the reward service)"
_THREADS = "run.threads holds for all services"
_PORT = "run.metrics_port holds for all services; `penstock up` gives them this port and the following ones"
_GUARDS = "guards.pause and guards.off list the guards that pause the run and those that are turned off; "
_VLLM = "set {} in rollout.vllm.arguments"
_SET = "evaluation.path names the sets, { name = path }, and evaluation.samples and its neighbors may be tables by set"
_MODELS = "reward.models.{} holds for all models of the reward service"
_FIXED = "it is now fixed"
_TESTS = "it is internal.{} now, for tests only"

REMOVED: Mapping[str, str] = {
    "bus.claim_after_s": _TESTS.format("claim_after_s"),
    "bus.max_attempts": _TESTS.format("max_attempts"),
    "bus.start_wait_s": _TESTS.format("start_wait_s"),
    "bus.audit_entries": _FIXED,
    "data.messages_field": "data.prompt_field may name a column of chat messages, and the column `messages` needs no setting",
    "evaluation.sets": _SET,
    "evaluation.pass_at": "pass@k is reported for k = 2, 4, 8, … up to evaluation.samples",
    "evaluation.gate.set": "the gate examines the first set in evaluation.path",
    "evaluation.gate.against": "the gate compares with the best version that passed",
    "evaluation.gate.min_problems": _FIXED + " (50)",
    "evaluation.gate.max_rollbacks": _FIXED + " (2)",
    "rollout.device": _DEVICE,
    "rollout.threads": _THREADS,
    "rollout.metrics_port": _PORT,
    "rollout.reproducible": 'set run.deterministic = "run"',
    "rollout.vllm.max_num_seqs": _VLLM.format("max_num_seqs"),
    "rollout.vllm.enforce_eager": _VLLM.format("enforce_eager"),
    "rollout.vllm.enable_prefix_caching": _VLLM.format("enable_prefix_caching"),
    "rollout.vllm.logprobs": _TESTS.format("logprobs"),
    "reward.max_groups": _TESTS.format("reward_groups"),
    "reward.metrics_port": _PORT,
    "reward.reference": "[reward.models] holds for all models of the reward service, the reference too",
    "reward.executor.metrics_port": _PORT,
    "reward.executor.profiles": "the executor keeps the interpreters warm that the code scorers' profile names",
    "reward.executor.user_id": _FIXED + " (65534)",
    "reward.executor.recycle_after": _TESTS.format("executor_recycle_after"),
    "reward.executor.check_every_s": _TESTS.format("executor_check_s"),
    "reward.executor.max_waiting": _FIXED + " (1024)",
    "reward.scorers[answer].tag": 'extract = "tag:NAME" names the tag',
    "reward.scorers[answer].choices": 'extract = "choice:ABCD" names the letters',
    "reward.scorers[answer].timeout_s": _FIXED + " (1 s of processor time)",
    "reward.scorers[answer].processes": _FIXED + " (2); start more reward replicas for more",
    "reward.scorers[code].max_tests": "all tests of a problem are run; leave some out of the data",
    "reward.scorers[code].in_flight": _FIXED + " (64)",
    "reward.scorers[code].wait_s": _FIXED + " (30 s)",
    "reward.scorers[format].min_characters": "characters = [shortest, longest]",
    "reward.scorers[format].max_characters": "characters = [shortest, longest]",
    "reward.scorers[format].min_tokens": "tokens = [shortest, longest]",
    "reward.scorers[format].max_tokens": "tokens = [shortest, longest]",
    "reward.scorers[format].min_script_share": _FIXED + " (0.95)",
    "reward.scorers[format].json_timeout_s": _FIXED + " (0.5 s of processor time)",
    "reward.scorers[model].device": _MODELS.format("device"),
    "reward.scorers[model].dtype": "weights are bfloat16 on a GPU and float32 on a CPU",
    "reward.scorers[model].threads": _THREADS,
    "reward.scorers[model].batch_tokens": _MODELS.format("batch_tokens"),
    "reward.scorers[model].offload_after_s": _MODELS.format("offload_after_s"),
    "reward.scorers[model].wait_s": _FIXED + " (0.01 s)",
    "reward.scorers[model].chat_template": "template may be a chat template of your own",
    "reward.scorers[judge].api_key_variable": 'key_source = "env:VARIABLE"',
    "reward.scorers[judge].api_key_file": 'key_source = "file:PATH"',
    "reward.scorers[judge].json_field": 'pattern = "json:FIELD"',
    "reward.scorers[judge].labels": "scale may be a table of words and their values",
    "reward.scorers[judge].max_tokens": "set max_tokens in request",
    "reward.scorers[judge].temperature": "set temperature in request",
    "reward.scorers[judge].attempts": _FIXED + " (4)",
    "reward.scorers[judge].backoff_s": _FIXED + " (0.5 s, doubled with each attempt)",
    "reward.scorers[judge].max_wait_s": _FIXED + " (30 s)",
    "algorithm.clip_low": "algorithm.clip = [low, high]",
    "algorithm.clip_high": "algorithm.clip = [low, high]",
    "algorithm.correction_low": "algorithm.correction_band = [low, high]",
    "algorithm.correction_high": "algorithm.correction_band = [low, high]",
    "algorithm.allow_uncorrected": 'set algorithm.correction = "ignored"',
    "algorithm.dynamic_sampling_rounds": _FIXED + " (10)",
    "algorithm.overlong_buffer": "algorithm.overlong = [share, penalty]",
    "algorithm.overlong_penalty": "algorithm.overlong = [share, penalty]",
    "algorithm.kl.horizon": _FIXED + " (10,000 samples)",
    "trainer.device": _DEVICE,
    "trainer.threads": _THREADS,
    "trainer.metrics_port": _PORT,
    "trainer.deterministic": 'set run.deterministic = "steps"',
    "trainer.adam_beta1": "trainer.adam_betas = [beta1, beta2]",
    "trainer.adam_beta2": "trainer.adam_betas = [beta1, beta2]",
    "trainer.attention": _TESTS.format("attention"),
    "trainer.logits_chunk_tokens": _TESTS.format("logits_chunk_tokens"),
    "trainer.peak_flops": "the GPU's name decides it",
    "trainer.stopped_exit_status": "the Helm chart sets it",
    "trainer.store.region": "set AWS_REGION in the environment",
    "trainer.store.keep_last": "trainer.keep_last holds for the store too",
    "weights.source_port": "the port is chosen at the start and travels with each version",
    "weights.bucket_mib": _FIXED + " (512 MiB)",
    "weights.fan_out": _FIXED + " (2)",
    "weights.probe_every_versions": "the interval is fixed (10 versions); guards.off turns off the guard `probe`",
    "coordinator.metrics_port": _PORT,
    "guards.no_signal": _GUARDS + "guards.steps is the number of steps",
    "guards.kl": _GUARDS + "the ceilings are guards.kl_nats and guards.reference_kl_nats",
    "guards.entropy": _GUARDS + "the floor is guards.entropy_nats",
    "guards.lag": _GUARDS + "the largest share is guards.stale_share",
    "guards.throughput": _GUARDS + "the smallest share is guards.throughput_share",
    "guards.trainer_starving": _GUARDS + "the largest share is guards.starving_share",
    "guards.rollouts_starving": _GUARDS + "the largest share is guards.starving_share",
    "guards.unscored": _GUARDS + "the number of groups is guards.unscored_groups",
    "guards.probe": _GUARDS + "the guard is called probe there",
    "guards.stalled": _GUARDS + "the number of seconds is guards.stalled_s",
    "telemetry.heartbeat_s": _TESTS.format("heartbeat_s"),
    "telemetry.prometheus_port": "Prometheus uses port 9090, or another free one, and `penstock up` shows it",
}


def replacement(where: Sequence[str | int]) -> str:
    """Return what replaced the setting at ``where``, a path of pydantic's; "" if it never existed.

    >>> replacement(("reward", "scorers", 0, "judge", "attempts"))
    'it is now fixed (4)'
    """
    return REMOVED.get(dotted(where), "")


def dotted(where: Sequence[str | int]) -> str:
    """Return the key of a setting as `penstock settings` writes it.

    >>> dotted(("reward", "scorers", 0, "judge", "backoff_s"))
    'reward.scorers[judge].backoff_s'
    """
    key, after_index = "", False
    for part in where:
        if isinstance(part, str):
            key += f"[{part}]" if after_index else f".{part}"
        after_index = isinstance(part, int)
    return key.removeprefix(".")
