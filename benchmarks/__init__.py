"""Benchmarks: each prints one JSON object on its last line.

    bus      the bus, its messages, and the coordinator on it     throughput · wire · losses · leader · status · api_*
    weights  weight updates during generation                     update
    rollout  decoding                                             decode · scheduling
    reward   scorers, graders, and the executor                   answers · graders · hostile_rewards · executor*
    trainer  the training step and its checkpoints                step · checkpoint · replay · hybrid · logits
    runs     whole runs of Penstock                               startup · whole_run · storm · reasoning · staleness · placement
    peers    Penstock beside other systems                        pipeline · learning_task

``results/`` has what they measured, with an index.
"""
