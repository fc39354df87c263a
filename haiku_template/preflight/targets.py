"""Targets: GPUs that are not here, for which programs are compiled ahead of time."""

import importlib.metadata
import os
import re
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from haiku_template.bounded import is_file
from haiku_template.devices import selection
from haiku_template.devices.manager import DeviceManager
from haiku_template.devices.transfer import Ledger
from haiku_template.errors import ConfigError, DeviceError, near

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
POOL = 0.75  # Of a card's memory, which JAX takes unless it is told otherwise.
# No card is here to time kernels on, and XLA's first guess is a slow one of its own.
FLAGS = "--xla_gpu_enable_triton_gemm=false"


class Card(NamedTuple):
    """Facts of a GPU, from its maker's data sheet and architecture paper."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    cores: int  # For float32, of each multiprocessor.
    gigabytes: int  # Decimal; the card itself reports up to 7 % more.
    bandwidth: int  # In 10**9 bytes a second.
    cache: int  # Second level, in 2**20 bytes.
    shared: int  # Memory of each multiprocessor, in 2**10 bytes.
    threads: int  # Resident on each multiprocessor.
    gigahertz: float


CARDS = {
    "t4": Card("T4", (7, 5), 40, 64, 16, 320, 4, 64, 1024, 1.59),
    "a100-40gb": Card("A100 SXM4 40GB", (8, 0), 108, 64, 40, 1555, 40, 164, 2048, 1.41),
    "a100": Card("A100 SXM4 80GB", (8, 0), 108, 64, 80, 2039, 40, 164, 2048, 1.41),
    "a10": Card("A10", (8, 6), 72, 128, 24, 600, 6, 100, 1536, 1.7),
    "rtx3090": Card("RTX 3090", (8, 6), 82, 128, 24, 936, 6, 100, 1536, 1.7),
    "l4": Card("L4", (8, 9), 58, 128, 24, 300, 48, 100, 1536, 2.04),
    "l40s": Card("L40S", (8, 9), 142, 128, 48, 864, 96, 100, 1536, 2.52),
    "rtx4090": Card("RTX 4090", (8, 9), 128, 128, 24, 1008, 72, 100, 1536, 2.52),
    "h100": Card("H100 SXM5 80GB", (9, 0), 132, 128, 80, 3352, 50, 228, 2048, 1.98),
    "h200": Card("H200 SXM5 141GB", (9, 0), 132, 128, 141, 4800, 50, 228, 2048, 1.98),
}


def target_devices(
    text: str, memory_fraction: float | None = None, gpu_memory: str | None = None
) -> DeviceManager:
    """Makes a manager of GPUs that are not here, for programs to be compiled alone.

    Args:
      text: a card of `CARDS`, or a file with one as XLA's GpuTargetConfigProto in text;
        and perhaps a number of them, as in `h100x8`.
      memory_fraction: share of a card's memory that the run may take; None for JAX's.
      gpu_memory: `unified:2.0`, for twice a card's memory, the host's beyond it.

    Raises:
      ConfigError: no such card or file, or not one of XLA's.
      DeviceError: JAX's CUDA plugin is not installed, or of another version; JAX has
        started on other flags; or the share is none.
    """
    is_one = text in CARDS or is_file(text)
    several = None if is_one else re.fullmatch(r"(.+)x(\d+)", text)
    name, number = (several[1], int(several[2])) if several else (text, 1)
    if name in CARDS:
        spec = _spec(CARDS[name])
    elif is_file(name):
        spec = Path(name).read_text(errors="replace")
    else:
        raise ConfigError(
            f"--target={text} is not known, nor is it a file; possible are "
            f"{', '.join(CARDS)}, or a file with XLA's GpuTargetConfigProto in text, "
            f"and a number of them, as in h100x8{near(text, CARDS)}"
        )
    size = re.search(r"device_memory_size:\s*(\d+)", spec)
    if size is None or number < 1:
        lacks = "device_memory_size: BYTES" if size is None else "one GPU or more"
        raise ConfigError(f"--target={text} is no target: {lacks} is needed")
    if memory_fraction is not None:
        selection.check_share(memory_fraction)
    unified = gpu_memory and selection.parse_memory(gpu_memory)
    _check_plugin()
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAGS not in flags:
        if selection.backend_started():
            raise DeviceError(
                f"--target={text} sets XLA_FLAGS={FLAGS}, and JAX has started and "
                f"would ignore it; {selection.TOO_LATE}, or set it in the environment"
            )
        os.environ["XLA_FLAGS"] = f"{flags} {FLAGS}".strip()
    jax.config.update("jax_platforms", "cpu")
    # What it writes for a target cannot be read back.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=spec, topology=f"1x1x{number}"
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"--target={text} is refused by XLA: {reason}") from error
    share = unified or memory_fraction or POOL
    memory = int(int(size[1]) * share)
    reason = f"--target={text}: compiled for, not here; {share:.0%} of a card's memory"
    devices = DeviceManager(tuple(topology.devices), reason, Ledger(), memory)
    return devices._replace(unified=unified)


def _spec(card: Card) -> str:
    """Facts of a card as XLA's GpuTargetConfigProto, in text."""
    major, minor = card.capability
    # Blackwell and Hopper have kernels for one generation alone.
    accelerated = " feature_extension: ACCELERATED_FEATURES" * (major >= 9)
    # A thread block may have all shared memory but what the driver keeps.
    shared, reserve = card.shared * 2**10, 0 if major == 7 else 2**10
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - reserve}
  threads_per_core_limit: {card.threads}
  core_count: {card.multiprocessors}
  fpus_per_core: {card.cores}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {card.bandwidth * 10**9}
  l2_cache_size: {card.cache * 2**20}
  clock_rate_ghz: {card.gigahertz}
  device_memory_size: {card.gigabytes * 10**9}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {card.name}"
"""


def _check_plugin() -> None:
    """Raises `DeviceError` unless a CUDA plugin of JAX's version, and cuDNN, are here.

    XLA would end the process for a plugin of another version.
    """
    versions = {d.name: d.version for d in importlib.metadata.distributions()}
    jaxlib = importlib.metadata.version("jaxlib")  # JAX's own leaves out its last part.
    plugin = next((name for name in PLUGINS if name in versions), None)
    package = plugin or PLUGINS[-1]
    cudnn = f"nvidia-cudnn-cu{package[8:10]}"
    # The extra has the wheels of CUDA 12: not those of 13 beside them.
    extra = '"haiku_template[target]"' if package == PLUGINS[-1] else cudnn
    install = f'pip install {extra} "{package}=={jaxlib}"'
    if plugin is None or cudnn not in versions:
        missing = "cuDNN" if plugin else "JAX's CUDA plugin"
        raise DeviceError(
            f"--target compiles with {missing}, which is not installed; no GPU and no "
            f"driver are needed, but 1.5 GB of disk: {install}"
        )
    if versions[plugin] != jaxlib:
        raise DeviceError(
            f"{plugin} is {versions[plugin]} and jaxlib is {jaxlib}; XLA aborts on "
            f"other versions: {install}"
        )
