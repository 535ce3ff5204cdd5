"""A run with TRL's GRPOTrainer: python examples/trl/train.py."""

import torch
from datasets import load_dataset
from rewards import length, right
from trl import GRPOConfig, GRPOTrainer

if __name__ == "__main__":
    trainer = GRPOTrainer(
        model="examples/arithmetic/policy",
        train_dataset=load_dataset("json", data_files="examples/arithmetic/train.jsonl", split="train"),
        reward_funcs=[right, length],
        args=GRPOConfig(
            output_dir="runs/trl",
            use_cpu=not torch.cuda.is_available(),
            max_steps=20,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=4,
            learning_rate=4e-4,
            reward_weights=[1.0, 0.1],
        ),
    )
    trainer.train()
