"""The picture at the end of a run: loss, learning rate, accuracy, throughput."""

import logging
from pathlib import Path

from haiku_template.training import metrics
from haiku_template.training import workdir as names

logger = logging.getLogger(__name__)

PANELS = (
    ("loss", ("train/loss", "eval/loss"), "log"),
    ("learning rate", ("train/learning_rate",), "linear"),
    ("accuracy", ("train/accuracy", "eval/accuracy"), "linear"),
    ("examples / s", ("perf/examples_per_second",), "linear"),
)


def write(workdir: Path) -> Path | None:
    """Draws metrics.jsonl as report.png; None, with a warning, without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            'no %s: matplotlib is not installed (pip install "haiku_template[plots]")',
            names.REPORT,
        )
        return None
    rows = metrics.read(workdir / names.METRICS)
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
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
