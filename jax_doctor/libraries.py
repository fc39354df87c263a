"""Causes in the CUDA libraries: wheels that lack, are too old, or are shadowed."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jax_doctor.machine import LIBRARY_FOLDERS, Machine, Requirement, numbers
from jax_doctor.table import Facts, Sign, Signs, step, warning

cause = step("CUDA libraries")

# Libraries of each wheel; JAX's CUDA plugin does not start without these.
NEEDED = {
    "cuda-runtime": ("libcudart.so",),
    "cudnn": ("libcudnn.so", "libcudnn_graph.so"),
    "cublas": ("libcublas.so", "libcublasLt.so"),
    "cufft": ("libcufft.so",),
    "cusparse": ("libcusparse.so",),
    "nvjitlink": ("libnvJitLink.so",),
    "cuda-cupti": ("libcupti.so",),
}
COMPILERS = ("cuda-nvcc", "nvvm")
# It starts without these; single operations fail.
NEEDED_LATER = {"cusolver": ("libcusolver.so",), "cuda-nvrtc": ("libnvrtc.so",)}
# Not libcurl, libcups, or the driver's own libcuda, which begin like them.
SHADOWED = r"/lib(nvJitLink|cu(blas|dart|dnn|fft|pti|rand|solver|sparse))\w*\.so[^/]*$"
BUS_ERROR = (-7, 135)
# The second is said, before the process is ended, where a part of cuDNN is missing.
NOT_LOADED = r"Unable to load (\w+)\. Is it installed\?|Cannot load symbol cudnn"


def _stem(wheel: str) -> str:
    return re.sub(r"^nvidia-|-cu1\d$", "", wheel)


def _wheels(machine: Machine, *families: str) -> list[Requirement]:
    """Wheels from nvidia that the plugins for these CUDAs require, or the installed."""
    return [
        need
        for family in families or machine.cuda_families()
        for need in machine.requirements(f"jax-cuda{family}-plugin")
        if need.name.startswith("nvidia-")
    ]


def complete(machine: Machine, family: str) -> bool:
    """True if all the nvidia wheels that a CUDA plugin requires are installed."""
    return all(n.name in machine.distributions for n in _wheels(machine, family))


def with_wheels(machine: Machine) -> str:
    """`pip install -U "jax[cuda13]"`, of the installed CUDA and version."""
    family = (machine.cuda_families() or ["13"])[-1]
    version = machine.version("jax")
    pin = f"=={version}" if version else ""
    return f'pip install -U "jax[cuda{family}]{pin}"'


def _outside_wheels(machine: Machine, library: str) -> bool:
    """True if the loader would find a library in the folders of a CUDA toolkit."""
    return any(machine.find(f"{library}*", *LIBRARY_FOLDERS, "/opt/conda/lib"))


def _local_cuda(machine: Machine) -> bool:
    """True if CUDA comes from the system: no wheel, but its runtime is to be found."""
    if any(need.name in machine.distributions for need in _wheels(machine)):
        return False
    return _outside_wheels(machine, "libcudart.so.")


def _gaps(machine: Machine, libraries: Mapping[str, tuple[str, ...]]) -> Iterator[Sign]:
    """Yields the wheels that are missing, and the libraries missing in a wheel."""
    # pip itself sees no file that is missing: -U would do nothing.
    command, sites = "pip install --force-reinstall --no-deps", machine.site_packages
    for name in (need.name for need in _wheels(machine)):
        for library in libraries.get(_stem(name), ()):
            inside = [any(site.glob(f"nvidia/*/lib/{library}*")) for site in sites]
            if _outside_wheels(machine, library):
                continue
            if name not in machine.distributions:
                yield Sign(f"the package {name} is not installed")
            elif sites and not any(inside):
                text = f"{name} is installed and its {library} is not there"
                yield Sign(text, f"{command} {name}=={machine.version(name)}")


@cause("A06", fix=with_wheels)
def _missing(machine: Machine, facts: Facts) -> Signs:
    """A CUDA library that JAX's plugin needs is missing."""
    local = _local_cuda(machine)
    if not local:
        yield from _gaps(machine, NEEDED)
    start = facts.failed_start(machine)
    command = with_wheels(machine).replace("-U", "--force-reinstall")
    if start and start.returncode in BUS_ERROR:
        text = "loading it ended in a bus error: its file is shorter than it should be"
        yield Sign(text, command)
    match = facts.said_at_start(machine, NOT_LOADED)
    if match and not foreign_library(machine):
        library = match[1] or "all of cuDNN"
        yield Sign(f"JAX's CUDA plugin cannot load {library}", command)
    for gap in _gaps(machine, NEEDED_LATER) if not local else ():
        yield gap._replace(severity="warning")


