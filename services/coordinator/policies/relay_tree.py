"""Who pulls a version from whom, so that the trainer sends it ``fan_out`` times however many replicas there are.

::

    fan_out 2                    trainer
                          ┌─────────┴─────────┐
                      rollout-0           rollout-1          replicas by name, row by row:
                     ┌────┴────┐         ┌────┴────┐         the parent of number i is number i // fan_out − 1
                 rollout-2 rollout-3 rollout-4 rollout-5

A replica passes each bucket on while later ones arrive, so depth costs a bucket's time, not a version's. When a parent
fails its children go to the trainer. A pure function; it knows no bus.
"""

from collections.abc import Iterable, Mapping

from shared.bus.stores.heartbeats import Heartbeat

FAN_OUT = 2
"""Replicas that pull from the trainer, and from each replica: two keep its network card busy, and the tree flat."""


def sources(replicas: Mapping[str, str], fan_out: int, trainer: str) -> dict[str, tuple[str, ...]]:
    """Return for each replica the addresses to pull from, in the order to try; the trainer's is the last of each.

    Args:
        replicas: the address at which each serves others, by name.
        fan_out: most children of the trainer and of each replica.

    >>> sources({"a": "h:1", "b": "h:2"}, 1, "t:0")
    {'a': ('t:0',), 'b': ('h:1', 't:0')}
    """
    names = sorted(replicas)
    parents = [place // fan_out - 1 for place in range(len(names))]
    return {
        name: (trainer,) if parent < 0 else (replicas[names[parent]], trainer)
        for name, parent in zip(names, parents, strict=True)
    }


def serving(beats: Iterable[Heartbeat]) -> dict[str, str]:
    """Return the replicas that can pass weights on, with their addresses: those that serve and are in order."""
    return {
        beat.replica: beat.source
        for beat in beats
        if beat.service == "rollout" and beat.source and beat.state in ("working", "waiting")
    }
