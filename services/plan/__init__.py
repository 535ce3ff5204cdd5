"""What fits on which GPUs, how fast it will be, and which layout to choose. Needs no GPU, torch or bus.

::

    settings, config.json ─▶ workload ─┐
    --gpus ─▶ hardware ────────────────┼─▶ layouts: memory ─▶ rates ─▶ pace ─▶ report
    an earlier run ─▶ measured ────────┘

``certain`` names what cannot fit on the GPUs of this machine; ``penstock up`` refuses it.
"""
