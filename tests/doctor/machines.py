"""Machines as folders: what a test describes is all that a diagnosis can see."""

import shutil
import subprocess
from pathlib import Path

import pytest

from jax_doctor import Machine
from jax_doctor.children import Child, Device, DriverResult, JaxResult, Stage

VERSION = "0.12.0"
DRIVER = "580.95.05"
WHEELS = {
    "nvidia-cuda-runtime": ("13.0.96", "libcudart.so.13", ">=13.0.48"),
    "nvidia-cudnn-cu13": (
        "9.15.0.57",
        "libcudnn.so.9 libcudnn_graph.so.9",
        "<10.0,>=9.12.0.46",
    ),
    "nvidia-cublas": (
        "13.1.0.3",
        "libcublas.so.13 libcublasLt.so.13",
        ">=13.0.0.19",
    ),
    "nvidia-cufft": ("12.0.0.61", "libcufft.so.12", ">=12.0.0.15"),
    "nvidia-cusparse": ("12.6.3.3", "libcusparse.so.12", ">=12.6.2.49"),
    "nvidia-cusolver": ("12.0.4.66", "libcusolver.so.12", ">=12.0.3.29"),
    "nvidia-cuda-cupti": ("13.0.85", "libcupti.so.13", ">=13.0.48"),
    "nvidia-nvjitlink": ("13.0.88", "libnvJitLink.so.13", ">=13.0.39"),
    "nvidia-cuda-nvrtc": ("13.0.88", "libnvrtc.so.13", ">=13.0.48"),
    "nvidia-cuda-nvcc": ("13.0.88", "", ">=13.0.48"),
    "nvidia-nccl-cu13": ("2.28.9", "", ">=2.27.7"),
}
JAX = {
    "jax": VERSION,
    "jaxlib": VERSION,
    "dm-haiku": "0.0.17",
    "numpy": "2.3.0",
    "scipy": "1.16.0",
}
CUDA = {f"jax-cuda13-{part}": VERSION for part in ("plugin", "pjrt")}
HEALTHY = DriverResult(
    0,
    "CUDA_SUCCESS",
    version=13000,
    count=1,
    count_unmasked=None,
    capabilities=((9, 0),),
)

COMPILER = shutil.which("gcc") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")


def build_stub(library, source, *options):
    """Compiles a library that stands in for one of the driver's."""
    command = [COMPILER, "-shared", "-fPIC", *options, "-o", str(library), str(source)]
    subprocess.run(command, check=True)


class Builder:
    """Builds a machine: first a healthy one, then what is wrong with it."""

    def __init__(self, root: Path):
        self.root = root
        self.environ = {"PATH": "/usr/bin", "HOME": "/root"}
        self.distributions = dict(JAX)
        wanted = [
            f'{name}{bounds}; sys_platform == "linux" and extra == "with-cuda"'
            for name, (_, _, bounds) in WHEELS.items()
        ]
        self.fields = {
            "requires": {
                "jax": (
                    "python>=3.12",
                    f"jaxlib<={VERSION},>=0.11.2",
                    "numpy>=2.2",
                    "scipy>=1.15",
                ),
                "jax-cuda13-plugin": tuple(wanted),
            },
            "python": (3, 12, 4),
        }

    def file(self, name, text=""):
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def remove(self, *names):
        for name in names:
            (self.root / name.lstrip("/")).unlink()

    def link(self, name, target):
        path = self.root / name.lstrip("/")
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def pci(self, vendor="0x10de", kind="0x030200"):
        self.file("/sys/bus/pci/devices/0000:01:00.0/vendor", vendor + "\n")
        self.file("/sys/bus/pci/devices/0000:01:00.0/class", kind + "\n")

    def driver(self, version=DRIVER, library=None):
        self.file(
            "/proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Sep 23\n",
        )
        library = library or version
        self.file(f"/usr/lib/x86_64-linux-gnu/libcuda.so.{library}")
        link = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
        self.link(link, f"libcuda.so.{library}")

    def card(self):
        for node in ("nvidia0", "nvidiactl", "nvidia-uvm"):
            self.file(f"/dev/{node}")
        self.pci()
        self.driver()

    def cuda(self):
        self.distributions.update(CUDA)
        for name, (version, libraries, _) in WHEELS.items():
            self.distributions[name] = version
            for library in libraries.split():
                self.file(f"/site/site-packages/nvidia/x/lib/{library}")
        self.fields["site_packages"] = (self.root / "site/site-packages",)

    def machine(self):
        return Machine(
            environ=self.environ,
            root=self.root,
            distributions=self.distributions,
            **self.fields,
        )


COMPUTED = (Stage("matmul", "a device"),)


def jax_result(*platforms, returncode=0, errors="", stages=COMPUTED, unfinished=""):
    """What JAX showed: devices of these platforms, or how it failed."""
    devices = tuple(
        Device("cuda" if name == "gpu" else name, name, 0, "kind") for name in platforms
    )
    child = Child(returncode, "", errors, 1.0)
    default = platforms[0] if platforms else ""
    if not platforms:
        return JaxResult(child)
    return JaxResult(child, devices, default, 1, stages, unfinished)
