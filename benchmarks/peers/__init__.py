"""Penstock beside other systems.

TRL is measured. What a package index had of two more on 2026-11-29: nothing of prime-rl, which is on GitHub only. Of verl
0.9.1 a wheel for Python below 3.13 with its asynchronous trainer (``separate_async``). Its extra ``vllm`` pins torch 2.11.0,
vLLM 0.24.0 and transformers 5.9.0 beside ray and tensordict, wheels of at least 3.4 GB, so it needs an environment of its
own. FlashAttention 2.8.3, its default, is there as source only; ``attn_implementation = "sdpa"`` and PyTorch's padding are
its alternatives. So a host without a network can run verl if these wheels are carried there. It was not run.
"""
