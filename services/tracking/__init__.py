"""The tracking service copies a run's records to experiment trackers.

::

    bus: steps, evaluations ──▶ Follower ── points ──▶ a killable process with the tracker's library
                                  │  └── offset file: what is delivered, and what is being delivered
                                  └── one for each sink; a sink that hangs or fails delays nothing else

It only reads the bus, so training never waits for it.
"""
