"""Overview dashboard: learning, health and bottlenecks."""

from deploy.dashboards.board import Board, Panel, Query, Row, rate

_LEARNING = Row(
    "Is it learning?",
    (
        Panel("Reward", "Mean reward of each step's samples. It should rise, not jump.", "short",
              (Query("penstock_trainer_reward_mean<>", "mean"), Query("penstock_trainer_reward_std<>", "standard deviation"))),
        Panel("Held-out accuracy", "Share of held-out problems that the newest evaluation marked correct. Its rise measures learning.", "percentunit",
              (Query("max by (namespace, run) (penstock_coordinator_evaluation_accuracy_ratio<>)", "{{run}}"),)),
        Panel("KL and entropy", "KL of the behavior policy to the trained one, and the policy's entropy, per token. Entropy near 0: no exploration. A rising KL: data too old or steps too large.", "suffix: nats",
              (Query("penstock_trainer_kl_mean_nats<>", "KL"), Query("penstock_trainer_entropy_nats<>", "entropy"))),
    ),
)  # fmt: skip

_HEALTHY = Row(
    "Is it healthy?",
    (
        Panel("State", "1 for the run's current state. /v1/run and the events give the reason for a pause.", "short",
              (Query("max by (namespace, run, state) (penstock_coordinator_run_state<>) == 1", "{{run}} {{state}}"),), "figure", 4),
        Panel("Step", "Committed optimizer steps.", "short", (Query("max by (namespace, run) (penstock_coordinator_step<>)", "{{run}}"),), "figure", 4),
        Panel("Guards that tripped", "Guards whose condition is true now. 0 is good.", "short",
              (Query("sum by (namespace, run) (penstock_coordinator_guard_active<>)", "{{run}}"),), "figure", 4),
        Panel("Dead letters", "Entries that could not be handled and failed for good, with their reasons: `penstock dead`. 0 is good.", "short",
              (Query("max by (namespace, run) (penstock_coordinator_dead_letters<>)", "{{run}}"),), "figure", 4),
        Panel("Replicas that respond", "Processes that answered their last scrape, by service.", "short",
              (Query("sum by (service) (up<>)", "{{service}}"),), "figure", 4),
        Panel("Bus", "1 while every process reaches the bus.", "short", (Query("min by (namespace, run) (penstock_bus_available<>)", "{{run}}"),), "figure", 4),
        Panel("Restarts", "Processes that restarted in the last hour.", "short",
              (Query("sum by (service) (changes(process_start_time_seconds<>[1h]))", "{{service}}"),), width=12),
        Panel("Groups that were lost or redone", "Entries that were tried again, taken over from a silent replica, or buried, per second; and groups dropped without training.", "ops",
              (Query('sum by (outcome) (rate(penstock_bus_entries_total<outcome=~"retried|reclaimed|buried|late">[$__rate_interval]))', "{{outcome}}"),
               Query("sum by (reason) (rate(penstock_trainer_groups_untrained_total<>[$__rate_interval]))", "untrained: {{reason}}")), width=12),
    ),
)  # fmt: skip

_BOTTLENECK = Row(
    "Where is the bottleneck?",
    (
        Panel("What the trainer does", "Share of time by phase. Mostly `wait`: generation or scoring is slower. Never `wait`: training is.", "percentunit",
              (Query("sum by (phase) (rate(penstock_trainer_phase_seconds_sum<>[$__rate_interval])) / ignoring (phase) group_left () sum (rate(penstock_trainer_phase_seconds_sum<>[$__rate_interval]))", "{{phase}}"),), "stack"),
        Panel("Groups by stream", "Groups by stage: prompts wait for or are in generation, rollouts in scoring, experience in training. The slower service has the longer queue before it.", "short",
              (Query('max by (stream) (penstock_coordinator_stream_entries<stream!="journal">)', "{{stream}}"),), "stack"),
        Panel("Tokens per second", "Tokens generated and tokens trained on. A lasting gap means that one side waits or drops data.", "short",
              (Query("sum(rate(penstock_rollout_drawn_tokens_total<>[$__rate_interval]))", "drawn"),
               Query("sum(rate(penstock_trainer_tokens_total<>[$__rate_interval]))", "trained"))),
        Panel("Slots", "Groups in flight and their limit. At the limit, generation waits for the trainer.", "short",
              (Query("max by (namespace, run) (penstock_coordinator_groups_in_flight<>)", "in flight"), Query("max by (namespace, run) (penstock_coordinator_slots<>)", "slots"))),
        Panel("Lag", "Mean lag of the samples that were trained on: how many steps old their oldest token's policy was.", "suffix: steps",
              (Query("sum(rate(penstock_trainer_lag_steps_sum<>[$__rate_interval])) / sum(rate(penstock_trainer_lag_steps_count<>[$__rate_interval]))", "mean"),)),
        Panel("Oldest entry", "How long the oldest entry of each stream has been there.", "s",
              (Query('max by (stream) (penstock_coordinator_stream_oldest_age_seconds<stream!="journal">)', "{{stream}}"),)),
        Panel("Memory", "Resident memory of each process.", "bytes", (Query("process_resident_memory_bytes<>"),), width=12),
        Panel("Memory by component", "What processes hold on each device in their largest phase of late. `penstock plan --memory` and the page show every phase.", "bytes",
              (Query("sum by (device, component) (penstock_memory_bytes<>)", "{{device}}: {{component}}"),), "stack", 24),
        Panel("Processor time", "Seconds of processor time per second of each process.", "short", (rate("process_cpu_seconds_total"),), width=12),
        Panel("Event loop stalls", "Share of a process's timers that ran more than 50 ms late: other work blocked its event loop.", "percentunit",
              (Query('1 - sum by (service, instance) (rate(penstock_event_loop_stall_seconds_bucket<le="0.05">[$__rate_interval])) / sum by (service, instance) (rate(penstock_event_loop_stall_seconds_count<>[$__rate_interval]))', "{{instance}}"),), width=12),
        Panel("Longest stall", "Longest time that each event loop was blocked since its process started, on the clock, without waits for a core (process), and in processor time of the loop.", "s",
              (Query("penstock_event_loop_longest_stall_seconds<>", "{{instance}} {{clock}}"),), width=12),
    ),
)  # fmt: skip

BOARD = Board(
    "overview",
    "Penstock / Overview",
    "Is it learning, is it healthy, where is the bottleneck?",
    (_LEARNING, _HEALTHY, _BOTTLENECK),
)
