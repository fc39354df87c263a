"""Device selection: parse the request, configure JAX before it starts, pick devices.

JAX reads platforms, device counts and memory options once, when its backend starts, and
ignores most later changes in silence. So `configure` sets them first, and refuses when
it is too late.
"""

import logging
import os
import re
from typing import NamedTuple

import jax
from jax.extend.backend import backends

from haiku_template.devices.checks import device_index
from haiku_template.doctor import GPU_NAMES, Machine, check_environment, diagnose
from haiku_template.errors import DeviceError

logger = logging.getLogger(__name__)

PLATFORMS = ("cpu", "gpu", "tpu")
SPEC = re.compile(r"(auto|cpu|gpu|tpu)(?::(\d+(?:,\d+)*))?")


class Request(NamedTuple):
    """Request for devices: a platform, indices among its devices, a count."""

    spec: str
    platform: str
    indices: tuple[int, ...] | None
    num_devices: int | None
    simulate_devices: int | None


def parse(
    spec: str, num_devices: int | None = None, simulate_devices: int | None = None
) -> Request:
    """Parses `auto`, `cpu`, `gpu`, `tpu`, `gpu:1` or `gpu:0,2`.

    Raises:
      DeviceError: the spec is not one of these, or contradicts the counts.
    """
    match = SPEC.fullmatch(spec)
    if not match or (match[1] == "auto" and match[2]):
        raise DeviceError(
            f"--device={spec} is not understood; possible are auto, cpu, gpu, tpu, and "
            "chosen devices such as gpu:1 or gpu:0,2"
        )
    platform = match[1]
    indices = tuple(int(i) for i in match[2].split(",")) if match[2] else None
    if indices and len(set(indices)) != len(indices):
        raise DeviceError(f"--device={spec} names a device twice; name each once")
    for flag, value in (
        ("num_devices", num_devices),
        ("simulate_devices", simulate_devices),
    ):
        if value is not None and value < 1:
            raise DeviceError(f"--{flag}={value} asks for no device; 1 is the least")
    if indices and num_devices not in (None, len(indices)):
        raise DeviceError(
            f"--device={spec} names {len(indices)} devices and "
            f"--num_devices={num_devices} asks for {num_devices}; give one of the two"
        )
    if simulate_devices and platform not in ("auto", "cpu"):
        raise DeviceError(
            f"--simulate_devices={simulate_devices} simulates CPU devices and "
            f"--device={spec} asks for others; give one of the two"
        )
    if simulate_devices:
        platform = "cpu"
    return Request(spec, platform, indices, num_devices, simulate_devices)


def check_memory_options(fraction: float | None, preallocate: bool | None) -> None:
    """Raises `DeviceError` for GPU memory options out of range, or given too late."""
    if fraction is not None and not 0 < fraction <= 1:
        raise DeviceError(
            f"--gpu_memory_fraction={fraction} is not a share of the card's memory; "
            "possible are numbers above 0 and up to 1"
        )
    if (fraction is not None or preallocate is not None) and backend_started():
        raise DeviceError(
            "gpu_memory_fraction and gpu_preallocate were given after JAX had "
            "started and would be ignored; create the DeviceManager before the "
            "first JAX operation"
        )


def backend_started() -> bool:
    """True if a JAX backend exists already, so that options come too late."""
    # JAX has no public question for this; this option is the one it refuses late.
    count = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", 1 if count != 1 else 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def configure(
    request: Request,
    *,
    gpu_memory_fraction: float | None = None,
    gpu_preallocate: bool | None = None,
) -> None:
    """Configures JAX before its backend starts: platforms, devices, GPU memory.

    Only the devices in use are made visible: JAX reserves memory on every GPU it sees.

    Raises:
      DeviceError: a GPU was asked for and none can be used; or a backend exists
        already, which ignores the platforms.
    """
    if backend_started():
        ignored = ignored_platforms()
        if request.platform == "auto" and ignored:
            raise DeviceError(f"--device=auto was asked for: {ignored}")
        return
    _configure_platforms(request)
    if request.simulate_devices:
        jax.config.update("jax_num_cpu_devices", request.simulate_devices)
    if gpu_memory_fraction is not None:
        # JAX refuses to start its GPU backend when the old name is set as well.
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(gpu_memory_fraction)
    if gpu_preallocate is not None:
        value = "true" if gpu_preallocate else "false"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = value


