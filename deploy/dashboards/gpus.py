"""GPU dashboard: NVIDIA's dcgm-exporter, by the pods of a run."""

from deploy.dashboards.board import Board, Panel, Query, Row

FIELDS = ("GPU_UTIL", "FB_USED", "FB_FREE", "POWER_USAGE", "XID_ERRORS", "NVLINK_BANDWIDTH_TOTAL")
"""Read from the exporter's default set, without the prefix DCGM_FI_DEV_."""
_POD = "on (namespace, pod) group_left (run) max by (namespace, pod, run) (0 * up<> + 1)"
"""A pod has one ``up`` for each of its processes that serves metrics."""
_LEGEND = "{{pod}} GPU {{gpu}}"


def _of_run(expression: str) -> tuple[Query, ...]:
    return (Query(f"{expression} * {_POD}", _LEGEND),)


_GPUS = Row(
    "GPUs",
    (
        Panel("Utilization", "Share of time in which a kernel ran.", "percentunit", _of_run("DCGM_FI_DEV_GPU_UTIL / 100")),
        Panel("Memory", "Share of the GPU's memory that is used.", "percentunit",
              (Query(f"DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE) * {_POD}", _LEGEND),)),
        Panel("Power", "Power in watts.", "short", _of_run("DCGM_FI_DEV_POWER_USAGE")),
        Panel("XID errors", "Number of the last XID error; 0: none. NVIDIA's documentation explains each number.", "short", _of_run("DCGM_FI_DEV_XID_ERRORS"), width=12),
        Panel("NVLink", "NVLink traffic as dcgm-exporter reports it.", "short", _of_run("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"), width=12),
        Panel("NCCL transport", "1 for each transport of a trainer's connections: rdma or socket between machines.", "short",
              (Query("max by (instance, transport) (penstock_nccl_transport<>)", "{{instance}} {{transport}}"),), width=24),
    ),
)  # fmt: skip

BOARD = Board(
    "gpus",
    "Penstock / GPUs",
    "Utilization, memory, power and errors of a run's GPUs. Needs dcgm-exporter with honorLabels.",
    (_GPUS,),
)
