"""The training loop: steps, evaluations, checkpoints; `step.py` has the mathematics."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax

from haiku_template.preflight import (
    check_budget,
    check_functions,
    check_parts,
    check_some,
    settle,
)
from haiku_template.reporting import Report, Writer, preamble
from haiku_template.runs.guards import Guards
from haiku_template.runs.resume import (
    brought_back,
    open_checkpoints,
    open_workdir,
    restored_or_first,
    resumed,
)
from haiku_template.runs.stopping import StopSignals
from haiku_template.storage import Checkpoints
from haiku_template.storage import workdir as workdirs
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer

Metrics = dict[str, float]


class Intervals(NamedTuple):
    """Intervals in steps; None means at the last step alone."""

    log: int | None
    evaluate: int | None
    save: int | None

    @property
    def some_unsaved(self) -> bool:
        """Tests for evaluations of steps that are not saved."""
        return bool(self.evaluate and (not self.save or self.evaluate % self.save))


class Event(NamedTuple):
    """Event for hooks: a step, an evaluation, or a save that has begun."""

    what: str  # `step`, `evaluation` or `save`.
    step: int  # Steps done.
    state: TrainState  # Donated to the next step: copy what you keep.
    values: Any  # Scalars on the devices (`jax.device_get` them), metrics, or None.


Hook = Callable[[Event], None]


class Result(NamedTuple):
    """Result of a run."""

    state: TrainState  # The last, on the devices.
    metrics: Metrics  # The last of each name.

    def __repr__(self) -> str:
        values = {k: x for k, x in self.metrics.items() if not k.startswith("perf/")}
        return f"Result({self.state!r}, {values})"


def train(
    trainer: Trainer,
    *,
    num_steps: int,
    workdir: str | Path,
    log_every: int | None = 50,
    eval_every: int | None = None,
    save_every: int | None = None,
    save_minutes: float | None = None,
    mirror: str | None = None,
    keep_last: int = 2,
    keep_best: int = 1,
    best_metric: str = "eval/loss",
    best_mode: str = "min",
    max_failed_saves: int = 3,
    max_consecutive_nonfinite: int = 1,
    watchdog_minutes: float | None = None,
    sdc_replay: str | None = None,
    config: dict[str, Any] | None = None,
    memory_limit: int | None = None,
    profile: tuple[int, int] | None = None,
    writers: Sequence[Callable[[Path, int], Writer]] = (),
    hooks: Sequence[Hook] = (),
    stop_when: Callable[[list[dict[str, Any]]], bool] | None = None,
) -> Result:
    """Trains, or resumes the run in `workdir`.

    Options are those of a config; intervals are in steps, None is at the end alone.

    Args:
      config: saved as config.json; by default that of `Experiment.from_config`. On
        resume only config.py's `MAY_CHANGE` may differ.
      memory_limit: bytes on each device; None asks JAX.
      profile: traces the steps after the first number, up to the second.
      writers: each maps (workdir, first step) to a function of (step, metrics), whose
        errors are warnings.
      hooks: each is called with every `Event`; its errors end the run, saved.
      stop_when: called after each evaluation, and on resume, with the lines of
        metrics.jsonl so far; ends the run if True, as `early_stop` does.

    Raises:
      ConfigError: an option is out of range, memory too small, or `workdir` another's.
      StorageError: a checkpoint cannot be read; the last, or one for a signal, cannot
        be written, or `max_failed_saves` in a row.
      PlacementError: a part of the state is not averaged over devices.
      ReplicaError: a part of the state came to differ between devices.
      NonFiniteError: a loss or the state is infinite or NaN, and is not saved.
      ReplayError: a step of `sdc_replay` gave other bits when it was made again.
      Interrupted: a signal came; the state is saved.
    """
    check_some(locals())  # Options have the names of a config's keys.
    check_functions(hooks=hooks, writers=writers)
    directory, devices = brought_back(trainer, workdir, mirror, config), trainer.devices
    ranks = {"best_metric": best_metric, "best_mode": best_mode}
    if config is None:
        config = workdirs.of_script(directory, trainer.experiment.config, ranks)
    workdirs.check(directory, config)  # Before anything is compiled.
    trainer = trainer.replace(skips=max_consecutive_nonfinite > 1)
    unseen = 0 if hooks or sdc_replay else num_steps
    trainer = settle(trainer, directory, memory_limit, unseen)
    starts = not workdirs.has_checkpoints(directory)
    check_parts(trainer, best_metric, stop_when, num_steps)
    budget = check_budget(trainer, memory_limit, starts=starts)
    with StopSignals(devices.processes.count > 1) as signals, ExitStack() as stack:
        stack.enter_context(workdirs.locked(directory))
        facts = open_workdir(trainer, directory, config, num_steps, ranks)
        report = Report(directory, trainer, num_steps, budget.matmul)
        stack.enter_context(report)
        checkpoints = open_checkpoints(
            trainer,
            workdir,
            facts,
            keep_last=keep_last,
            keep_best=keep_best,
            max_failed_saves=max_failed_saves,
            save_minutes=save_minutes,
            mirror=mirror,
            **ranks,
        )
        stack.enter_context(checkpoints)
        start, state = restored_or_first(trainer, checkpoints, num_steps, directory)
        trainer = resumed(trainer, directory, config) if start else trainer
        checkpoints.check_room(state.saved(), start, num_steps, save_every)
        report.print(*preamble(trainer, state, report, start, hooks), budget.summary())
        trainer.compile()
        signals.listen()  # Until all that is open here is closed.
        report.begin(start, profile, writers)
        run = _Run(
            trainer.with_replay(sdc_replay, budget) if sdc_replay else trainer,
            directory,
            report,
            checkpoints,
            Guards(trainer, state, checkpoints, max_consecutive_nonfinite),
            signals,
            every=Intervals(log_every, eval_every, save_every),
            hooks=tuple(hooks),
            stop_when=stop_when,
            watchdog_minutes=watchdog_minutes,
        )
        return Result(*run.steps(state, start, num_steps))


class _Run(NamedTuple):
    """Steps of a run, and the work between them."""

    trainer: Trainer
    workdir: Path
    report: Report
    checkpoints: Checkpoints
    guards: Guards
    signals: StopSignals
    every: Intervals
    hooks: tuple[Hook, ...]
    stop_when: Callable[[list[dict[str, Any]]], bool] | None
    watchdog_minutes: float | None

    def steps(self, state: TrainState, start: int, stop: int) -> tuple[TrainState, Any]:
        """Runs steps `start + 1` to `stop`, or fewer, saved; returns the metrics, too.

        Raises an error of the data, an evaluation or a hook once the steps before it
        are saved, but for numbers that are not finite.
        """
        minutes = self.watchdog_minutes
        watched = self.signals.watched(self, minutes) if minutes else nullcontext(self)
        self.signals.measure(state.saved())
        with watched as run, closing(self.guards):
            with self.trainer.devices.explicit_transfers(), self.signals.saving(self):
                state, last = run._loop(state, start, stop)
            self.checkpoints.wait()
        unsaved = self.every.some_unsaved
        describe = self.checkpoints.unsaved_best if unsaved else None
        return state, self.report.finish(last, describe)

    def _loop(self, state: TrainState, start: int, stop: int) -> tuple[TrainState, int]:
        every, timer = self.every, self.checkpoints.timer
        facts = {"hooks": bool(self.hooks), "save_minutes": bool(timer)}
        processes = self.trainer.devices.processes
        processes.agree(facts | {"log_every, eval_every, save_every": [*every]})
        if processes.first(start and not self.checkpoints.metrics.get(start)):
            self.checkpoints.add_metrics(start, self._evaluate(start, state, stop))
        if 0 < start < stop and self._stops_early():
            return state, start

        def ends_call(step: int) -> bool:
            due = _due(step, stop, *every) or self.report.due(step)
            return due or bool(self.hooks) or step == start + 1

        # A thread makes them ahead: `training/feed.py`.
        state, unlogged = self.trainer.packed(state), self.signals.unlogged
        with self.trainer.calls(start, stop, ends_call) as calls, unlogged:
            self.report.restart(start)
            for steps, arrays in calls:
                step = steps[-1]
                trace = jax.profiler.StepTraceAnnotation("train", step_num=step)
                with self.signals.lock, trace:
                    state, scalars = self.trainer.advance(state, steps, arrays)
                    self.guards.note(steps, scalars, state)
                    self.signals.latest = steps, state, scalars
                unlogged.close()  # While the devices are at work.
                self.report.step(step)
                if _due(step, stop, every.log):
                    unlogged.callback(self._log, steps, scalars)
                if self.hooks:  # Then calls are of one step each.
                    whole = self.trainer.unpacked(state)
                    self._tell("step", step, whole, scalars.first())
                first = step == start + 1
                late = timer is not None and timer.due(step, scalars)
                due = _due(step, stop, every.evaluate, every.save)
                if self.signals.due() or late or due or first or self.report.due(step):
                    # Evaluation must not run its collectives beside the step's.
                    self.trainer.devices.wait(scalars)
                    if first:
                        self.guards.agree(state)
                    unlogged.close()
                    if self._between(steps, stop, state, scalars, late):
                        return self.trainer.unpacked(state), step
                    if first:  # Checked and waited for: not throughput.
                        self.report.restart(step)
                # Why: docs/decisions/training.md#late-lines
                elif _due(step, stop, every.log):
                    self.guards.collect()
        return self.trainer.unpacked(state), stop

    def _between(
        self, steps: range, stop: int, state: TrainState, scalars: Any, late: bool
    ) -> bool:
        """Evaluates and saves, if due or late; True ends the run early."""
        step = steps[-1]
        with self.report.paused():
            state = self.trainer.unpacked(state)
            metrics = self._evaluate(step, state, stop)
            early = metrics is not None and step < stop and self._stops_early()
        if early and not _due(step, stop, self.every.log):
            # As the last step of any run; before the save, behind which it may end.
            self._log(steps, scalars)
        with self.report.paused():
            waits = self.signals.received is not None and step < stop
            if waits or early or late or _due(step, stop, self.every.save):
                with self.signals.lock:
                    is_saving = self._save(steps, state, scalars, metrics, waits)
                    if waits:
                        self.signals.save = None
                if self.trainer.devices.processes.first(is_saving):  # Process 0 saves.
                    self._tell("save", step, state, metrics)
            if waits:
                raise self.signals.error(step)
        self.signals.restart()
        if self.report.due(step):
            self.report.profile(step)
        return early

    def _log(self, steps: range, scalars: Any) -> None:
        self.trainer.devices.wait(scalars)  # A check waits for the next call, too.
        speed = self.report.clock.read(steps[-1])
        values = self.guards.finite(steps, scalars)
        values |= self.trainer.derived(values)
        self.report.training(steps[-1], values, speed)

    def _stops_early(self) -> bool:
        with self.trainer.devices.implicit_transfers():
            stops = self.stop_when is not None and self.stop_when(self.report.rows())
        if not self.trainer.devices.processes.first(stops):
            return False
        reason = getattr(self.stop_when, "reason", "as the evaluations so far say")
        self.report.print(f"stopped   early: {reason}")
        return True

    def _tell(self, what: str, step: int, state: TrainState, values: Any) -> None:
        with self.trainer.devices.implicit_transfers():  # A user's own arithmetic.
            for hook in self.hooks:
                hook(Event(what, step, state, values and dict(values)))

    def _evaluate(self, step: int, state: TrainState, stop: int) -> Metrics | None:
        data = self.trainer.experiment.data
        if data.evaluation is None or not _due(step, stop, self.every.evaluate):
            return None
        with self.trainer.devices.ledger.timed("evaluation"):
            metrics = self.trainer.evaluate(state)
        self.guards.evaluated(step, metrics, state)
        self.checkpoints.warn_of_no_rank(metrics)
        self.report.evaluation(step, metrics)
        self.signals.evaluated = step, metrics
        self._tell("evaluation", step, state, metrics)
        return metrics

    def _save(
        self, steps: range, state: TrainState, scalars: Any, metrics: Any, waits: bool
    ) -> bool:
        """Begins a save, or raises unless all is finite and replicas are equal.

        One that fails is a warning, and an error if it `waits`. True if it has begun.
        """
        with self.signals.lock, self.trainer.devices.ledger.timed("saving"):
            self.guards.before_save(steps, scalars, state)
            self.signals.writes = True
            with self.trainer.devices.implicit_transfers():  # Orbax's own copies.
                is_saving = self.checkpoints.save(steps[-1], state.saved(), metrics)
            if waits:
                self.checkpoints.wait()
            self.signals.writes = False
        return is_saving or waits

    def save_latest(self) -> int | None:
        """Saves what the last call made; returns its step, None if there was none.

        Tells no hook, which may be what blocks or has failed.
        """
        with self.signals.lock:
            if self.signals.latest is None:
                return None
            steps, state, scalars = self.signals.latest
            leaves = jax.tree.leaves(state)
            if not all(isinstance(x, jax.Array) and not x.is_deleted() for x in leaves):
                return None  # Donated to a call that failed.
            state = self.trainer.unpacked(state)
            self.checkpoints.without_batches()
            step, metrics = self.signals.evaluated
            metrics = metrics if step == steps[-1] else None
            self._save(steps, state, scalars, metrics, waits=True)
            self.signals.unlogged.close()
            return steps[-1]


def _due(step: int, stop: int, *intervals: int | None) -> bool:
    return step == stop or any(x is not None and step % x == 0 for x in intervals)
