"""Rollout dashboard: generation, its weights, and vLLM's own metrics."""

from deploy.dashboards.board import Board, Panel, Query, Row, quantiles, rate

_GENERATION = Row(
    "Generation",
    (
        Panel("Tokens per second", "Tokens drawn, by replica, of unfinished samples, too.", "short", (rate("penstock_rollout_drawn_tokens_total"),)),
        Panel("Samples per second", "Completions generated, for training and for evaluation.", "ops", (rate("penstock_rollout_generated_samples_total", "purpose"),)),
        Panel("Time of a sample", "How long the engine took for an entry (a sample in training), without waiting for its turn.", "s", quantiles("penstock_rollout_generate_seconds")),
        Panel("Entries in progress", "Samples (in evaluations: problems) that are generated or wait for weights, by replica.", "short", (Query("penstock_rollout_entries_in_progress<>"),)),
        Panel("Cut samples", "Share of completions that reached their length limit. A rise means rambling, or a limit too low.", "percentunit",
              (Query("sum(rate(penstock_rollout_truncated_samples_total<>[$__rate_interval])) / sum(rate(penstock_rollout_generated_samples_total<>[$__rate_interval]))", "cut"),)),
        Panel("Prompts taken", "Prompts by outcome: handed over, tried again, taken over from a silent replica, buried.", "ops",
              (rate("penstock_bus_entries_total", "outcome", 'service="rollout"'),)),
    ),
)  # fmt: skip

_WEIGHTS = Row(
    "Weights",
    (
        Panel("Version", "The version that each replica generates with, and the head.", "short",
              (Query("penstock_rollout_policy_version<>"), Query("max by (namespace, run) (penstock_coordinator_head_version<>)", "head"))),
        Panel("Swap", "Pause between the last decoding step under old weights and the first under new ones.", "s", quantiles("penstock_rollout_weight_swap_seconds", "path")),
        Panel("Agreement with the trainer", "Mean difference of the logprobs that trainer and replica compute for the same tokens, and its limit (guards.limits.probe), above which weights or kernels are wrong.", "suffix: nats",
              (Query("penstock_rollout_probe_gap_nats<>"), Query("max(penstock_rollout_probe_limit_nats<>)", "limit"))),
    ),
)  # fmt: skip

_EPISODES = Row(
    "Episodes",
    (
        Panel("Episodes", "Episodes that are played, by replica.", "short", (Query("penstock_episodes_running<>"),)),
        Panel("Ended", "Episodes by how they ended.", "ops", (rate("penstock_episodes_ended_total", "reason"),)),
        Panel("Turns of an episode", "Answers of the policy in an episode, on average.", "short",
              (Query("sum(rate(penstock_episodes_turns_total<>[$__rate_interval])) / sum(rate(penstock_episodes_ended_total<>[$__rate_interval]))", "turns"),)),
        Panel("Time of a turn", "Waiting for its tools or agent, rendering its messages, and drawing it.", "s", quantiles("penstock_episodes_turn_seconds", "part")),
        Panel("Calls of tools", "Answered, by an error of the tool (raised), or unavailable: then the episode is played again. Tools that the policy invents are other.", "ops",
              (Query("sum by (tool, status) (rate(penstock_episodes_tool_calls_total<>[$__rate_interval]))", "{{tool}} {{status}}"),)),
        Panel("Lost attempts", "Attempts at an episode that gave no sample: it is played again, five times at most.", "ops", (rate("penstock_episodes_lost_total", "cause"),)),
        Panel("Branches", "Turns per second that begin another branch: of an edited history, or by the chat template.", "ops", (rate("penstock_episodes_forks_total", "cause"),)),
        Panel("Cached history", "Share of the tokens before turns that their replicas had in the prefix cache.", "percentunit",
              (Query("sum(rate(penstock_episodes_cached_tokens_total<>[$__rate_interval])) / sum(rate(penstock_episodes_history_tokens_total<>[$__rate_interval]))", "cached"),)),
        Panel("Drawn again, processes lost", "Turns that another replica drew, and processes of users' code that ended.", "ops",
              (rate("penstock_episodes_redrawn_total", "cause"), rate("penstock_episodes_hosts_lost_total", "cause"))),
    ),
)  # fmt: skip

_VLLM = Row(
    "vLLM",
    (
        Panel("Requests", "Requests that run in the engine, and those that wait for room.", "short",
              (Query("sum by (instance) (vllm:num_requests_running<>)", "{{instance}} running"), Query("sum by (instance) (vllm:num_requests_waiting<>)", "{{instance}} waiting"))),
        Panel("KV cache in use", "Share of the KV cache that requests hold. At 1 requests are preempted.", "percentunit", (Query("max by (instance) (vllm:kv_cache_usage_perc<>)"),)),
        Panel("Preemptions", "Requests per second that lost their place in the KV cache and are computed again.", "ops", (rate("vllm:num_preemptions_total"),)),
        Panel("Prefix cache", "Share of prompt tokens found in the prefix cache. The samples of a group share their prompt.", "percentunit",
              (Query("sum by (instance) (rate(vllm:prefix_cache_hits_total<>[$__rate_interval])) / sum by (instance) (rate(vllm:prefix_cache_queries_total<>[$__rate_interval]))"),)),
        Panel("Prompt and generated tokens", "Tokens that the engine read and wrote per second.", "short",
              (Query("sum(rate(vllm:prompt_tokens_total<>[$__rate_interval]))", "read"), Query("sum(rate(vllm:generation_tokens_total<>[$__rate_interval]))", "written"))),
        Panel("Time between tokens", "How long a request waits for its next token, on average: running requests / tokens per second.", "s",
              (Query("sum by (instance) (vllm:num_requests_running<>) / sum by (instance) (rate(vllm:generation_tokens_total<>[$__rate_interval]))"),)),
        Panel("Logprobs in the workers", "1: behavior logprobs are noted on the device; 0: vLLM returns them, at the cost of much of the rate.", "short",
              (Query("penstock_rollout_logprobs_captured<>"),)),
        Panel("Time in the queue", "How long requests waited before the engine began with them.", "s", quantiles("vllm:request_queue_time_seconds")),
    ),
)  # fmt: skip

BOARD = Board(
    "rollout",
    "Penstock / Rollout",
    "Generation, the weights that it generates with, and vLLM's own metrics.",
    (_GENERATION, _WEIGHTS, _EPISODES, _VLLM),
)
