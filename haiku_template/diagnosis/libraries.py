"""Causes in the CUDA libraries: wheels that lack, are too old, or are shadowed."""

import re
from typing import NamedTuple

from haiku_template.diagnosis import versions
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.rows import Cause, Detect, Facts, cuda_families

# What each wheel brings; JAX's CUDA plugin does not start without these.
NEEDED = {
    "cuda-runtime": ("libcudart.so",),
    "cudnn": ("libcudnn.so", "libcudnn_graph.so"),
    "cublas": ("libcublas.so", "libcublasLt.so"),
    "cufft": ("libcufft.so",),
    "cusparse": ("libcusparse.so",),
    "nvjitlink": ("libnvJitLink.so",),
    "cuda-cupti": ("libcupti.so",),
}
# It starts without these; single operations fail.
NEEDED_LATER = {"cusolver": ("libcusolver.so",), "cuda-nvrtc": ("libnvrtc.so",)}
# Not libcurl, libcups, or the driver's own libcuda, which begin like them.
SHADOWED = r"/lib(nvJitLink|cu(blas|dart|dnn|fft|pti|rand|solver|sparse))\w*\.so[^/]*$"
LOCAL_CUDA = (
    "/usr/local/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu",
    "/opt/conda/lib",
)


def _stem(wheel: str) -> str:
    return re.sub(r"^nvidia-|-cu1\d$", "", wheel)


def _wanted(machine: Machine, *families: str) -> list[versions.Requirement]:
    """The nvidia wheels that the plugins for these CUDAs ask for, or the installed."""
    found = []
    for family in families or cuda_families(machine):
        lines = machine.requires.get(f"jax-cuda{family}-plugin", ())
        needs = versions.requirements(lines)
        found += [need for need in needs if need.name.startswith("nvidia-")]
    return found


def complete(machine: Machine, family: str) -> bool:
    """Whether all the nvidia wheels that a CUDA plugin asks for are installed."""
    return all(n.name in machine.distributions for n in _wanted(machine, family))


def _outside_wheels(machine: Machine, library: str) -> bool:
    """Whether the loader would find a library in the folders of a CUDA toolkit."""
    folders = (*machine.library_path(), *LOCAL_CUDA)
    return any(any(machine.path(f).glob(f"{library}*")) for f in folders)


def _local_cuda(machine: Machine) -> bool:
    """Whether CUDA comes from the system: no wheel, but its runtime is to be found."""
    if any(need.name in machine.distributions for need in _wanted(machine)):
        return False
    return _outside_wheels(machine, "libcudart.so.")


class Gap(NamedTuple):
    """A wheel that is missing, or a library that is missing in it."""

    wheel: str
    library: str

    def words(self) -> str:
        """What is missing."""
        if not self.library:
            return f"the package {self.wheel} is not installed"
        return f"{self.wheel} is installed and its {self.library} is not there"

    def fix(self, machine: Machine) -> str:
        """The pip command that brings it: pip itself sees no file that is missing."""
        if not self.library:
            return with_wheels(machine)
        version = machine.distributions[self.wheel]
        return f"pip install --force-reinstall --no-deps {self.wheel}=={version}"


def _gap(machine: Machine, libraries: dict[str, tuple[str, ...]]) -> Gap | None:
    if _local_cuda(machine):
        return None
    for need in _wanted(machine):
        for library in libraries.get(_stem(need.name), ()):
            if _outside_wheels(machine, library):
                continue
            if need.name not in machine.distributions:
                return Gap(need.name, "")
            pattern = f"nvidia/*/lib/{library}*"
            files = [f for site in machine.site_packages for f in site.glob(pattern)]
            if machine.site_packages and not files:
                return Gap(need.name, library)
    return None


def _missing(libraries: dict[str, tuple[str, ...]]) -> Detect:
    """Detects that one of these libraries is missing."""

    def detect(machine: Machine, facts: Facts) -> str | None:
        gap = _gap(machine, libraries)
        return gap.words() if gap else None

    return detect


def _outdated(machine: Machine, facts: Facts) -> str | None:
    for need in _wanted(machine):
        version = machine.distributions.get(need.name, "")
        checked = _stem(need.name) in NEEDED | NEEDED_LATER
        if version and checked and not need.allows(version):
            return f"{need.name} {version}, and {need.wanted()} is needed"
    return None


def with_wheels(machine: Machine) -> str:
    """The pip command that installs JAX with CUDA's libraries."""
    family = (cuda_families(machine) or ["13"])[-1]
    version = machine.distributions.get("jax", "")
    pinned = f"=={version}" if version else ""
    return f'pip install -U "jax[cuda{family}]{pinned}"'


