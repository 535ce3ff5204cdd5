"""Laws of built images (`make images`): as user 10001, with a read-only root, as the chart's pods run them."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.process.service import INVALID_SETTINGS
from tests.conftest import PATIENCE_S
from tests.support.chart import ROOT, TRACKED, Json, render, template_of, values

STORE = Path(os.environ.get("PENSTOCK_IMAGES", "/var/tmp/penstock-images"))
IMAGES = ("coordinator", "episodes", "executor", "pod", "reward", "rollout", "tracking", "trainer")
CHANGE_BYTES = 10_000_000
EXAMPLES = "/mnt"
"""Where a container sees this repository: its examples are in no image."""
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
BUILT_S = 1200.0
"""Within which CI, which builds the images beside the tests, has them."""
pytestmark = [pytest.mark.usefixtures("helm", "built"), pytest.mark.timeout(BUILT_S + 600.0)]


@pytest.fixture(scope="module")
def built() -> None:
    deadline = time.monotonic() + BUILT_S
    while (STORE / "building").exists():
        assert time.monotonic() < deadline, f"expected images within {BUILT_S:.0f} s: see {STORE}/*.log"
        time.sleep(1)
    if not (STORE / "layers").is_dir():
        pytest.skip("no built images: call make images")


def buildah(*words: str) -> str:
    flags = [
        "--root",
        str(STORE / "layers"),
        "--runroot",
        str(STORE / "run"),
        "--storage-driver",
        os.environ.get("DRIVER", "overlay"),
    ]
    return str(subprocess.check_output(["buildah", *flags, *words], text=True)).strip()


def need_image(image: str) -> None:
    names = json.loads(buildah("images", "--json"))
    if not any(f"localhost/penstock-{image}:latest" in (each.get("names") or ()) for each in names):
        pytest.skip(f'no built image of {image}: call make images IMAGES="{image}"')


@pytest.fixture(params=IMAGES)
def root(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    need_image(request.param)
    container = buildah("from", "--pull-never", f"localhost/penstock-{request.param}")
    try:
        yield request.param, Path(buildah("mount", container))
    finally:
        buildah("umount", container)
        buildah("rm", container)


def runtime_config(role: str, root: Path, words: list[str], place: str = "/tmp") -> Json:
    """Return the container that kubelet would make of the role's rendered pod, for crun."""
    kind = {"kind": "pod"} if role == "pod" else {}
    chart = values(executor={"enabled": True}, run={"config": TRACKED, **kind})
    pod = template_of(render(chart).workload(role))["spec"]
    (container,) = pod["containers"]
    security = pod["securityContext"] | container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        *(
            {"destination": mount["mountPath"], "type": "tmpfs", "source": "tmpfs"}
            for mount in container["volumeMounts"]
            if mount["name"] == "tmp"
        ),
        {"destination": EXAMPLES, "type": "bind", "source": str(ROOT), "options": ["bind", "ro"]},
    ]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": security["readOnlyRootFilesystem"]},
        "process": {
            "user": {"uid": security["runAsUser"], "gid": security["runAsGroup"]},
            "args": words,
            "cwd": place,
            "env": ["PATH=/opt/penstock/bin:/usr/bin:/bin", "HOME=/tmp"],
            "noNewPrivileges": not security["allowPrivilegeEscalation"],
            "capabilities": {},
        },
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")]},
    }


