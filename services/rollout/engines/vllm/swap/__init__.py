"""Replace a running vLLM model's weights.

tensors ──▶ copy_plan (traced once) ──▶ copies ──▶ live parameters
"""
