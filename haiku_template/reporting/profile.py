"""Profile of some steps: a trace, and a page that summarizes it."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from haiku_template.devices import DeviceManager
from haiku_template.reporting.perf import PARTS, Clock, bound_text

SHOWN_OPERATIONS = 20


class Profiler:
    """Context manager that traces an interval of a run.

    A new folder of `directory` gets a trace for TensorBoard (`tensorboard
    --logdir=DIRECTORY`, with xprof installed), one for Perfetto (ui.perfetto.dev opens
    `perfetto_trace.json.gz`), and `summary.txt`.

    `interval` (start, stop) means the steps start + 1 to stop; None profiles nothing.
    """

    def __init__(
        self, interval: tuple[int, int] | None, directory: Path, devices: DeviceManager
    ) -> None:
        self._interval = interval
        self._directory = directory
        self._devices = devices
        self.clock = Clock(devices)
        self.clock.start(0)
        self._first: int | None = None

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._first is not None:  # The run ends before the interval does.
            jax.profiler.stop_trace()

    def due(self, step: int) -> bool:
        """Tests if `at(step)` has something to do."""
        return self._interval is not None and step in self._interval

    def begin(self, step: int) -> str | None:
        """Starts in a run that begins at `step`; returns a line if it is too late."""
        if self._interval is None or step < self._interval[0]:
            return None
        if step >= self._interval[1]:
            start, stop = self._interval
            return f"profile   none: steps {start} to {stop} were done before this run"
        self._start(step)
        return None

    def at(self, step: int) -> str | None:
        """Starts or stops at `step`, no step in flight; returns a line when done."""
        if self._first is None:
            if step == self._interval[0]:
                self._start(step)
            return None
        metrics = self.clock.read(step)
        first, self._first = self._first, None
        jax.profiler.stop_trace()
        folder = max(self._directory.glob("plugins/profile/*"))
        text = summary(folder, self._devices.describe(), first, step, metrics)
        (folder / "summary.txt").write_text(text)
        return f"profile   {folder / 'summary.txt'}; {bound_text(metrics)}"

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

    Args:
      folder: has the trace, `*.xplane.pb`.
      first: the step before the traced ones.
      last: the last traced step.
      metrics: of these steps, from `Clock.read`.
    """
    milliseconds = 1000 / metrics["perf/steps_per_second"]
    lines = [
        f"Steps {first + 1} to {last}",
        f"devices  {devices}",
        f"step     {milliseconds:.3f} ms on average, {bound_text(metrics)}",
        "",
        "A step's time, as the loop sees it:",
    ]
    for key, name in PARTS.items():
        if key in metrics:
            value = 1000 * metrics[key]
            lines.append(f"  {value:10.3f} ms {value / milliseconds:6.1%}  {name}")
    lines += [
        "",
        f"Copied in a step: {metrics['perf/bytes_to_devices']:,.0f} bytes to the "
        f"devices, {metrics['perf/bytes_from_devices']:,.0f} from them",
        "",
        "Operations on the devices, without those inside them:",
        f"  {'ms a step':>10} {'share':>7} {'calls':>7}  operation",
    ]
    seconds, calls = operations(folder)
    total = sum(seconds.values())
    for name, value in seconds.most_common(SHOWN_OPERATIONS):
        each = 1000 * value / (last - first)
        share = value / total
        lines.append(f"  {each:10.3f} {share:7.1%} {calls[name]:7}  {name}")
    if not seconds:
        lines.append("  the trace holds none")
    elif len(seconds) > SHOWN_OPERATIONS:
        lines.append(f"  and {len(seconds) - SHOWN_OPERATIONS} more")
    lines += ["", "The whole trace: open perfetto_trace.json.gz in ui.perfetto.dev"]
    return "\n".join(lines) + "\n"


def operations(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Sums seconds and calls of each compiled operation in a trace, over all devices.

    An operation that holds others, such as a loop, counts without them.
    """
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for path in folder.glob("*.xplane.pb"):
        for events in _device_lines(path):
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


def _device_lines(path: Path) -> Iterator[list[tuple[float, float, str]]]:
    """Yields each line of a trace: (start, duration, name) of operations, in ns."""
    with warnings.catch_warnings():
        # jax 0.12's reader makes a type that Python 3.12 finds incomplete.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            found: dict[str, list[Any]] = defaultdict(list)
            for line in plane.lines:
                for event in line.events:
                    if "hlo_op" in dict(event.stats):
                        entry = (event.start_ns, event.duration_ns, event.name)
                        found[line.name].append(entry)
            yield from found.values()
