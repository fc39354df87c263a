"""The loop: what happens when.

The mathematics is in `steps.py`; together they are the whole of a run.
"""

import contextlib
import math
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import jax

from haiku_template.data.prefetch import Prefetcher
from haiku_template.devices import check_replicas, matmul_peak
from haiku_template.errors import ConfigError, NonFiniteError
from haiku_template.finetuning.source import place_base
from haiku_template.reporting import plots
from haiku_template.reporting.display import Display, first_lines, memory_text
from haiku_template.reporting.perf import Clock, rates
from haiku_template.reporting.profile import Profiler
from haiku_template.storage import workdir as names
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.files import dispensable
from haiku_template.storage.metrics import MetricsWriter, read
from haiku_template.storage.workdir import check as check_workdir
from haiku_template.storage.workdir import locked, open_workdir
from haiku_template.training import fingerprint
from haiku_template.training.guards import (
    StopSignals,
    blame,
    check_state,
    faulty_leaves,
    faulty_steps,
    non_finite,
)
from haiku_template.training.memory import budget_table
from haiku_template.training.preflight import check_before_start
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Program, batch_maker, compile_ahead

EVALUATION = "the state is finite, so look at the data to evaluate on and at the model"
UNCHECKED = 1000  # Steps whose scalars are kept until one of them is looked at.


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
    program: Program,
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
      program: see `make_program`.
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
      PlacementError: a part of the state is not averaged over devices.
      ReplicaError: a part of the state that was the same on all devices differs.
      NonFiniteError: a loss or a part of the state is infinite or NaN; it is not saved.
      Interrupted: SIGTERM or SIGINT came; the state is saved.
    """
    directory, devices = Path(workdir), program.devices
    check_workdir(directory, config or {})  # Before anything is compiled.
    budget = check_before_start(program, directory, best_metric, memory_limit)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(directory))
        fingerprint.keep(directory, program, config or {})
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
        peak = _measured(program, budget.matmul)  # Before there is a state.
        place_base(devices, program.start, directory)
        abstract = devices.abstract(program.init)
        state = checkpoints.restore(start, abstract) if start else program.first_state()
        devices.check(state)
        display.print(*first_lines(program, state, directory, start))
        display.print(budget_table(budget))
        compile_ahead(program)  # Compilation is no throughput.
        run = _Run(
            program,
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


def _measured(program: Program, most_bytes: int) -> float | None:
    """What the devices can do at most, where the model's arithmetic is known."""
    if not program.work.flops:
        return None
    return matmul_peak(program.devices, program.compute_dtype, most_bytes)


class _Run:
    """One run of the loop: the steps, and what happens between them."""

    def __init__(
        self,
        program: Program,
        directory: Path,
        display: Display,
        checkpoints: Checkpoints,
        writer: MetricsWriter,
        signals: StopSignals,
        profiler: Profiler,
        every: Intervals,
        peak: float | None,
    ) -> None:
        self.program = program
        self.devices = program.devices
        self.directory = directory
        self.display = display
        self.checkpoints = checkpoints
        self.writer = writer
        self.signals = signals
        self.profiler = profiler
        self.every = every
        self.evaluated = self.agreed = False
        self.infinite_from_start: dict[str, str] = {}
        self.unchecked: deque[tuple[int, Any]] = deque(maxlen=UNCHECKED)
        self.peak = peak
        self.clock = Clock(program.devices)

    def _catch_up(self, state: TrainState, start: int, last: int) -> None:
        """Evaluates step `start`, where a fault kept the run before from doing so."""
        self.infinite_from_start = faulty_leaves(self.devices, state)
        owed = start and start not in self.checkpoints.evaluated
        data = self.program.data.evaluation
        if owed and data and _due(start, self.every.evaluate, last):
            self._evaluate(start, state)

    def steps(self, state: TrainState, start: int, stop: int) -> TrainState:
        """Runs the updates `start` to `stop - 1`."""
        ledger = self.devices.ledger
        self._catch_up(state, start, stop)

        with Prefetcher(batch_maker(self.program), start, stop) as batches:
            self._say(self.profiler.begin(start))
            self.clock.start(start)
            for step, batch in enumerate(ledger.waits(batches), start + 1):
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    state, scalars = self.program.train_step(state, batch)
                self.unchecked.append((step, scalars))
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
            self.agreed = True
        if _due(step, self.every.log, last):
            self._log(step, scalars)
        with self.clock.paused(), self.profiler.clock.paused():
            evaluated = None
            if self.program.data.evaluation and _due(step, self.every.evaluate, last):
                evaluated = self._evaluate_or_save(step, state, scalars)
            stopping = self.signals.received is not None and step < last
            if stopping or _due(step, self.every.save, last):
                self._save(step, state, scalars, evaluated)
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
        values |= self.program.derive(values)
        speed = self.clock.read(step)
        rate = speed["perf/steps_per_second"] * self.program.batch_size
        metrics = {f"train/{name}": value for name, value in values.items()}
        metrics |= speed | rates(self.program.work, rate, self.peak)
        self.writer.write(step, metrics)
        self.display.train(step, metrics, memory_text(self.devices))

    def _evaluate_or_save(
        self, step: int, state: TrainState, scalars: Any
    ) -> dict[str, float]:
        """Evaluates; what was trained is saved though a fault comes up there."""
        try:
            return self._evaluate(step, state)
        except NonFiniteError:
            raise
        except Exception:
            self._save(step, state, scalars, None)
            self.checkpoints.wait()
            raise

    def _save(
        self,
        step: int,
        state: TrainState,
        scalars: Any,
        evaluated: dict[str, float] | None,
    ) -> None:
        self._fetch_finite(step, scalars)
        self._check_state(step, state)
        self.unchecked.clear()
        with self.devices.implicit_transfers():  # Orbax's own copies.
            self.checkpoints.save(step, state, evaluated)
        names.mark_saved(self.directory, step)

    def _check_state(self, step: int, state: TrainState) -> None:
        check_replicas(state, agreed=self.agreed)
        known = self.infinite_from_start, step, self.checkpoints.latest
        check_state(self.devices, state, *known, self._blame)

    def _blame(self) -> str:
        """The first batch since the last save that explains what is not finite."""
        steps = faulty_steps(self.devices, self.unchecked, "loss", "grad_norm")
        words = (blame(self.devices, self.program.data.train, step) for step in steps)
        return next(filter(None, words), "")

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        with contextlib.ExitStack() as stack:
            if not self.evaluated:
                # Compiling may read arrays that a task or a model closes over.
                stack.enter_context(self.devices.implicit_transfers())
            metrics = self.program.evaluate(state)
        self.evaluated = True
        if not math.isfinite(metrics["eval/loss"]):
            self._check_state(step, state)
            what = f"the evaluation's loss after step {step} is infinite or NaN"
            raise non_finite(what, self.checkpoints.latest, EVALUATION)
        self.checkpoints.check_metric(metrics)
        self.writer.write(step, metrics)
        self.display.evaluation(step, metrics)
        return metrics

    def _fetch_finite(self, step: int, scalars: Any) -> dict[str, float]:
        """Fetches a step's scalars; raises `NonFiniteError` for its loss."""
        values = {k: float(v) for k, v in self.devices.fetch(scalars).items()}
        if not math.isfinite(values["loss"]):
            step = next(faulty_steps(self.devices, self.unchecked, "loss"), step)
            what = f"the loss of step {step} is infinite or NaN"
            raise non_finite(what, self.checkpoints.latest, self._blame())
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
