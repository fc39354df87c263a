"""Causes in JAX_PLATFORMS and its kin: which platforms JAX is allowed to start."""

import re

from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.rows import (
    GPU_NAMES,
    Cause,
    Facts,
    has_card,
    has_cuda,
    platforms,
)

BUILT_IN = ("cpu", "tpu", "cuda", "gpu", "proxy", "interpreter")


def _spaces(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("JAX_PLATFORMS", "")
    words = value.split(",") if value else []
    wrong = [word for word in words if word != word.strip() or not word]
    return f"JAX_PLATFORMS={value!r} holds the name {wrong[0]!r}" if wrong else None


def _unknown_platform(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("JAX_PLATFORMS", "")
    if "gpu" in platforms(machine):
        return (
            f"JAX_PLATFORMS={value}: 'gpu' stands for cuda, rocm and oneapi together, "
            "and JAX fails on the first of them that is not installed"
        )
    for word in filter(None, platforms(machine)):
        # A plugin package of another maker bears the name of its platform.
        plugins = [n for n in machine.distributions if re.search("jax|xla|pjrt", n)]
        plugged = any(word in name for name in plugins)
        plugged = plugged or (word == "METAL" and "jax-metal" in plugins)
        if word not in BUILT_IN and not plugged:
            return f"JAX_PLATFORMS={value}: no backend {word!r} is installed"
    return None


def _fix_platforms(machine: Machine) -> str:
    """Without a card `cuda,cpu` would be the next cause."""
    if machine.nodes():
        return "export JAX_PLATFORMS=cuda,cpu, or unset it"
    return "unset JAX_PLATFORMS, and see that this machine shows its GPU"


def _fix_spaces(machine: Machine) -> str:
    words = [word for word in platforms(machine) if word]
    if words == ["cuda"]:
        return _fix_platforms(machine)
    return f"export JAX_PLATFORMS={','.join(words)}"


def _platform_name(machine: Machine, facts: Facts) -> str | None:
    name = machine.environ.get("JAX_PLATFORM_NAME", "").lower()
    if not name or name == facts.asked or (name in GPU_NAMES and facts.asked == "gpu"):
        return None
    if facts.asked == "auto" and (name == "cpu" or has_card(machine)):
        return None
    return f"JAX_PLATFORM_NAME={name} sends arrays there, not to the {facts.asked}"


def _cpu_first(machine: Machine, facts: Facts) -> str | None:
    words = platforms(machine)
    if not words or words[0] in GPU_NAMES or words[0] not in BUILT_IN:
        return None
    if hides_the_hint(machine):
        return None
    value = machine.environ["JAX_PLATFORMS"]
    return f"JAX_PLATFORMS={value} puts {words[0]} first, and JAX uses the first"


def hides_the_hint(machine: Machine) -> bool:
    """Whether JAX_PLATFORMS=cpu hides that JAX was installed without CUDA (A02)."""
    return (
        platforms(machine) == ["cpu"]
        and bool(machine.nodes())
        and not has_cuda(machine)
    )


def _only_cuda(machine: Machine, facts: Facts) -> str | None:
    if platforms(machine) == ["cuda"] and not machine.nodes():
        return (
            "JAX_PLATFORMS=cuda allows CUDA alone, and this machine shows no NVIDIA "
            "card (no /dev/nvidia0, /dev/nvidiactl or /dev/dxg)"
        )
    return None


def _cuda_then_cpu(machine: Machine, facts: Facts) -> str | None:
    words = platforms(machine)
    if len(words) > 1 and words[0] == "cuda" and not machine.nodes():
        return (
            f"JAX_PLATFORMS={machine.environ['JAX_PLATFORMS']} falls back to "
            f"{words[1]}, because this machine shows no NVIDIA card (no /dev/nvidia0, "
            "/dev/nvidiactl or /dev/dxg)"
        )
    return None


def _no_libtpu(machine: Machine, facts: Facts) -> str | None:
    wanted = facts.asked == "tpu" or "tpu" in platforms(machine)
    there = {"libtpu", "libtpu-nightly"} & set(machine.distributions)
    if not wanted or there or machine.environ.get("TPU_LIBRARY_PATH"):
        return None
    return "the package libtpu is not installed"


ROWS = (
    Cause(
        "A44",
        "JAX_PLATFORMS holds a space or an empty name",
        _spaces,
        _fix_spaces,
        asked="default",
    ),
    Cause(
        "A41",
        "JAX_PLATFORMS names a backend that JAX does not have",
        _unknown_platform,
        _fix_platforms,
        asked="default",
    ),
    Cause(
        "A45",
        "JAX_PLATFORM_NAME, deprecated, names another platform",
        _platform_name,
        "unset JAX_PLATFORM_NAME",
        asked="all",
    ),
    Cause(
        "A43",
        "JAX_PLATFORMS puts another platform before the GPU",
        _cpu_first,
        _fix_platforms,
    ),
    Cause(
        "A40",
        "JAX_PLATFORMS=cuda on a machine that shows no NVIDIA card",
        _only_cuda,
        "give this machine or container its card (docker run --gpus "
        "all ...), or unset JAX_PLATFORMS and ask for --device=cpu",
        asked="default",
    ),
    Cause(
        "A42",
        "JAX_PLATFORMS allows another platform, and there is no card",
        _cuda_then_cpu,
        "give this machine or container its card (docker run "
        "--gpus all ...), or ask for --device=cpu",
    ),
    Cause(
        "A56",
        "a TPU is asked for and libtpu is not installed",
        _no_libtpu,
        'pip install -U "jax[tpu]"',
        asked="default",
    ),
)
