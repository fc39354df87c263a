"""Report of a run whose device had no memory left: what was there, and what would fit.

Entered after XLA's error alone, which the budget before step 0 did not foresee.
"""

import gc
import traceback
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from haiku_template.data.dataset import host_memory
from haiku_template.devices.layout import device_bytes
from haiku_template.devices.packing import Packed
from haiku_template.errors import MemoryFullError, counted
from haiku_template.params import leaves_by_path
from haiku_template.preflight import memory_budget, settle
from haiku_template.preflight.fit import candidates, closest_of, unified
from haiku_template.reporting.display import in_units, table
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer

LARGEST = 8  # Arrays that are shown.
LESS = 0.9  # Of what was expected, which a change must stay below.


def explained(
    error: BaseException, trainer: Trainer, build: Any, workdir: Path, limit: int | None
) -> MemoryFullError:
    """Prints the largest arrays alive; makes the error that says what would fit.

    Args:
      error: of XLA's, whose frames keep the arrays of the run alive.
      build: makes the trainer of a changed config, as for `preflight.fit`.
      limit: bytes on each device; None asks JAX, on CPUs the machine.
    """
    devices, reason = trainer.devices, str(error).strip().split("\n")[0]
    arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
    Console(markup=False).print(_largest(arrays, _paths(error, trainer)))
    alive = in_units(sum(map(device_bytes, arrays)))
    del arrays
    traceback.clear_frames(error.__traceback__)  # And with them the arrays.
    gc.collect()
    sentence = f"the memory of a device was full: {reason[:200]}; arrays of {alive} "
    sentence += "were there (above)"
    if devices.processes.count > 1:  # Others neither compile nor agree with this one.
        return MemoryFullError(f"{sentence}; --dry_run --fit says what needs less")
    expected = memory_budget(settle(trainer, workdir, limit), limit).peak
    sentence += f", and the budget expected {in_units(expected)} on each device"
    limit = limit or devices.memory_limit() or host_memory() // devices.num_devices
    most = min(limit, int(LESS * expected))
    best = closest_of([*candidates(build, workdir, most)])
    need = f"{best.flags} would need {in_units(best.size)}"
    if best.fits:
        return MemoryFullError(f"{sentence}; {need}")
    return MemoryFullError(
        f"{sentence}; no change that --fit tries is within {in_units(most)}: {need}"
        f"{unified(best)}"
    )


def _paths(error: BaseException, trainer: Trainer) -> dict[int, str]:
    """Paths of the leaves of the train states in the frames of an error, by id."""
    paths: dict[int, str] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, Packed):
                value = trainer.packing.larger(value)
            if isinstance(value, TrainState):
                paths |= {id(x): path for path, x in leaves_by_path(value).items()}
    return paths


def _largest(arrays: list[jax.Array], paths: dict[int, str]) -> Any:
    largest = sorted(arrays, key=device_bytes, reverse=True)[:LARGEST]
    rows = [
        (
            paths.get(id(x), "not of the state"),
            "x".join(map(str, x.shape)),
            str(x.dtype),
            in_units(device_bytes(x)),
        )
        for x in largest
    ]
    title = f"Largest of {counted(len(arrays), 'arrays')}, on each device"
    return table(title, ("path", "shape", "dtype", "size"), rows)
