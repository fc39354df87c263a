"""Comparison of the runs below a folder: what differs, and how each one did."""

import contextlib
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from haiku_template import config as configs
from haiku_template.bounded import exists, is_dir, is_file
from haiku_template.errors import ConfigError
from haiku_template.reporting import plots
from haiku_template.reporting.display import table
from haiku_template.runs.early_stop import early_stop
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.metrics import sampled

DONE, EARLY = "done", "stopped early"
WIDTH = 20  # Columns of a terminal that a run's name has at least.
MOST_BYTES = 250_000  # Of lines of each run, of which there may be hundreds.


class Summary(NamedTuple):
    """A run as its workdir has it."""

    name: str  # Path below the folder.
    keys: dict[str, Any]  # Of its config, dotted; {} of a script's.
    rows: list[dict[str, Any]]  # Of metrics.jsonl, `sampled`.
    metric: str
    best: tuple[float, int] | None  # Its best value, and the first step that has it.
    state: str  # `running`, `done`, `stopped early`, `stopped at 120`, `not saved`.


def summarize_run(
    workdir: Path, name: str = "", metric: str | None = None, mode: str | None = None
) -> Summary:
    """Summarizes one workdir; metric and mode are by default the run's own.

    Raises `ConfigError` if its config cannot be read.
    """
    values = configs.completed(workdirs.read_json(workdir / workdirs.CONFIG))
    if metric is None:
        ranks = workdirs.ranks(workdir)
        metric, mode = str(ranks["best_metric"]), mode or ranks["best_mode"]
    points: list[tuple[float, int]] = []

    def look(row: dict[str, Any]) -> None:
        if row.get(metric) is not None:
            points.append((row[metric], row["step"]))

    rows = sampled(workdir / workdirs.METRICS, look, MOST_BYTES)
    best = (max if mode == "max" else min)(points, key=lambda x: x[0], default=None)
    keys = configs.flatten(values)
    started = workdirs.read_json(workdir / workdirs.ENV).get("num_steps")
    # A script trains as many steps as it says, whatever its config does.
    steps = {"num_steps": started} if started else {}
    try:
        state = state_of(workdir, values | steps, rows)
    except TypeError as error:  # Keys that are not as `config.check` wants them.
        sentence = f"{workdir / workdirs.CONFIG} cannot be read: {error}"
        raise ConfigError(sentence) from error
    return Summary(name, keys, rows, metric, best, state)


