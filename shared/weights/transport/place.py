"""The location of a process's weights, which determines the transport. No torch."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Kind of device, GPU UUIDs (by rank; empty on a CPU), and boot."""

    device: Literal["cuda", "cpu"] = "cpu"
    gpu_uuids: tuple[str, ...] = ()
    boot_id: str = ""
    """Equal exactly for processes under the same kernel."""

    def pack(self) -> dict[str, Any]:
        return {"device": self.device, "gpu_uuids": list(self.gpu_uuids), "boot_id": self.boot_id}


def boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def plain_uuid(uuid: object) -> str:
    """Normalize a GPU's UUID: ``GPU-1b…`` in NVML, ``1b…`` in torch."""
    return str(uuid).lower().removeprefix("gpu-")
