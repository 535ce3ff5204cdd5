"""Recognize out-of-memory errors of torch, on device or host, without importing torch."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the host refused memory; torch has no class for the host's error."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
