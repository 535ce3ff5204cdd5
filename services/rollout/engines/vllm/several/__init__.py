"""Several vLLM engines on one GPU, which a small model's single scheduler would leave idle.

::

    start ──▶ plan, gpu, statistics ──▶ EngineSet ──▶ router ──▶ VllmEngine × N
"""
