"""The vLLM engine.

this process                          vLLM's worker processes
start ──▶ engine ──▶ requests         worker ──▶ runner_hooks ──▶ token_record; scheduling
             └──── worker_channel ◀──────┘ └────▶ swap
"""
