"""Memory for the experts of each token (``trainer.router_replay``), from the draw to the training pass.

::

    replica's GPU     of running requests, in pages          (services/rollout/engines/vllm/routing/route_record.py)
    episodes' host    of all turns of the episodes in progress
    trainer's host    of the next step on rank 0, of this step on the ranks that pack it; copies while ranks exchange them
    trainer's GPU     of the pass that runs, in int32        (services/trainer/model/routing)

Shelves are files, whose size ``bus.shelf_bytes`` limits.
"""

from penstock.services.plan.workload import Workload

NAME = "record of experts"
_PAGE, _FIRST_PAGES = 64, 64
_DOUBLED, _GROWS = 2, 1.5
"""The record doubles, so that it is at most twice as large as needed, beside that of half the size from which it grows."""
_INT32 = 4


def record_bytes(work: Workload, sequences: int, room_tokens: float) -> float:
    """Return the most that an engine's record takes of each of its GPUs, with ``sequences`` at a time, and room for
    ``room_tokens`` in its cache at most."""
    if not work.replays:
        return 0.0
    most_tokens = work.lengths.most if work.episode is None else work.episode.most_tokens
    most = min(sequences * most_tokens, room_tokens)
    pages = most / _PAGE + 2 * sequences + 1  # a last one that is not full, and the next
    return max(_FIRST_PAGES, _DOUBLED * _GROWS * pages) * _PAGE * _token_bytes(work)


def pass_bytes(work: Workload, tokens: int) -> float:
    """Return what a pass of ``tokens`` has on a rank's GPU."""
    return float(work.replays * tokens * work.shape.routes * _INT32)


def episode_bytes(work: Workload) -> float:
    """Return what the services that play the run's episodes keep of all of those in flight, were none of them finished."""
    tokens = work.slots * work.group_size * work.lengths.mean
    return float(work.replays * (work.episode is not None) * tokens * _token_bytes(work))


def host_bytes(work: Workload, ranks: int) -> float:
    """Return the most of the memory of rank 0's host, with all ``ranks`` on it, while they exchange a step's routes.

    With several ranks these are what was fetched, and what is sent, received and unpacked. Of episodes, sampled tokens alone.
    """
    tokens = work.lengths.mean + (work.prompt_tokens if work.episode is None else 0)
    return work.replays * work.samples * tokens * _token_bytes(work) * (4.0 if ranks > 1 else 2.0)


def _token_bytes(work: Workload) -> int:
    return work.shape.routes * work.shape.route_bytes
