"""Processes of one run, joined by JAX's distributed runtime."""

import contextlib
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from operator import index
from typing import Any, NamedTuple

import jax
import numpy as np

from haiku_template.bounded import parse
from haiku_template.errors import ConfigError, DeviceError

# Variables beside JAX's options that change what a program computes.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
# Options in which processes may differ: what is written where, and seen of it.
OWN = re.compile(
    "cache|captured|dump|log|traceback|tracer|debug|pprint|profil|pgle|address|visible|"
    "mtls|timeout|source|guard|default_device|explain|garbage|platform|num_cpu"
)
_SINCE: dict[int, float] = {}  # When each thread that waits began to.


@contextlib.contextmanager
def waiting() -> Iterator[None]:  # Why: docs/decisions/cluster.md#all-devices
    """Context in which this thread may wait for other processes; `waited` times it."""
    thread = threading.get_ident()
    is_outermost = thread not in _SINCE
    _SINCE.setdefault(thread, time.monotonic())
    try:
        yield
    finally:
        if is_outermost:
            _SINCE.pop(thread, None)


def waited() -> float:
    """Seconds for which this process has waited for all others; 0 if it does not."""
    since = min(_SINCE.copy().values(), default=None)
    return 0.0 if since is None else time.monotonic() - since


class Processes(NamedTuple):
    """Place of this process among those of a run, and the devices of all of them."""

    index: int = 0
    count: int = 1
    devices: tuple[jax.Device, ...] = ()  # In the order of processes; () for one.

    @property
    def name(self) -> str:
        """Place of this process in words; "" for the only one."""
        return f" in process {self.index} of {self.count}" if self.count > 1 else ""

    def waiting(self) -> contextlib.AbstractContextManager:
        """Context in which this process may wait for all others; `waited` times it."""
        return waiting() if self.count > 1 else contextlib.nullcontext()

    def first(self, value: Any) -> Any:
        """Value of process 0, in each of them."""
        return value if self.count == 1 else gather(value)[0]

    def least(self, value: int | None) -> int | None:
        """Smallest value of all processes; None where none has one."""
        return min((x for x in gather(value) if x is not None), default=None)

    def agree(
        self,
        facts: dict[str, Any],
        error: type[Exception] = ConfigError,
        advice: str = "start all with the same command, code and files",
    ) -> None:
        """Raises `error` unless facts, of JSON, are the same in all processes."""
        if self.count > 1:  # Why: docs/decisions/cluster.md#comparison
            _check_same(gather(facts), error, advice)


def _check_same(
    all_facts: list[dict[str, Any]], error: type[Exception], advice: str
) -> None:
    for i, facts in enumerate(all_facts):
        for name in all_facts[0] | facts:
            value = all_facts[0].get(name)
            # NaN is not equal to itself.
            if facts.get(name) != value and repr(facts.get(name)) != repr(value):
                raise error(
                    f"the processes of a run differ in {name}: {value} in process "
                    f"0 and {facts.get(name)} in process {i}; {advice}"
                )


def of(devices: list[jax.Device]) -> Processes:
    """Asks all processes for their devices; `DeviceError` unless they are alike."""
    return Processes() if jax.process_count() == 1 else _joined(devices)


def _joined(devices: list[jax.Device]) -> Processes:
    by_id = {d.id: d for d in jax.devices(devices[0].platform)}
    # Known to each before any of them can compute with the others.
    _check_alike(Counter(d.process_index for d in by_id.values()))
    this = Processes(jax.process_index(), jax.process_count())
    this.agree(options(), advice="start all with the same environment and flags")
    ids = gather([d.id for d in devices])
    _check_alike(dict(enumerate(map(len, ids))))
    everyone = tuple(by_id[number] for numbers in ids for number in numbers)
    return this._replace(devices=everyone)


def options() -> dict[str, str]:
    """Options of JAX, and variables of XLA, that all processes must share."""
    values = {k: str(x) for k, x in jax.config.values.items() if not OWN.search(k)}
    for name in VARIABLES:
        flags = os.environ.get(name, "").split()
        values[name] = " ".join(sorted(x for x in flags if not OWN.search(x)))
    return values


def _check_alike(counts: dict[int, int]) -> None:
    sizes = [counts.get(i, 0) for i in range(jax.process_count())]
    if len(set(sizes)) > 1:
        clauses = [f"{size} in process {i}" for i, size in enumerate(sizes)]
        raise DeviceError(
            f"the devices of a run are {', '.join(clauses)}; each process needs as "
            "many, of one platform: give all the same --device, --num_devices and "
            "--simulate_devices"
        )


def gather(value: Any) -> list[Any]:
    """Gathers a value that JSON can hold from all processes, in their order."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value, default=index).encode(), np.uint8)
    with jax.transfer_guard("allow"), waiting():
        # Not an int64, which others may not have.
        sizes = multihost_utils.process_allgather(np.array(len(data), np.int32))
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: len(data)] = data
        rows = multihost_utils.process_allgather(padded)
    return [parse(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