def _configure_platforms(request: Request) -> None:
    if request.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return
    _show_only_what_is_used(request)
    if request.platform == "gpu":
        _configure_gpu(request)
    elif request.platform == "tpu":
        jax.config.update("jax_platforms", "tpu,cpu")


def _configure_gpu(request: Request) -> None:
    machine = Machine.here()
    # From files and variables alone, in milliseconds; the driver is asked once JAX has
    # failed.
    found = [f for f in diagnose(machine) if f.severity == "error"]
    if found:
        raise DeviceError(
            f"--device={request.spec} was asked for and no GPU can be used: "
            f"{found[0]}; --fallback=cpu or --device=cpu runs on the CPU"
        )
    # The CPU stays available beside the GPU, for `DeviceManager.on_host`.
    jax.config.update("jax_platforms", "rocm,cpu" if machine.is_amd() else "cuda,cpu")


def _show_only_what_is_used(request: Request) -> None:
    """Makes other GPUs invisible to JAX, which reserves memory on each it sees.

    Indices and counts are among the devices that the user's own
    JAX_CUDA_VISIBLE_DEVICES leaves.
    """
    wanted = request.indices
    if wanted is None and request.num_devices:
        wanted = tuple(range(request.num_devices))
    for option in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
        if wanted is not None and jax.config.values.get(option) == "all":
            jax.config.update(option, ",".join(str(i) for i in sorted(wanted)))


def select(request: Request) -> tuple[list[jax.Device], str]:
    """Selects the requested devices, and says why in one sentence; starts JAX.

    Raises:
      DeviceError: the platform or one of the devices does not exist; the message names
        what there is.
    """
    platform = None if request.platform == "auto" else request.platform
    try:
        devices = jax.local_devices(backend=platform)
    except (RuntimeError, AssertionError) as error:
        # A bare AssertionError is JAX's answer to JAX_PLATFORMS=cuda without a card.
        words = str(error).strip().split("\n")[0] or "no backend could be started"
        ignored = backend_started() and ignored_platforms()
        if ignored or request.platform != "tpu":
            words = f"{words}; {ignored or why_no_gpu()}"
        raise DeviceError(
            f"--device={request.spec} was asked for and JAX cannot provide it: {words}"
        ) from error
    if request.simulate_devices and len(devices) < request.simulate_devices:
        raise DeviceError(
            f"{request.simulate_devices} simulated devices were asked for after JAX "
            f"had started with {len(devices)}; create the DeviceManager before the "
            "first JAX operation"
        )
    chosen = _pick(request, devices)
    return chosen, _reason(request, chosen, len(devices))


def _pick(request: Request, devices: list[jax.Device]) -> list[jax.Device]:
    """Picks the requested devices, in the order asked."""
    platform = devices[0].platform
    by_index = {device_index(device): device for device in devices}
    names = ", ".join(f"{platform}:{index}" for index in by_index)
    there = f"there are {len(devices)}: {names}"
    if request.indices is not None:
        missing = [index for index in request.indices if index not in by_index]
        if missing:
            there += _simulated(platform, max(request.indices) + 1)
            raise DeviceError(
                f"--device={request.spec} names {platform}:{missing[0]}, and {there}"
            )
        return [by_index[index] for index in request.indices]
    count = request.num_devices or request.simulate_devices or len(devices)
    if count > len(devices):
        there += _simulated(platform, count)
        raise DeviceError(
            f"--num_devices={count} was asked for on {platform}, and {there}"
        )
    return devices[:count]


def _simulated(platform: str, count: int) -> str:
    if platform != "cpu":
        return ""
    return f"; --simulate_devices={count} makes the CPU appear as so many"


