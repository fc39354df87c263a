"""Facts of a machine that are read in milliseconds: variables, files, versions.

Nothing here starts a process that could hang, opens a device, or imports JAX. Every
path is looked up under `root`, so that a test can describe any machine as a folder.
"""

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import NamedTuple

PTXAS_SECONDS = 20.0  # To start a program of 30 MB from a slow disk.
# The device nodes that JAX itself looks for before it tries the CUDA backend.
NVIDIA_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
WSL_NODE = "/dev/dxg"
# Platforms of JAX that are GPUs.
GPU_NAMES = ("gpu", "cuda", "rocm", "oneapi")
# Where the loader looks for libcuda.so.1 besides LD_LIBRARY_PATH, most likely first.
LIBRARY_FOLDERS = (
    "/usr/lib/wsl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/compat",
)
COMPARE = {">=": ge, "<=": le, ">": gt, "<": lt, "==": eq, "!=": ne}
# The namespace of processes in which Linux itself starts: this number is fixed.
HOST_PROCESSES = "pid:[4026531836]"
# The packages whose requirements say what fits together.
WITH_REQUIREMENTS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: (0, 11, 0) of 0.11.0.dev2+cuda."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


class Requirement(NamedTuple):
    """One requirement of a package: `numpy>=2.1 ; extra == "x"`.

    Attributes:
      bounds: as in `>=9.8,<10.0`; wildcards and ~= count for nothing.
      python: bounds of the Python that it is for.
    """

    name: str
    bounds: str
    extra: str = ""
    python: str = ""

    @classmethod
    def read(cls, line: str) -> "Requirement":
        """Parses a Requires-Dist line of a package's metadata."""
        demand, _, marker = line.partition(";")
        match = re.match(r"\s*([\w.-]*)(?:\[[^\]]*\])?(.*)", demand)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", marker)
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        python = re.findall(r"python_version\s*([<>=!]+)\s*['\"]([\d.]+)", marker)
        bounds = ",".join(map("".join, python))
        return cls(name, match[2].strip(), extra[1] if extra else "", bounds)

    def allows(self, version: str) -> bool:
        """True if a version lies within the bounds; zeros at its end do not count."""
        pattern = r"(>=|<=|==|!=|>|<)\s*(\d[\d.]*\d|\d)(?![\d.]*\*)"
        for sign, bound in re.findall(pattern, self.bounds):
            pairs = zip_longest(numbers(version), numbers(bound), fillvalue=0)
            if not COMPARE[sign](*zip(*pairs, strict=True)):
                return False
        return True


class Holder(NamedTuple):
    """A process that holds device nodes open; its fields are keys of `--json`."""

    pid: int
    program: str
    nodes: list[str]


