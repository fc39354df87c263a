"""Causes in the card and its driver: what files show, and what the driver answered."""

import os
import re

from jax_doctor.machine import LIBRARY_FOLDERS, WSL_NODE, Machine, numbers
from jax_doctor.report import holders
from jax_doctor.start import DAMAGED, NO_DNN
from jax_doctor.table import Facts, Sign, Signs, step, warning

cause = step("card and driver files")

# The oldest driver and card for each major version of CUDA.
OLDEST_DRIVER = {"12": 525, "13": 580}
OLDEST_CARD = {"12": (5, 2), "13": (7, 5)}
COMPILERS = {"12": "nvidia-cuda-nvcc-cu12", "13": "nvidia-cuda-nvcc"}
NO_DEVICES = ("", "-1", "none", "void", "NoDevFiles")
# The ends of the names of cuInit's codes that have a cause of their own.
NAMES = (
    "OUT_OF_MEMORY|STUB_LIBRARY|DEVICE_UNAVAILABLE|NO_DEVICE|INVALID_DEVICE|NOT_READY|"
    r"OPERATING_SYSTEM|DRIVER_MISMATCH|COMPAT_NOT_SUPPORTED_ON_DEVICE|MPS_\w+|"
)
# Without a name where there is no library, as JAX counts it; else of one it loads.
NOT_LOADED = "303|SHARED_OBJECT_INIT_FAILED"
NAMES += NOT_LOADED
ABORT = (-6, 134)
# Both plugins together would be the next cause.
TWELVE = (
    'pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt; pip install -U "jax[cuda12]"'
)
START_WITH_CARD = (
    "docker run --gpus all ... (the host needs nvidia-container-toolkit), the limit "
    "nvidia.com/gpu: 1 in Kubernetes, apptainer --nv"
)


def _answered(machine: Machine, facts: Facts, name: str) -> str:
    """Describes cuInit's error if its name ends so; "" otherwise."""
    driver = facts.driver
    if not driver or driver.code in (0, None) or _wsl(machine, facts):
        return ""
    if not re.search(f"({name})$", f"{driver.code} {driver.name}".strip()):
        return ""
    where = f" from {driver.library}" if driver.library else ""
    code = f"{driver.code}, " if driver.code > 0 else ""
    return f"cuInit(0) returned {code}{driver.name or driver.problem}{where}"


def _mask(machine: Machine) -> str:
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f"; CUDA_VISIBLE_DEVICES={value!r}"


def _show_cards(machine: Machine) -> str:
    """Unset CUDA_VISIBLE_DEVICES; where it is not set, reset the card or reboot."""
    if _mask(machine):
        return "unset CUDA_VISIBLE_DEVICES, or name a card that exists: 0"
    return "sudo nvidia-smi --gpu-reset, or reboot; restart the container with its card"


def _holders(machine: Machine, facts: Facts) -> str:
    programs = holders(machine, facts.driver)
    return f"; the card is held by {programs}" if programs else ""


@cause("A35", fix="make /dev/kfd writable to this user, and install jax[rocm7-local]")
def _amd(machine: Machine, facts: Facts) -> Signs:
    """The AMD GPU cannot be reached."""
    kfd = machine.path("/dev/kfd")
    if not machine.is_amd():
        return
    if not os.path.exists(kfd):
        fix = "docker run --device /dev/kfd --device /dev/dri ..."
        yield Sign("the kernel lists an AMD GPU and there is no /dev/kfd", fix)
    if not machine.may_write(kfd):
        fix = "sudo usermod -aG render,video $USER, then log in again"
        yield Sign("/dev/kfd exists and this user may not write to it", fix)
    if not any(name.startswith("jax-rocm") for name in machine.distributions):
        text = "/dev/kfd exists and no jax-rocm plugin is installed"
        yield Sign(text, 'pip install -U "jax[rocm7-local]"')


