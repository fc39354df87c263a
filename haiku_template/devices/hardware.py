"""What the machine says about accelerators, read from files: no JAX, no driver."""

import importlib.metadata
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

# The device nodes that JAX itself looks for before it tries the CUDA backend.
NVIDIA_NODES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg")
CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def nvidia_nodes(root: Path = Path("/")) -> list[str]:
    """The NVIDIA device nodes under `root`, as absolute names."""
    return ["/" + node for node in NVIDIA_NODES if (root / node).exists()]


def nvidia_on_pci(root: Path = Path("/")) -> bool:
    """Whether the PCI bus lists an NVIDIA display or 3D controller."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith(("0x0300", "0x0302")):
            return True
    return False


def cuda_plugins() -> list[str]:
    """The installed CUDA plugins of JAX, with their versions."""
    found = []
    for name in CUDA_PLUGINS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def why_no_gpu(root: Path = Path("/")) -> str:
    """One sentence: the first broken link between this machine and a CUDA device."""
    nodes = nvidia_nodes(root)
    if not nodes and nvidia_on_pci(root):
        return (
            "the PCI bus lists an NVIDIA card but there is no /dev/nvidia0: the driver "
            "is not loaded, or this container was started without the card "
            "(docker run --gpus all)"
        )
    if not nodes:
        return (
            "this machine shows no NVIDIA card (no /dev/nvidia0, /dev/nvidiactl or "
            "/dev/dxg)"
        )
    if not cuda_plugins():
        return (
            f"there is an NVIDIA card ({nodes[0]}) but JAX is installed without CUDA: "
            'pip install "haiku_template[cuda13]" (driver 580 or newer) or '
            '"haiku_template[cuda12]" (driver 525 or newer)'
        )
    return (
        f"there is an NVIDIA card ({nodes[0]}) and {', '.join(cuda_plugins())}, but "
        "JAX could not start it; its own words are above"
    )


def warn_of_unused_card() -> None:
    """Logs, loudly, that a run is on the CPU beside an NVIDIA card."""
    if nvidia_nodes() or nvidia_on_pci():
        logger.warning(
            "THIS MACHINE'S NVIDIA CARD IS NOT USED; THE RUN IS ON THE CPU: %s",
            why_no_gpu(),
        )
