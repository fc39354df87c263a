"""Writers of metrics for the trackers of others: `config.writers = ("csv", "wandb")`.

Each is called with the workdir and the first step, when config.json and run.json are
there, and returns a function of (step, metrics). A resumed run has the same id there.
"""

import csv
import io
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from haiku_template.errors import need_package
from haiku_template.params import flatten
from haiku_template.registry import resolve
from haiku_template.reporting import tensorboard
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.files import append_whole
from haiku_template.storage.metrics import rows_of

PROJECT = "haiku_template"  # Where WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME says none.
TAG = "haiku_template.run"
LONGEST = 500  # Characters of a parameter that MLflow takes in every version.
WRITERS = {
    name: f"haiku_template.reporting.trackers:{name}_writer"
    for name in ("csv", "hparams", "mlflow", "wandb")
}
PACKAGES = ("mlflow", "wandb")  # Of others, imported when a config names them.


def by_name(names: Sequence[str]) -> tuple[Callable[..., Any], ...]:
    """Looks up `config.writers`, by a name of the table or as `module:function`.

    Raises `ConfigError` for an unknown name, and for a package that is not installed.
    """
    for name in filter(PACKAGES.__contains__, names):
        need_package(name, f"config.writers={name!r} needs the package {name}", name)
    return tuple(resolve("writers", name, WRITERS) for name in names)


def csv_writer(workdir: Path, start: int) -> Callable[[int, dict[str, float]], None]:
    """Writes metrics.csv, a row for each of metrics.jsonl's, as far as `start`."""
    path, columns = workdir / "metrics.csv", []

    def write(step: int, metrics: dict[str, float]) -> None:
        header = list(columns)
        columns.clear()  # If writing fails, the next row writes all of them anew.
        if any(name not in header for name in metrics):
            file = workdir / workdirs.METRICS
            names = (name for row in rows_of(file) for name in row)
            header = [*dict.fromkeys(itertools.chain(header, names))]
            rows = (_table(header, [row]) for row in rows_of(file))
            head = _table(header, [], has_header=True)
            workdirs.write_atomically(path, itertools.chain([head], rows))
        else:
            append_whole(path, _table(header, [{"step": step} | metrics]))
        columns.extend(header)

    return write


def _table(
    columns: list[str], rows: Sequence[dict[str, Any]], has_header: bool = False
) -> bytes:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns)
    if has_header:
        table.writeheader()
    finite = lambda x: x if x is not None and math.isfinite(x) else None  # noqa: E731
    table.writerows({name: finite(x) for name, x in row.items()} for row in rows)
    return text.getvalue().encode()


def hparams_writer(workdir: Path, start: int) -> Callable[..., None]:
    """Writes the config to TensorBoard's page of hyper-parameters; no metrics."""
    config = workdirs.read_json(workdir / workdirs.CONFIG)
    values = {k.replace("/", "."): x for k, x in flatten(config).items()}
    tensorboard.write_hparams(workdir, values)
    return lambda step, metrics: None


def wandb_writer(workdir: Path, start: int) -> Callable[[int, dict[str, float]], None]:
    """Logs to Weights & Biases; WANDB_MODE=offline keeps it in the workdir."""
    import wandb

    run = wandb.init(
        id=workdirs.run_id(workdir),
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=workdir.name,
        dir=workdir,
        config=workdirs.read_json(workdir / workdirs.CONFIG),
    )
    # Its own counter only rises, and a resumed run begins below the last line.
    run.define_metric("*", step_metric="step")

    def write(step: int, metrics: dict[str, float]) -> None:
        run.log({"step": step} | metrics)

    write.close = run.finish
    return write


def mlflow_writer(workdir: Path, start: int) -> Callable[[int, dict[str, float]], None]:
    """Logs to MLflow, at MLFLOW_TRACKING_URI or in mlruns beside the workdir."""
    import mlflow

    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:  # A folder of files, which newer versions want asked for.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(uri or (workdir.absolute().parent / "mlruns").as_uri())
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    old = client.get_experiment_by_name(project)
    number = old.experiment_id if old else client.create_experiment(project)
    identity = workdirs.run_id(workdir)
    if runs := client.search_runs([number], f"tags.`{TAG}` = '{identity}'"):
        key = runs[0].info.run_id
        client.set_terminated(key, "RUNNING")
    else:
        key = client.create_run(number, tags={TAG: identity}, run_name=workdir.name)
        key = key.info.run_id
        values = flatten(workdirs.read_json(workdir / workdirs.CONFIG))
        for name, value in values.items():
            client.log_param(key, name.replace("/", "."), str(value)[:LONGEST])

    def write(step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        points = [mlflow.entities.Metric(k, x, now, step) for k, x in metrics.items()]
        client.log_batch(key, metrics=points)

    write.close = lambda: client.set_terminated(key)
    return write
