"""Guards of a run: checks before step 0, non-finite numbers, signals to stop."""

import logging
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from haiku_template import signals
from haiku_template.data import ArrayDataset, each_shape
from haiku_template.devices import (
    DeviceManager,
    canonical_shapes,
    check_processes,
    check_replicas,
    device_name,
)
from haiku_template.errors import (
    ConfigError,
    Interrupted,
    NonFiniteError,
    PlacementError,
    near,
)
from haiku_template.models.losses import WEIGHT
from haiku_template.params import leaves_by_path
from haiku_template.registry import IMPORTING
from haiku_template.training.evaluation import pad, summarize
from haiku_template.training.memory import Budget, check_budget
from haiku_template.training.outliers import GradientNorms, blame
from haiku_template.training.state import split_seed
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

SHOWN = 3  # Leaves in a message.
SCALED = {"grad_norm", "loss", "loss_scale"}  # Scalars of float16's steps.
UNCHECKED = 1000  # Steps whose scalars are kept until one of them is checked.
OBEYED = (signal.SIGTERM, signal.SIGINT)  # Whatever a script does with them.
EVALUATION = "the state is finite, so look at the data to evaluate on (its labels and "
EVALUATION += "weights are 0 or more) and at the model"
IGNORED = (
    "; classes and tokens count from 0: an example to leave out has an example_weight "
    "of 0, a token a loss_mask of False (-1 and -100 mean that elsewhere)"
)


@jax.jit
def _faults(leaves: list[jax.Array]) -> jax.Array:
    """Tests each leaf for NaN and for infinity: bool [n, 2]."""
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


def non_finite(what: str, latest: int | None, blamed: str = "") -> NonFiniteError:
    """Makes the error that names the newest checkpoint and the likely cause."""
    kept = f"the newest is of step {latest}" if latest else "there is none"
    reason = blamed or (
        "values in the data that are not finite do this, an example_weight below 0, "
        "labels below 0, and learning rates too high for want of a warm-up or clip_norm"
    )
    return NonFiniteError(
        f"{what}; it was not saved as a checkpoint, and {kept}: {reason}"
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
        self._unchecked: deque[tuple[int, Any]] = deque(maxlen=UNCHECKED)
        self._norms = GradientNorms(devices, train)
        self._counted, self._skipped = 0, 0  # Last step that was; float16's.
        self._agreed = False
        # After such an error of one process, others may be elsewhere: nothing is saved.
        self.unsaved = Exception if devices.processes.count > 1 else NonFiniteError

    def note(self, step: int, scalars: Any) -> None:
        """Keeps a step's scalars on their devices, unchecked."""
        self._unchecked.append((step, scalars))
        self._norms.note(step, scalars.get("grad_norm"), "loss_scale" in scalars)
        if scalars.keys() >= SCALED and step - self._counted >= UNCHECKED:
            self._count_skipped()

    def agree(self, state: Any) -> None:
        """Raises `PlacementError` if the first step left replicas that differ."""
        check_replicas(state)
        check_processes(self._devices.processes, (state, self._unchecked[-1][1]))
        self._agreed = True

    def finite(self, step: int, scalars: Any) -> dict[str, float]:
        """Fetches scalars; raises `NonFiniteError` if the loss is not finite.

        With a loss scale, of all steps so far: those that were skipped are counted, as
        `skipped_steps`, and a scale of 1 is no cause to skip.
        """
        values = {k: float(v) for k, v in self._devices.fetch(scalars).items()}
        if values.keys() >= SCALED:
            self._count_skipped()
            values["skipped_steps"] = float(self._skipped)
        elif not math.isfinite(values["loss"]):
            step = next(self._faulty_steps("loss"), step)
            what = f"the loss of step {step} is infinite or NaN"
            raise non_finite(what, self._latest(), self._blame())
        self._norms.look()
        return values

    def _count_skipped(self) -> None:
        for step, scalars in self._unchecked:
            if step <= self._counted:
                continue
            values = self._devices.fetch([scalars[name] for name in sorted(SCALED)])
            norm, loss, scale = map(float, values)
            if math.isfinite(norm) and math.isfinite(loss):
                continue
            if math.isfinite(norm) or scale <= 1:
                what = f"the loss of step {step} is infinite or NaN"
                what += f" with a loss scale of {scale:g}"
                raise non_finite(what, self._latest(), self._blame())
            self._skipped += 1
        self._counted = max(step for step, _ in self._unchecked)

    def evaluated(self, step: int, metrics: dict[str, float], state: Any) -> None:
        """Raises `NonFiniteError` if the loss of an evaluation is infinite or NaN."""
        if not math.isfinite(metrics["eval/loss"]):
            self._check(step, state)
            what = f"the evaluation's loss after step {step} is infinite or NaN"
            raise non_finite(what, self._latest(), EVALUATION)

    def before_save(self, step: int, scalars: Any, state: Any) -> None:
        """Asserts that scalars and state are finite, and replicas equal.

        Raises:
          NonFiniteError: a number is not finite.
          ReplicaError: a leaf differs between devices.
        """
        self.finite(step, scalars)
        self._check(step, state)
        self._unchecked.clear()

    def _check(self, step: int, state: Any) -> None:
        check_replicas(state, agreed=self._agreed)
        check_processes(self._devices.processes, state, agreed=self._agreed)
        faults = {
            name: fault
            for name, fault in faulty_leaves(self._devices, state).items()
            if fault == "NaN" or self._from_start.get(name) != fault
        }
        if faults:
            some = ", ".join(f"{k} ({v})" for k, v in list(faults.items())[:SHOWN])
            more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
            what = f"the state after step {step} is infinite or NaN in {some}{more}"
            raise non_finite(what, self._latest(), self._blame())

    def _faulty_steps(self, *names: str) -> Iterator[int]:
        """Yields the unchecked steps at which a scalar of these is not finite."""
        for step, values in self._unchecked:
            found = [values[name] for name in names if name in values]
            if not all(map(math.isfinite, self._devices.fetch(found))):
                yield step

    def _blame(self) -> str:
        """Searches the batches since the last save for the cause."""
        steps = self._faulty_steps("loss", "grad_norm")
        causes = (blame, below_zero)
        words = (f(self._devices, self._train, step) for step in steps for f in causes)
        return next(filter(None, words), "")


def _leave_to_the_run() -> None:
    """Resets signals in a forked data worker, which saves nothing.

    It ends at SIGTERM, and ignores others to make the batches of the run's last step.
    """
    for number in signals.EXIT_CODES:
        handler = signal.getsignal(number)
        if isinstance(getattr(handler, "__self__", None), StopSignals):
            ends = number == signal.SIGTERM
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)