@cause("A20", fix=f"run where there is a card, or {START_WITH_CARD}; or --device=cpu")
def _no_node(machine: Machine, facts: Facts) -> Signs:
    """JAX sees no NVIDIA card and passes over CUDA in silence."""
    if machine.nodes() or machine.is_amd():
        return
    address = machine.nvidia_on_pci()
    visible = machine.environ.get("NVIDIA_VISIBLE_DEVICES")
    sign, fix = "and nothing on the PCI bus", ""
    if address:
        sign = f"though the PCI bus lists {address}"
        fix = (
            "install the driver (sudo apt install nvidia-driver-580) or load it "
            f"(sudo modprobe nvidia); in a container: {START_WITH_CARD}"
        )
    elif visible is not None:
        sign = f"though NVIDIA_VISIBLE_DEVICES={visible}"
    elif machine.cuda_families():
        sign = "though JAX's CUDA plugin is installed"
    if machine.kernel_driver():
        fix = f"sudo nvidia-modprobe -u -c 0; in a container: {START_WITH_CARD}"
    yield Sign(f"no /dev/nvidia0, /dev/nvidiactl or /dev/dxg, {sign}", fix)


@cause(
    "A33",
    fix="export LD_LIBRARY_PATH=/usr/lib/wsl/lib, and remove any Linux driver "
    "installed inside WSL (sudo apt purge 'libnvidia-*' 'nvidia-*')",
)
def _wsl(machine: Machine, facts: Facts) -> Signs:
    """In WSL the driver's library is not WSL's own."""
    driver = facts.driver
    if WSL_NODE not in machine.nodes() or (driver and driver.code == 0):
        return
    library = driver.library if driver else machine.libcuda()
    if "/usr/lib/wsl/" not in library:
        code = f"cuInit(0) returned {driver.code}, " if driver else ""
        file = library or "not to be found"
        text = f"/dev/dxg exists, {code}libcuda.so.1 is {file}, not WSL's own"
        yield text if driver else warning(text)


@cause("A32", fix="recreate the container (docker rm, docker run --gpus all ...)")
def _refused(machine: Machine, facts: Facts) -> Signs:
    """The device nodes can no longer be opened, or NVML does not start."""
    driver = facts.driver
    if driver and driver.code != 0:
        for node, reason in driver.refused:
            yield f"{node} exists and cannot be opened: {reason}"
    elif driver and driver.nvml:
        text = f"nvmlInit_v2() returned {driver.nvml}, though CUDA starts"
        yield warning(
            text, "reboot, or recreate the container: nvidia-smi will not work"
        )


@cause("A22", fix=_show_cards)
def _no_device(machine: Machine, facts: Facts) -> Signs:
    """The driver finds no card: it is hidden, or gone."""
    mask = _mask(machine)
    value = machine.environ.get("CUDA_VISIBLE_DEVICES", "")
    error = _answered(machine, facts, "NO_DEVICE")
    if error and mask and not _refused(machine, facts):
        yield f"{error}{mask}, and {facts.driver.count_unmasked or 0} without it"
    if error and not _refused(machine, facts):
        yield f"{error}; the card may have dropped out (dmesg | grep -i nvrm)"
    first, cards = value.split(",")[0].strip(), len(machine.cards())
    if not mask or not machine.nodes() or first.startswith(("GPU-", "MIG-")):
        return
    if first in NO_DEVICES:
        yield f"CUDA_VISIBLE_DEVICES={value!r} hides every card"
    if not first.isdecimal() or (cards and int(first) >= cards):
        yield f"CUDA_VISIBLE_DEVICES={value!r} names no card; there are {cards}"


@cause("A28", fix=_show_cards)
def _none_counted(machine: Machine, facts: Facts) -> Signs:
    """The driver counts no devices."""
    if facts.driver and facts.driver.code == 0 and facts.driver.count == 0:
        yield f"the driver started and counts 0 devices{_mask(machine)}"


@cause("A27", fix="take the folder stubs out of LD_LIBRARY_PATH")
def _stub(machine: Machine, facts: Facts) -> Signs:
    """The library libcuda.so.1 is the toolkit's stub, not the driver."""
    library = machine.libcuda()
    if facts.driver:
        yield _answered(machine, facts, "STUB_LIBRARY")
    elif machine.nodes() and "/stubs/" in library:
        yield warning(f"libcuda.so.1 is the toolkit's stub {library}")


