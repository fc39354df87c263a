"""What can be read of a machine in milliseconds: variables, files, versions.

Nothing here starts a process that could hang, opens a device, or imports JAX. Every
path is looked up under `root`, so that a test can describe any machine as a folder.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# The device nodes that JAX itself looks for before it tries the CUDA backend.
NVIDIA_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
WSL_NODE = "/dev/dxg"
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
# The namespace of processes in which Linux itself starts: this number is fixed.
HOST_PROCESSES = "pid:[4026531836]"
# The packages whose requirements say what fits together.
WITH_REQUIREMENTS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK)


@dataclass(frozen=True)
class Machine:
    """One machine and one Python installation, as a value.

    Attributes:
      environ: the environment variables.
      root: the folder that holds dev/, proc/, sys/, usr/.
      distributions: installed packages, normalised name to version.
      requires: what some of them require, as in their metadata.
      requires_python: which Python some of them require.
      python: the version of this Python.
      executables: programs on PATH, name to version ("" when it does not tell).
      site_packages: the folders that packages were installed in.
      conda_meta: the folder in which conda keeps its records.
      may_write: whether this user may write to a path.
    """

    environ: Mapping[str, str]
    root: Path = Path("/")
    distributions: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    requires_python: Mapping[str, str] = field(default_factory=dict)
    python: tuple[int, ...] = sys.version_info[:3]
    executables: Mapping[str, str] = field(default_factory=dict)
    site_packages: tuple[Path, ...] = ()
    conda_meta: Path | None = None
    may_write: Callable[[Path], bool] = _may_write

    @classmethod
    def here(cls) -> "Machine":
        """This machine, as this process sees it."""
        distributions = dict(_distributions(sys.path))
        known = [name for name in WITH_REQUIREMENTS if name in distributions]
        metadata = {name: importlib.metadata.metadata(name) for name in known}
        return cls(
            environ=dict(os.environ),
            distributions=distributions,
            requires={
                n: tuple(m.get_all("Requires-Dist") or ()) for n, m in metadata.items()
            },
            requires_python={
                n: m.get("Requires-Python", "") for n, m in metadata.items()
            },
            executables=dict(_executables()),
            site_packages=tuple(
                Path(p) for p in sys.path if p and Path(p, "nvidia").is_dir()
            ),
            conda_meta=Path(sys.prefix, "conda-meta"),
        )

    def path(self, absolute: str) -> Path:
        """Where the file of this absolute name lies under `root`."""
        return self.root / absolute.lstrip("/")

    def read(self, absolute: str) -> str:
        """The text of a file; empty when it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace").strip()
        except OSError:
            return ""

    def nodes(self) -> list[str]:
        """The device nodes by which JAX recognises an NVIDIA card."""
        return [node for node in NVIDIA_NODES if self.path(node).exists()]

    def cards(self) -> list[str]:
        """The nodes of single cards: /dev/nvidia0, /dev/nvidia1 and so on."""
        found = self.path("/dev").glob("nvidia[0-9]*")
        return sorted("/dev/" + node.name for node in found)

    def nvidia_on_pci(self) -> str:
        """The address of the first NVIDIA display or 3D controller; empty if none."""
        for device in sorted(self.path("/sys/bus/pci/devices").glob("*")):
            where = f"/sys/bus/pci/devices/{device.name}"
            kind = self.read(f"{where}/class")
            shows = kind.startswith(("0x0300", "0x0302"))
            if shows and self.read(f"{where}/vendor") == "0x10de":
                return device.name
        return ""

    def amd_gpus(self) -> list[str]:
        """The AMD GPUs that the kernel driver lists: nodes with SIMD units."""
        found = []
        for node in sorted(self.path("/sys/class/kfd/kfd/topology/nodes").glob("*")):
            text = self.read(
                f"/sys/class/kfd/kfd/topology/nodes/{node.name}/properties"
            )
            units = re.search(r"\bsimd_count\s+(\d+)", text)
            if units and int(units[1]) > 0:
                found.append(node.name)
        return found

    def kernel_driver(self) -> str:
        """The version of the loaded NVIDIA kernel module, as 580.95.05, or empty."""
        text = self.read("/proc/driver/nvidia/version")
        match = re.search(r"Kernel Module\D.*?(\d{3,}\.\d+(?:\.\d+)?)", text)
        return match[1] if match else ""

    def library_path(self) -> list[str]:
        """The folders in LD_LIBRARY_PATH."""
        return [p for p in self.environ.get("LD_LIBRARY_PATH", "").split(":") if p]

    def libcuda(self) -> str:
        """The libcuda.so.1 that the loader would find, as its real name, or empty."""
        for folder in (*self.library_path(), *LIBRARY_FOLDERS):
            file = self.path(folder) / "libcuda.so.1"
            if file.exists():
                return str(file.resolve())
        return ""

    def conda_build(self, package: str) -> str:
        """Version and build of a conda package, as 0.6.0-cpu_py312h1_0, or empty."""
        pattern = re.compile(re.escape(package) + r"-(\d[^-]*-[^-]+)\.json")
        files = self.conda_meta.glob(f"{package}-*.json") if self.conda_meta else ()
        matches = (pattern.fullmatch(file.name) for file in files)
        return next((match[1] for match in matches if match), "")

    def mapped_libraries(self) -> list[str]:
        """The CUDA libraries that this process has loaded already."""
        names = re.findall(
            r"(/\S*/lib(?:cu|nv)\w+\.so\S*)", self.read("/proc/self/maps")
        )
        return sorted(set(names))

    def holders(self) -> list[tuple[int, str, list[str]]]:
        """The processes that hold NVIDIA device nodes open: id, program, nodes.

        Processes of other users show only to root.
        """
        found = []
        for process in self.path("/proc").glob("[0-9]*"):
            nodes = set()
            try:
                for handle in (process / "fd").iterdir():
                    nodes.add(os.readlink(handle))
            except OSError:
                pass  # It has ended, or belongs to another user.
            held = sorted(n for n in nodes if re.match(r"/dev/nvidia\d", n))
            if held:
                pid = int(process.name)
                found.append((pid, self.program(pid), held))
        return sorted(found)

    def program(self, pid: int) -> str:
        """The name of the program that a process runs; empty if there is none."""
        return self.read(f"/proc/{pid}/comm")

    def sees_all_processes(self) -> bool:
        """Whether processes are numbered here as on the host: this is no container."""
        try:
            return os.readlink(self.path("/proc/self/ns/pid")) == HOST_PROCESSES
        except OSError:
            return True


def _distributions(folders: list[str]) -> Iterator[tuple[str, str]]:
    """Names and versions from the names of the metadata folders: no file is read."""
    seen = set()
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
            if name and name not in seen:
                seen.add(name)
                yield name, match[2]


def _executables() -> Iterator[tuple[str, str]]:
    for name in ("ptxas",):
        found = shutil.which(name)
        if not found:
            continue
        try:
            text = subprocess.run(
                [found, "--version"], capture_output=True, text=True, timeout=2
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
        match = re.search(r"release (\d+\.\d+)", text)
        yield name, match[1] if match else ""
