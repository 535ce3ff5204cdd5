"""Checks of the machine or pod that this process runs in: driver, locked memory, shared memory, RDMA devices."""

import ctypes
import importlib.metadata
import os
import resource
import shutil
import subprocess
from pathlib import Path

from penstock.shared.preflight.finding import Finding, failed, passed

_IPC_LOCK = 14
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_OLDEST_DRIVER = {12: "525", 13: "580"}
"""NVIDIA's drivers support every minor version of a CUDA release from these on."""
_LIBRARY = "libcuda.so.1"
_DEVICE = "/dev/nvidiactl"
_MPS_CONTROL = "nvidia-cuda-mps-control"


def driver(library: str = _LIBRARY, needed: int | None = None) -> Finding:
    """Check that the NVIDIA driver is visible and as new as the CUDA release ``needed`` (default: the installed one)."""
    needed = needed or _installed_cuda()
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return _no_library(library)
    if status := cuda.cuInit(0):
        fix = "check nvidia-smi on the node, and that the pod requests GPUs (gpu.count)"
        return failed("driver", "a driver that starts (cuInit)", f"CUDA error {status}", fix)
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    major, minor = version.value // 1000, version.value % 1000 // 10
    if major < needed:
        required = f"a driver for CUDA {needed} (version {_OLDEST_DRIVER[needed]} or newer)"
        return failed("driver", required, f"one for CUDA {major}.{minor}", "update the node's NVIDIA driver")
    return passed("driver", f"the driver supports CUDA {major}.{minor}")


def graphics() -> Finding:
    """Check the driver where there is a GPU; without one, models run on the CPU."""
    checked = driver()
    if checked.ok or Path(_DEVICE).exists():
        return checked
    return passed("driver", 'no NVIDIA GPU: models run on the CPU, and run.device = "cuda" is refused')


def sharing() -> Finding:
    """Report how processes share a GPU."""
    if mps_answers():
        return passed("sharing", "processes on one GPU run side by side (CUDA MPS)")
    return passed(
        "sharing",
        "processes on one GPU run in time slices: with rollout.engines_per_gpu > 1, start CUDA MPS before the run "
        f"({_MPS_CONTROL} -d)",
    )


def mps_answers() -> bool:
    """Whether the daemon of CUDA MPS answers this user, in CUDA_MPS_PIPE_DIRECTORY."""
    control = shutil.which(_MPS_CONTROL)
    if control is None:
        return False
    try:
        asked = subprocess.run([control], input=b"get_server_list\n", capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _no_library(library: str) -> Finding:
    if Path(_DEVICE).exists():
        fix = "add the folder where the node mounts the driver to LD_LIBRARY_PATH (extraEnv)"
        return failed("driver", f"NVIDIA's driver library {library}", "GPU devices without it", fix)
    fix = (
        'install the driver, or train without a GPU (run.device = "cpu"); in a cluster, request GPUs (gpu.count), and set '
        "runtimeClassName to nvidia where it needs that"
    )
    return failed("driver", f"NVIDIA's driver library {library}", "neither it nor a GPU", fix)


def _installed_cuda() -> int:
    for package in _RUNTIMES:
        try:
            return int(importlib.metadata.version(package).partition(".")[0])
        except importlib.metadata.PackageNotFoundError:
            continue
    return min(_OLDEST_DRIVER)


def locked_memory() -> Finding:
    """Check that RDMA may lock memory: no limit, or the capability to ignore it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or _effective_capabilities() >> _IPC_LOCK & 1:
        return passed("memlock", "memory may be locked without a limit")
    fix = "set LimitMEMLOCK=infinity for the node's containerd, or run the role as root with the capability IPC_LOCK"
    return failed("memlock", "an unlimited memlock limit, because RDMA locks memory", f"{limit / 2**20:g} MiB", fix)


def _effective_capabilities() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)


def shared_memory(least_bytes: int, folder: str = "/dev/shm") -> Finding:  # noqa: S108 (where NCCL and torch look)
    """Check the size of /dev/shm, through which ranks of one pod exchange data."""
    room = os.statvfs(folder)
    size = room.f_blocks * room.f_frsize
    if size >= least_bytes:
        return passed("shm", f"{folder} holds {size / 2**20:.0f} MiB")
    size_found, fix = f"{size / 2**20:.0f} MiB", "raise the role's shm"
    return failed("shm", f"{folder} of at least {least_bytes / 2**20:.0f} MiB", size_found, fix)


def rdma(devices: str = "/sys/class/infiniband", library: str = "libibverbs.so.1") -> Finding:
    """Check that NCCL can load RDMA's library and that there is a device."""
    try:
        ctypes.CDLL(library)
    except OSError:
        fix = "use an image of deploy/docker, or install rdma-core"
        return failed("rdma", f"the library {library}, without which NCCL takes sockets", "none", fix)
    folder = Path(devices)
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names:
        fix = "set rdma.resource to what the fabric's device plugin offers"
        return failed("rdma", f"an RDMA device in {devices}", "none", fix)
    return passed("rdma", f"RDMA devices: {', '.join(names)}")
