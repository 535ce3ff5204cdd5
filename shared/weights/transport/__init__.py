"""Transports of weights: process groups and CUDA IPC."""