@dataclass(frozen=True)
class Machine:
    """One machine and one Python installation, as a value.

    Attributes:
      root: folder that holds dev/, proc/, sys/, usr/.
      distributions: installed packages, normalized name to version.
      requires: requirements of some of them, as in their metadata, `python` included.
      ptxas: asks the compiler on PATH for its version: "" when it does not tell; None:
        no such.
      site_packages: folders that packages were installed in.
      conda_meta: folder in which conda keeps its records.
    """

    environ: Mapping[str, str]
    root: Path = Path("/")
    distributions: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    python: tuple[int, ...] = sys.version_info[:3]
    site_packages: tuple[Path, ...] = ()
    conda_meta: Path | None = None
    may_write: Callable[[Path], bool] = lambda path: os.access(path, os.W_OK)
    ptxas: Callable[[], str | None] = lambda: None

    @classmethod
    def here(cls) -> "Machine":
        """This machine, as this process sees it."""
        distributions = dict(_distributions(sys.path))
        names = [name for name in WITH_REQUIREMENTS if name in distributions]
        sites = [Path(p) for p in sys.path if p and os.path.isdir(Path(p, "nvidia"))]
        return cls(
            environ=dict(os.environ),
            distributions=distributions,
            requires={name: _requires(name) for name in names},
            ptxas=_ptxas,
            site_packages=tuple(sites),
            conda_meta=Path(sys.prefix, "conda-meta"),
        )

    def path(self, name: str) -> Path:
        """Path of a file: an absolute name is under `root`."""
        return self.root / name.lstrip("/") if name.startswith("/") else Path(name)

    def read(self, absolute: str) -> str:
        """Reads the text of a file; empty when it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace").strip()
        except OSError:
            return ""

    def version(self, package: str) -> str:
        """Version of an installed package; empty if it is not installed."""
        return self.distributions.get(package, "")

    def nodes(self) -> list[str]:
        """Device nodes by which JAX recognizes an NVIDIA card."""
        return [name for name in NVIDIA_NODES if os.path.exists(self.path(name))]

    def cards(self) -> list[str]:
        """Nodes of single cards: /dev/nvidia0, /dev/nvidia1 and so on."""
        nodes = self.path("/dev").glob("nvidia[0-9]*")
        return sorted("/dev/" + node.name for node in nodes)

    def nvidia_on_pci(self) -> str:
        """Address of the first NVIDIA display or 3D controller; empty if none."""
        for device in sorted(self.path("/sys/bus/pci/devices").glob("*")):
            folder = f"/sys/bus/pci/devices/{device.name}"
            display = self.read(f"{folder}/class").startswith(("0x0300", "0x0302"))
            if display and self.read(f"{folder}/vendor") == "0x10de":
                return device.name
        return ""

    def amd_gpus(self) -> list[str]:
        """AMD GPUs that the kernel driver lists: nodes with SIMD units."""
        nodes = "/sys/class/kfd/kfd/topology/nodes"
        names = sorted(node.name for node in self.path(nodes).glob("*"))
        texts = {name: self.read(f"{nodes}/{name}/properties") for name in names}
        return [n for n in names if re.search(r"\bsimd_count\s+0*[1-9]", texts[n])]

    def requirements(self, package: str) -> list[Requirement]:
        """Requirements of an installed package for this Python, if they were read."""
        python = ".".join(map(str, self.python[:2]))
        needs = map(Requirement.read, self.requires.get(package, ()))
        return [n for n in needs if Requirement("python", n.python).allows(python)]

    def has_card(self) -> bool:
        """True if anything speaks for a GPU in this machine."""
        return bool(self.nodes() or self.nvidia_on_pci() or self.amd_gpus())

    def is_amd(self) -> bool:
        """True if the GPU to be used is an AMD one."""
        amd = os.path.exists(self.path("/dev/kfd")) or bool(self.amd_gpus())
        return amd and not self.nodes()

    def platforms(self) -> list[str]:
        """Names in JAX_PLATFORMS without the spaces around them."""
        value = self.environ.get("JAX_PLATFORMS", "")
        return [name.strip() for name in value.split(",")] if value else []

    def cuda_families(self) -> list[str]:
        """CUDA plugin families of which a part is installed: `12`, `13`."""
        names = " ".join(self.distributions)
        return sorted(set(re.findall(r"\bjax-cuda(1[23])-p", names)))

    def has_cuda(self) -> bool:
        """True if JAX was installed with CUDA, by pip or by conda."""
        return bool(self.cuda_families()) or "cuda" in self.conda_build("jaxlib")

    def kernel_driver(self) -> str:
        """Version of the loaded NVIDIA kernel module, as 580.95.05, or empty."""
        text = self.read("/proc/driver/nvidia/version")
        match = re.search(r"Kernel Module\D.*?(\d{3,}\.\d+(?:\.\d+)?)", text)
        return match[1] if match else ""

    def driver_branch(self) -> int:
        """First number of `kernel_driver`; 0 when there is none."""
        return int(self.kernel_driver().partition(".")[0] or 0)

    def library_path(self) -> list[str]:
        """Folders in LD_LIBRARY_PATH."""
        return [p for p in self.environ.get("LD_LIBRARY_PATH", "").split(":") if p]

    def find(self, pattern: str, *folders: str) -> Iterator[Path]:
        """Finds files of a pattern in LD_LIBRARY_PATH, then in these folders."""
        for folder in (*self.library_path(), *folders):
            with contextlib.suppress(OSError):  # A name may be too long.
                yield from sorted(self.path(folder).glob(pattern))

    def libcuda(self) -> str:
        """Real name of the libcuda.so.1 that the loader would find, or empty."""
        files = filter(os.path.exists, self.find("libcuda.so.1", *LIBRARY_FOLDERS))
        return next((str(file.resolve()) for file in files), "")

    def conda_build(self, package: str) -> str:
        """Version and build of a conda package, as 0.6.0-cpu_py312h1_0, or empty."""
        pattern = re.compile(re.escape(package) + r"-(\d[^-]*-[^-]+)\.json")
        files = self.conda_meta.glob(f"{package}-*.json") if self.conda_meta else ()
        matches = (pattern.fullmatch(file.name) for file in files)
        return next((match[1] for match in matches if match), "")

    def holders(self) -> list[Holder]:
        """Processes that hold NVIDIA device nodes open; root alone sees all users'."""
        rows = []
        for process in self.path("/proc").glob("[0-9]*"):
            files = set()
            # It may have ended, or belong to another user.
            with contextlib.suppress(OSError):
                for handle in (process / "fd").iterdir():
                    files.add(os.readlink(handle))
            if nodes := sorted(f for f in files if re.match(r"/dev/nvidia\d", f)):
                pid = int(process.name)
                rows.append(Holder(pid, self.program(pid), nodes))
        return sorted(rows)

    def program(self, pid: int) -> str:
        """Name of the program that a process runs; empty if there is none."""
        return self.read(f"/proc/{pid}/comm")

    def sees_all_processes(self) -> bool:
        """True if processes are numbered here as on the host: this is no container."""
        try:
            return os.readlink(self.path("/proc/self/ns/pid")) == HOST_PROCESSES
        except OSError:
            return True


def _distributions(folders: list[str]) -> Iterator[tuple[str, str]]:
    """Names and versions from the names of the metadata folders: no file is read.

    What an uninstallation left of one, without its METADATA, is no package.
    """
    earlier = set()
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in names:
            match = re.fullmatch(
                r"(.+?)-(\d[^-]*)(?:-py[\d.]+)?\.(dist|egg)-info", entry
            )
            name = re.sub(r"[-_.]+", "-", match[1]).lower() if match else None
            if name and name not in earlier and _is_whole(Path(folder, entry)):
                earlier.add(name)
                yield name, match[2]


def _is_whole(metadata: Path) -> bool:
    is_wheel = metadata.suffix == ".dist-info"  # Else a folder with PKG-INFO, or it.
    return not is_wheel or os.path.isfile(metadata / "METADATA")


def _requires(name: str) -> tuple[str, ...]:
    metadata = importlib.metadata.metadata(name)
    python = metadata.get("Requires-Python", "")
    return (f"python{python}", *(metadata.get_all("Requires-Dist") or ()))


def _ptxas() -> str | None:
    program = shutil.which("ptxas")
    if not program:
        return None
    try:
        text = subprocess.check_output(
            [program, "--version"],
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=PTXAS_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else ""
