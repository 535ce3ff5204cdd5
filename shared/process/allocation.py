"""Tell from an error of torch's whether memory was refused, by a device or by the host. Imports no torch: who has such an error has it."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device or the host refused memory; for the host's, torch has no class of its own."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
