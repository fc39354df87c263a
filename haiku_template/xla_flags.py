"""The flag of XLA that right numbers on CPUs need, set when the package is imported.

XLA's CPU compiler gives sums to YNNPACK, which gets some of them wrong in silence: the
last row of many or a crash in jaxlib 0.10.2, NaN in 0.12. XLA reads its flags when a
backend of JAX starts, and children inherit them. It ends a process for a flag that it
does not know: each library that reads them is searched for the name first, which takes
milliseconds. Why: docs/decisions/dependencies.md#wrong-sums
"""

import importlib.util
import logging
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

OPTION = "--xla_cpu_experimental_ynn_fusion_type"
FLAG = f"{OPTION}=-reduce"
LIBRARIES = {"jaxlib": "*jax_common*", "jax_plugins": "*/*.so", "libtpu": "libtpu.so"}


def set_flag() -> None:
    """Adds the flag to XLA_FLAGS, unless these name the option or XLA lacks it."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # Then it is the name of a file with them.
        try:
            flags = Path(flags).read_text(errors="replace")
        except OSError:
            return  # The doctor reports it.
    libraries = list(_libraries())
    if OPTION in flags or not libraries or not all(map(_knows, libraries)):
        return
    if backend_started():
        return _warn(flags)
    os.environ["XLA_FLAGS"] = f"{FLAG} {flags}".strip()


def backend_started() -> bool:
    """True if a JAX backend exists already, so that options come too late."""
    # Why: docs/decisions/devices.md#backend-started
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _warn(flags: str) -> None:
    flags = f"{FLAG} {flags}".strip()
    logging.getLogger(__name__).warning(
        "JAX started before haiku_template was imported, and sums on CPUs may be "
        "wrong; import haiku_template before the first JAX operation, or write "
        f'export XLA_FLAGS="{flags}"'
    )


def _libraries() -> Iterator[Path]:
    """Yields the libraries that may parse XLA_FLAGS: of jaxlib, plugins and TPUs."""
    for package, pattern in LIBRARIES.items():
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            yield from Path(folder).glob(pattern)
    if path := os.environ.get("TPU_LIBRARY_PATH"):
        yield Path(path)


def known(*options: str) -> list[str]:
    """Lists those of the options that XLA's libraries here have."""
    libraries = list(_libraries())
    return [x for x in options if all(_knows(path, x) for path in libraries)]


def _knows(library: Path, name: str = OPTION) -> bool:
    """True if a library has the option, or does not read XLA_FLAGS."""
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            option = f"{name.removeprefix('--')}\0".encode()
            return text.find(option) >= 0 or text.find(b"XLA_FLAGS\0") < 0
    except (OSError, ValueError):  # It cannot be read, or is empty.
        return False
