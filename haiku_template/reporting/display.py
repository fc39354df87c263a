"""Terminal and log of a run: tables first, then a progress bar or plain lines."""

import collections
import contextlib
import datetime
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import haiku as hk
import jax
from haiku.data_structures import partition, tree_bytes, tree_size
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from haiku_template.devices import DeviceManager, describe
from haiku_template.errors import ConfigError
from haiku_template.finetuning.lora import is_adapter
from haiku_template.params import flatten
from haiku_template.storage.files import Note
from haiku_template.storage.workdir import LOG

MEMORY = "/proc/self/statm"  # Linux alone has it.
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
REDRAW_SECONDS = 0.2
WHOLE = Column(no_wrap=True, min_width=14)  # The step is not cut off.
ROWS = 20  # Of parameters on the screen.
SHOWN = 6  # Leaves that a line names.
WIDTH = 120  # Columns of tables in files and pipes.
NUMBERS = ("parameters", "share", "bytes")  # Columns that are justified right.
# Parts of a step's time in the loop's thread, which add up to the whole.
PARTS = {
    "perf/data_seconds": "data",
    "perf/to_devices_seconds": "host-to-device",
    "perf/dispatch_seconds": "dispatch",
    "perf/compute_seconds": "compute",
    "perf/from_devices_seconds": "device-to-host",
    "perf/other_seconds": "the loop",
}


class _Screen(Console):
    """Standard output; rich would end the process if its reader is gone."""

    def on_broken_pipe(self) -> None:
        raise  # What rich is handling.


class _Bar(Progress):
    """Progress bar with a line below it: 80 columns are too short for both."""

    below = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.below, no_wrap=True, overflow="ellipsis")


class Display:
    """Context manager of a run's standard output and log file.

    On a terminal a bar shows step, loss, examples/s, ETA and memory; elsewhere, and in
    the log, each report is a plain line. If standard output is lost (a closed pipe, a
    full disk), the log says so and continues.
    """

    def __init__(self, workdir: Path, num_steps: int, quiet: bool = False) -> None:
        self.num_steps = num_steps
        # Brackets in names are no colors, and a notebook would take the log as well.
        plain = {"highlight": False, "soft_wrap": True, "markup": False}
        plain["force_jupyter"] = False
        width = None if sys.stdout.isatty() else WIDTH
        self._screen = _Screen(**plain, width=width, quiet=quiet)
        self._file = Note(workdir / LOG)
        log = {"file": self._file, "width": WIDTH, "force_terminal": False}
        self._log = Console(**plain, **log)
        self._bar = _Bar(
            TextColumn("step {task.completed}/{task.total}", table_column=WHOLE),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            console=self._screen,
            disable=not self._screen.is_terminal,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=num_steps)
        self._drawn = 0.0

    def __enter__(self) -> "Display":
        self._show(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._file.close()

    def stop(self) -> None:
        """Draws the bar for the last time; what is printed then is below it."""
        self._show(self._bar.stop)

    def print(self, *things: Any) -> None:
        """Prints texts and tables; of a pair one is for the screen, one for the log."""
        for thing in things:
            brief, whole = thing if isinstance(thing, tuple) else (thing, thing)
            self._show(self._screen.print, brief)
            self._log.print(whole)

    def _show(self, draw: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Draws on the screen, unless it is lost."""
        if self._screen.quiet:
            return
        try:
            draw(*args, **kwargs)
        except OSError as error:
            self._screen.quiet = True
            self._log.print(f"standard output is lost, and the run continues: {error}")
            with contextlib.suppress(OSError, ValueError):
                # Python would try to write the rest at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def step(self, step: int) -> None:
        """Moves the bar, a few times a second at most; cheap enough for every step."""
        if not self._bar.disable and self._redraws():
            self._show(self._bar.update, self._task, completed=step, refresh=True)

    def _redraws(self) -> bool:
        if time.monotonic() - self._drawn < REDRAW_SECONDS:
            return False
        self._drawn = time.monotonic()
        return True

    def train(self, step: int, metrics: dict[str, float], memory: str) -> None:
        """Reports training metrics: in the bar, or as a line."""
        seconds = (self.num_steps - step) / metrics["perf/steps_per_second"]
        left = str(datetime.timedelta(seconds=round(seconds)))
        eta = "ETA " + re.sub("^0:0?", "", left)
        bound, speed = bound_text(metrics), rate_text(metrics)
        line = (
            f"step {step:>6}/{self.num_steps}  {_numbers(metrics, 'train/')}  {speed}  "
            f"{eta}  {bound}  memory {memory}"
        )
        if self._bar.disable:
            self._show(self._screen.print, line)
        brief = f"loss {metrics['train/loss']:.4g}  {eta}"
        self._bar.below = "  ".join((speed_text(metrics), bound, memory))
        drawn = {"completed": step, "description": brief, "refresh": self._redraws()}
        self._show(self._bar.update, self._task, **drawn)
        self._log.print(line)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Reports evaluation metrics as a line."""
        numbers = _numbers(metrics, "eval/")
        self.print(f"step {step:>6}/{self.num_steps}  eval {numbers}")


def first_lines(
    devices: DeviceManager,
    params: hk.Params,
    frozen: hk.Params,
    batch_size: int,
    placement: str,
    workdir: Path,
    start: int,
) -> list[Any]:
    """Lines shown before step 0: devices, parameters, batch for each device."""
    resumed = f", resumed at step {start}" if start else ""
    each = batch_size // devices.num_devices
    return [
        f"devices   {devices.describe()}",
        parameter_tables(params),
        *frozen_tables(params, frozen),
        f"batch     {batch_size} examples, {each} on each device",
        f"data      {placement}",
        f"workdir   {workdir}{resumed}",
    ]


def from_batch_line(paths: Sequence[str]) -> str:
    """Names the leaves of a first state that are made of the first batch."""
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return f"init      {', '.join(paths[:SHOWN])}{more}, from the first batch"


def parameter_tables(params: Any) -> tuple[Table, Table]:
    """Tabulates parameters for the screen and the log: name, shape, dtype, bytes.

    If they are many, the screen has a row for each module, or for each kind of module.
    """
    leaves = flatten(params)
    for fold in (
        lambda name: name,
        lambda name: name.rpartition("/")[0],
        lambda name: re.sub(r"\d+", "*", name.rpartition("/")[0]),
        lambda name: re.sub(r"\d+", "*", "/".join(name.split("/")[:2])),
        lambda name: "all",
    ):
        groups = collections.defaultdict(list)
        for name, leaf in leaves.items():
            groups[fold(name)].append(leaf)
        if len(groups) <= ROWS:
            break
    whole = {name: [leaf] for name, leaf in leaves.items()}
    return _parameter_table(groups), _parameter_table(whole)


def _parameter_table(groups: dict[str, list[jax.Array]]) -> Table:
    made = table("Parameters", "name", "shape", "dtype", "bytes", "where")
    for name, leaves in groups.items():
        shape = "x".join(map(str, leaves[0].shape)) or "scalar"
        if len(leaves) > 1:
            shape, made.caption = f"{len(leaves)} leaves", f"each of them is in {LOG}"
        where = ", ".join(sorted({describe(leaf) for leaf in leaves}))
        made.add_row(name, shape, _dtypes(leaves), f"{tree_bytes(leaves):,}", where)
    made.add_section()
    total = f"{tree_size(groups):,} parameters"
    made.add_row(total, "", "", f"{tree_bytes(groups):,}", "on each device")
    return made


def frozen_tables(params: hk.Params, frozen: hk.Params) -> list[Table]:
    """Counts trainable and frozen parameters; no table without frozen ones."""
    if not frozen:
        return []
    adapters, whole = partition(lambda module, name, _: is_adapter(name), params)
    made = table("Fine-tuning", "what", "parameters", "share", "bytes", "dtypes")
    trees = {"trained whole": whole, "adapters": adapters, "frozen": frozen}
    for what, tree in trees.items():
        number, size = tree_size(tree), f"{tree_bytes(tree):,}"
        share = f"{number / tree_size((params, frozen)):.2%}"
        made.add_row(what, f"{number:,}", share, size, _dtypes(tree))
    return [made]


def table(title: str, *names: str) -> Table:
    """Makes an empty table of these columns; only the first one is folded."""
    columns = [Column(name, overflow="fold", no_wrap=True) for name in names]
    columns[0].no_wrap = False
    for column in columns:
        column.justify = "right" if column.header in NUMBERS else "left"
    left = {"title_justify": "left", "caption_justify": "left"}
    return Table(*columns, title=title, **left)


def _dtypes(tree: Any) -> str:
    return ", ".join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(tree)}))


