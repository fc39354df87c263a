"""Loops in alternating rounds: medians and quartiles, as a table, JSON and a picture.

A loop is a function that runs once and returns its steps per second. Loops of other
environments are processes, which wait while others run: `serve` is their side.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("build/bench")
PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy")
PACKAGES += ("keras", "torch", "lightning", "flax")

Loop = Callable[[], float]


def serve(make: Callable[[], tuple[Loop, str]]) -> None:
    """Runs the loop of `make()` for each line of standard input, and prints its rate.

    The first line that is printed has the loop's description and its versions. What
    libraries print goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loop, description = make()
    loop()  # Compiles, and warms up.
    facts = {"description": description, "versions": versions()}
    print(json.dumps(facts), file=out, flush=True)
    for _ in sys.stdin:
        print(json.dumps(loop()), file=out, flush=True)


@contextlib.contextmanager
def served(
    command: Sequence[str | Path], folder: Path | None = None
) -> Iterator[tuple[Loop, dict[str, Any]]]:
    """Starts a process that serves a loop; gives the loop, and its facts."""
    with (
        tempfile.TemporaryFile("w+") as errors,  # A pipe would fill up.
        subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
        ) as process,
    ):

        def answer() -> Any:
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                said = errors.read()[-2000:]
                raise RuntimeError(f"{' '.join(map(str, command))}: {said}")
            return json.loads(line)

        def loop() -> float:
            process.stdin.write("\n")
            process.stdin.flush()
            return answer()

        try:
            yield loop, answer()
        finally:
            process.kill()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    numbers = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers[name] = importlib.metadata.version(name)
    return numbers


def alternate(loops: dict[str, Loop], rounds: int) -> dict[str, list[float]]:
    """Runs all loops in each round, each time from another one on."""
    names, rates = [*loops], {name: [] for name in loops}
    for n in range(rounds):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            rates[name].append(loops[name]())
        done = ", ".join(f"{name} {_rate(x[-1])}" for name, x in rates.items())
        print(f"round {n + 1}/{rounds}: {done}", file=sys.stderr, flush=True)
    return rates


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Ratio to the base in each round."""
    return [a / b for a, b in zip(values, base, strict=True)]


def compare(rates: dict[str, list[float]], name: str, base: str) -> None:
    """Prints a loop's ratio to another: median and quartiles of the rounds."""
    low, middle, high = quartiles(ratios(rates[name], rates[base]))
    print(f"{name:>24} / {base}  {middle:.2f} ({low:.2f}-{high:.2f})")


def report(
    name: str, rates: dict[str, list[float]], base: str, facts: dict[str, Any]
) -> None:
    """Prints a table with ratios to `base`; writes NAME.json and NAME.png."""
    rows = {}
    for loop, values in rates.items():
        rows[loop] = {
            "steps_per_second": quartiles(values),
            "ratio": quartiles(ratios(values, rates[base])),
            "rounds": values,
        }
    print(f"{'steps/s':>24} {'median':>7}  quartiles      of {base}")
    for loop, row in rows.items():
        (low, middle, high), ratio = row["steps_per_second"], row["ratio"]
        print(
            f"{loop:>24} {_rate(middle):>7}  {_rate(low)}-{_rate(high)}".ljust(49)
            + f"{ratio[1]:.2f} ({ratio[0]:.2f}-{ratio[2]:.2f})"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    about = {
        "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": _machine(),
        "commit": _commit(),
        "base": base,
        **facts,
    }
    path.write_text(json.dumps(about | {"loops": rows}, indent=2) + "\n")
    _draw(path.with_suffix(".png"), rows, base, about)
    print(f"written   {path}, {path.with_suffix('.png')}")


def _machine() -> str:
    return f"{os.cpu_count()} x {processor(Path('/proc/cpuinfo').read_text())}"


def processor(cpuinfo: str) -> str:
    """Model of the processor; its architecture where no model is told, as on ARM."""
    match = re.search(r"^model name\s*: *(.+)", cpuinfo, re.M)
    return match[1].strip() if match else platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.check_output(command, text=True, timeout=20).strip()
    except (OSError, subprocess.SubprocessError):  # What was measured is not lost.
        return "unknown"


def _draw(path: Path, rows: dict[str, Any], base: str, about: dict[str, Any]) -> None:
    """Draws medians as bars, with quartiles as whiskers."""
    import numpy as np
    from matplotlib.figure import Figure

    names = sorted(rows, key=lambda name: rows[name]["steps_per_second"][1])
    low, middle, high = np.transpose([rows[x]["steps_per_second"] for x in names])
    figure = Figure(figsize=(9, 1.2 + 0.38 * len(names)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:blue" if name.startswith("whole") else "tab:gray" for name in names]
    whiskers = middle - low, high - middle
    axes.barh(names, middle, xerr=whiskers, color=colors, capsize=3)
    for n, name in enumerate(names):
        text = f"{_rate(middle[n])}  ({rows[name]['ratio'][1]:.2f} of {base})"
        axes.annotate(
            text, (high[n], n), xytext=(6, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(0, 1.35 * high.max())
    axes.set_xlabel("steps per second: median and quartiles of the rounds")
    model = about.get("title", "digits MLP, batches of 64")
    title = f"{model}; {about['machine']}, {about['date']}"
    axes.set_title(title, fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
