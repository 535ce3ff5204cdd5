"""Relay tree of weight pulls: the trainer sends a version ``fan_out`` times.

::

    fan_out 2                    trainer
                          ┌─────────┴─────────┐
                      rollout-0           rollout-1          replicas by name, row by row:
                     ┌────┴────┐         ┌────┴────┐         the parent of number i is number i // fan_out − 1
                 rollout-2 rollout-3 rollout-4 rollout-5

Buckets are pipelined, so a level adds one bucket's time. A failed parent's children pull from the trainer. Replicas that
stream weights into their live parameters keep no copy to relay: each of them pulls from the trainer.
"""

from collections.abc import Iterable, Mapping

from penstock.shared.bus.stores.replicas.heartbeats import Heartbeat

FAN_OUT = 2
"""Two saturate the trainer's network card."""


def sources(replicas: Mapping[str, str], fan_out: int, trainer: str) -> dict[str, tuple[str, ...]]:
    """Return each replica's source addresses in order; the trainer's is last. Replicas with an empty address pull
    from the trainer and relay nothing.

    >>> sources({"a": "h:1", "b": "h:2", "c": ""}, 1, "t:0")
    {'a': ('t:0',), 'b': ('h:1', 't:0'), 'c': ('t:0',)}
    """
    names = sorted(name for name, address in replicas.items() if address)
    parents = [place // fan_out - 1 for place in range(len(names))]
    return dict.fromkeys(replicas, (trainer,)) | {
        name: (replicas[names[parent]], trainer) for name, parent in zip(names, parents, strict=True) if parent >= 0
    }


def addresses(beats: Iterable[Heartbeat]) -> dict[str, str]:
    """Return the address of each replica that works; empty if it keeps no copy of the weights to relay."""
    return {
        beat.replica: beat.source
        for beat in beats
        if beat.service == "rollout" and beat.state in ("working", "waiting")
    }
