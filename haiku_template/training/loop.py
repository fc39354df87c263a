"""The training loop: what happens when; `step.py` has the mathematics."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import jax

from haiku_template.devices import check_replicas
from haiku_template.errors import ConfigError
from haiku_template.finetuning import check_same_frozen
from haiku_template.reporting import plots
from haiku_template.reporting.display import Display, first_lines, memory_text
from haiku_template.reporting.perf import Clock, matmul_peak, rates
from haiku_template.reporting.profile import Profiler
from haiku_template.storage import workdir as names
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.files import dispensable
from haiku_template.storage.metrics import MetricsWriter, read
from haiku_template.storage.workdir import check as check_workdir
from haiku_template.storage.workdir import has_checkpoints, locked, open_workdir
from haiku_template.training import fingerprint
from haiku_template.training.guards import StopSignals, check_loss, check_params
from haiku_template.training.memory import budget_table, check_budget
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer


class Intervals(NamedTuple):
    """Steps between two of each; None means at the last step alone."""

    log: int | None
    evaluate: int | None
    save: int | None


class Result(NamedTuple):
    """What a run leaves: its last state, on the devices, and its last metrics."""

    state: TrainState
    metrics: dict[str, float]


def train(
    trainer: Trainer,
    *,
    num_steps: int,
    workdir: str | Path,
    log_every: int | None = 50,
    eval_every: int | None = None,
    save_every: int | None = None,
    keep_last: int = 2,
    keep_best: int = 1,
    best_metric: str = "eval/loss",
    best_mode: str = "min",
    config: dict[str, Any] | None = None,
    memory_limit: int | None = None,
    profile: tuple[int, int] | None = None,
) -> Result:
    """Trains, or goes on where the run in `workdir` stopped.

    Args:
      trainer: an experiment compiled for devices; see `Experiment.trainer`.
      num_steps: updates in all, also when resuming.
      workdir: metrics, checkpoints and the report go here.
      log_every: steps between training metrics.
      eval_every: steps between evaluations; None for the end alone.
      save_every: steps between checkpoints; None for the end alone.
      keep_last: newest checkpoints that stay.
      keep_best: best checkpoints that stay, among those of evaluated steps.
      best_metric: what is best.
      best_mode: `min` or `max`.
      config: saved as config.json; a workdir goes on only with the same.
      memory_limit: bytes that each device has for the run; None asks JAX.
      profile: the steps to trace: after the first number, up to the second.

    Raises:
      ConfigError: the run would not fit; nothing was allocated or written.
      ConfigError: `workdir` belongs to another run.
      StorageError: a checkpoint cannot be written or read.
      ConfigError: what the run starts from cannot be read, or is another base.
      PlacementError: a part of the state differs between devices.
      NonFiniteError: the loss or a parameter is infinite or NaN; it is not saved.
      Interrupted: SIGTERM or SIGINT came; the state is saved.
    """
    directory, devices = Path(workdir), trainer.devices
    check_workdir(directory, config or {})  # Before anything is compiled.
    budget = check_budget(trainer, memory_limit, starts=not has_checkpoints(directory))
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(directory))
        fingerprint.keep(directory, trainer, config or {})
        open_workdir(directory, config or {}, devices)
        display = stack.enter_context(Display(directory, num_steps))
        checkpoints = stack.enter_context(
            Checkpoints(
                directory / names.CHECKPOINTS,
                keep_last=keep_last,
                keep_best=keep_best,
                best_metric=best_metric,
                best_mode=best_mode,
                cleanup=True,
                run=names.run_id(directory),
            )
        )
        start = checkpoints.latest or 0
        if start > num_steps:
            raise ConfigError(
                f"{directory} has a checkpoint of step {start}, and num_steps is "
                f"{num_steps}; a run does not go back: use another --workdir"
            )
        peak = _measured(trainer, budget.matmul)  # Before there is a state.
        if start:
            saved = checkpoints.restore(start, trainer.abstract.saved())
            state = TrainState(**saved, frozen=trainer.frozen())
        else:
            state = trainer.init()
        devices.check(state)
        if trainer.experiment.init_from is not None:
            check_same_frozen(devices, state.frozen, directory)
        display.print(
            *first_lines(
                devices,
                state.params,
                state.frozen,
                trainer.batch_size,
                trainer.placement,
                directory,
                start,
            )
        )
        display.print(budget_table(budget))
        trainer.compile()  # Compilation is no throughput.
        run = _Run(
            trainer,
            directory,
            display,
            checkpoints,
            stack.enter_context(MetricsWriter(directory, start)),
            stack.enter_context(StopSignals()),
            stack.enter_context(Profiler(profile, directory / names.PROFILE, devices)),
            Intervals(log_every, eval_every, save_every),
            peak,
        )
        with devices.explicit_transfers():
            state = run.steps(state, start, num_steps)
        checkpoints.wait()
        display.print(f"done      step {num_steps}; {_draw(directory)}")
    rows = read(directory / names.METRICS)
    return Result(state, {k: v for row in rows for k, v in row.items() if k != "step"})


def _measured(trainer: Trainer, most_bytes: int) -> float | None:
    """What the devices can do at most, where the model's arithmetic is known."""
    if not trainer.work.flops:
        return None
    dtype = trainer.precision.policy.compute_dtype
    return matmul_peak(trainer.devices, dtype, most_bytes)


