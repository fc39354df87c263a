"""Report of a live run: screen, log, metrics on disk, profile, throughput."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from haiku_template.reporting import notebook, plots
from haiku_template.reporting.display import Display, memory_text
from haiku_template.reporting.goodput import GOODPUT, Progress, described, goodput
from haiku_template.reporting.perf import Clock, matmul_peak, rates
from haiku_template.reporting.profile import Profiler
from haiku_template.storage.files import dispensable
from haiku_template.storage.metrics import MetricsWriter, Reader, Row, sampled
from haiku_template.storage.workdir import METRICS, PROFILE, REPORT

Metrics = dict[str, float]
Writer = Callable[[int, Metrics], None]
Maker = Callable[[Path, int], Writer]  # Of a workdir, and the first step.
Describe = Callable[[list[Row]], Iterable[str]]


class Report:
    """Context manager that observes the loop; no error in writing ends the run.

    `print` and `step` are those of its `Display`; `restart(step)` measures throughput
    from a step on, so that compilation does not count; `clock` reads it, and `paused`
    is a context that it leaves out, of evaluation and saving. `rows` reads the lines of
    metrics.jsonl so far. `peak` is the FLOP/s of matrix products on all devices,
    measured in `matmul_bytes` of each if the work of the trainer's model is known, or
    None.
    """

    def __init__(
        self, workdir: Path, trainer: Any, num_steps: int, matmul_bytes: int
    ) -> None:
        self.workdir, self.num_steps = workdir, num_steps
        self._devices, self._work = trainer.devices, trainer.work
        self._batch_size = trainer.feed.batch_size
        self._follows = self._devices.processes.index > 0  # Process 0 shows the run.
        self._display = Display(workdir, num_steps, quiet=self._follows)
        self.print, self.step = self._display.print, self._display.step
        self.clock, self._profiler, self._start = Clock(self._devices), None, 0
        self.restart, self.paused = self.clock.start, self.clock.paused
        self._stack = contextlib.ExitStack()
        self.peak: float | None = None
        if self._work.flops:  # Before there is a state.
            dtype = trainer.recipe.precision.policy.compute_dtype
            self.peak = matmul_peak(self._devices, dtype, matmul_bytes)
        self._writers: list[tuple[str, Writer]] = []
        self.rows = Reader(workdir / METRICS)

    def __enter__(self) -> "Report":
        self._stack.enter_context(self._display)
        return self

    def __exit__(self, *_: object) -> None:
        for name, write in self._writers:
            with dispensable(name):
                getattr(write, "close", lambda: None)()
        self._stack.close()

    def begin(
        self, step: int, profile: tuple[int, int] | None, writers: Sequence[Maker] = ()
    ) -> None:
        """Starts writing metrics and profiling at `step`."""
        if profile is not None:
            self._begin_profile(step, profile)
        self._start = step
        if step:
            self.step(step)  # Of a run that resumes.
        for make in (MetricsWriter, *(() if self._follows else writers)):
            name = f"writer {getattr(make, '__qualname__', make)}"
            with dispensable(name):
                self._writers.append((name, make(self.workdir, step)))
        if not self._follows:
            progress = Progress(self.workdir, step, self._devices.ledger)
            self._stack.callback(progress.close)
            self._writers.append((GOODPUT, lambda step, _: progress.add(step)))

    def _begin_profile(self, step: int, interval: tuple[int, int]) -> None:
        self._profiler = Profiler(interval, self.workdir / PROFILE, self._devices)
        self.paused = self._both_paused
        self._stack.callback(self._profiler.close)
        self.print(*self._profiler.begin(step))

    @contextlib.contextmanager
    def _both_paused(self) -> Iterator[None]:
        with self.clock.paused(), self._profiler.clock.paused():
            yield

    def due(self, step: int) -> bool:
        """Tests if `profile` has something to do at `step`."""
        return self._profiler is not None and self._profiler.due(step)

    def profile(self, step: int) -> None:
        """Starts or stops the trace at `step`, with no step in flight."""
        with self.clock.paused():
            self.print(*self._profiler.at(step))

    def training(self, step: int, values: Metrics, speed: Metrics) -> None:
        """Reports a step's scalars, and the throughput, of `clock`."""
        rate = speed["perf/steps_per_second"] * self._batch_size
        metrics = {f"train/{name}": value for name, value in values.items()}
        metrics |= speed | rates(self._work, rate, self.peak)
        self._write(step, metrics)
        self._display.train(step, metrics, memory_text(self._devices))

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Reports the metrics of an evaluation."""
        self._write(step, metrics)
        self._display.evaluation(step, metrics)

    def finish(self, step: int, describe: Describe | None = None) -> Metrics:
        """Draws report.png and prints its path; returns the last metrics.

        It also prints the lines of `describe`, of rows with all evaluations.
        """
        self._display.stop()
        if self._start and not self._follows:
            with dispensable("the goodput"):
                self.print(described(goodput(self.workdir)))
        path, last = self.workdir, {}
        rows = sampled(path / METRICS, last.update)
        if describe is not None:
            with dispensable("the best evaluation"):
                self.print(*describe(rows))
        with dispensable(self.workdir / REPORT):
            path = (not self._follows and plots.write(path, rows)) or path
        self.print(f"done      step {step}; {path}")
        if self._display.in_notebook and path.suffix:
            notebook.show_picture(path)
        return {k: v for k, v in last.items() if k != "step"}

    def _write(self, step: int, metrics: Metrics) -> None:
        for name, write in self._writers:
            with dispensable(name), self._devices.implicit_transfers():
                write(step, dict(metrics))  # It may change what it gets.
