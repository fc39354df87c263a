"""Plots of a run: metrics by step, and the confusion matrix of an evaluation."""

import io
import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from haiku_template.storage import workdir as names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
NAMED_CLASSES = 50  # More names and numbers cannot be read.
SPEED = "perf/examples_per_second"

Lines = dict[str, list[tuple[int, float]]]


def panels(rows: list[dict[str, Any]]) -> dict[str, Lines]:
    """Steps and values by key, in panels by title: loss first, and speed last."""
    titles: dict[str, Lines] = {"loss": {}}
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in sorted(keys, key=lambda key: key == SPEED):
        kind, _, name = key.partition("/")
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points and (kind in ("train", "eval") or key == SPEED):
            title = "examples / s" if key == SPEED else name.replace("_", " ")
            titles.setdefault(title, {})[key] = points
    return {title: lines for title, lines in titles.items() if lines}


def scale(title: str, lines: Lines) -> str:
    """`log` for losses above zero, else `linear`."""
    values = (value for points in lines.values() for _, value in points)
    return "log" if title == "loss" and all(v > 0 for v in values) else "linear"


def write(workdir: Path, rows: list[dict[str, Any]]) -> Path | None:
    """Draws metrics as report.png; without matplotlib warns and returns None."""
    metrics = panels(rows)
    height = -(-len(metrics) // 2)
    if (figure := _figure(names.REPORT, 10, 1 + 3 * height)) is None:
        return None
    for place, (title, lines) in enumerate(metrics.items(), 1):
        axes = figure.add_subplot(height, 2, place)
        for key, points in lines.items():
            style = "o-" if key.startswith("eval/") else "-"
            axes.plot(*zip(*points, strict=True), style, label=_plain(key), ms=4)
        axes.set(title=_plain(title), xlabel="step", yscale=scale(title, lines))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(_plain(workdir.name))
    return _save(figure, workdir / names.REPORT)


def write_comparison(
    path: Path, runs: dict[str, list[dict[str, Any]]], metrics: Sequence[str]
) -> Path | None:
    """Draws each metric's curves of all runs, by label; if it cannot, None."""
    height = 4 + 0.21 * len(runs)  # A line of the legend has 0.208 inches.
    if (figure := _figure(path.name, 6 * len(metrics), height)) is None:
        return None
    for place, metric in enumerate(metrics, 1):
        axes = figure.add_subplot(1, len(metrics), place)
        for label, rows in runs.items():
            points = [(x["step"], x[metric]) for x in rows if x.get(metric) is not None]
            steps, values = zip(*points, strict=True) if points else ((), ())
            style = "o-" if len(points) < 20 else "-"
            axes.plot(steps, values, style, label=_plain(label))
        above_zero = all(y > 0 for line in axes.lines for y in line.get_ydata())
        yscale = "log" if metric.endswith("loss") and above_zero else "linear"
        axes.set(title=_plain(metric), xlabel="step", yscale=yscale)
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center")
    return _save_if_possible(figure, path)


def write_confusion(
    workdir: Path, matrix: np.ndarray, classes: Sequence[str], title: str
) -> Path | None:
    """Draws a confusion matrix as confusion.png; if it cannot, warns and returns None.

    `matrix` [K, K] counts examples by label (row) and prediction (column).
    """
    side = min(max(3.5, 0.4 * len(classes) + 2), 24)
    if (figure := _figure(names.CONFUSION, side, side)) is None:
        return None
    axes = figure.subplots()
    # Each row's colors are shares of its label, so that rare classes show too.
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(title=_plain(title), xlabel="prediction", ylabel="label")
    if len(classes) <= NAMED_CLASSES:
        labels = [*map(_plain, classes)]
        axes.set_xticks(range(len(classes)), labels, rotation=90)
        axes.set_yticks(range(len(classes)), labels)
        for (row, column), count in np.ndenumerate(matrix):
            color = "white" if shares[row, column] > 0.5 else "black"
            label = f"{count:.0f}" if count else ""
            axes.text(
                column, row, label, ha="center", va="center", color=color, fontsize=7
            )
    return _save_if_possible(figure, workdir / names.CONFUSION)


def write_pictures(
    path: Path, pixels: np.ndarray, titles: Sequence[str]
) -> Path | None:
    """Draws pictures [N, height, width, 1 or 3], in rows of 8; None as `write`."""
    rows = -(-len(pixels) // 8)
    if (figure := _figure(path.name, 10, 1.5 * rows)) is None:
        return None
    low, high = float(pixels.min()), float(pixels.max())
    pixels = (pixels - low) / max(high - low, 1e-12)
    for place, (picture, title) in enumerate(zip(pixels, titles, strict=True), 1):
        axes = figure.add_subplot(rows, 8, place)
        axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
        axes.set_title(_plain(title), fontsize=8)
        axes.axis("off")
    return _save(figure, path)


def _plain(text: str) -> str:
    """Escapes text for matplotlib: a $ begins a formula, and _ a label left out."""
    return re.sub("^_", " _", text.replace("$", r"\$"))


def _figure(name: str, width: float, height: float) -> "Figure | None":
    """Makes an empty figure, in inches; without matplotlib warns and returns None."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        advice = 'matplotlib is not installed (pip install "haiku_template[plots]")'
        logger.warning("no %s: %s", name, advice)
        return None
    return Figure(figsize=(width, height), layout="constrained")


def _save_if_possible(figure: "Figure", path: Path) -> Path | None:
    try:
        return _save(figure, path)
    except (OSError, ValueError) as error:  # A picture may be too large.
        logger.warning("no %s: %s", path, error)
        return None


def _save(figure: "Figure", path: Path) -> Path:
    picture = io.BytesIO()
    with warnings.catch_warnings():  # A letter that no font has is a box.
        warnings.filterwarnings("ignore", "Glyph|Matplotlib currently does not support")
        figure.savefig(picture, format="png", dpi=110)
    names.write_atomically(path, picture.getvalue())
    return path