class _Run:
    """One run of the loop: the steps, and what happens between them."""

    def __init__(
        self,
        trainer: Trainer,
        directory: Path,
        display: Display,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        signals: StopSignals,
        profiler: Profiler,
        every: Intervals,
        peak: float | None,
    ) -> None:
        self.trainer = trainer
        self.devices = trainer.devices
        self.directory = directory
        self.display = display
        self.checkpoints = checkpoints
        self.writer = writer
        self.signals = signals
        self.profiler = profiler
        self.every = every
        self.evaluated = False
        self.peak = peak
        self.clock = Clock(trainer.devices)

    def steps(self, state: TrainState, start: int, stop: int) -> TrainState:
        """Runs the updates `start` to `stop - 1`."""
        with self.trainer.batches(start, stop) as batches:
            self._say(self.profiler.begin(start))
            self.clock.start(start)
            for step, batch in enumerate(batches, start + 1):
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, scalars = self.trainer.step(state, batch)
                self.display.step(step)
                if self._something_due(step, start + 1, stop):
                    # Two programs that talk between devices never run at once.
                    self.devices.wait(scalars)
                    self._between(step, start + 1, stop, state, scalars)
        return state

    def _something_due(self, step: int, first: int, last: int) -> bool:
        due = (_due(step, every, last) for every in self.every)
        stopping = self.signals.received is not None
        return step == first or stopping or self.profiler.due(step) or any(due)

    def _between(
        self, step: int, first: int, last: int, state: TrainState, scalars: Any
    ) -> None:
        """Reports, evaluates and saves, whatever is due after `step`."""
        if step == first:
            check_replicas(state)
        if _due(step, self.every.log, last):
            self._log(step, scalars)
        with self.clock.paused(), self.profiler.clock.paused():
            evaluated = None
            if self.trainer.experiment.data.evaluation and _due(
                step, self.every.evaluate, last
            ):
                evaluated = self._evaluate(step, state)
            stopping = self.signals.received is not None and step < last
            if stopping or _due(step, self.every.save, last):
                self._fetch_finite(step, scalars)
                latest = self.checkpoints.latest
                check_params(self.devices, state.params, step, latest)
                check_replicas(state)
                with self.devices.implicit_transfers():  # Orbax's own copies.
                    self.checkpoints.save(step, state.saved(), evaluated)
                names.mark_saved(self.directory, step)
            if stopping:
                self.checkpoints.wait()
                raise self.signals.error(step)
        if self.profiler.due(step):
            with self.clock.paused():
                self._say(self.profiler.at(step))
        if step == first:
            self.clock.start(step)  # Compilation is no throughput.

    def _log(self, step: int, scalars: Any) -> None:
        values = self._fetch_finite(step, scalars)
        values |= self.trainer.task.derive(values, {})
        speed = self.clock.read(step)
        rate = speed["perf/steps_per_second"] * self.trainer.batch_size
        metrics = {f"train/{name}": value for name, value in values.items()}
        metrics |= speed | rates(self.trainer.work, rate, self.peak)
        self.writer.write(step, metrics)
        self.display.train(step, metrics, memory_text(self.devices))

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        with contextlib.ExitStack() as stack:
            if not self.evaluated:
                # Compiling may read arrays that a task or a model closes over.
                stack.enter_context(self.devices.implicit_transfers())
            metrics = self.trainer.evaluate(state)
        self.evaluated = True
        self.checkpoints.check_metric(metrics)
        self.writer.write(step, metrics)
        self.display.evaluation(step, metrics)
        return metrics

    def _fetch_finite(self, step: int, scalars: Any) -> dict[str, float]:
        """Fetches a step's scalars; raises `NonFiniteError` for its loss."""
        values = {k: float(v) for k, v in self.devices.fetch(scalars).items()}
        check_loss(values, step, self.checkpoints.latest)
        return values

    def _say(self, line: str | None) -> None:
        if line is not None:
            self.display.print(line)


def _draw(directory: Path) -> Path:
    """The report of a run; where it cannot be drawn, the run's directory."""
    with dispensable(directory / names.REPORT):
        return plots.write(directory) or directory
    return directory


def _due(step: int, every: int | None, last: int) -> bool:
    return step == last or (every is not None and step % every == 0)
