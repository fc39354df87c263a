"""Terminal and log of a run: tables first, then a progress bar or plain lines."""

import collections
import contextlib
import datetime
import functools
import io
import logging
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import haiku as hk
import jax
from haiku.data_structures import partition, tree_bytes, tree_size
from rich.cells import cell_len
from rich.console import Console, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from haiku_template.devices import DeviceManager, describe
from haiku_template.devices.layout import device_bytes
from haiku_template.errors import ConfigError, counted, some
from haiku_template.finetuning.lora import is_adapter
from haiku_template.params import flatten
from haiku_template.reporting import notebook
from haiku_template.storage.files import Note
from haiku_template.storage.workdir import LOG

MEMORY = "/proc/self/statm"  # Linux alone has it.
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
REDRAW_SECONDS = 0.2
STEP = Column(no_wrap=True, min_width=14)  # It is not cut off.
ROWS = 20  # Of parameters on the screen.
# Of training, in the report alone: lines have the values of the task.
UNSHOWN = ("grad_norm", "learning_rate", "loss_scale", "skipped_steps")
FOLDED = 8  # Columns of a terminal that a folded column of a table has, at least.
WIDTH = 120  # Columns of tables in files and pipes.
INDENT = 10 * " "  # Of a line's further rows, below what follows its first word.
NUMBERS = ("parameters", "share", "bytes", "size")  # Columns that are justified right.
# Parts of a step's time in the loop's thread, which add up to it.
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
        self.num_steps, self._drawn = num_steps, 0.0
        # Brackets in names are no colors, and a notebook would take the log as well.
        console = functools.partial(
            _Screen, highlight=False, soft_wrap=True, markup=False, force_jupyter=False
        )
        # FORCE_COLOR, which notebooks and CI set, makes no terminal of them.
        width, force = (None, None) if sys.stdout.isatty() else (WIDTH, False)
        self._screen = console(width=width, quiet=quiet, force_terminal=force)
        self.in_notebook = type(sys.stdout).__module__ == "ipykernel.iostream"
        put = self._screen.print
        # rich takes as long for a line as a small step.
        plain = lambda line: print(line, file=self._screen.file, flush=True)  # noqa: E731
        means = notebook.means(put) if self.in_notebook else (plain, put)
        self._line, self._put = means
        self._file = Note(workdir / LOG)
        self._log = console(file=self._file, width=WIDTH, force_terminal=False)
        self._bar = _Bar(
            TextColumn("step {task.completed}/{task.total}", table_column=STEP),
            BarColumn(bar_width=None),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            console=self._screen,
            disable=not self._screen.is_terminal,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=num_steps)
        self._streams: list[tuple[Any, Any]] = []

    def __enter__(self) -> "Display":
        errors = sys.stderr
        self._show(self._bar.start)
        # The bar is drawn over what a handler writes to the stream that it began with.
        if sys.stderr is not errors and _is_terminal(errors):
            handlers = [x for x in _handlers() if x.stream is errors]
            self._streams = [(x, x.setStream(sys.stderr)) for x in handlers]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._file.close()

    def stop(self) -> None:
        """Draws the bar for the last time; what is printed then is below it."""
        self._show(self._bar.stop)
        while self._streams:
            handler, stream = self._streams.pop()
            handler.setStream(stream)

    def print(self, *lines: Any) -> None:
        """Prints texts and tables; of a pair one is for the screen, one for the log."""
        for line in lines:
            brief, full = line if isinstance(line, tuple) else (line, line)
            if isinstance(brief, str) and self._screen.is_terminal:
                brief = _in_width(brief, self._screen.width)
            self._show(self._put, brief)
            self._log.print(full)

    def _show(self, draw: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Draws on the screen, unless its reader is gone."""
        if self._screen.quiet:
            return
        try:
            draw(*args, **kwargs)
        except OSError as error:
            self._lose_screen(error)

    def _lose_screen(self, error: OSError) -> None:
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
        clock = str(datetime.timedelta(seconds=round(seconds)))
        eta, bound = "ETA " + re.sub("^0:0?", "", clock), bound_text(metrics)
        line = f"step {step:>6}/{self.num_steps}  {_numbers(metrics, 'train/')}  "
        line += f"{rate_text(metrics)}  {eta}  {bound}  memory {memory}"
        self._file.write(f"{line}\n")
        if self._bar.disable:
            self._show(self._line, line)
        self._bar.below = f"{speed_text(metrics)}  {bound}  {memory}"
        update = functools.partial(self._bar.update, self._task, completed=step)
        text = f"{_numbers(metrics, 'train/', 2)}  {eta}"
        self._show(update, description=text, refresh=self._redraws())

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Reports evaluation metrics as a line."""
        numbers = _numbers(metrics, "eval/")
        self.print(f"step {step:>6}/{self.num_steps}  eval {numbers}")


def _in_width(text: str, width: int) -> str:
    """Breaks lines at spaces, where a terminal would break them inside of words."""
    wrapper = textwrap.TextWrapper(
        max(width, 2 * len(INDENT)),  # COLUMNS=0 is one, too.
        subsequent_indent=INDENT,
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,  # Of a path, which is copied.
        break_on_hyphens=False,
    )
    return "\n".join(map(wrapper.fill, text.split("\n")))


def _handlers() -> list[Any]:
    # absl's wraps the one that has the stream.
    every = [getattr(x, "python_handler", x) for x in logging.getLogger().handlers]
    return [x for x in every if isinstance(x, logging.StreamHandler)]


def _is_terminal(stream: Any) -> bool:
    """Tests for a terminal itself: an object of a script's may copy what it gets."""
    is_file = isinstance(stream, io.TextIOBase) and not stream.closed
    return is_file and stream.isatty()


def preamble(trainer: Any, state: Any, report: Any, start: int, hooks: Any) -> list:
    """Lines shown before step 0: devices, parameters, batch for each device."""
    devices, feed = trainer.devices, trainer.feed
    resumed = f", resumed at step {start}" if start else ""
    from_batch = () if start else trainer.initializer.from_batch
    share = feed.batch_size // devices.num_devices
    steps = 1 if hooks else feed.steps_per_call
    calls = f", {steps} steps a call" if steps > 1 else ""
    if size := getattr(trainer.experiment.data.train, "num_examples", None):
        epochs = f"{report.num_steps * feed.batch_size / size:,.4g}"
        calls += f"; {counted(report.num_steps, 'steps')} = {counted(epochs, 'epochs')}"
    size = counted(feed.batch_size, "examples")
    return [
        f"devices   {devices.describe()}",
        parameter_tables(state.params),
        *([frozen_table(state.params, state.frozen)] if state.frozen else []),
        f"batch     {size}, {share} on each device{calls}",
        f"data      {feed.placement}",
        f"workdir   {report.workdir}{resumed}",
        *([_of_the_batch(from_batch)] if from_batch else []),
    ]


def _of_the_batch(paths: Sequence[str]) -> str:
    return f"init      {some(paths, 6)}, from the first batch"


def parameter_tables(params: Any) -> tuple[Table, Table]:
    """Tabulates parameters for the screen, by module if they are many, and the log."""
    leaves = flatten(params)
    full = _parameter_table({name: [leaf] for name, leaf in leaves.items()})
    return (full if len(leaves) <= ROWS else _folded_table(leaves)), full


def _folded_table(leaves: dict[str, jax.Array]) -> Table:
    for fold in (
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
    folded = _parameter_table(groups)
    folded.caption = f"each of them is in {LOG}"
    return folded


def _parameter_table(groups: dict[str, list[jax.Array]]) -> Table:
    rows = []
    for name, leaves in groups.items():
        shape = "x".join(map(str, leaves[0].shape)) or "scalar"
        shape = f"{len(leaves)} leaves" if len(leaves) > 1 else shape
        places = ", ".join(sorted(set(map(describe, leaves))))
        rows.append((name, shape, _dtypes(leaves), f"{tree_bytes(leaves):,}", places))
    total = counted(tree_size(groups), "parameters")
    totals = (total, "", "", f"{device_bytes(groups):,}", "on each device")
    columns = ("name", "shape", "dtype", "bytes", "where")
    return table("Parameters", columns, rows, [totals])


def frozen_table(params: hk.Params, frozen: hk.Params) -> Table:
    """Counts trainable parameters, adapters apart, and frozen ones."""
    adapters, full = partition(lambda module, name, _: is_adapter(name), params)
    trees = {"trained whole": full, "adapters": adapters, "frozen": frozen}
    total = tree_size((params, frozen))
    rows = [
        (
            name,
            f"{tree_size(tree):,}",
            f"{tree_size(tree) / total:.2%}",
            f"{tree_bytes(tree):,}",
            _dtypes(tree),
        )
        for name, tree in trees.items()
    ]
    columns = ("what", "parameters", "share", "bytes", "dtypes")
    return table("Fine-tuning", columns, rows)


class Grid(Table):
    """Table of texts; lines of them where there is no room for its columns."""

    def __rich_console__(self, *args: Any) -> RenderResult:
        columns = [(x.header, *x.cells) for x in self.columns]
        sizes = [max(map(cell_len, cells)) for cells in columns]
        pairs = zip(self.columns, sizes, strict=True)
        least = [x if column.no_wrap else min(x, FOLDED) for column, x in pairs]
        if 1 + sum(3 + x for x in least) <= args[-1].max_width:
            yield from super().__rich_console__(*args)
            return
        rows = ["  ".join(y or "-" for y in x) for x in zip(*columns, strict=True)]
        yield Text("\n".join(filter(None, (self.title, *rows, self.caption))))


def table(
    title: str, columns: Iterable[str], *sections: Iterable[Sequence[str]]
) -> Table:
    """Makes a table of sections of rows; only its first column is folded."""
    grid = Grid(title=title, title_justify="left", caption_justify="left")
    for i, name in enumerate(columns):
        justify = "right" if name in NUMBERS else "left"
        grid.add_column(name, justify=justify, overflow="fold", no_wrap=i > 0)
    for rows in sections:
        for row in rows:
            grid.add_row(*row)
        grid.add_section()
    return grid


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


def bound_text(metrics: dict[str, float]) -> str:
    """`bound by compute 93%`: the largest part of a step, and its share of the time."""
    seconds = {name: metrics[key] for key, name in PARTS.items() if key in metrics}
    name = max(seconds, key=seconds.__getitem__)
    share = seconds[name] / max(sum(seconds.values()), 1e-12)
    return f"bound by {name} {share:.0%}"


def speed_text(metrics: dict[str, float]) -> str:
    """`1,234 tokens/s`, or `1,234 examples/s`."""
    unit = "tokens" if "perf/tokens_per_second" in metrics else "examples"
    rate = metrics[f"perf/{unit}_per_second"]
    return f"{rate:,.{2 * (rate < 10)}f} {unit}/s"  # Also of a large model on a CPU.


def rate_text(metrics: dict[str, float]) -> str:
    """`1,234 tokens/s (31% of matmul peak)`: throughput with its MFU, if known."""
    share = metrics.get("perf/utilisation")
    peak = "" if share is None else f" ({share:.0%} of matmul peak)"
    return speed_text(metrics) + peak


def _numbers(metrics: dict[str, float], prefix: str, most: int | None = None) -> str:
    order = ("loss", "accuracy", "absolute_error", "perplexity", "bits_per_byte")
    values = {k[len(prefix) :]: x for k, x in metrics.items() if k.startswith(prefix)}
    names = [x for x in dict.fromkeys((*order, *values)) if x in values]
    shown = [x for x in names if x in order or x not in UNSHOWN]
    return "  ".join(f"{name} {values[name]:.4g}" for name in shown[:most])


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