@cause("A23", fix="sudo reboot (or reload the nvidia kernel modules)")
def _versions_differ(machine: Machine, facts: Facts) -> Signs:
    """The kernel module and libcuda.so.1 are of different drivers."""
    library, kernel = machine.libcuda(), machine.kernel_driver()
    # The version in the name of the file: 580.95.05.
    user = library.rpartition("libcuda.so.")[2]
    if facts.driver:
        yield _answered(machine, facts, "SYSTEM_DRIVER_MISMATCH")
    elif "." in user and kernel not in ("", user) and "compat" not in library:
        yield warning(f"the kernel module is {kernel} and {library} is {user}")


def _newer_driver(machine: Machine) -> str:
    """A newer driver, or JAX for an older CUDA."""
    if "13" in machine.cuda_families() and machine.driver_branch() >= 525:
        return f"{TWELVE}, or update the driver to 580 or newer"
    return "sudo apt install nvidia-driver-580, and reboot"


@cause("A29", fix=_newer_driver)
def _old_driver(machine: Machine, facts: Facts) -> Signs:
    """The driver is too old for the installed CUDA."""
    driver, branch = facts.driver, machine.driver_branch()
    cuda = driver.cuda if driver and driver.code == 0 else ""
    guess = not driver and branch and "compat" not in machine.libcuda()
    for family in machine.cuda_families():
        oldest = OLDEST_DRIVER[family]
        if cuda and numbers(cuda) < (int(family),):
            yield f"the driver supports CUDA {cuda}, not {family}"
        elif guess and branch < oldest:
            need = f"CUDA {family} needs {oldest} or newer"
            yield warning(f"driver {machine.kernel_driver()}, and {need}")


@cause("A30", fix="update the driver", severity="warning")
def _slow_compiler(machine: Machine, facts: Facts) -> Signs:
    """The driver is older than the compiler: compiling is slow."""
    driver = facts.driver
    cuda = driver.cuda if driver and driver.code == 0 else ""
    if not cuda:
        return
    # Another CUDA's wheel may have stayed, which nobody uses.
    for name in (COMPILERS[family] for family in machine.cuda_families()):
        wheel = machine.version(name)
        newer = numbers(wheel)[:2] > numbers(cuda)
        if newer and not _old_driver(machine, facts):
            yield f"the driver supports CUDA {cuda}, {name} is {wheel}"


def _other_cuda(machine: Machine) -> str:
    """Another card, or JAX for an older CUDA."""
    if "13" in machine.cuda_families():
        return f"{TWELVE} (compute capability 5.2 to 12), or another card"
    return "another card: JAX for CUDA 12 needs compute capability 5.2"


@cause("A31", fix=_other_cuda)
def _old_card(machine: Machine, facts: Facts) -> Signs:
    """The card is too old for the installed CUDA, and JAX has no program for it."""
    for family in machine.cuda_families():
        oldest = OLDEST_CARD[family]
        for index, card in enumerate(facts.driver.capabilities if facts.driver else ()):
            if card < oldest:
                yield (
                    f"card {index} has compute capability {card[0]}.{card[1]}, and JAX "
                    f"for CUDA {family} needs {oldest[0]}.{oldest[1]}"
                )
    errors, jax = facts.problems(), facts.jax
    no_kernel = re.search("NoKernelImageForDevice|no kernel image is available", errors)
    another = re.search(f"{DAMAGED}|{NO_DNN}", errors)
    abort = jax and jax.child.returncode in ABORT and jax.unfinished == "matmul"
    if facts.on_gpu() and (no_kernel or (abort and not another)):
        yield "the card is listed, and a matrix product on it fails"


@cause(
    "A21",
    fix="start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility and the "
    "nvidia-container-toolkit; on a host install the driver; then sudo ldconfig",
)
def _no_library(machine: Machine, facts: Facts) -> Signs:
    """The driver's library libcuda.so.1, or one that it needs, cannot be loaded."""
    if facts.driver:
        yield _answered(machine, facts, NOT_LOADED)
    elif machine.nodes() and WSL_NODE not in machine.nodes() and not machine.libcuda():
        folders = ", ".join((*machine.library_path(), *LIBRARY_FOLDERS[1:4]))
        yield warning(f"no libcuda.so.1 in {folders} and the like")


