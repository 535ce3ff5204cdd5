"""The trainer: experience into policy versions, on DeepSpeed."""
