"""Device memory of a trained model.

residency (what is on the device, what on the host)
sizes (what a forward pass costs) ──▶ recomputation (which layers keep their activations)
"""
