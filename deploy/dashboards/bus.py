"""Bus and weights dashboard: queues, redeliveries, weight transfers."""

from deploy.dashboards.board import Board, Panel, Query, Row, quantiles, rate

_STREAMS = Row(
    "Streams",
    (
        Panel("Entries", "Entries in each stream. The journal empties at each checkpoint.", "short", (Query("max by (stream) (penstock_coordinator_stream_entries<>)", "{{stream}}"),)),
        Panel("In hands", "Entries that a replica holds.", "short", (Query("max by (stream) (penstock_coordinator_stream_pending<>)", "{{stream}}"),)),
        Panel("Oldest entry", "How long the oldest entry has been in its stream.", "s", (Query("max by (stream) (penstock_coordinator_stream_oldest_age_seconds<>)", "{{stream}}"),)),
        Panel("Hand-overs", "Entries handed over per second, by stream.", "ops", (rate("penstock_bus_entries_total", "stream", 'outcome="handed_over"'),)),
        Panel("Redeliveries", "Entries that were tried again, given back, taken over from a silent replica, or finished late.", "ops",
              (rate("penstock_bus_entries_total", "outcome", 'outcome!="handed_over"'),)),
        Panel("Dead letters", "Entries that failed for good (dead letters), with their reasons.", "short", (Query("max by (namespace, run) (penstock_coordinator_dead_letters<>)", "{{run}}"),)),
        Panel("Handler errors", "Exceptions of handlers per second, by stream; each costs its group an attempt.", "ops", (rate("penstock_handler_errors_total", "stream"),), width=24),
        Panel("Bus reached", "1 while a process reaches the bus.", "short", (Query("penstock_bus_available<>"),), width=12),
        Panel("Admission", "Groups admitted per second.", "ops", (rate("penstock_coordinator_admitted_total"),), width=12),
    ),
)  # fmt: skip

_WEIGHTS = Row(
    "Weights",
    (
        Panel("Pull", "From asking a source for a version to having received all of it, by kind of source.", "s", quantiles("penstock_rollout_weight_pull_seconds", "source")),
        Panel("Swap", "Pause of generation for a swap, by how the weights were put in place.", "s", quantiles("penstock_rollout_weight_swap_seconds", "path")),
        Panel("Received", "Bytes of weights that replicas received.", "Bps", (rate("penstock_rollout_weight_received_bytes_total"),)),
        Panel("Sent", "Bytes of weights that trainer and relaying replicas sent.", "Bps", (rate("penstock_weights_sent_bytes_total"),)),
        Panel("Failed pulls", "Attempts that failed, by what failed. The replica keeps serving the old version.", "ops",
              (Query("sum by (transport, reason) (rate(penstock_rollout_weight_pull_failures_total<>[$__rate_interval]))", "{{transport}} {{reason}}"),
               Query("sum(rate(penstock_weights_pull_failures_total<>[$__rate_interval]))", "at the source"))),
        Panel("Overtaken", "Versions that were skipped for a newer one, per second.", "ops", (rate("penstock_rollout_weight_pulls_overtaken_total"),)),
        Panel("Versions behind", "How many versions each replica is behind the head.", "short",
              (Query("max by (namespace, run) (penstock_coordinator_head_version<>) - on (namespace, run) group_right () penstock_rollout_policy_version<>"),)),
    ),
)  # fmt: skip

BOARD = Board(
    "bus", "Penstock / Bus and weights", "Queues, redeliveries, and how weights travel.", (_STREAMS, _WEIGHTS)
)
