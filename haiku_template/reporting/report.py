"""Report of a live run: screen, log, metrics on disk, profile, throughput."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from haiku_template.devices import DeviceManager
from haiku_template.reporting import notebook, plots
from haiku_template.reporting.display import Display, memory_text
from haiku_template.reporting.goodput import GOODPUT, Progress, described, goodput
from haiku_template.reporting.perf import Clock, Work, rates
from haiku_template.reporting.profile import Profiler
from haiku_template.storage.files import dispensable
from haiku_template.storage.metrics import MetricsWriter, read
from haiku_template.storage.workdir import METRICS, PROFILE, REPORT

Metrics = dict[str, float]
Writer = Callable[[int, Metrics], None]


class Report:
    """Context manager that observes the loop; no error in writing ends the run.

    `print` and `step` are those of its `Display`; `restart(step)` measures throughput
    from a step on, so that compilation does not count; `clock` reads it. `peak` is the
    FLOP/s of matrix products on all devices; None if not measured.
    """

    def __init__(
        self,
        workdir: Path,
        devices: DeviceManager,
        *,
        num_steps: int,
        batch_size: int,
        work: Work,
    ) -> None:
        self.workdir, self._devices = workdir, devices
        self._batch_size, self._work, self.num_steps = batch_size, work, num_steps
        self._follows = devices.processes.index > 0  # Another process shows the run.
        self._display = Display(workdir, num_steps, quiet=self._follows)
        self.print, self.step = self._display.print, self._display.step
        self.clock, self._profiler, self._start = Clock(devices), None, 0
        self._clocks = [self.clock]
        self.restart = self.clock.start
        self._stack = contextlib.ExitStack()
        self.peak: float | None = None
        self._writers: list[tuple[str, Writer]] = []

    def __enter__(self) -> "Report":
        self._stack.enter_context(self._display)
        return self

    def __exit__(self, *_: object) -> None:
        for name, write in self._writers:
            with dispensable(name):
                getattr(write, "close", lambda: None)()
        self._stack.close()

    def begin(
        self,
        step: int,
        profile: tuple[int, int] | None,
        writers: Sequence[Callable[[Path, int], Writer]] = (),
    ) -> None:
        """Starts writing metrics, measuring and profiling at `step`."""
        if profile is not None:
            self._profiler = Profiler(profile, self.workdir / PROFILE, self._devices)
            self._clocks.append(self._profiler.clock)
            self._stack.callback(self._profiler.close)
            self.print(*self._profiler.begin(step))
        self._start = step
        for make in (MetricsWriter, *(() if self._follows else writers)):
            name = f"writer {getattr(make, '__qualname__', make)}"
            with dispensable(name):
                self._writers.append((name, make(self.workdir, step)))
        if not self._follows:
            progress = Progress(self.workdir, step, self._devices.ledger)
            self._stack.callback(progress.close)
            self._writers.append((GOODPUT, lambda step, _: progress.add(step)))
        self.restart(step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context of evaluation and saving, which the throughput leaves out."""
        with contextlib.ExitStack() as stack:
            for clock in self._clocks:
                stack.enter_context(clock.paused())
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

    def finish(self, step: int) -> Metrics:
        """Draws report.png and prints its path; returns the last metrics."""
        self._display.stop()
        if self._start and not self._follows:
            with dispensable("the goodput"):
                self.print(described(goodput(self.workdir)))
        path = self.workdir
        with dispensable(self.workdir / REPORT):
            path = (not self._follows and plots.write(path)) or path
        self.print(f"done      step {step}; {path}")
        if self._display.in_notebook and path.suffix:
            notebook.show_picture(path)
        rows = read(self.workdir / METRICS)
        return {k: v for row in rows for k, v in row.items() if k != "step"}

    def _write(self, step: int, metrics: Metrics) -> None:
        for name, write in self._writers:
            with dispensable(name), self._devices.implicit_transfers():
                write(step, metrics)
