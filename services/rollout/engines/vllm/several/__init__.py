"""Several vLLM engines on one GPU as one: with a small model, a single scheduler leaves the GPU idle.

::

    start ──▶ plan, gpu, statistics ──▶ EngineSet ──▶ router ──▶ VllmEngine × N
"""