@cause(
    "A24", fix="unset LD_LIBRARY_PATH (or drop its compat folder), or update the driver"
)
def _compat(machine: Machine, facts: Facts) -> Signs:
    """The cuda-compat package does not support every card."""
    if facts.driver:
        yield _answered(machine, facts, "COMPAT_NOT_SUPPORTED_ON_DEVICE")
        return
    for folder in machine.library_path() if machine.nodes() else ():
        library = machine.path(folder) / "libcuda.so.1"
        if "compat" in folder and os.path.exists(library):
            yield warning(f"LD_LIBRARY_PATH holds {folder}, which few cards support")


@cause("A26", fix="sudo modprobe nvidia-uvm; after suspend or a live update: reboot")
def _no_uvm(machine: Machine, facts: Facts) -> Signs:
    """The driver fails without saying why, or nvidia-uvm is not loaded."""
    driver, uvm = facts.driver, os.path.exists(machine.path("/dev/nvidia-uvm"))
    if not driver and not uvm and "/dev/nvidia0" in machine.nodes():
        yield warning("/dev/nvidia0 exists and /dev/nvidia-uvm does not")
    if not driver or _wsl(machine, facts) or _refused(machine, facts):
        return
    if driver.code is None:
        yield f"the driver gave no answer: {driver.problem}"
    if not _answered(machine, facts, NAMES):
        missing = "" if uvm else "; /dev/nvidia-uvm does not exist"
        error = _answered(machine, facts, "")
        yield f"{error}{missing}" if error else ""


@cause("A25", fix="sudo systemctl start nvidia-fabricmanager")
def _no_fabric_manager(machine: Machine, facts: Facts) -> Signs:
    """The fabric manager of this NVSwitch host does not run."""
    yield _answered(machine, facts, "SYSTEM_NOT_READY")


@cause(
    "A110",
    fix="unset CUDA_VISIBLE_DEVICES; where MIG is on, sudo nvidia-smi mig -cgi 0 -C; "
    "under Slurm, --gres=gpu:N in place of --gpus-per-task",
)
def _no_such_card(machine: Machine, facts: Facts) -> Signs:
    """The driver was asked for a card that does not exist."""
    error = _answered(machine, facts, "INVALID_DEVICE")
    yield error and error + _mask(machine)


@cause(
    "A38",
    fix="end the process that holds it, or sudo nvidia-smi --compute-mode=DEFAULT",
)
def _busy(machine: Machine, facts: Facts) -> Signs:
    """The card is busy, or allows one process alone."""
    error = _answered(machine, facts, "DEVICE_UNAVAILABLE")
    yield error and error + _holders(machine, facts)


@cause(
    "A39",
    fix="docker run --security-opt seccomp=unconfined --ulimit memlock=-1 ...; outside "
    "a container: ulimit -l unlimited, and write permission on /dev/nvidia-uvm",
)
def _system_call(machine: Machine, facts: Facts) -> Signs:
    """The system refuses the driver a call."""
    yield _answered(machine, facts, "OPERATING_SYSTEM")


@cause(
    "A59", fix="unset CUDA_MPS_PIPE_DIRECTORY, or start it: nvidia-cuda-mps-control -d"
)
def _mps(machine: Machine, facts: Facts) -> Signs:
    """CUDA's MPS server does not serve this process."""
    yield _answered(machine, facts, r"MPS_\w+")


@cause("A61", fix="end it, or export XLA_PYTHON_CLIENT_PREALLOCATE=false")
def _full(machine: Machine, facts: Facts) -> Signs:
    """Another process holds the memory of the card, or none is left for the driver."""
    error = _answered(machine, facts, "OUT_OF_MEMORY")
    if error:
        fix = (
            "end the process that holds the card; lift this process's own limits "
            "(ulimit -v unlimited, docker run without --memory)"
        )
        yield Sign(error + _holders(machine, facts), fix)
    errors = facts.jax.child.errors if facts.jax and not facts.reached() else ""
    errors += facts.problems()
    if re.search("RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY", errors):
        programs = _holders(machine, facts) or "; the card is held by others"
        yield f"no memory left{programs}"
