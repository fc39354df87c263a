"""Guards of a run's numbers: non-finite values, replicas that differ."""

import contextlib
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.devices import DeviceManager, check_processes, check_replicas
from haiku_template.devices.compiled import Scalars
from haiku_template.devices.layout import in_device_memory
from haiku_template.errors import EvaluationError, NonFiniteError, some
from haiku_template.models.losses import WEIGHT
from haiku_template.params import leaves_by_path
from haiku_template.runs.outliers import GradientNorms, blame, located, oddity
from haiku_template.runs.scalars import LOSS, NORM, SCALE, StepScalars
from haiku_template.storage import Checkpoints
from haiku_template.training.state import SKIPPED
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

SCALED = {NORM, LOSS, SCALE}  # Scalars of float16's steps.
SUSPECTS = 100  # Steps that are remembered for their batches.
EVALUATION = "the state is finite, so look at the data to evaluate on (its labels and "
EVALUATION += "weights are 0 or more) and at the model"
IGNORED = (
    "; classes and tokens count from 0: an example to leave out has an example_weight "
    "of 0, a token a loss_mask of False (-1 and -100 mean that elsewhere)"
)
TESTED = 250  # Leaves at once: XLA takes 0.3 s to compile 250, and 13 s for 1,000.


@jax.jit
def _faults(leaves: list[jax.Array]) -> jax.Array:
    """Tests each leaf for NaN and for infinity: bool [n, 2]."""
    leaves = in_device_memory(leaves)
    pairs = [[jnp.any(jnp.isnan(x)), jnp.any(jnp.isinf(x))] for x in leaves]
    return jnp.array(pairs, bool).reshape(-1, 2)


def faulty_leaves(devices: DeviceManager, tree: Any) -> dict[str, str]:
    """Finds non-finite leaves on their devices: `NaN` or `infinite` by path."""
    leaves = leaves_by_path(tree).items()
    leaves = {k: x for k, x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)}
    arrays = [*leaves.values()]
    pairs = [_faults(arrays[i : i + TESTED]) for i in range(0, len(arrays), TESTED)]
    faults = [pair for part in devices.fetch(pairs) for pair in part.tolist()]
    return {
        name: "NaN" if is_nan else "infinite"
        for name, (is_nan, is_infinite) in zip(leaves, faults, strict=True)
        if is_nan or is_infinite
    }


def below_zero(trainer: Trainer, step: int) -> str:
    """Describes a label or weight below 0 in a step's batch; "" without one."""
    leaves = leaves_by_path(trainer.feed.read(step - 1))
    mask = np.asarray(leaves.pop("['loss_mask']", True), bool)
    for path, leaf in leaves.items():
        is_label = path == "['labels']" and leaf.dtype.kind == "i"
        if not (is_label or WEIGHT in path):
            continue
        counts = mask if is_label and mask.shape == leaf.shape else True
        if len(bad := np.argwhere((leaf < 0) & counts)):
            row = located(trainer, int(bad[0][0]), len(leaf))
            advice = IGNORED if is_label else ": it is 0 or more"
            return (
                f"the batch of step {step} has {leaf[tuple(bad[0])]} in its {path}, "
                f"{row}{advice}"
            )
    return ""


def non_finite(fault: str, latest: int | None, cause: str = "") -> NonFiniteError:
    """Makes the error that names the newest checkpoint and the likely cause."""
    newest = f"the newest is of step {latest}" if latest else "there is none"
    reason = cause or (
        "usual causes are NaN or infinity in the data, a label that is no class (0 to "
        "below the number of outputs), an example_weight below 0, a learning rate "
        "too high (try optimizer.warmup_steps, optimizer.clip_norm)"
    )
    return NonFiniteError(
        f"{fault}; it was not saved as a checkpoint, and {newest}: {reason}"
    )


