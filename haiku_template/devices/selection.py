"""Device selection: parse the request, configure JAX before it starts, pick devices.

JAX reads platforms, device counts and memory options once, when its backend starts, and
ignores most later changes in silence. So they are set first, or refused as too late.
"""

import logging
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.backend import backends

from haiku_template.devices.checks import device_index
from haiku_template.errors import MEANT, DeviceError, counted
from haiku_template.xla_flags import backend_started
from jax_doctor import GPU_NAMES, Machine, check_environment, children, diagnose

logger = logging.getLogger(__name__)

# A platform, and chosen devices of it.
SPEC = re.compile(r"auto|(cpu|gpu|tpu)(?::(\d+(?:,\d+)*))?")
MOST_UNIFIED = 100
TOO_LATE = "create the DeviceManager before the first JAX operation"


class Request(NamedTuple):
    """Request for devices of a platform, by indices or counts, and for their memory."""

    spec: str
    platform: str | None  # None for JAX's first: `auto`.
    indices: tuple[int, ...]
    num_devices: int | None = None
    simulate_devices: int | None = None
    memory_fraction: float | None = None
    preallocate: bool | None = None
    unified: float | None = None  # Times a card's memory, the host's beyond it.


def choose(request: Request, fallback: str) -> tuple[list[jax.Device], str]:
    """Starts JAX on the devices of a request, unless it has started; says why these."""
    if fallback not in ("error", "cpu"):
        raise DeviceError(f"--fallback={fallback}; possible are error and cpu")
    try:
        return _start(request)
    except DeviceError as error:
        if fallback != "cpu" or request.platform == "cpu":
            raise
        logger.warning("RUNNING ON THE CPU, as --fallback=cpu allows: %s", error)
        return _start(parse("cpu"))[0], f"--fallback=cpu, because {error}"


def check_share(memory_fraction: float) -> None:
    """Raises `DeviceError` for a share of memory outside (0, 1]."""
    if not 0 < memory_fraction <= 1:
        raise DeviceError(
            f"--gpu_memory_fraction={memory_fraction} is not a share of the card's "
            "memory; possible are numbers above 0 and up to 1"
        )


def parse_memory(text: str) -> float:
    """Parses `unified:2.0`, managed memory of so many times a card's."""
    match = re.fullmatch(r"unified:(\d+(?:\.\d+)?)", text)
    if not match or not 1 < float(match[1]) < MOST_UNIFIED:
        raise DeviceError(
            f"--gpu_memory={text} is not understood; possible is unified:2.0, twice "
            "the memory of a card, the host's beyond it; the number is above 1 and "
            f"below {MOST_UNIFIED}. A share of the card is --gpu_memory_fraction=0.5"
        )
    return float(match[1])


# Sentences about requests that are refused, each with its condition.
FAULTS: dict[str, Callable[[Request], Any]] = {
    "--device={spec} names a device twice; name each once": (
        lambda r: len(set(r.indices)) < len(r.indices)
    ),
    "--num_devices={num_devices} asks for no device; 1 is the least": (
        lambda r: r.num_devices is not None and r.num_devices < 1
    ),
    "--simulate_devices={simulate_devices} asks for no device; 1 is the least": (
        lambda r: r.simulate_devices is not None and r.simulate_devices < 1
    ),
    "--device={spec} names {count} and --num_devices={num_devices} asks for "
    "{num_devices}; give one of the two": (
        lambda r: r.indices and r.num_devices not in (None, len(r.indices))
    ),
    "--simulate_devices={simulate_devices} simulates CPU devices and --device={spec} "
    "asks for others; give one of the two": (
        lambda r: r.simulate_devices and r.platform not in (None, "cpu")
    ),
    "--gpu_memory=unified:{unified} and --gpu_memory_fraction={memory_fraction} both "
    "say how much memory; give one of the two": lambda r: (
        r.unified and r.memory_fraction
    ),
    "gpu_memory, gpu_memory_fraction and gpu_preallocate were given after JAX had "
    f"started and would be ignored; {TOO_LATE}": (
        lambda r: r[-3:] != (None, None, None) and backend_started()
    ),
    "[A53] jax.default_device was overwritten with {default!r}, which changes no "
    "device and breaks JAX; write `with jax.default_device(device):`, or leave it "
    "out: DeviceManager places arrays": lambda _: not callable(jax.default_device),
}


