"""Causes in the card and its driver that files show: the driver is not asked yet."""

from haiku_template.diagnosis.machine import LIBRARY_FOLDERS, WSL_NODE, Machine
from haiku_template.diagnosis.rows import Cause, Facts, cuda_families

# The oldest driver for each major version of CUDA.
OLDEST_DRIVER = {"12": 525, "13": 580}
NO_DEVICES = ("", "-1", "none", "void", "NoDevFiles")
START_WITH_CARD = (
    "docker run --gpus all ... (the host needs nvidia-container-toolkit), the limit "
    "nvidia.com/gpu: 1 in Kubernetes, apptainer --nv"
)


def is_amd(machine: Machine) -> bool:
    """Whether the GPU to be used is an AMD one."""
    amd = machine.path("/dev/kfd").exists() or bool(machine.amd_gpus())
    return amd and not machine.nodes()


def _amd(machine: Machine, facts: Facts) -> str | None:
    if not is_amd(machine):
        return None
    kfd = machine.path("/dev/kfd")
    if not kfd.exists():
        return "the kernel lists an AMD GPU and there is no /dev/kfd"
    if not machine.may_write(kfd):
        return "/dev/kfd exists and this user may not write to it"
    if not any(name.startswith("jax-rocm") for name in machine.distributions):
        return "/dev/kfd exists and no jax-rocm plugin is installed"
    return None


def _fix_amd(machine: Machine) -> str:
    kfd = machine.path("/dev/kfd")
    if not kfd.exists():
        return "docker run --device /dev/kfd --device /dev/dri ..."
    if not machine.may_write(kfd):
        return "sudo usermod -aG render,video $USER, then log in again"
    return 'pip install -U "jax[rocm7-local]"'


def _no_node(machine: Machine, facts: Facts) -> str | None:
    if machine.nodes() or is_amd(machine):
        return None
    missing = "no /dev/nvidia0, /dev/nvidiactl or /dev/dxg"
    visible = machine.environ.get("NVIDIA_VISIBLE_DEVICES")
    if machine.nvidia_on_pci():
        return f"{missing}, though the PCI bus lists {machine.nvidia_on_pci()}"
    if visible is not None:
        return f"{missing}, though NVIDIA_VISIBLE_DEVICES={visible}"
    if cuda_families(machine):
        return f"{missing}, though JAX's CUDA plugin is installed"
    return f"{missing}, and nothing on the PCI bus"


def _fix_no_node(machine: Machine) -> str:
    if machine.kernel_driver():
        return f"sudo nvidia-modprobe -u -c 0; in a container: {START_WITH_CARD}"
    if machine.nvidia_on_pci():
        return (
            "install the driver (sudo apt install nvidia-driver-580) or load it (sudo "
            f"modprobe nvidia); in a container: {START_WITH_CARD}"
        )
    return f"run on a machine with a card, or {START_WITH_CARD}; or --device=cpu"


def _wsl_library(machine: Machine, facts: Facts) -> str | None:
    if WSL_NODE not in machine.nodes() or facts.driver:
        return None
    library = machine.libcuda()
    if not library:
        return "/dev/dxg exists and there is no /usr/lib/wsl/lib/libcuda.so.1"
    if "/usr/lib/wsl/" not in library:
        return f"/dev/dxg exists and libcuda.so.1 is {library}, not WSL's own"
    return None


