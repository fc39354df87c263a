"""What tracing tells before step 0, and would otherwise end a run later."""

from pathlib import Path
from typing import Any

import haiku as hk
import jax
import numpy as np

from haiku_template.errors import ConfigError, PlacementError
from haiku_template.storage.workdir import has_checkpoints
from haiku_template.training.evaluation import pad, padded_size, summarise, variables
from haiku_template.training.memory import Budget, check_budget
from haiku_template.training.trainer import Program


def check_before_start(
    program: Program, workdir: Path, best_metric: str, memory_limit: int | None
) -> Budget:
    """The memory budget of a run that has none of the faults that tracing tells.

    Args:
      program: what runs.
      workdir: where; it holds checkpoints if the run goes on.
      best_metric: what is best, a metric of the evaluation.
      memory_limit: bytes that each device has; None asks JAX.

    Raises:
      PlacementError: a norm is not averaged over the devices.
      ConfigError: the run would not fit.
      ConfigError: `best_metric` is not measured.
    """
    check_norms(program)
    budget = check_budget(program, memory_limit, starts=not has_checkpoints(workdir))
    check_evaluation(program, best_metric)
    return budget


def check_norms(program: Program) -> None:
    """Asserts that modules that can average over the devices do, where there are some.

    Raises:
      PlacementError: one does not; names it.
    """
    devices = program.devices
    if devices.axis_name is None:
        return
    alone: list[str] = []

    def look(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
        module = context.module
        training = kwargs.get("is_training", args[1] if len(args) > 1 else False)
        if (
            context.method_name == "__call__"
            and training is True
            and getattr(module, "cross_replica_axis", "not a norm") is None
        ):
            alone.append(f"{type(module).__name__} {module.module_name}")
        return call(*args, **kwargs)

    with hk.intercept_methods(look):
        devices.abstract(program.init)
    if alone:
        raise PlacementError(
            f"{', '.join(alone[:3])} would keep statistics of its own on each of the "
            f"{devices.num_devices} devices: give it "
            "cross_replica_axis=devices.axis_name (in a function of your own that a "
            "config names: axis_name)"
        )


def check_evaluation(program: Program, best_metric: str) -> None:
    """Traces the evaluation, so that a fault in it is found before step 0.

    Raises:
      ConfigError: `best_metric` is not among what it gives.
    """
    devices, dataset = program.devices, program.data.evaluation
    if dataset is None:
        return
    batch = pad(dataset.batch(0), padded_size(devices, dataset))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    state, base = devices.abstract(program.init), program.start.base.abstract
    _, eval_step = program.uncompiled
    sums = devices.abstract(eval_step, variables(state), shapes, base)
    numbers = jax.tree.map(lambda x: np.ones(x.shape), sums)
    try:
        names, _ = summarise(numbers, program.derive, program.tally.derive)
    except Exception:  # What is derived may not take such numbers.
        return
    if best_metric not in names:
        raise ConfigError(
            f"best_metric={best_metric} is not measured; possible are "
            f"{', '.join(names)}"
        )