def _unknown(spec: str) -> DeviceError:
    """Says what may be meant, for words of others: `cuda:0` is `gpu:0`."""
    guess = re.sub("cuda|nvidia|rocm|mps", "gpu", spec.lower().strip())
    guess = f"gpu:{guess}" if re.fullmatch(r"[\d,]+", guess) else guess
    meant = MEANT.format(f"--device={guess}") if SPEC.fullmatch(guess) else ""
    return DeviceError(
        f"--device={spec} is not understood{meant}; possible are auto, cpu, gpu, tpu, "
        "and chosen devices such as gpu:1 or gpu:0,2"
    )


def parse(spec: str, memory: str | None = None, **options: Any) -> Request:
    """Parses `auto`, `cpu`, `gpu`, `tpu`, `gpu:1` or `gpu:0,2`; checks the options.

    These are fields of a request, and a `memory` for `parse_memory`.
    """
    if not (match := SPEC.fullmatch(spec)):
        raise _unknown(spec)
    indices = tuple(map(int, match[2].split(","))) if match[2] else ()
    unified = memory and parse_memory(memory)
    request = Request(spec, match[1], indices, **options, unified=unified)
    if request.memory_fraction is not None:
        check_share(request.memory_fraction)
    for sentence, is_faulty in FAULTS.items():
        if is_faulty(request):
            raise _refused(request, sentence)
    return request._replace(platform="cpu") if request.simulate_devices else request


def _refused(request: Request, sentence: str) -> DeviceError:
    count, default = counted(len(request.indices), "devices"), jax.default_device
    values = {"count": count, "default": default} | request._asdict()
    return DeviceError(sentence.format_map(values))


def _configure(request: Request) -> None:
    if request.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        _configure_accelerators(request)
    if request.simulate_devices:
        jax.config.update("jax_num_cpu_devices", request.simulate_devices)
    if request[-3:] != (None, None, None):
        _configure_memory(request)


def _configure_memory(request: Request) -> None:
    if request.unified:  # Of the allocators BFC alone has it.
        os.environ["TF_FORCE_UNIFIED_MEMORY"] = "1"
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "bfc"
    if (share := request.unified or request.memory_fraction) is not None:
        # JAX refuses to start its GPU backend when the old name is set as well.
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(share)
    if request.preallocate is not None:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(request.preallocate).lower()


def _configure_accelerators(request: Request) -> None:
    # The CPU stays available beside the others, for `DeviceManager.on_host`.
    if request.platform == "tpu":
        jax.config.update("jax_platforms", "tpu,cpu")
    if request.platform == "gpu":
        machine = Machine.here()
        # From files and variables alone, in milliseconds; the driver is asked once JAX
        # has failed.
        for finding in diagnose(machine):
            if finding.severity == "error":
                raise DeviceError(
                    f"--device={request.spec} was asked for and no GPU can be used: "
                    f"{finding}; --fallback=cpu or --device=cpu runs on the CPU"
                )
        platforms = "rocm,cpu" if machine.is_amd() else "cuda,cpu"
        jax.config.update("jax_platforms", platforms)
    indices = sorted(request.indices or range(request.num_devices or 0))
    # JAX reserves memory on every GPU it sees. Indices and counts are among the devices
    # that the user's own JAX_CUDA_VISIBLE_DEVICES leaves.
    # Why: docs/decisions/devices.md#visible-devices
    for option in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
        if indices and jax.config.values.get(option) == "all":
            jax.config.update(option, ",".join(map(str, indices)))


def _start(request: Request) -> tuple[list[jax.Device], str]:
    if not backend_started():
        _configure(request)
    elif request.platform is None and (late_change := ignored_platforms()):
        raise DeviceError(f"--device=auto was asked for: {late_change}")
    try:
        devices = jax.local_devices(backend=request.platform)
    except (RuntimeError, AssertionError) as error:
        raise _unavailable(request, error) from error
    if (simulated := request.simulate_devices) and len(devices) < simulated:
        raise _too_few(simulated, len(devices))
    by_index = {device_index(device): device for device in devices}
    count = request.num_devices or simulated or len(devices)
    if not by_index.keys() >= set(request.indices) or count > len(devices):
        raise _absent(request, [f"{devices[0].platform}:{index}" for index in by_index])
    picks = [by_index[index] for index in request.indices] or devices[:count]
    share = f"{len(picks)} of {len(devices)}" if len(picks) < len(devices) else "all"
    if simulated:
        reason = f"--simulate_devices={simulated}: the CPU as several"
    elif request.platform is not None:
        of_process = f"{share} of this process's {request.platform} devices"
        reason = f"--device={request.spec}, {of_process}"
    else:
        reason = f"--device=auto, and {_reason_for_auto(picks[0].platform, share)}"
    return picks, reason


