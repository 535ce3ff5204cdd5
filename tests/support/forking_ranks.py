"""Imported by the server that engines are forked from: they fork their ranks, too, which vLLM would spawn on a CPU."""

import functools
import gc
import multiprocessing

from vllm.v1.executor import multiproc_executor

multiproc_executor.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
gc.freeze()
gc.unfreeze = lambda: None  # vLLM does at an engine's end, and collects what the server imported: seconds