def process_bytes() -> int | None:
    """Resident bytes of this process; None where the system does not tell."""
    try:
        pages = int(Path(MEMORY).read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_text(devices: DeviceManager) -> str:
    """Bytes in use: of the fullest device, or of this process on the CPU."""
    used = devices.memory_in_use()
    size = process_bytes() if used is None else used
    where = " (host)" if used is None else ""
    return "unknown" if size is None else f"{size / 2**20:,.0f} MiB{where}"


def bound(metrics: dict[str, float]) -> tuple[str, float]:
    """Names the largest part of a step, and its share of the time in [0, 1]."""
    seconds = {name: metrics[key] for key, name in PARTS.items() if key in metrics}
    name = max(seconds, key=seconds.__getitem__)
    return name, seconds[name] / max(sum(seconds.values()), 1e-12)


def bound_text(metrics: dict[str, float]) -> str:
    """`bound by compute 93%`."""
    name, share = bound(metrics)
    return f"bound by {name} {share:.0%}"


def speed_text(metrics: dict[str, float]) -> str:
    """`1,234 tokens/s`, or `1,234 examples/s`."""
    unit = "tokens" if "perf/tokens_per_second" in metrics else "examples"
    return f"{metrics[f'perf/{unit}_per_second']:,.0f} {unit}/s"


def rate_text(metrics: dict[str, float]) -> str:
    """`1,234 tokens/s (31% of matmul peak)`: throughput with its MFU, if known."""
    share = metrics.get("perf/utilisation")
    peak = "" if share is None else f" ({share:.0%} of matmul peak)"
    return speed_text(metrics) + peak


def _numbers(metrics: dict[str, float], prefix: str) -> str:
    shown = ("loss", "accuracy", "absolute_error", "perplexity", "bits_per_byte")
    known = [name for name in metrics if name.startswith(prefix)]
    first = [prefix + name for name in shown if prefix + name in known]
    rest = [] if prefix == "train/" else [name for name in known if name not in first]
    found = (f"{n.removeprefix(prefix)} {metrics[n]:.4g}" for n in first + rest)
    return "  ".join(found)


def in_units(size: int) -> str:
    """Formats a number of bytes with its unit."""
    for unit, factor in reversed(UNITS.items()):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


def parse_bytes(text: str) -> int:
    """Reads `24GiB`, `500MiB` or a number of bytes, or raises `ConfigError`."""
    number, factor = text.strip(), 1
    for unit in UNITS:
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), UNITS[unit]
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ConfigError(
            f"--device_memory_limit={text} is not an amount of memory; possible are a "
            "number of bytes, and amounts such as 500MiB or 24GiB"
        )
    return size
