"""Terminal and log of a run: tables first, then a progress bar or plain lines."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from haiku_template.devices import DeviceManager, describe
from haiku_template.finetuning.lora import is_adapter
from haiku_template.params import flatten
from haiku_template.reporting.perf import bound_text, rate_text, speed_text
from haiku_template.storage import workdir as names
from haiku_template.storage.files import Note

STATUS = "/proc/self/status"
REDRAW_SECONDS = 0.2
WHOLE = Column(no_wrap=True, min_width=14)  # The step is not cut off.
ROWS = 20  # Of parameters on the screen.
WIDTH = 120  # Columns of tables in files and pipes.


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


class Tables(NamedTuple):
    """One table twice: a few rows for the screen, and all for the log."""

    brief: Table
    whole: Table


class Display:
    """Context manager of a run's standard output and log file.

    On a terminal a bar shows step, loss, examples/s, ETA and memory; elsewhere, and in
    the log, each report is a plain line. If standard output is lost (a closed pipe, a
    full disk), the log says so and continues.
    """

    def __init__(self, workdir: Path, num_steps: int) -> None:
        self.num_steps = num_steps
        # In a notebook rich would send both to the cell, the log as well.
        plain = {"highlight": False, "soft_wrap": True, "force_jupyter": False}
        plain["markup"] = False  # Brackets in names are no colors.
        width = None if sys.stdout.isatty() else WIDTH
        self._screen = _Screen(**plain, width=width)
        self._log_file = Note(workdir / names.LOG)
        self._log = Console(
            **plain, file=self._log_file, width=WIDTH, force_terminal=False
        )
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
        self._show(self._bar.stop)
        self._log_file.close()

    def print(self, *things: Any) -> None:
        """Prints text or tables on the screen and in the log."""
        for thing in things:
            self._show(self._screen.print, getattr(thing, "brief", thing))
            self._log.print(getattr(thing, "whole", thing))

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
        now = time.monotonic()
        if self._bar.disable or now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        self._show(self._bar.update, self._task, completed=step, refresh=True)

    def train(self, step: int, metrics: dict[str, float], memory: str) -> None:
        """Reports training metrics: in the bar, or as a line."""
        left = (self.num_steps - step) / metrics["perf/steps_per_second"]
        numbers = f"{_numbers(metrics, 'train/')}  {rate_text(metrics)}"
        time_left, bound = f"ETA {_clock(left)}", bound_text(metrics)
        line = f"{numbers}  {time_left}  {bound}  memory {memory}"
        full = f"step {step:>6}/{self.num_steps}  {line}"
        if self._bar.disable:
            self._show(self._screen.print, full)
        brief = f"loss {metrics['train/loss']:.4g}  {time_left}"
        self._bar.below = "  ".join((speed_text(metrics), bound, memory))
        drawn = {"completed": step, "description": brief, "refresh": True}
        self._show(self._bar.update, self._task, **drawn)
        self._log.print(full)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Reports evaluation metrics as a line."""
        self.print(
            f"step {step:>6}/{self.num_steps}  eval {_numbers(metrics, 'eval/')}"
        )


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
    return [
        f"devices   {devices.describe()}",
        parameter_tables(params),
        *frozen_tables(params, frozen),
        f"batch     {batch_size} examples, {batch_size // devices.num_devices} on each "
        "device",
        f"data      {placement}",
        f"workdir   {workdir}{resumed}",
    ]


def parameter_tables(params: Any) -> Tables:
    """Tabulates parameters: name, shape, dtype, bytes, device.

    If they are many, the screen has a row for each module, or for each kind of module.
    """
    leaves = flatten(params)
    by_module = next(
        fold
        for fold in (
            lambda name: name,
            lambda name: name.rpartition("/")[0],
            lambda name: re.sub(r"\d+", "*", name.rpartition("/")[0]),
            lambda name: re.sub(r"\d+", "*", "/".join(name.split("/")[:2])),
            lambda name: "all",
        )
        if len(set(map(fold, leaves))) <= ROWS
    )
    groups: dict[str, list[jax.Array]] = {}
    for name, leaf in leaves.items():
        groups.setdefault(by_module(name), []).append(leaf)
    whole = _parameter_table({name: [leaf] for name, leaf in leaves.items()})
    return Tables(_parameter_table(groups), whole)


def _parameter_table(groups: dict[str, list[jax.Array]]) -> Table:
    folded = any(len(leaves) > 1 for leaves in groups.values())
    caption = f"each of them is in {names.LOG}" if folded else None
    table = Table(
        title="Parameters",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for column in ("name", "shape", "dtype", "bytes", "where"):
        table.add_column(
            column,
            justify="right" if column == "bytes" else "left",
            overflow="fold",
            no_wrap=column != "name",
        )
    for name, leaves in groups.items():
        shape = "x".join(map(str, leaves[0].shape)) or "scalar"
        size = sum(leaf.nbytes for leaf in leaves)
        table.add_row(
            name,
            shape if len(leaves) == 1 else f"{len(leaves)} leaves",
            ", ".join(sorted({str(leaf.dtype) for leaf in leaves})),
            f"{size:,}",
            ", ".join(sorted({describe(leaf) for leaf in leaves})),
        )
    everything = sum(groups.values(), [])
    number = sum(int(np.prod(leaf.shape)) for leaf in everything)
    total = sum(leaf.nbytes for leaf in everything)
    table.add_section()
    table.add_row(f"{number:,} parameters", "", "", f"{total:,}", "on each device")
    return table


def frozen_tables(params: hk.Params, frozen: hk.Params) -> list[Table]:
    """Counts trainable and frozen parameters; no table without frozen ones."""
    if not frozen:
        return []
    table = Table(title="Fine-tuning", title_justify="left")
    table.add_column("what")
    for column in ("parameters", "share", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("dtypes")
    adapters, whole = hk.data_structures.partition(
        lambda module, name, _: is_adapter(name), params
    )
    total = hk.data_structures.tree_size((params, frozen))
    for what, tree in (
        ("trained whole", whole),
        ("adapters", adapters),
        ("frozen", frozen),
    ):
        number = hk.data_structures.tree_size(tree)
        size = hk.data_structures.tree_bytes(tree)
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(tree)})
        row = (f"{number:,}", f"{number / total:.2%}", f"{size:,}", ", ".join(dtypes))
        table.add_row(what, *row)
    return [table]


def memory_text(devices: DeviceManager) -> str:
    """Bytes in use: of the fullest device, or of this process on the CPU."""
    used = devices.memory_in_use()
    if used is not None:
        return f"{used / 2**20:,.0f} MiB"
    with contextlib.suppress(OSError, ValueError, IndexError):  # Linux alone has it.
        for line in Path(STATUS).read_text().splitlines():
            if line.startswith("VmRSS"):
                return f"{int(line.split()[1]) / 2**10:,.0f} MiB (host)"
    return "unknown"


def _numbers(metrics: dict[str, float], prefix: str) -> str:
    shown = ("loss", "accuracy", "absolute_error", "perplexity", "bits_per_byte")
    known = {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
    rest = () if prefix == "train/" else [n for n in known if n not in shown]
    names = [name for name in shown if name in known] + list(rest)
    return "  ".join(f"{name} {known[name]:.4g}" for name in names)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
