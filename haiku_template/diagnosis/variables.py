"""Causes in the environment variables: pure strings, seen before anything starts."""

import difflib
import re
import shlex

from haiku_template.diagnosis import names
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.rows import Cause, Facts

ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")
GPU_NUMBERS = {
    "XLA_CLIENT_MEM_FRACTION": float,
    "XLA_PYTHON_CLIENT_MEM_FRACTION": float,
    "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": int,
    "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": int,
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": int,
}


def _flags_file(machine: Machine, facts: Facts) -> str | None:
    # XLA reads a value that does not begin with a dash as the name of a file.
    value = machine.environ.get("XLA_FLAGS", "").strip()
    if not value or value.startswith("-") or machine.path(value).is_file():
        return None
    return f"XLA_FLAGS={value} does not begin with -- and is not a file"


def _flags_words(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("XLA_FLAGS", "").strip()
    try:
        words = shlex.split(value) if value.startswith("-") else []
    except ValueError:
        return f"XLA_FLAGS={value} has an unclosed quotation mark"
    bare = [word for word in words if not word.startswith("-")]
    return f"XLA_FLAGS holds {bare[0]!r}, which XLA ignores" if bare else None


def _unreadable(machine: Machine, facts: Facts) -> str | None:
    for name, value in sorted(machine.environ.items()):
        if name in names.BOOLEANS and value.lower() not in names.TRUE | names.FALSE:
            return f"{name}={value!r} is not a truth value"
        for known, kind in ((names.INTEGERS, int), (names.FLOATS, float)):
            if name in known and not _reads(kind, value):
                word = "a whole number" if kind is int else "a number"
                return f"{name}={value!r} is not {word}"
    return None


def _reads(kind: type, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _both_fractions(machine: Machine, facts: Facts) -> str | None:
    new = machine.environ.get("XLA_CLIENT_MEM_FRACTION")
    old = machine.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not (new and old):
        return None
    return f"XLA_CLIENT_MEM_FRACTION={new} and XLA_PYTHON_CLIENT_MEM_FRACTION={old}"


def _gpu_value(machine: Machine, facts: Facts) -> str | None:
    allocator = machine.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    if allocator.lower() not in ALLOCATORS:
        possible = ", ".join(ALLOCATORS)
        return f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator!r}; possible are {possible}"
    for name, kind in GPU_NUMBERS.items():
        value = machine.environ.get(name, "")
        if value and not _reads(kind, value):
            return f"{name}={value!r} is not a number"
    return None


def _jax_visible_devices(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("JAX_CUDA_VISIBLE_DEVICES", "all")
    if value == "all" or all(_reads(int, part) for part in value.split(",")):
        return None
    return f"JAX_CUDA_VISIBLE_DEVICES={value}, and JAX's own variable takes numbers"


def _several_slices(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("CUDA_VISIBLE_DEVICES", "")
    slices = re.findall(r"\bMIG-", value)
    if len(slices) > 1:
        return f"CUDA_VISIBLE_DEVICES={value}: one process sees one MIG slice"
    return None


def _skipped_check(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    return f"JAX_SKIP_CUDA_CONSTRAINTS_CHECK={value}" if value else None


def _preallocate(machine: Machine, facts: Facts) -> str | None:
    value = machine.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    if value in ("true", "True", "1", "false", "False", "0", ""):
        return None
    return f"XLA_PYTHON_CLIENT_PREALLOCATE={value} counts as true"


def _misspelt(machine: Machine, facts: Facts) -> str | None:
    for name in sorted(machine.environ):
        if name in names.KNOWN or not name.startswith(("JAX_", "XLA_")):
            continue
        near = difflib.get_close_matches(name, names.KNOWN, n=1, cutoff=0.85)
        if near:
            return f"{name} is no variable of JAX; did you mean {near[0]}?"
    return None


ROWS = (
    Cause(
        "A51",
        "XLA_FLAGS holds a word without --",
        _flags_file,
        "write each flag as --name=value",
        asked="all",
    ),
    Cause(
        "A52",
        "a JAX variable has a value that JAX cannot read",
        _unreadable,
        "unset it, or give true or false (a number where one is needed)",
        asked="all",
    ),
    Cause(
        "A48",
        "the GPU memory fraction is set under both of its names",
        _both_fractions,
        "unset XLA_PYTHON_CLIENT_MEM_FRACTION",
    ),
    Cause(
        "A47",
        "a GPU memory variable has a value that JAX refuses",
        _gpu_value,
        "unset the variable, or give one of its possible values",
    ),
    Cause(
        "A34",
        "JAX's own list of visible devices names a device by a UUID",
        _jax_visible_devices,
        "unset JAX_CUDA_VISIBLE_DEVICES, and set CUDA_VISIBLE_DEVICES instead",
    ),
    Cause(
        "A34",
        "several MIG slices are asked for",
        _several_slices,
        "export CUDA_VISIBLE_DEVICES=MIG-..., one of them",
        severity="warning",
    ),
    Cause(
        "A57",
        "the check of CUDA's versions is switched off",
        _skipped_check,
        "unset JAX_SKIP_CUDA_CONSTRAINTS_CHECK",
        severity="warning",
    ),
    Cause(
        "A49",
        "preallocation stays on",
        _preallocate,
        "export XLA_PYTHON_CLIENT_PREALLOCATE=false",
        severity="warning",
    ),
    Cause(
        "A51",
        "a word in XLA_FLAGS is no flag",
        _flags_words,
        "write each flag as --name=value",
        severity="warning",
        asked="all",
    ),
    Cause(
        "A58",
        "a variable's name is misspelt, so that it does nothing",
        _misspelt,
        "export it under its right name",
        severity="warning",
        asked="all",
    ),
)
