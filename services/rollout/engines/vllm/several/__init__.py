"""Several vLLM engines on one GPU, behind the protocol of one: a small model leaves the GPU idle while one scheduler works.

::

    start ──▶ plan, gpu, statistics ──▶ EngineSet ──▶ router ──▶ VllmEngine × N
"""