def _reason(request: Request, chosen: list[jax.Device], available: int) -> str:
    platform = chosen[0].platform
    if request.simulate_devices:
        return f"--simulate_devices={request.simulate_devices}: the CPU as several"
    share = f"{len(chosen)} of {available}" if len(chosen) < available else "all"
    if request.platform != "auto":
        return f"--device={request.spec}, {share} of this process's {platform} devices"
    if platform != "cpu":
        return f"--device=auto, and JAX found {platform} ({share} of them used)"
    variable = os.environ.get("JAX_PLATFORMS", "")
    unused = unused_card()
    if variable.split(",")[0].strip() == "cpu":
        return f"--device=auto, and JAX_PLATFORMS={variable} chooses the CPU"
    if only_cpu():
        return "--device=auto, and jax_platforms='cpu' was chosen in this process"
    if unused:
        return f"--device=auto, and this machine's GPU is not used: {unused}"
    fell = f", so that JAX_PLATFORMS={variable} falls back" if variable else ""
    return f"--device=auto, and no accelerator was found{fell}"


def available() -> dict[str, list[jax.Device]]:
    """Devices of each backend that JAX has here, the preferred backend first.

    `jax.devices()` shows those of one backend alone. Starts JAX and never raises: where
    JAX cannot start, it logs a warning and returns nothing.
    """
    try:
        preferred = jax.default_backend()
        found = {name: backend.local_devices() for name, backend in backends().items()}
    except (RuntimeError, AssertionError) as error:
        words = str(error).strip().split("\n")[0] or "no backend could be started"
        logger.warning("JAX cannot start: %s", words)
        return {}
    # One backend may have several names: `cuda` is `gpu` to everything else.
    named = {devices[0].platform: devices for devices in found.values() if devices}
    return dict(sorted(named.items(), key=lambda item: item[0] != preferred))


logger = logging.getLogger(__name__)


def why_no_gpu() -> str:
    """Diagnoses why JAX has no GPU here: cause and remedy, in one sentence.

    Asks the driver, in a child process, where there is a card.
    """
    for finding in check_environment("gpu"):
        if finding.severity == "error":
            return str(finding)
    if only_cpu():
        return (
            "this process had chosen jax_platforms='cpu', as DeviceManager.create"
            "('cpu') does, and JAX keeps the platforms that it started with; create "
            "the DeviceManager for the GPU first, or start another process"
        )
    return (
        "nothing is wrong outside JAX, whose own words are above; "
        "python -m haiku_template.doctor --device=gpu looks further"
    )


def only_cpu() -> bool:
    """True if JAX was told to start the CPU and nothing else."""
    return jax.config.jax_platforms == "cpu"


def unused_card() -> str:
    """Warns that a run is on the CPU beside a GPU; returns why, or ""."""
    if not Machine.here().has_card():
        return ""
    why = why_no_gpu()
    logger.warning("THIS MACHINE'S GPU IS NOT USED; THE RUN IS ON THE CPU: %s", why)
    return why


def check_default_device() -> None:
    """Raises `DeviceError` if the program overwrote `jax.default_device` (A53)."""
    if not callable(jax.default_device):
        raise DeviceError(
            f"[A53] jax.default_device was overwritten with {jax.default_device!r}, "
            "which changes no device and breaks JAX; write `with "
            "jax.default_device(device):`, or leave it out: DeviceManager places arrays"
        )


def ignored_platforms() -> str:
    """Describes a change of `jax_platforms` that came too late (A46); "" for none.

    JAX must have started. It keeps the platforms that it started with, in silence.
    """
    wanted = jax.config.jax_platforms
    words = ["gpu" if word in GPU_NAMES else word for word in (wanted or "").split(",")]
    used = jax.default_backend()
    if not wanted or words[0] == used:
        return ""
    # Without a card JAX passes over CUDA in silence: then it may have come in time.
    if words[0] == "gpu" and used in words and not Machine.here().has_card():
        return ""
    return (
        f"[A46] jax_platforms was changed to {wanted!r} after JAX had started on "
        f"{', '.join(backends())}, and JAX ignores that; change it, or create the "
        "DeviceManager, before the first JAX operation"
    )
