"""Decoding steps on the device, for vLLM 0.26 with one GPU: several together, drawn in one pass over the logits."""
