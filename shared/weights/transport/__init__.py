"""Transports of weights: process groups over NCCL or gloo, and CUDA IPC on one GPU."""
