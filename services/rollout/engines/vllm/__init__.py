"""vLLM: token ids in and out, weights swapped under running requests.

this process                          vLLM's worker processes
start ──▶ engine ──▶ requests         worker ──▶ runner_hooks ──▶ token_record
             └──── worker_channel ◀──────┘ └────▶ swap
"""
