"""The models that are trained, and DeepSpeed.

engine (DeepSpeed) ──▶ policy, critic ──▶ trunk ──▶ layers
     │                     │
  optimizer             adapter (peft)
"""