def _too_few(simulated: int, count: int) -> DeviceError:
    return DeviceError(
        f"--simulate_devices={simulated} came after JAX had started with "
        f"{counted(count, 'devices')}; {TOO_LATE}"
    )


def _unavailable(request: Request, error: Exception) -> DeviceError:
    # JAX is told to see the chosen cards alone; with none of them it has no word of
    # the others, which the NVIDIA driver counts.
    visible = jax.config.values.get("jax_cuda_visible_devices")
    if request.indices and visible == ",".join(map(str, sorted(request.indices))):
        count = children.probe_driver(children.CHILD_SECONDS, os.environ).count
        if count and min(request.indices) >= count:
            return _absent(request, [f"gpu:{index}" for index in range(count)])
    reason = _first_line(error)
    late_change = backend_started() and ignored_platforms()
    if late_change or request.platform in ("gpu", None):
        reason = f"{reason}; {late_change or why_no_gpu()}"
    return DeviceError(
        f"--device={request.spec} was asked for and JAX cannot provide it: {reason}"
    )


def _first_line(error: Exception) -> str:
    # A bare AssertionError is JAX's answer to JAX_PLATFORMS=cuda without a card.
    return str(error).strip().split("\n")[0] or "no backend could be started"


def _absent(request: Request, names: list[str]) -> DeviceError:
    """Devices that were asked for, next to those that there are."""
    platform, count = names[0].split(":")[0], request.num_devices
    clause = f"--num_devices={count} was asked for on {platform}"
    requested = [f"{platform}:{index}" for index in request.indices]
    if missing := [name for name in requested if name not in names]:
        clause = f"--device={request.spec} names {missing[0]}"
        count = max(request.indices) + 1
    hint = f"; --simulate_devices={count} makes the CPU appear as so many"
    return DeviceError(
        f"{clause}, and there are {len(names)}: {', '.join(names)}"
        f"{hint * (platform == 'cpu')}"
    )


def _reason_for_auto(platform: str, share: str) -> str:
    if platform != "cpu":
        return f"JAX found {platform} ({share} of them used)"
    variable = os.environ.get("JAX_PLATFORMS", "")
    if no_gpu := why_no_gpu() if Machine(os.environ).has_card() else "":
        logger.warning(
            f"THIS MACHINE'S GPU IS NOT USED; THE RUN IS ON THE CPU: {no_gpu}"
        )
    if variable.split(",")[0].strip() == "cpu":
        return f"JAX_PLATFORMS={variable} chooses the CPU"
    if only_cpu():
        return "jax_platforms='cpu' was chosen in this process"
    if no_gpu:
        return f"this machine's GPU is not used: {no_gpu}"
    clause = f", so that JAX_PLATFORMS={variable} falls back" if variable else ""
    return f"no accelerator was found{clause}"


def available() -> dict[str, list[jax.Device]]:
    """Devices of each backend that JAX has here, the preferred backend first.

    `jax.devices()` shows those of one backend alone. Starts JAX and never raises: where
    JAX cannot start, it logs a warning and returns nothing.
    """
    try:
        preferred = jax.default_backend()
        groups = [backend.local_devices() for backend in backends().values()]
    except (RuntimeError, AssertionError) as error:
        logger.warning("JAX cannot start: %s", _first_line(error))
        return {}
    # One backend may have several names: `cuda` is `gpu` to everything else.
    by_platform = {devices[0].platform: devices for devices in groups if devices}
    return dict(sorted(by_platform.items(), key=lambda item: item[0] != preferred))


def why_no_gpu() -> str:
    """Cause and remedy of JAX's having no GPU; asks the driver in a child process."""
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


def ignored_platforms() -> str:
    """Describes a change of `jax_platforms` that came too late (A46); "" for none.

    JAX must have started. It keeps the platforms that it started with, in silence.
    """
    setting = jax.config.jax_platforms
    platforms = ["gpu" if x in GPU_NAMES else x for x in (setting or "").split(",")]
    backend = jax.default_backend()
    if not setting or platforms[0] == backend:
        return ""
    # Without a card JAX passes over CUDA in silence: then it may have come in time.
    was_passed_over = platforms[0] == "gpu" and backend in platforms
    if was_passed_over and not Machine(os.environ).has_card():
        return ""
    return (
        f"[A46] jax_platforms was changed to {setting!r} after JAX had started on "
        f"{', '.join(backends())}, and JAX ignores that; change it, or create the "
        "DeviceManager, before the first JAX operation"
    )
