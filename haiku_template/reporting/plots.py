"""Pictures of a run: how it went, and which classes an evaluation took for others."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from haiku_template.storage import metrics
from haiku_template.storage import workdir as names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
NAMED_CLASSES = 50  # More names and numbers cannot be read.

PANELS = (
    ("loss", ("train/loss", "eval/loss"), "log"),
    ("learning rate", ("train/learning_rate",), "linear"),
    ("accuracy", ("train/accuracy", "eval/accuracy"), "linear"),
    ("examples / s", ("perf/examples_per_second",), "linear"),
)


def write(workdir: Path) -> Path | None:
    """Draws metrics.jsonl as report.png; None, with a warning, without matplotlib."""
    figure = _figure(names.REPORT, 10, 7)
    if figure is None:
        return None
    rows = metrics.read(workdir / names.METRICS)
    for axes, (title, keys, scale) in zip(
        figure.subplots(2, 2).flat, PANELS, strict=True
    ):
        for key in keys:
            points = [
                (row["step"], row[key]) for row in rows if row.get(key) is not None
            ]
            if points:
                style = "o-" if key.startswith("eval/") else "-"
                axes.plot(*zip(*points, strict=True), style, label=key, markersize=4)
        axes.set(title=title, xlabel="step", yscale=scale)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    figure.suptitle(workdir.name)
    figure.savefig(workdir / names.REPORT, dpi=110)
    return workdir / names.REPORT


def write_confusion(
    workdir: Path, matrix: np.ndarray, classes: Sequence[str], title: str
) -> Path | None:
    """Draws a confusion matrix as confusion.png; None, with a warning, if it cannot be.

    Args:
      workdir: where the picture goes; an older one is replaced.
      matrix: examples by label (row) and prediction (column): [K, K].
      classes: the names of the K classes.
      title: above the picture.
    """
    side = min(max(3.5, 0.4 * len(classes) + 2), 24)
    figure = _figure(names.CONFUSION, side, side)
    if figure is None:
        return None
    axes = figure.subplots()
    # Each row's colours are shares of its label, so that rare classes show too.
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(title=title, xlabel="prediction", ylabel="label")
    if len(classes) <= NAMED_CLASSES:
        # A dollar sign would begin a formula.
        labels = [name.replace("$", r"\$") for name in classes]
        axes.set_xticks(range(len(classes)), labels, rotation=90)
        axes.set_yticks(range(len(classes)), labels)
        for (row, column), count in np.ndenumerate(matrix):
            colour = "white" if shares[row, column] > 0.5 else "black"
            where = {"ha": "center", "va": "center", "color": colour, "fontsize": 7}
            axes.text(column, row, f"{count:.0f}" if count else "", **where)
    path = workdir / names.CONFUSION
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        figure.savefig(partial, dpi=110)
        partial.replace(path)
    except OSError as error:
        logger.warning("no %s: %s", path, error)
        return None
    return path


def _figure(name: str, width: float, height: float) -> "Figure | None":
    """An empty picture, sizes in inches; None, with a warning, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            'no %s: matplotlib is not installed (pip install "haiku_template[plots]")',
            name,
        )
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