class Guards:
    """Watches over a run's numbers: no checkpoint gets a NaN or a new infinity.

    `most` steps in a row whose loss is not finite are an error; where calls skip steps,
    fewer are warnings, but for the first of the run. Leaves that are infinite in the
    first state may stay so.
    """

    def __init__(
        self, trainer: Trainer, state: Any, checkpoints: Checkpoints, most: int = 1
    ) -> None:
        self._trainer, self._devices = trainer, trainer.devices
        self._train = trainer.experiment.data.train
        self._checkpoints, self._most = checkpoints, most
        self._from_start = faulty_leaves(self._devices, state)
        self._norms = GradientNorms(trainer)
        self._scalars = StepScalars(self._devices, self._read)
        self.collect = self._scalars.collect
        self._skipped = 0  # Steps since this start.
        self._streak: list[int] = []  # Of them in a row, but for float16's own.
        self._suspects: list[int] = []  # Steps since a save that may be in the state.
        self._agreed = False

    def note(self, steps: range, scalars: Scalars, state: Any) -> None:
        """Keeps the state of a call and its scalars on their devices, unread."""
        self._state = state
        self._scalars.note(steps, scalars)

    def close(self) -> None:
        """Drops the state of the last call, which a cycle would hold."""
        self._state = None

    def agree(self, state: Any) -> None:
        """Raises `UnequalError` if the first step left replicas that differ."""
        self._check_copies(state)
        self._check_copies(self._scalars.pending[-1][1].first())  # By their names.
        self._agreed = True
        self.collect()  # Compiled before the throughput is measured.

    def _check_copies(self, tree: Any) -> None:
        if self._devices.num_devices > 1:
            check_replicas(tree, agreed=self._agreed)
            check_processes(self._devices.processes, tree, agreed=self._agreed)

    def finite(self, steps: range, scalars: Scalars) -> dict[str, float]:
        """Fetches a call's last scalars; `NonFiniteError` of any step until then."""
        columns = self._devices.fetch(scalars)
        self._scalars.look(steps[-1])
        values = {k: float(x[len(steps) - 1]) for k, x in columns.items()}
        values.pop(SKIPPED, None)
        if self._skipped or values.keys() >= SCALED:
            values[SKIPPED] = float(self._skipped)
        return values

    def _read(self, steps: list[int], columns: dict[str, np.ndarray]) -> None:
        """Takes the scalars of the next steps, [steps] of each name."""
        is_finite = all(np.isfinite(column).all() for column in columns.values())
        if is_finite and SKIPPED not in columns and not self._trainer.left_out:
            self._streak, norms = [], columns.get(NORM, np.zeros(len(steps)))
            for step, norm in zip(steps, norms.tolist(), strict=True):
                self._norms.read(step, norm)
        else:
            for i, step in enumerate(steps):
                self._take(step, {k: float(x[i]) for k, x in columns.items()})

    # Why: docs/decisions/training.md#skipped-steps
    def _take(self, step: int, values: dict[str, float]) -> None:
        norm, is_scaled = values.get(NORM, 0.0), values.keys() >= SCALED
        if step in self._trainer.left_out:  # Its scalars are of no step.
            return
        if all(map(math.isfinite, values.values())) and not values.get(SKIPPED):
            self._streak = []
            self._norms.read(step, norm)
        elif is_scaled and values[SCALE] > 1 and not math.isfinite(norm):
            self._skipped += 1  # A smaller scale mends it.
        elif math.isfinite(values[LOSS]) and not is_scaled and SKIPPED not in values:
            self._norms.read(step, norm)  # The state is checked before a save.
            self._suspects = [*self._suspects[: SUSPECTS - 1], step]
        else:
            self._streak.append(step)
            if SKIPPED not in values or step == 1 or len(self._streak) >= self._most:
                self._end(values)
            self._skipped += 1
            cause = oddity(self._trainer, lambda: self._blame([step]))
            logger.warning(
                f"step {step} is skipped, as its {_subject(values)} is infinite or "
                f"NaN, and the state stays as after step {step - 1}: {cause}; the run "
                f"ends after {self._most} in a row"
            )

    def _end(self, values: dict[str, float]) -> None:
        """Raises the error of steps in a row; `values` are those of the last."""
        first, *further = self._streak
        steps = f"{first} (and of the {len(further)} after it)" if further else first
        fault = f"the {_subject(values)} of step {steps} is infinite or NaN"
        if values.keys() >= SCALED:
            fault += f" with a loss scale of {values[SCALE]:g}"
        if SKIPPED in values:
            self._check(self._streak[-1], self._trainer.unpacked(self._state))
            if math.isfinite(values[LOSS]) and (names := self._leaves_of(first)):
                fault = f"the state after step {steps} is infinite or NaN in {names}"
        self._record([*self._suspects, *self._streak])
        raise non_finite(fault, self._checkpoints.latest, self._blame(self._streak))

    def _record(self, steps: list[int]) -> None:
        if self._devices.processes.index == 0:
            from haiku_template.runs.rewind import record

            record(self._checkpoints.directory.parent, self._train, steps)

    def _leaves_of(self, step: int) -> str:
        """Makes a skipped step again, in a copy of the state; names faulty leaves."""
        if self._devices.processes.count > 1:  # One alone would wait for the others.
            return ""
        with contextlib.suppress(Exception), self._devices.implicit_transfers():
            state = jax.tree.map(jnp.copy, self._trainer.unpacked(self._state))
            state = state._replace(step=jnp.full_like(state.step, step - 1))
            if self._trainer.feed.staged is None:
                batch = self._devices.shard(self._trainer.feed.read(step - 1))
                return some(self._faults(self._trainer.step(state, batch)[0]))
            with self._trainer.batches(step - 1, step) as batches:
                return some(self._faults(self._trainer.step(state, next(batches))[0]))
        return ""

    def evaluated(self, step: int, metrics: dict[str, float], state: Any) -> None:
        """Raises `NonFiniteError` if the loss of an evaluation is infinite or NaN.

        It is an `EvaluationError` where the state is finite, which may be saved.
        """
        if not math.isfinite(metrics["eval/loss"]):
            self._check(step, state)
            fault = f"the evaluation's loss after step {step} is infinite or NaN"
            raise EvaluationError(f"{fault}; {EVALUATION}")

    # Why: docs/decisions/training.md#checked-state
    def before_save(self, steps: range, scalars: Scalars, state: Any) -> None:
        """Raises `NonFiniteError` or `ReplicaError` for a state not to be saved."""
        self.finite(steps, scalars)
        self._check(steps[-1], state)
        self._suspects = []

    def _check(self, step: int, state: Any) -> None:
        self._check_copies(state)
        if names := self._faults(state):
            fault = f"the state after step {step} is infinite or NaN in {some(names)}"
            self._record(self._suspects)
            raise non_finite(fault, self._checkpoints.latest, self._blame([]))

    def _faults(self, state: Any) -> list[str]:
        """Names leaves that are not finite, but for those infinite from the start."""
        return [
            f"{name} ({kind})"
            for name, kind in faulty_leaves(self._devices, state).items()
            if not self.is_old(name, kind)
        ]

    def is_old(self, name: str, kind: str = "infinite") -> bool:
        """True for a leaf that was infinite in the first state."""
        return kind == "infinite" == self._from_start.get(name)

    def _blame(self, steps: list[int]) -> str:
        """Searches the batches of suspects and of these steps for the cause."""
        sentences = (
            cause(self._trainer, step)
            for step in [*self._suspects, *steps]
            for cause in (blame, below_zero)
        )
        return next(filter(None, sentences), "")


def _subject(values: dict[str, float]) -> str:
    if not math.isfinite(values[LOSS]):
        return LOSS
    is_finite = math.isfinite(values.get(NORM, 0.0))
    return "network state" if is_finite else "gradient's norm"