@cause("A08", fix=with_wheels)
def _outdated(machine: Machine, facts: Facts) -> Signs:
    """A CUDA library is older than JAX needs."""
    for need in _wheels(machine):
        version, library = machine.version(need.name), _stem(need.name)
        if version and library in NEEDED | NEEDED_LATER and not need.allows(version):
            yield f"{need.name} {version}, and {need.bounds} is needed"
    if match := facts.said_at_start(machine, r"Outdated (\w+) installation found"):
        version = facts.said_at_start(machine, r"Installed version: (\d+)")
        yield f"{match[1]} {version[1] if version else ''} is older than JAX needs"


def _jit_wheel(machine: Machine) -> str:
    """Version of pip's libnvJitLink beside a CUDA plugin, or empty."""
    if not machine.cuda_families():
        return ""
    names = ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12")
    return next(filter(None, map(machine.version, names)), "")


def _foreign(machine: Machine, files: Iterable[Path]) -> list[str]:
    """Real files among these that are not of a wheel."""
    files = [file.resolve() for file in files]
    # The wheels of another environment are as foreign as a toolkit.
    sites = [site.resolve() for site in machine.site_packages]
    return [str(f) for f in files if not any(f.is_relative_to(site) for site in sites)]


def foreign_library(machine: Machine) -> str:
    """Describes the first CUDA library that LD_LIBRARY_PATH brings beside pip's."""
    if not _jit_wheel(machine):
        return ""
    files = [*machine.find("libnvJitLink.so*"), *machine.find("libcu*.so*")]
    files = [f for f in _foreign(machine, files) if re.search(SHADOWED, f)]
    return f"LD_LIBRARY_PATH brings {files[0]} beside pip's" if files else ""


@cause("A07", fix="unset LD_LIBRARY_PATH")
def _shadowed(machine: Machine, facts: Facts) -> Signs:
    """LD_LIBRARY_PATH shadows pip's CUDA libraries."""
    wheel, foreign = _jit_wheel(machine), foreign_library(machine)
    links = machine.find("libnvJitLink.so.*") if wheel else ()
    for file in _foreign(machine, links):
        version = file.rpartition(".so.")[2]
        if "." in version and numbers(version) < numbers(wheel):
            yield f"LD_LIBRARY_PATH brings {file}, older than the wheel's {wheel}"
    if foreign and facts.said_at_start(machine, NOT_LOADED):
        yield foreign
    elif foreign:
        yield warning(foreign)


@cause("A17", fix=with_wheels)
def _compiler(machine: Machine, facts: Facts) -> Signs:
    """The compiler for the card is missing or old."""
    errors = r".*(libdevice not found|ptxas not found|Unsupported \.version).*"
    for match in re.finditer(errors, facts.problems()):
        yield match[0].strip()
    needs = _wheels(machine) if not _local_cuda(machine) else ()
    compilers = [need.name for need in needs if _stem(need.name) in COMPILERS]
    ptxas = machine.ptxas() if compilers else None
    for name in compilers:
        wheel = machine.version(name)
        if not wheel and ptxas is None:
            yield warning(f"{name} is not installed, nor is ptxas on PATH")
        old = wheel and ptxas and numbers(ptxas) < numbers(wheel)[:2]
        if old and _stem(name) == COMPILERS[0]:
            yield warning(f"ptxas {ptxas} on PATH is older than {name} {wheel}")


@cause(
    "A16",
    fix="call jax.devices() before importing it, or install its CPU build",
    severity="warning",
)
def _loaded_before(machine: Machine, facts: Facts) -> Signs:
    """Another framework loaded its CUDA libraries first."""
    names = r"/\S*/lib(?:cublas|cudnn|cudart|cufft|cusparse|cusolver|nvJitLink)\.so\S*"
    files = sorted(re.findall(names, machine.read("/proc/self/maps")))
    for file in _foreign(machine, map(machine.path, files)):
        yield f"this process has loaded {file} before JAX started"


@cause("A108", fix=with_wheels, severity="warning")
def _nccl(machine: Machine, facts: Facts) -> Signs:
    """NCCL is missing, and several cards cannot work together."""
    cards = len(machine.cards())
    for need in _wheels(machine) if cards > 1 and not _local_cuda(machine) else ():
        if _stem(need.name) == "nccl" and need.name not in machine.distributions:
            yield f"{cards} cards and no package {need.name}"
