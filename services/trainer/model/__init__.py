"""The trained models, and DeepSpeed.

engine (DeepSpeed) ──▶ policy, critic ──▶ trunk ──▶ layers
     │                     │
  optimizer             adapter (peft)
"""
