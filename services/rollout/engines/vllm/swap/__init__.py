"""Replace the weights of a running vLLM model: by one traced copy plan, or by vLLM's layerwise reload.

tensors ──▶ copy_plan (traced once) ──▶ copies ──▶ live parameters
"""
