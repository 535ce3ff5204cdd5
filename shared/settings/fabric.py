"""What connects GPUs: ``[fabric]``."""

from typing import Literal

from pydantic import Field

from shared.settings.section import Section


class FabricSettings(Section):
    """What connects GPUs of several pods or machines."""

    require: Literal["any", "rdma"] = Field(default="any")
    """`rdma`: the trainer ends at its start if NCCL chose sockets between machines, as it does without an error if a
    device, a library or locked memory is missing."""
