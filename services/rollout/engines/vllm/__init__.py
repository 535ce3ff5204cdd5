"""The vLLM engine.

this process                          vLLM's worker processes
start ──▶ engine ──▶ requests         worker ──▶ runner_hooks ──▶ token_record
             │ └── worker_channel ◀──────┘ └────▶ swap
             │
             └────── tokens ◀──────── scheduling, in vLLM's engine process
"""
