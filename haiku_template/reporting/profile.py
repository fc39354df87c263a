"""Profile of some steps: a trace, and a page that summarizes it."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from haiku_template.devices import DeviceManager
from haiku_template.reporting.display import PARTS, bound_text
from haiku_template.reporting.perf import Clock

SHOWN_OPERATIONS = 20
PAGE = """\
Steps {first} to {last}
devices  {devices}
step     {milliseconds:.3f} ms on average, {bound}

A step's time, as the loop sees it:
{phases}

Copied in a step: {sent:,.0f} bytes to the devices, {fetched:,.0f} from them

Operations on the devices, without those inside them:
   ms a step   share   calls  operation
{operations}

The whole trace: open perfetto_trace.json.gz in ui.perfetto.dev
"""


class Profiler:
    """Traces the steps start + 1 to stop of `interval`.

    A new folder of `directory` gets a trace for TensorBoard (`tensorboard
    --logdir=DIRECTORY`, with xprof installed), one for Perfetto (ui.perfetto.dev opens
    `perfetto_trace.json.gz`), and `summary.txt`.
    """

    def __init__(
        self, interval: tuple[int, int], directory: Path, devices: DeviceManager
    ) -> None:
        self._interval, self._directory, self._devices = interval, directory, devices
        self.clock = Clock(devices)
        self._first: int | None = None  # The step before the traced ones.

    def close(self) -> None:
        """Stops the trace of a run that ends before the interval does."""
        if self._first is not None:
            jax.profiler.stop_trace()

    def due(self, step: int) -> bool:
        """Tests if `at(step)` has something to do."""
        return step in self._interval

    def begin(self, step: int) -> list[str]:
        """Starts in a run from `step`; returns a line if it is too late."""
        start, stop = self._interval
        if step < stop:
            return self.at(step)
        return [f"profile   none: steps {start} to {stop} were done before this run"]

    def at(self, step: int) -> list[str]:
        """Starts or stops at `step`, no step in flight; returns a line when done."""
        if self._first is None:
            if step >= self._interval[0]:
                self._start(step)
            return []
        metrics = self.clock.read(step)
        first, self._first = self._first, None
        jax.profiler.stop_trace()
        folder = max(self._directory.glob("plugins/profile/*"))
        text = summary(folder, self._devices.describe(), first, step, metrics)
        (folder / "summary.txt").write_text(text)
        return [f"profile   {folder / 'summary.txt'}; {bound_text(metrics)}"]

    def _start(self, step: int) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Every Python call would be an event.
        jax.profiler.start_trace(
            str(self._directory), create_perfetto_trace=True, profiler_options=options
        )
        self._first = step
        self.clock.start(step)


def summary(
    folder: Path, devices: str, first: int, last: int, metrics: dict[str, float]
) -> str:
    """Summarizes a trace: parts of a step's time, and its longest operations.

    `folder` has the trace, `*.xplane.pb`, of the steps `first` + 1 to `last`; `metrics`
    are of these steps, from `Clock.read`.
    """
    rate, (seconds, calls) = metrics["perf/steps_per_second"], operations(folder)
    phases = [
        f"  {1000 * metrics[key]:10.3f} ms {rate * metrics[key]:6.1%}  {name}"
        for key, name in PARTS.items()
        if key in metrics
    ]
    total, steps = sum(seconds.values()), last - first
    rows = [
        f"  {1000 * value / steps:10.3f} {value / total:7.1%} {calls[name]:7}  {name}"
        for name, value in seconds.most_common(SHOWN_OPERATIONS)
    ]
    if len(seconds) > SHOWN_OPERATIONS:
        rows.append(f"  and {len(seconds) - SHOWN_OPERATIONS} more")
    return PAGE.format(
        first=first + 1,
        last=last,
        devices=devices,
        milliseconds=1000 / rate,
        bound=bound_text(metrics),
        phases="\n".join(phases),
        sent=metrics["perf/bytes_to_devices"],
        fetched=metrics["perf/bytes_from_devices"],
        operations="\n".join(rows or ["  the trace holds none"]),
    )


def operations(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Sums seconds and calls of each compiled operation in a trace, over all devices.

    An operation that holds others, such as a loop, counts without them.
    """
    seconds, calls = Counter[str](), Counter[str]()
    for events in _device_lines(folder):
        open_until: list[tuple[float, str]] = []
        for start, duration, name in sorted(events, key=lambda e: (e[0], -e[1])):
            while open_until and open_until[-1][0] <= start:
                open_until.pop()
            if open_until:
                seconds[open_until[-1][1]] -= duration / 1e9
            seconds[name] += duration / 1e9
            calls[name] += 1
            open_until.append((start + duration, name))
    return seconds, calls


def _device_lines(folder: Path) -> Iterator[list[tuple[float, float, str]]]:
    """Yields each line of a trace: (start, duration, name) of operations, in ns."""
    for path in folder.glob("*.xplane.pb"):
        events: dict[Any, list[Any]] = defaultdict(list)
        # jax 0.12's reader makes a type that Python 3.12 finds incomplete.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines:
                    for event in line.events:
                        if "hlo_op" in dict(event.stats):
                            entry = (event.start_ns, event.duration_ns, event.name)
                            events[plane.name, line.name].append(entry)
        yield from events.values()
