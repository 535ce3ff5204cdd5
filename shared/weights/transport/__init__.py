"""Transports of weights: process groups (NCCL, gloo), and CUDA IPC on one GPU."""
