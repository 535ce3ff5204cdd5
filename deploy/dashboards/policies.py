"""Policies dashboard: versions, rollbacks, pauses, evaluations, coordinator."""

from deploy.dashboards.board import Board, Panel, Query, Row, quantiles, rate

_VERSIONS = Row(
    "Versions",
    (
        Panel("Head", "The version that replicas must serve. It never decreases: a rollback creates a new number with an older parent.", "short",
              (Query("max by (namespace, run) (penstock_coordinator_head_version<>)", "{{run}}"), Query("penstock_trainer_policy_version<>", "newest published"))),
        Panel("Steps", "Committed optimizer steps. A rollback takes them back.", "short", (Query("max by (namespace, run) (penstock_coordinator_step<>)", "{{run}}"),)),
        Panel("Versions of replicas", "The version that each replica holds, as its heartbeat says.", "short", (Query("max by (replica) (penstock_coordinator_replicas_version<>)", "{{replica}}"),)),
        Panel("Promotion", "From a version's commit to the moment at which it was the head.", "s", quantiles("penstock_coordinator_promote_seconds")),
        Panel("Rollbacks", "Rollbacks in an hour, by how they ended.", "short", (Query("sum by (state) (increase(penstock_coordinator_rollbacks_total<>[1h]))", "{{state}}"),)),
        Panel("Groups of revoked versions", "Groups per second that were fenced: a rollback revoked a version that wrote them.", "ops",
              (rate("penstock_trainer_groups_untrained_total", "instance", 'reason="fenced"'),)),
    ),
)  # fmt: skip

_RUN = Row(
    "The run",
    (
        Panel("State", "1 for the run's current state.", "short", (Query("max by (state) (penstock_coordinator_run_state<>)", "{{state}}"),), "stack"),
        Panel("Guards", "1 while a guard's condition is true.", "short", (Query("max by (guard) (penstock_coordinator_guard_active<>)", "{{guard}}"),)),
        Panel("Guards that tripped", "Times in an hour, by action.", "short", (Query("sum by (guard, action) (increase(penstock_coordinator_guard_trips_total<>[1h]))", "{{guard}} {{action}}"),)),
        Panel("Held-out accuracy", "Share of held-out problems that the newest evaluation marked correct.", "percentunit",
              (Query("max by (namespace, run) (penstock_coordinator_evaluation_accuracy_ratio<>)", "{{run}}"),)),
        Panel("Leader", "1 for the coordinator that leads. Exactly one should.", "short", (Query("penstock_coordinator_leading<>"),)),
        Panel("Requests", "HTTP requests per second, by status.", "ops", (rate("penstock_coordinator_requests_total", "status"),)),
        Panel("Time of a request", "From a request's arrival to the start of its answer.", "s", quantiles("penstock_coordinator_request_seconds")),
        Panel("Builds", "Version of Penstock of each process.", "short", (Query("sum by (service, version) (penstock_build_info<>)", "{{service}} {{version}}"),)),
    ),
)  # fmt: skip

BOARD = Board(
    "policies",
    "Penstock / Policies",
    "Versions, rollbacks, pauses, evaluations and the coordinator itself.",
    (_VERSIONS, _RUN),
)
