"""GPUs and clusters, from words such as ``8xH200``, ``4x80GiB`` and ``8x8xH100`` (nodes × GPUs × kind), each with the memory
of a host if it is known, as in ``8xH200,2000GiB``."""

import dataclasses
import re
from collections.abc import Mapping

from penstock.shared.errors import SettingsError
from penstock.shared.model.flops import peak_tflops

GIB = float(1 << 30)
_PER_NODE = 8
"""GPUs of a host, where more are given than a host has."""
_SIZE = r"\d+(?:\.\d+)?"
_WORDS = re.compile(rf"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*|{_SIZE}GiB)(?:,({_SIZE})GiB)?", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    """To the other GPUs of its host, in one direction."""


def _gpu(name: str, gib: float, tb_per_s: float, link_gb_per_s: float, tflops: float = 0.0) -> Gpu:
    return Gpu(name, gib * GIB, tb_per_s * 1e12, (tflops or peak_tflops(name)) * 1e12, link_gb_per_s * 1e9)


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 179.0, 8.0, 900),
        _gpu("H200", 140.4, 4.8, 450),
        _gpu("H100", 79.6, 3.35, 450),
        _gpu("H800", 79.6, 3.35, 200),
        _gpu("A100", 79.2, 2.04, 300),
        _gpu("L40S", 45.0, 0.864, 25),
        _gpu("L4", 22.5, 0.3, 12),
        _gpu("A10G", 22.5, 0.6, 12),
    )
}
"""Memory as nvidia-smi reports it."""
_ASSUMED = GPUS["A100"]
"""Its rates are assumed for a GPU of which only the memory is given."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    gpu: Gpu
    nodes: int
    per_node: int
    network_bytes_per_s: float = 40e9
    """Per GPU between hosts: a card of 400 Gbit/s for each, at 80 %."""
    host_bytes_per_s: float = 50e9
    """Between a GPU and its host's pinned memory."""
    host_memory_bytes: float = 0.0
    """Of one host; 0: not known."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    @property
    def words(self) -> str:
        return f"{self.gpus}x{self.gpu.name}" if self.nodes == 1 else f"{self.nodes}x{self.per_node}x{self.gpu.name}"


def parse_cluster(words: str) -> Cluster:
    """Return the cluster in ``words``. Raises SettingsError: it cannot be read, or the GPU is not known."""
    read = _WORDS.fullmatch(words.strip())
    if read is None or not int(read[2]) or read[1] == "0":
        raise SettingsError(
            "expected GPUs such as 8xH200, 4x80GiB or 8x8xH100 (nodes x GPUs x kind), or 8xH200,2000GiB with the memory of a host, "
            f"found {words!r}: change --gpus"
        )
    nodes, gpus = int(read[1] or 1), int(read[2])
    if read[1] is None and gpus > _PER_NODE and gpus % _PER_NODE == 0:
        nodes, gpus = gpus // _PER_NODE, _PER_NODE
    return Cluster(_kind(read[3]), nodes, gpus, host_memory_bytes=float(read[4] or 0) * GIB)


def _kind(word: str) -> Gpu:
    if word.lower().endswith("gib"):
        return dataclasses.replace(_ASSUMED, name=word, memory_bytes=float(word[:-3]) * GIB)
    for name, gpu in GPUS.items():
        if name.lower() == word.lower():
            return gpu
    raise SettingsError(
        f"expected one of {', '.join(GPUS)}, found {word!r}: change --gpus, or give the memory instead, such as 8x80GiB"
    )
