"""The tracking service copies a run's records to experiment trackers.

::

    bus: steps, evaluations    ──▶ Follower ── points ──▶ a killable process with the tracker's library
    folder: rollouts, report   ──▶   │  └── offset file: what is delivered, and what is being delivered
                                     └── one for each sink; a sink that hangs or fails delays nothing else

It only reads the bus and the run's folder, so training never waits for it. Rollouts and the report are read from the
folder because the bus has them only until the next checkpoint, or not at all.
"""