def state_of(workdir: Path, values: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """State of a run in words, by its config and metrics."""
    if workdirs.is_locked(workdir):
        return "running"
    if not (saved := workdirs.saved_steps(workdir / workdirs.CHECKPOINTS)):
        return "not saved"
    last = saved[-1]
    if last >= values.get("num_steps", last):
        return DONE
    stopping = values.get("early_stop", {})
    if stopping.get("patience") is not None and early_stop(**stopping)(rows):
        return EARLY
    return f"stopped at {last}"


def summarize_runs(
    folder: Path, metric: str | None = None, mode: str | None = None
) -> list[Summary]:
    """Summarizes all runs below a folder, sorted by their best values, then by name.

    Raises `ConfigError` if there are none.
    """
    # A workdir may be a link, behind which `rglob` does not look.
    deep, linked = (folder.glob(f"{x}/{workdirs.RUN}") for x in ("**", "*"))
    files = [*sorted(deep), *sorted(linked)] if is_dir(folder) else []
    places = {x.resolve(): x.parent for x in reversed(files)}  # Of two the first.
    names = sorted(str(x.relative_to(folder)) for x in places.values())
    names = [x for x in names if not _is_process(folder / x)]
    names = _without_mirrors(folder, names)
    if not names:
        raise ConfigError(
            f"{folder} holds no runs: workdirs, each with its {workdirs.RUN}; name the "
            "folder that they are in"
        )
    runs = [summarize_run(folder / name, name, metric, mode) for name in names]
    mode = mode or workdirs.ranks(folder / names[0])["best_mode"]
    sign = -1 if mode == "max" else 1
    return sorted(
        runs, key=lambda run: (run.best is None, sign * run.best[0] if run.best else 0)
    )


def _is_process(place: Path) -> bool:
    """Tests for what a further process of a run writes, and not of another run."""
    has_run = exists(place.parent.parent / workdirs.RUN)
    return place.parent.name == workdirs.PROCESSES and has_run


def _without_mirrors(folder: Path, names: list[str]) -> list[str]:
    """Leaves out mirrors of runs that are here, too, which alone say where they ran."""
    ids = {}
    for name in names:
        with contextlib.suppress(ConfigError):  # One that is damaged is no mirror's.
            ids[name] = workdirs.run_id(folder / name)
    runs = [name for name in names if is_file(folder / name / workdirs.ENV)]
    mirrored = {ids.get(name) for name in runs} - {None}
    return [name for name in names if name in runs or ids.get(name) not in mirrored]


def differing(runs: Sequence[Summary]) -> list[str]:
    """Keys of the configs that are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.keys)
    return [key for key in keys if len({repr(run.keys.get(key)) for run in runs}) > 1]


def records(runs: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and a row of text for each run."""
    keys = differing(runs)
    metrics = {run.metric for run in runs}
    title = metrics.pop() if len(metrics) == 1 else "best metric"
    rows = []
    for run in runs:
        values = ["" if (x := run.keys.get(key)) is None else str(x) for key in keys]
        best = (
            ["", ""] if run.best is None else [f"{run.best[0]:.6g}", str(run.best[1])]
        )
        rows.append([run.name, *values, *best, run.state])
    return ["run", *keys, title, "at step", "state"], rows


def as_table(runs: Sequence[Summary], width: int | None = None) -> Table:
    """Tabulates runs; keys that a terminal's `width` has no room for are left out.

    Long keys are shortened to their last word where it is enough.
    """
    columns = _columns(runs)
    places = range(len(columns)) if width is None else _fitting(columns, width)
    names, *rows = zip(*(columns[i] for i in places), strict=True)
    grid = table("Runs", names, rows)
    grid.columns[0].min_width = min(WIDTH, max(map(cell_len, columns[0])))
    return grid


def _columns(runs: Sequence[Summary]) -> list[tuple[str, ...]]:
    names, rows = records(runs)
    return [*zip(_short(names), *rows, strict=True)]


def _short(names: list[str]) -> list[str]:
    """Shortens dotted names to their last words, where no other has it."""
    last = [name.rpartition(".")[2] for name in names]
    return [y if last.count(y) == 1 else x for x, y in zip(names, last, strict=True)]


def _fitting(columns: list[tuple[str, ...]], width: int) -> list[int]:
    """Places of the run, its best, step and state, and of keys there is room for."""
    sizes = [3 + max(map(cell_len, cells)) for cells in columns]  # And rules.
    sizes[0] = min(sizes[0], 3 + WIDTH)
    keys = range(1, len(columns) - 3)
    room, places = width - 1 - sum(sizes) + sum(sizes[i] for i in keys), []
    for i in keys:
        if sizes[i] <= room:
            places, room = [*places, i], room - sizes[i]
    return [0, *places, *range(len(columns) - 3, len(columns))]


def over_seeds(runs: Sequence[Summary]) -> Table | None:
    """Tabulates means over the seeds of finished runs that are otherwise the same.

    The deviation is that of a sample. None where no two such runs have other seeds.
    """
    apart = [key for key in differing(runs) if key != "seed"]
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    for run in runs:
        if run.best and run.state in (DONE, EARLY) and "seed" in run.keys:
            same = (*(str(run.keys.get(key)) for key in apart), run.metric)
            groups.setdefault(same, {})[str(run.keys["seed"])] = run.best[0]
    several = [(k, [*x.values()]) for k, x in groups.items() if len(x) > 1]
    best = [run.best[0] for run in runs if run.best]  # The best one first.
    several.sort(key=lambda group: np.mean(group[1]), reverse=best[:1] > best[-1:])
    rows = [
        (*same, f"{np.mean(x):.6g}", f"{np.std(x, ddof=1):.2g}", str(len(x)))
        for same, x in several
    ]
    names = _short([*apart, "best of", "mean", "±", "seeds"])
    return table("Over seeds", names, rows) if rows else None


def as_csv(runs: Sequence[Summary]) -> str:
    """Tabulates runs as comma-separated values."""
    columns, rows = records(runs)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def write_picture(folder: Path, runs: Sequence[Summary]) -> Path | None:
    """Draws the curves of all runs over each other; None without matplotlib."""
    keys = {key: key.rpartition(".")[2] for key in differing(runs)}
    labels = [
        ", ".join(f"{last}={run.keys.get(key)}" for key, last in keys.items())
        for run in runs
    ]
    if len(set(labels)) < len(runs):  # As of scripts' runs, which have no config.
        labels = [run.name for run in runs]
    rows = {label: run.rows for label, run in zip(labels, runs, strict=True)}
    metrics = dict.fromkeys(["train/loss", *(run.metric for run in runs)])
    return plots.write_comparison(folder / "comparison.png", rows, list(metrics))


def show(folder: Path, runs: Sequence[Summary]) -> None:
    """Prints a table of all runs, draws their curves, and prints the picture's path."""
    console = Console(highlight=False, markup=False)
    console.print(as_table(runs, console.width))
    places = {*_fitting(_columns(runs), console.width)}
    names = enumerate(differing(runs), 1)
    if hidden := [name for i, name in names if i not in places]:
        verb = "differs" if len(hidden) == 1 else "differ"
        reason = f"no room in {console.width} columns"
        print(f"{', '.join(hidden)} {verb}, too; --csv has all: {reason}")
    if (grid := over_seeds(runs)) is not None:
        console.print(grid)
    if picture := write_picture(folder, runs):
        print(picture)