os.register_at_fork(after_in_child=_leave_to_the_run)


class StopSignals:
    """Context manager that gives back the handlers of signals, taken by `listen`.

    SIGTERM and SIGINT are noted, to stop after a save; SIGHUP and SIGUSR1, too, unless
    they are ignored, as by nohup, or a script handles them. A second SIGINT is for the
    handler from before: a command ends at once, Python raises KeyboardInterrupt.
    Outside the main thread, where Python allows no handlers, all are left alone.
    """

    def __init__(self, several: bool = False) -> None:
        self._several = several  # Then JAX's runtime has the handler of SIGTERM.
        self.received: signal.Signals | None = None
        self._noted: signal.Signals | None = None
        self._calls = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        return self

    def listen(self) -> None:
        """Takes the signals; before, and after the context, they end a command."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals.EXIT_CODES:
            theirs = number == signal.SIGTERM and self._several
            obeyed = number in OBEYED or signals.is_free(number)
            if obeyed and not theirs:
                self._previous[number] = signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None and number == signal.SIGINT:
            return _hand_on(self._previous[number], number, frame)
        self._noted = signal.Signals(number)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's runtime tells the others.
        else:
            self.received = self._noted

    def due(self) -> bool:
        """True once a signal came; in several processes, at a call common to all."""
        self._calls += 1  # Not steps, of which a resumed run has passed the first.
        if self._several and multihost_utils.reached_preemption_sync_point(self._calls):
            self.received = self._noted or signal.SIGTERM
        return self.received is not None

    def error(self, step: int) -> Interrupted:
        """Makes the error to raise once `step` is saved."""
        words = f"{self.received.name} received: step {step} is saved, and the same "
        words += "command resumes it"
        return Interrupted(words, signals.EXIT_CODES[self.received])


def _hand_on(handler: Any, number: int, frame: FrameType | None) -> None:
    """Calls the handler from before for a second SIGINT."""
    if handler is signals.leave:
        signals.leave(number, frame, signals.AGAIN)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def early_stop(
    metric: str, patience: int, mode: str = "min"
) -> Callable[[list[dict[str, Any]]], bool]:
    """Makes `train(stop_when=...)` for early stopping, which a resumed run remembers.

    It ends a run after `patience` evaluations without a better value of `metric` (such
    as `eval/loss`); `mode` is `min` or `max`.
    """

    def stops(rows: list[dict[str, Any]]) -> bool:
        names = dict.fromkeys(name for row in rows for name in row)
        if any(name.startswith("eval/") for name in names):
            check_measured("early_stop.metric", metric, names)
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if not values:
            return False
        best = values.index((min if mode == "min" else max)(values))
        return len(values) - 1 - best >= patience

    stops.metric = metric
    return stops


def check_measured(key: str, metric: str, names: Iterable[str]) -> None:
    """Raises `ConfigError` unless a metric that `key` asks for is among the names."""
    if metric not in names:
        found = ", ".join(names) or "none without data to evaluate on"
        words = f"{key}={metric} is not measured{near(metric, names)}"
        raise ConfigError(f"{words}; possible are {found}")


def check_before_start(
    trainer: Trainer,
    best_metric: str,
    memory_limit: int | None,
    starts: bool,
    stop_when: Any = None,
) -> Budget:
    """Traces a run for faults before step 0, and returns its memory budget.

    `starts` is False for a run that resumes.

    Raises:
      PlacementError: a norm is not averaged over the devices.
      ConfigError: the run would not fit, or a metric that it needs is not measured.
    """
    if IMPORTING:
        raise ConfigError(
            f"{IMPORTING[-1]} trains while a command imports it; put what trains under "
            "if __name__ == '__main__':"
        )
    train, size = trainer.experiment.data.train, trainer.batch_size
    if isinstance(train, ArrayDataset) and len(train.inputs) < size:
        logger.warning(
            "a batch has %d examples and the training set %d, so that some are in a "
            "batch several times; give a batch_size of %d or less",
            *(size, len(train.inputs), len(train.inputs)),
        )
    check_norms(trainer)
    budget = check_budget(trainer, memory_limit, starts=starts)
    check_evaluation(trainer, best_metric, stop_when)
    return budget


def check_norms(trainer: Trainer) -> None:
    """Raises `PlacementError` if normalization does not average over the devices."""
    devices, experiment = trainer.devices, trainer.experiment
    if devices.axis_name is None:
        return
    init = trainer.functions(devices.axis_name).init
    alone = _norms_alone(devices, init, {})
    if alone and experiment.step is None:  # Initialized; in training they may be fixed.
        recipe, state = trainer.recipe, trainer.abstract

        def forward(*args: Any) -> Any:
            rng = split_seed(recipe.seed).params
            return experiment.steps.forward(recipe, *args, (rng, rng), True)[1]

        batch = canonical_shapes(each_shape(experiment.data.train)[0])
        args = state.variables(), state.frozen, batch
        alone = _norms_alone(devices, forward, *args)
    if alone:
        raise PlacementError(
            f"{', '.join(alone[:3])} would keep statistics of its own on each of the "
            f"{devices.num_devices} devices: give it "
            "cross_replica_axis=devices.axis_name (in a function of your own that a "
            "config names: axis_name), or is_training=hk.running_init(), which keeps "
            "its statistics as they are"
        )


def _norms_alone(
    devices: DeviceManager, function: Callable[..., Any], *args: Any
) -> list[str]:
    """Names norms that are called to train, and without the axis of the devices."""
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
        devices.abstract(function, *args)
    return alone


def check_evaluation(trainer: Trainer, best_metric: str, stop_when: Any = None) -> None:
    """Traces the evaluation; its metrics must have `best_metric`, and early stopping's.

    `stop_when` is from `early_stop`, or anything without its `metric`.
    """
    devices, dataset = trainer.devices, trainer.experiment.data.evaluation
    early = getattr(stop_when, "metric", None)
    if dataset is None:
        if early:
            check_measured("early_stop.metric", early, ())
        return
    for each in (dataset, *trainer.experiment.data.evaluations.values()):
        trainer.padded_size(each)  # Raises if one does not split over the devices.
    if not trainer.pads:
        logger.warning(
            "the model returns one loss for a batch: its evaluation is exact if that "
            "is a mean over the examples; a loss for each, [B], is exact in any case"
        )
    batch = pad(dataset.batch(0), trainer.padded_size(dataset))
    shapes = canonical_shapes(batch)
    state, eval_step = trainer.abstract, trainer.functions().eval_step
    sums = devices.abstract(eval_step, state.variables(), state.frozen, shapes)
    numbers = jax.tree.map(lambda x: np.ones(x.shape), sums)
    try:
        names, _ = summarize(numbers, trainer.task.derive)
    except Exception:  # A derived metric may refuse these made-up numbers.
        return
    further = trainer.experiment.data.evaluations
    names = [*names, *(k.replace("/", f"/{s}/", 1) for s in further for k in names)]
    check_measured("best_metric", best_metric, names)
    if early and not early.startswith(("train/", "perf/")):
        check_measured("early_stop.metric", early, names)
