"""What only a real card can show, in one command of less than ten minutes.

    python -m benchmarks.gpu_check

Runs on the first GPU, downloads nothing, prints a table for each check and writes
benchmarks/results/gpu-YYYY-MM-DD.json. Without a usable GPU it says why, measures and
writes nothing, and ends with exit code 0. Exit codes: 0 nothing failed, 1 a check
failed, 64 bad flags. With --quick every check runs small, and --device=cpu runs the
checks themselves where there is no card; both need --output. With --levers it times
GPT-2 124M and ResNet-20 with options of XLA, each off and on, in eight minutes instead.
"""

import contextlib
import json
import math
import re
import signal
import sys
import time
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_behaviour as behaviour
from benchmarks import gpu_levers
from benchmarks import gpu_speed as speed
from haiku_template.devices import DeviceManager
from haiku_template.errors import DeviceError, Interrupted
from haiku_template.storage.workdir import environment, write_atomically
from jax_doctor import Machine

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH = 120  # Columns of tables in files and pipes.
DRIVER = Path("/proc/driver/nvidia/version")
# Seconds for each; what one leaves, the next may use. Together less than ten minutes.
CHECKS: dict[Callable[..., bool | None], float] = {
    behaviour.device_choice: 60,
    behaviour.operations: 30,
    speed.digits_training: 90,
    behaviour.losses_on_cpu: 20,
    behaviour.transfer_guard: 20,
    behaviour.attention: 20,
    speed.bandwidth: 20,
    speed.loop_overhead: 35,
    behaviour.checkpoints: 60,
    speed.throughput: 120,
    speed.memory: 20,
    behaviour.prediction: 95,
}
LEVERS = {gpu_levers.levers: 480}
AGAIN = 5.0  # Seconds to the next alarm, where something on the way caught the last.


class OutOfTime(BaseException):
    """A check used up its seconds; no `except Exception` on the way ends this."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` inside after so many seconds, once compiled code returns."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s, which is all it may take")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def run(
    check: Callable[..., bool | None],
    limit: float,
    devices: DeviceManager,
    scale: speed.Scale,
) -> dict[str, Any]:
    """One check's name, verdict, seconds and figures; its failure is one of them."""
    figures: dict[str, Any] = {}
    begun = time.monotonic()
    try:
        with time_limit(limit):
            passed = check(devices, scale, figures)
    except Interrupted as error:
        raise KeyboardInterrupt from error
    except (Exception, OutOfTime) as error:
        passed = False
        figures["error"] = f"{type(error).__name__}: {error}"[:1000]
    return {
        "name": check.__name__,
        "passed": passed,
        "seconds": round(time.monotonic() - begun, 1),
        "limit_seconds": round(limit),
        "figures": _for_json(figures),
    }


def _for_json(value: Any) -> Any:
    """The same without infinities and NaN, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def show(console: Console, result: dict[str, Any]) -> None:
    """Prints one check: single figures as lines, groups of them as a table."""
    verdict = {True: "passed", False: "FAILED", None: "not judged"}[result["passed"]]
    used = f"{result['seconds']} s of {result['limit_seconds']} s"
    console.print(f"\n{result['name']}: {verdict}, {used}")
    groups = {}
    for name, value in result["figures"].items():
        if isinstance(value, dict) and "median" not in value:
            groups[name] = value
        else:
            console.print(f"  {name}: {_text(value)}")
    if not groups:
        return
    keys = list(dict.fromkeys(key for group in groups.values() for key in group))
    rows, columns = (groups, keys) if len(groups) > len(keys) else (keys, groups)
    table = Table("", *columns)
    for row in rows:
        places = ((row, c) if rows is groups else (c, row) for c in columns)
        table.add_row(row, *(_text(groups[name].get(key, "")) for name, key in places))
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        low, high = _text(value["min"]), _text(value["max"])
        return f"{_text(value['median'])} ({low}-{high})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value)


def report(
    devices: DeviceManager, arguments: list[str], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Everything that is written: where it ran, and what each check found."""
    facts = environment(devices)
    del facts["host"]
    driver = DRIVER.read_text() if DRIVER.exists() else ""
    version = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", driver)
    packages = sorted(Machine.here().distributions.items())
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks.gpu_check", *arguments]),
        **facts,
        "driver": version[1] if version else None,
        "cuda_plugins": [f"{n} {v}" for n, v in packages if n.startswith("jax-cuda")],
        "passed": all(result["passed"] is not False for result in results),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "checks": results,
    }


def parse(arguments: list[str]) -> Namespace:
    """The flags.

    Raises:
      ArgumentError: an unknown flag or value, or --output is missing.
    """
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--quick", action="store_true", help="everything small")
    parser.add_argument("--levers", action="store_true", help="options of XLA alone")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ArgumentError(None, f"unexpected argument {unknown[0]}")
    if not values.output and (values.quick or values.device == "cpu"):
        raise ArgumentError(None, "--quick and --device=cpu need --output=FILE")
    if not values.output:
        kind = "gpu-levers" if values.levers else "gpu"
        values.output = RESULTS / f"{kind}-{time.strftime('%Y-%m-%d')}.json"
    return values


def main(arguments: list[str]) -> int:
    """Runs all checks, and returns the exit code."""
    try:
        flags = parse(arguments)
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    # Without this the first process would keep most of the card from the children.
    memory = {"gpu_preallocate": False}
    try:
        devices = DeviceManager.create(flags.device, num_devices=1, **memory)
    except DeviceError as error:
        print(f"{error}\nNothing was measured, and nothing was written.")
        return 0
    logging.set_verbosity(logging.WARNING)
    console = Console(
        width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False
    )
    console.print(devices.describe())
    scale = speed.QUICK if flags.quick else speed.FULL
    results, until = [], time.monotonic()
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    checks = LEVERS if flags.levers else CHECKS
    for check, seconds in checks.items():
        until += seconds
        results.append(run(check, until - time.monotonic(), devices, scale))
        show(console, results[-1])
        # After each, since the next may end this process.
        found = report(devices, arguments, results)
        found["not_run"] = [check.__name__ for check in checks][len(results) :]
        text = json.dumps(found, indent=2, allow_nan=False)
        write_atomically(flags.output, text + "\n")
    failed = [result["name"] for result in results if result["passed"] is False]
    console.print(f"\n{found['seconds']} s; written to {flags.output}")
    console.print(f"failed: {', '.join(failed)}" if failed else "no check failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