def reinstall(machine: Machine) -> str:
    """The pip command that brings JAX with CUDA's libraries, whatever is there."""
    return with_wheels(machine).replace("-U", "--force-reinstall")


def _jit_wheel(machine: Machine) -> str:
    for name in ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"):
        if name in machine.distributions:
            return machine.distributions[name]
    return ""


def _foreign(machine: Machine, pattern: str) -> list[str]:
    """The real files of this pattern in LD_LIBRARY_PATH that are not of a wheel."""
    files = [
        f.resolve()
        for folder in machine.library_path()
        for f in sorted(machine.path(folder).glob(pattern))
    ]
    # The wheels of another environment are as foreign as a toolkit.
    own = [site.resolve() for site in machine.site_packages]
    return [str(f) for f in files if not any(f.is_relative_to(site) for site in own)]


def _shadowed(machine: Machine, facts: Facts) -> str | None:
    wheel = _jit_wheel(machine)
    if not (wheel and cuda_families(machine)):
        return None
    for file in _foreign(machine, "libnvJitLink.so.*"):
        version = file.rpartition(".so.")[2]
        if "." in version and versions.numbers(version) < versions.numbers(wheel):
            return f"LD_LIBRARY_PATH brings {file}, older than the wheel's {wheel}"
    return None


def foreign_library(machine: Machine) -> str | None:
    """The first CUDA library that LD_LIBRARY_PATH brings beside pip's."""
    if not (_jit_wheel(machine) and cuda_families(machine)):
        return None
    files = _foreign(machine, "libnvJitLink.so*") + _foreign(machine, "libcu*.so*")
    files = [f for f in files if re.search(SHADOWED, f)]
    return f"LD_LIBRARY_PATH brings {files[0]} beside pip's" if files else None


def _shadowing(machine: Machine, facts: Facts) -> str | None:
    return None if _shadowed(machine, facts) else foreign_library(machine)


def _compiler(machine: Machine, facts: Facts) -> str | None:
    for need in _wanted(machine):
        stem = _stem(need.name)
        if stem not in ("cuda-nvcc", "nvvm") or _local_cuda(machine):
            continue
        wheel = machine.distributions.get(need.name)
        if not wheel and "ptxas" not in machine.executables:
            return f"{need.name} is not installed and there is no ptxas on PATH"
        ptxas = machine.executables.get("ptxas", "")
        old = wheel and versions.numbers(ptxas) < versions.numbers(wheel)[:2]
        if ptxas and old and stem == "cuda-nvcc":
            return f"ptxas {ptxas} on PATH is older than {need.name} {wheel}"
    return None


def _loaded_before(machine: Machine, facts: Facts) -> str | None:
    names = r"lib(cublas|cudnn|cudart|cufft|cusparse|cusolver|nvJitLink)\b"
    for file in machine.mapped_libraries():
        if re.search(names, file) and "site-packages/nvidia/" not in file:
            return f"this process has loaded {file} before JAX started"
    return None


def _nccl(machine: Machine, facts: Facts) -> str | None:
    if len(machine.cards()) < 2 or _local_cuda(machine):
        return None
    for need in _wanted(machine):
        if _stem(need.name) == "nccl" and need.name not in machine.distributions:
            return f"{len(machine.cards())} cards and no package {need.name}"
    return None


ROWS = (
    Cause(
        "A06",
        "a CUDA library that the plugin needs is missing",
        _missing(NEEDED),
        lambda machine: _gap(machine, NEEDED).fix(machine),
    ),
    Cause(
        "A08", "a CUDA library is older than the plugin needs", _outdated, with_wheels
    ),
    Cause(
        "A07",
        "LD_LIBRARY_PATH shadows pip's libnvJitLink",
        _shadowed,
        "unset LD_LIBRARY_PATH",
    ),
    Cause(
        "A07",
        "LD_LIBRARY_PATH brings other CUDA libraries",
        _shadowing,
        "unset LD_LIBRARY_PATH",
        severity="warning",
    ),
    Cause(
        "A06",
        "a CUDA library is missing that single operations need",
        _missing(NEEDED_LATER),
        lambda machine: _gap(machine, NEEDED_LATER).fix(machine),
        severity="warning",
    ),
    Cause(
        "A17",
        "the compiler for the card is missing or old",
        _compiler,
        with_wheels,
        severity="warning",
    ),
    Cause(
        "A16",
        "another framework loaded its CUDA libraries first",
        _loaded_before,
        "call jax.devices() before importing it, or install its CPU build",
        severity="warning",
    ),
    Cause(
        "A108",
        "NCCL is missing, and several cards cannot work together",
        _nccl,
        with_wheels,
        severity="warning",
    ),
)
