"""Guards of a run's numbers: non-finite values, replicas that differ."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.devices import (
    DeviceManager,
    check_processes,
    check_replicas,
    device_name,
)
from haiku_template.devices.compiled import Scalars
from haiku_template.devices.layout import in_device_memory
from haiku_template.errors import NonFiniteError
from haiku_template.models.losses import WEIGHT
from haiku_template.params import leaves_by_path
from haiku_template.runs.outliers import GradientNorms, blame

logger = logging.getLogger(__name__)

SHOWN = 3  # Leaves in a message.
SCALED = {"grad_norm", "loss", "loss_scale"}  # Scalars of float16's steps.
UNCHECKED = 1000  # Steps whose scalars are kept until one of them is checked.
EVALUATION = "the state is finite, so look at the data to evaluate on (its labels and "
EVALUATION += "weights are 0 or more) and at the model"
IGNORED = (
    "; classes and tokens count from 0: an example to leave out has an example_weight "
    "of 0, a token a loss_mask of False (-1 and -100 mean that elsewhere)"
)


@jax.jit
def _faults(leaves: list[jax.Array]) -> jax.Array:
    """Tests each leaf for NaN and for infinity: bool [n, 2]."""
    leaves = in_device_memory(leaves)
    pairs = [[jnp.any(jnp.isnan(x)), jnp.any(jnp.isinf(x))] for x in leaves]
    return jnp.array(pairs, bool).reshape(-1, 2)


def faulty_leaves(devices: DeviceManager, tree: Any) -> dict[str, str]:
    """Finds non-finite leaves on their devices: `NaN` or `infinite` by path."""
    leaves = {
        path: leaf
        for path, leaf in leaves_by_path(tree).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    faults = devices.fetch(_faults(list(leaves.values())))
    return {
        name: "NaN" if is_nan else "infinite"
        for name, (is_nan, is_infinite) in zip(leaves, faults.tolist(), strict=True)
        if is_nan or is_infinite
    }


def below_zero(devices: DeviceManager, train: Any, step: int) -> str:
    """Describes a label or weight below 0 in a step's batch; "" without one."""
    batch = getattr(train, "dataset", train).batch(step - 1)  # Also of staged data.
    leaves = leaves_by_path(batch)
    mask = np.asarray(leaves.pop("['loss_mask']", True), bool)
    for path, leaf in leaves.items():
        is_label = path == "['labels']" and leaf.dtype.kind == "i"
        if not (is_label or WEIGHT in path):
            continue
        counts = mask if is_label and mask.shape == leaf.shape else True
        bad = np.argwhere((leaf < 0) & counts)
        if len(bad):
            row, advice = int(bad[0][0]), IGNORED if is_label else ": it is 0 or more"
            device = devices.devices[row * len(devices.devices) // len(leaf)]
            return (
                f"the batch of step {step} has {leaf[tuple(bad[0])]} in its {path}, "
                f"row {row}, which is on {device_name(device)}{advice}"
            )
    return ""


def non_finite(fault: str, latest: int | None, cause: str = "") -> NonFiniteError:
    """Makes the error that names the newest checkpoint and the likely cause."""
    newest = f"the newest is of step {latest}" if latest else "there is none"
    reason = cause or (
        "usual causes are NaN or infinity in the data, a label or example_weight below "
        "0, a learning rate too high (try optimizer.warmup_steps, optimizer.clip_norm)"
    )
    return NonFiniteError(
        f"{fault}; it was not saved as a checkpoint, and {newest}: {reason}"
    )


class Guards:
    """Watches over a run's numbers: no checkpoint gets a NaN or a new infinity.

    Leaves that are infinite in the first state may stay so. `latest` tells the step of
    the newest checkpoint, None without any.
    """

    def __init__(
        self,
        devices: DeviceManager,
        train: Any,
        state: Any,
        latest: Callable[[], int | None],
    ) -> None:
        self._devices, self._train, self._latest = devices, train, latest
        self._from_start = faulty_leaves(devices, state)
        self._unchecked: deque[tuple[range, Scalars]] = deque()
        self._norms = GradientNorms(devices, train)
        self.collect = self._norms.collect
        self._counted, self._skipped = 0, 0  # Last step that was; float16's.
        self._agreed = False
        # Errors after which nothing is saved: another process may be a step ahead.
        self.unsaved = Exception if devices.processes.count > 1 else NonFiniteError

    def note(self, steps: range, scalars: Scalars) -> None:
        """Keeps the scalars of a call's steps on their devices, unchecked."""
        self._unchecked.append((steps, scalars))
        self._norms.note(steps, scalars)
        if scalars.keys() >= SCALED and steps[-1] - self._counted >= UNCHECKED:
            self._count_skipped(steps[-1])
        while steps[-1] - self._unchecked[0][0][-1] >= UNCHECKED:
            self._unchecked.popleft()

    def agree(self, state: Any) -> None:
        """Raises `PlacementError` if the first step left replicas that differ."""
        self._check_copies(state, (state, self._unchecked[-1][1].first()))
        self._agreed = True
        self.collect()  # Compiled before the throughput is measured.

    def _check_copies(self, state: Any, common: Any) -> None:
        if self._devices.num_devices > 1:
            check_replicas(state, agreed=self._agreed)
            check_processes(self._devices.processes, common, agreed=self._agreed)

    def finite(self, steps: range, scalars: Scalars) -> dict[str, float]:
        """Fetches a call's last scalars; raises `NonFiniteError` for an infinite loss.

        With a loss scale, of all steps so far: those that were skipped are counted, as
        `skipped_steps`, and a scale of 1 is no cause to skip.
        """
        columns = self._devices.fetch(scalars)
        values = {k: float(x[len(steps) - 1]) for k, x in columns.items()}
        if values.keys() >= SCALED:
            self._count_skipped(steps[-1])
            values["skipped_steps"] = float(self._skipped)
        elif not np.isfinite(columns["loss"][: len(steps)]).all():
            step = next(self._faulty_steps("loss"), steps[-1])
            fault = f"the loss of step {step} is infinite or NaN"
            raise non_finite(fault, self._latest(), self._blame())
        self._norms.look(steps[-1])
        return values

    # Why: docs/decisions/training.md#skipped-steps
    def _count_skipped(self, last: int) -> None:
        uncounted = range(self._counted + 1, last + 1)
        for step, values in self._each_step(*sorted(SCALED), within=uncounted):
            norm, loss, scale = values
            if math.isfinite(norm) and math.isfinite(loss):
                continue
            if math.isfinite(norm) or scale <= 1:
                fault = f"the loss of step {step} is infinite or NaN"
                fault += f" with a loss scale of {scale:g}"
                raise non_finite(fault, self._latest(), self._blame())
            self._skipped += 1
        self._counted = last

    def evaluated(self, step: int, metrics: dict[str, float], state: Any) -> None:
        """Raises `NonFiniteError` if the loss of an evaluation is infinite or NaN."""
        if not math.isfinite(metrics["eval/loss"]):
            self._check(step, state)
            fault = f"the evaluation's loss after step {step} is infinite or NaN"
            raise non_finite(fault, self._latest(), EVALUATION)

    # Why: docs/decisions/training.md#checked-state
    def before_save(self, steps: range, scalars: Scalars, state: Any) -> None:
        """Asserts that scalars and the whole state are finite, and replicas equal.

        Raises:
          NonFiniteError: a number is not finite.
          ReplicaError: a leaf differs between devices.
        """
        self.finite(steps, scalars)
        self._check(steps[-1], state)
        self._unchecked.clear()

    def _check(self, step: int, state: Any) -> None:
        self._check_copies(state, state)
        faults = {
            name: kind
            for name, kind in faulty_leaves(self._devices, state).items()
            if kind == "NaN" or self._from_start.get(name) != kind
        }
        if faults:
            names = ", ".join(f"{k} ({v})" for k, v in list(faults.items())[:SHOWN])
            names += f" and {len(faults) - SHOWN} more" * (len(faults) > SHOWN)
            fault = f"the state after step {step} is infinite or NaN in {names}"
            raise non_finite(fault, self._latest(), self._blame())

    def _faulty_steps(self, *names: str) -> Iterator[int]:
        """Yields the unchecked steps at which a scalar of these is not finite."""
        for step, values in self._each_step(*names):
            if not all(map(math.isfinite, values)):
                yield step

    def _each_step(
        self, *names: str, within: range | None = None
    ) -> Iterator[tuple[int, list[float]]]:
        """Yields the unchecked steps, and those of these scalars that there are.

        Calls end where steps are looked at: `within` has all steps of a call, or none,
        and of others nothing is fetched, as they may still run.
        """
        for steps, scalars in self._unchecked:
            if within is not None and steps[-1] not in within:
                continue
            values = self._devices.fetch(scalars)
            columns = [values[name] for name in names if name in values]
            yield from zip(steps, zip(*columns, strict=True), strict=False)

    def _blame(self) -> str:
        """Searches the batches since the last save for the cause."""
        steps = self._faulty_steps("loss", "grad_norm")
        causes = (blame, below_zero)
        sentences = (
            cause(self._devices, self._train, step)
            for step in steps
            for cause in causes
        )
        return next(filter(None, sentences), "")
