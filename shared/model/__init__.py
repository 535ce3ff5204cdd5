"""Parts of models that trainer, reward and rollout share: logits, rotary embeddings, context length, model folders."""