def contained(
    role: str, root: Path, words: list[str], folder: Path, place: str = "/tmp"
) -> subprocess.CompletedProcess[str]:
    assert shutil.which("crun"), "expected Debian's crun, found none: apt-get install crun"
    (folder / "config.json").write_text(json.dumps(runtime_config(role, root, words, place)))
    crun = ["crun", "--cgroup-manager=disabled", "--root", str(folder / "state"), "run", "--bundle", str(folder)]
    command = ["unshare", "--mount", "sh", "-ec", UNIFIED, "sh", *crun, f"penstock-{role}-{os.getpid()}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


UNIFIED = 'umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec "$@"'
"""crun refuses a machine that has both versions of cgroups."""
LOOK = """
import os, pathlib
print(os.getuid(), os.getgid(), int(pathlib.Path('/proc/self/status').read_text().split('CapEff:')[1].split()[0], 16))
for place in ('/', '/opt/code', '/opt/penstock'):
    try:
        pathlib.Path(place, 'x').touch()
        print('wrote', place)
    except OSError as error:
        print(error.strerror)
pathlib.Path('/tmp/x').touch()
"""


def test_a_built_image_runs_without_root_rights_or_a_writable_root(root: tuple[str, Path], tmp_path: Path) -> None:
    role, place = root
    done = contained(role, place, ["python", "-c", LOOK], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "10001 10001 0"
    assert done.stdout.split("\n")[1:4] == ["Read-only file system"] * 3


def started(role: str, place: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Start the service without settings, by Python with ``flags``."""
    words = {
        "executor": ["penstock.services.reward.executor", "--config", "missing.toml"],
        "pod": ["penstock.services.cli", "up", "missing.toml"],
    }.get(role, [f"penstock.services.{role}", "--config", "missing.toml"])
    return contained(role, place, ["python", *flags, "-m", *words], folder)


def test_a_built_image_starts_its_service(root: tuple[str, Path], tmp_path: Path) -> None:
    role, place = root
    done = started(role, place, tmp_path)
    assert done.returncode == (2 if role in ("pod", "executor") else INVALID_SETTINGS), done.stderr
    assert done.stderr.strip().endswith("no settings file at missing.toml: check the path after the command")


def test_a_built_image_has_byte_code_of_all_that_it_imports(root: tuple[str, Path], tmp_path: Path) -> None:
    said = started(*root, tmp_path, "-v").stderr
    assert "# code object from '/opt/code/penstock/" in said  # a quoted path is one of byte code
    assert re.findall(r"^# code object from (/.+)$", said, re.MULTILINE) == []


@pytest.mark.timeout(900)
def test_a_run_trains_in_the_pods_image(tmp_path: Path) -> None:
    need_image("pod")
    container = buildah("from", "--pull-never", "localhost/penstock-pod")
    flags = ["--run.folder=/tmp/runs", "--run.id=image", "--run.steps=5", "--evaluation.problems=8"]
    try:
        words = ["python", "-m", "penstock.services.cli", "up", "config/arithmetic.toml", *flags]
        done = contained("pod", Path(buildah("mount", container)), words, tmp_path, EXAMPLES)
    finally:
        buildah("umount", container)
        buildah("rm", container)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "finished: 5 steps" in done.stdout


LIBRARIES = """
import ctypes, importlib, sys
import torch
for name in ('libibverbs.so.1', 'librdmacm.so.1'):
    ctypes.CDLL(name)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(torch.version.cuda, torch.cuda.nccl.version(), torch.cuda.is_available())
"""
TRAINER = ["deepspeed", "penstock.services.trainer.__main__", "penstock.services.trainer.training"]
ROLLOUT = ["vllm", "penstock.services.rollout.__main__", "penstock.services.rollout.engines.vllm.engine"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("role", "modules"),
    [
        ("trainer", TRAINER),
        ("rollout", ROLLOUT),
        ("pod", [*TRAINER, *ROLLOUT]),
    ],
)
def test_an_image_with_cuda_loads_its_libraries_and_those_of_rdma(
    role: str, modules: list[str], tmp_path: Path
) -> None:
    need_image(role)
    container = buildah("from", "--pull-never", f"localhost/penstock-{role}")
    try:
        done = contained(role, Path(buildah("mount", container)), ["python", "-c", LIBRARIES, *modules], tmp_path)
    finally:
        buildah("umount", container)
        buildah("rm", container)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+ \(\d+, \d+, \d+\) False", done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("image", IMAGES)
def test_a_change_of_one_line_pushes_less_than_10_mb(image: str, tmp_path: Path) -> None:
    need_image(image)
    context = tmp_path / "context"
    for name in ("penstock", "shared", "services", "deploy/docker"):
        shutil.copytree(ROOT / name, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    with (context / "shared/errors.py").open("a") as file:
        file.write("# one line\n")
    flags = ["--layers", "--isolation", "chroot", "--volume", f"{AUTHORITIES}:{AUTHORITIES}:ro"]
    flags += ["--build-arg", "BASE=localhost/penstock-base", "-f", str(context / f"deploy/docker/{image}.Dockerfile")]
    changed = f"localhost/penstock-{image}-changed"
    buildah("bud", "-q", *flags, "-t", changed, str(context))
    try:
        pushed = [
            size
            for layer, size in layers(changed, tmp_path).items()
            if layer not in diffs(f"localhost/penstock-{image}")
        ]
    finally:
        buildah("rmi", changed)
    print(f"{image}: {sum(pushed) / 1e3:.0f} kB")
    assert 0 < sum(pushed) < CHANGE_BYTES


def layers(image: str, folder: Path) -> dict[str, int]:
    """Return the bytes that a registry receives of each layer, by the digest of what it holds."""
    buildah("push", "-q", image, f"oci:{folder / 'registry'}:image")
    (index,) = json.loads((folder / "registry/index.json").read_text())["manifests"]
    manifest = json.loads((folder / "registry/blobs/sha256" / index["digest"].removeprefix("sha256:")).read_text())
    return dict(zip(diffs(image), [layer["size"] for layer in manifest["layers"]], strict=True))


def diffs(image: str) -> list[str]:
    return list(json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["rootfs"]["diff_ids"])