def _masked(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or not machine.nodes():
        return None
    first = value.split(",")[0].strip()
    if first in NO_DEVICES:
        return f"CUDA_VISIBLE_DEVICES={value!r} hides every card"
    if first.startswith(("GPU-", "MIG-")):
        return None
    cards = len(machine.cards())
    if not first.isdecimal() or (cards and int(first) >= cards):
        return f"CUDA_VISIBLE_DEVICES={value!r} names no card; there are {cards}"
    return None


def _stub(machine: Machine, facts: Facts) -> str | None:
    library = machine.libcuda()
    if facts.driver or not machine.nodes() or "/stubs/" not in library:
        return None
    return f"libcuda.so.1 is the toolkit's stub {library}"


def library_version(library: str) -> str:
    """The driver version in the name of a library file, as 580.95.05, or empty."""
    version = library.rpartition("libcuda.so.")[2]
    return version if version.count(".") else ""


def _versions_differ(machine: Machine, facts: Facts) -> str | None:
    library = machine.libcuda()
    kernel, user = machine.kernel_driver(), library_version(library)
    if facts.driver or not (kernel and user) or kernel == user or "compat" in library:
        return None
    return f"the kernel module is {kernel} and {library} is {user}"


def _old_driver(machine: Machine, facts: Facts) -> str | None:
    kernel = machine.kernel_driver()
    if facts.driver or not kernel or "compat" in machine.libcuda():
        return None
    for family in cuda_families(machine):
        if int(kernel.split(".")[0]) < OLDEST_DRIVER[family]:
            return (
                f"driver {kernel}, and CUDA {family} needs {OLDEST_DRIVER[family]} or "
                "newer"
            )
    return None


def fix_old_driver(machine: Machine) -> str:
    """What to do about a driver that is too old for the installed plugin."""
    kernel = machine.kernel_driver()
    if "13" in cuda_families(machine) and kernel and int(kernel.split(".")[0]) >= 525:
        return f"{TWELVE}, or update the driver to 580 or newer"
    return "sudo apt install nvidia-driver-580, and reboot"


def fix_old_card(machine: Machine) -> str:
    """What to do about a card that the installed CUDA has no programs for."""
    if "13" in cuda_families(machine):
        return f"{TWELVE} (compute capability 5.2 to 12), or another card"
    return "another card: JAX for CUDA 12 needs compute capability 5.2"


def _compat(machine: Machine, facts: Facts) -> str | None:
    if facts.driver or not machine.nodes():
        return None
    for folder in machine.library_path():
        if (
            "compat" in folder
            and machine.path(
                folder,
            )
            .joinpath("libcuda.so.1")
            .exists()
        ):
            return f"LD_LIBRARY_PATH holds {folder}, which few cards support"
    return None


def _no_uvm(machine: Machine, facts: Facts) -> str | None:
    if facts.driver or "/dev/nvidia0" not in machine.nodes():
        return None
    if machine.path("/dev/nvidia-uvm").exists():
        return None
    return "/dev/nvidia0 exists and /dev/nvidia-uvm does not"


def _no_library(machine: Machine, facts: Facts) -> str | None:
    if facts.driver or not machine.nodes() or WSL_NODE in machine.nodes():
        return None
    if machine.libcuda():
        return None
    looked = ", ".join((*machine.library_path(), *LIBRARY_FOLDERS[1:4]))
    return f"no libcuda.so.1 in {looked} and the like"


# Both plugins together would be the next cause.
TWELVE = (
    'pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt; pip install -U "jax[cuda12]"'
)
FIX_COMPAT = "unset LD_LIBRARY_PATH (or drop its compat folder), or update the driver"
FIX_STUB = "take the folder stubs out of LD_LIBRARY_PATH"
FIX_MISMATCH = "sudo reboot (or reload the nvidia kernel modules)"
FIX_MASKED = "unset CUDA_VISIBLE_DEVICES, or name a card that exists: 0"
FIX_UVM = "sudo modprobe nvidia-uvm; after suspend or a live update: reboot"
FIX_WSL = (
    "export LD_LIBRARY_PATH=/usr/lib/wsl/lib, and remove any Linux driver installed "
    "inside WSL (sudo apt purge 'libnvidia-*' 'nvidia-*')"
)
FIX_LIBRARY = (
    "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility and the "
    "nvidia-container-toolkit; on a host install the driver; then sudo ldconfig"
)
ROWS = (
    Cause("A35", "the AMD GPU cannot be reached", _amd, _fix_amd),
    Cause(
        "A20",
        "JAX sees no NVIDIA card and passes over CUDA in silence",
        _no_node,
        _fix_no_node,
    ),
    Cause("A33", "in WSL the driver's library is not WSL's own", _wsl_library, FIX_WSL),
    Cause("A22", "CUDA_VISIBLE_DEVICES hides every card", _masked, FIX_MASKED),
    Cause("A27", "libcuda.so.1 is the toolkit's stub, not the driver", _stub, FIX_STUB),
    Cause(
        "A23",
        "the kernel module and libcuda.so.1 are of different drivers",
        _versions_differ,
        FIX_MISMATCH,
    ),
    Cause(
        "A29",
        "the driver is too old for the installed CUDA",
        _old_driver,
        fix_old_driver,
    ),
    Cause(
        "A21",
        "libcuda.so.1 may be missing",
        _no_library,
        FIX_LIBRARY,
        severity="warning",
    ),
    Cause(
        "A24",
        "a cuda-compat folder is in LD_LIBRARY_PATH",
        _compat,
        FIX_COMPAT,
        severity="warning",
    ),
    Cause(
        "A26",
        "the kernel module nvidia-uvm may not be loaded",
        _no_uvm,
        FIX_UVM,
        severity="warning",
    ),
)
