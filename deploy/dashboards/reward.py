"""Reward and executor dashboard: scores, durations, programs and isolation."""

from deploy.dashboards.board import Board, Panel, Query, Row, quantiles, rate

_SCORING = Row(
    "Scoring",
    (
        Panel("Samples scored", "Samples per second by scorer and outcome.", "ops", (Query("sum by (scorer, status) (rate(penstock_reward_samples_scored_total<>[$__rate_interval]))", "{{scorer}} {{status}}"),)),
        Panel("Time of a group", "How long a scorer took for one group.", "s", quantiles("penstock_reward_score_seconds", "scorer")),
        Panel("Mean value", "Mean of the values that a scorer gave.", "short",
              (Query("sum by (scorer) (rate(penstock_reward_value_sum<>[$__rate_interval])) / sum by (scorer) (rate(penstock_reward_value_count<>[$__rate_interval]))", "{{scorer}}"),)),
        Panel("Scorers available", "1 while a scorer works. A group whose scorer is not available waits and is tried again; it is never scored 0.", "short",
              (Query("min by (scorer) (penstock_reward_scorer_available<>)", "{{scorer}}"),)),
        Panel("Failures", "Groups a minute that a scorer, the reference or the expression failed on, each attempt counted. The cause is in `penstock status`.", "short",
              (Query("sum by (part) (rate(penstock_reward_failures_total<>[$__rate_interval])) * 60", "{{part}}"),)),
        Panel("Groups in progress", "Groups that are being scored, by replica.", "short", (Query("penstock_reward_groups_in_progress<>"),)),
        Panel("Rollouts taken", "Groups by outcome: handed over, tried again, taken over from a silent replica, buried.", "ops",
              (rate("penstock_bus_entries_total", "outcome", 'service="reward"'),)),
        Panel("Processes replaced", "Killable processes of the answer matcher that were replaced, by why.", "ops", (rate("penstock_reward_process_restarts_total", "reason"),)),
    ),
)  # fmt: skip

_MODELS = Row(
    "Reward models",
    (
        Panel("Tokens per second", "Tokens that a model read, padding left out.", "short", (rate("penstock_reward_model_tokens_total", "scorer"),)),
        Panel("Fill of a batch", "Tokens of a forward pass as a share of batch_tokens.", "percentunit", quantiles("penstock_reward_batch_fill_ratio")),
        Panel("Busy", "Share of time that a model spent in forward passes. Near 1 it is the bottleneck.", "percentunit", (rate("penstock_reward_model_busy_seconds_total", "scorer"),)),
        Panel("Samples that wait", "Samples that wait for a model.", "short", (Query("sum by (scorer) (penstock_reward_model_waiting_samples<>)", "{{scorer}}"),)),
        Panel("Out of memory", "Forward passes that did not fit into memory and were split.", "ops", (rate("penstock_reward_model_out_of_memory_total", "scorer"),)),
        Panel("Cut samples", "Samples that were too long for a model.", "ops", (rate("penstock_reward_model_cut_samples_total", "scorer"),)),
    ),
)  # fmt: skip

_EXECUTOR = Row(
    "Executor",
    (
        Panel("Isolation", "1 for the isolation tier in which programs run. `unsafe`: no isolation.", "short", (Query("max by (tier) (penstock_executor_info<>)", "{{tier}}"),), "figure", 4),
        Panel("Contained", "1 while the newest escape attempt failed, as it should.", "short", (Query("min by (instance) (penstock_executor_contained<>)"),), "figure", 4),
        Panel("Programs", "Programs per second by outcome.", "ops", (rate("penstock_executor_executions_total", "outcome"),)),
        Panel("Time of a program", "Seconds that a program had its slot.", "s", quantiles("penstock_executor_execution_seconds", "profile")),
        Panel("Queue", "Programs that wait for a slot, and those that run.", "short",
              (Query("penstock_executor_queue_programs<>", "wait"), Query("penstock_executor_programs_in_progress<>", "run"))),
        Panel("Interpreters replaced", "Warm interpreters that were replaced, by why. `died` and `stuck` are not normal.", "ops", (rate("penstock_executor_zygote_restarts_total", "reason"),)),
    ),
)  # fmt: skip

BOARD = Board(
    "reward",
    "Penstock / Reward and executor",
    "Values and durations of scorers; programs and their isolation.",
    (_SCORING, _MODELS, _EXECUTOR),
)
