"""Predictions: outputs for each example of a data set, written to a file or shown."""

import csv
import functools
import json
import math
import sys
import types
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haiku_template.data import ahead
from haiku_template.devices import detached
from haiku_template.errors import ConfigError
from haiku_template.params import flatten, in_dictionaries, path_of
from haiku_template.pretrained import check_new, new_file
from haiku_template.runs.run import Run
from haiku_template.storage.manifest import bits
from haiku_template.training import Trainer
from haiku_template.training.evaluation import num_rows
from haiku_template.training.state import TrainState

MOST_PRINTED = 10_000  # Numbers of an example, on a terminal.


def read_examples(run: Run, name: str) -> Any:
    """Reads new examples for a run: `data.examples.read_examples`."""
    from haiku_template.data import examples

    data, size = run.trainer.experiment.data, run.trainer.feed.batch_size
    whole_batch = run.trainer.recipe.task.whole_batch
    return examples.read_examples(name, data, size, whole_batch)


def write_predictions(run: Run, output: Path, examples: Any = None) -> int:
    """Writes outputs and labels, if any, of a run's evaluation set, in its order.

    `output` ends in `.npz`, for arrays [N, ...] named `outputs`, or `outputs/NAME`, and
    `labels`, which memory must hold; in `.jsonl`, for an object with both a line; or in
    `.csv`, for a row with both, each number in a column. With them come `class`, of a
    classification or of data with names of classes, and the `file` of a picture.
    `examples` are those of `read_examples`.

    Returns the number of examples. Raises `ConfigError` for another ending, an `output`
    that exists, no such checkpoint, or nothing to predict; `StorageError` if the
    checkpoint is damaged, or `output` cannot be written.
    """
    if output.suffix not in (".npz", ".jsonl", ".csv"):
        raise ConfigError(
            f"--output={output} ends in none of .npz (arrays), .jsonl (a JSON object "
            "an example) and .csv (a row an example)"
        )
    check_new(output)
    run.check_outputs()
    batches = _apart(_batches(run, examples))
    rows = (row for batch in batches for row in _rows(batch))
    with run.devices.explicit_transfers():
        try:
            with new_file(output) as file:
                if output.suffix == ".npz":
                    return _write_arrays(file, [*batches])
                if output.suffix == ".csv":
                    names = run.trainer.experiment.data.class_names
                    return _write_table(file, rows, names)
                with file.open("w") as lines:
                    return sum(lines.write(json_line(row)) > 0 for row in rows)
        except _UnreadError as error:
            fault = error.args[0]
            raise fault from fault.__cause__


def _write_arrays(file: Path, batches: list[Any]) -> int:
    shapes = {str(jax.tree.map(lambda x: x.shape[1:], x)) for x in batches}
    if len(shapes) > 1:
        raise _several_lengths(file, "arrays")
    parts = [*map(flatten, batches)]
    with zipfile.ZipFile(file, "w") as archive:  # `np.savez` takes no name `file`.
        for name in parts[0]:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                _write_array(entry, [leaves[name] for leaves in parts])
    return sum(map(num_rows, batches))


def _several_lengths(file: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"batches have outputs of several lengths, which are no {kind}; "
        f"--output={file.stem}.jsonl has a line for each"
    )


def _write_table(file: Path, rows: Iterator[Any], names: Sequence[str]) -> int:
    """Writes rows below the names of their columns; returns their number."""
    count, header = 0, []
    with file.open("w", newline="") as lines:
        table = csv.writer(lines, lineterminator="\n")
        for count, row in enumerate(rows, start=1):
            leaves = jax.tree_util.tree_leaves_with_path(row)
            cells = {path_of(keys): x for keys, x in leaves}
            if count == 1:
                header = [*cells]
                table.writerow(_of_classes(header, names))
            if [*cells] != header:
                raise _several_lengths(file, "table")
            table.writerow(cells.values())
    return count


def _of_classes(columns: list[str], names: Sequence[str]) -> list[str]:
    """Columns, of which outputs that are as many as the classes have their names."""
    scores = {f"outputs/{i}": f"outputs/{name}" for i, name in enumerate(names)}
    is_score = [*scores] == [x for x in columns if x.split("/")[0] == "outputs"]
    return [scores.get(x, x) for x in columns] if is_score else columns


def _write_array(entry: Any, parts: Sequence[np.ndarray]) -> None:
    """Writes an array of its parts, without joining them: memory holds it once."""
    rows = sum(map(len, parts))
    dtype = functools.reduce(np.promote_types, {x.dtype for x in parts})
    if dtype.hasobject:
        return np.lib.format.write_array(entry, np.concatenate(parts))
    array = np.broadcast_to(np.zeros((), dtype), (rows, *parts[0].shape[1:]))
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(entry, header | {"fortran_order": False})
    for part in parts:
        entry.write(bits(part.astype(dtype, copy=False)))
    return None


class _UnreadError(Exception):
    """Error of the data, and not of the file that is written."""


def _apart(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except OSError as error:
        raise _UnreadError(error) from error


def print_predictions(run: Run, examples: Any = None) -> None:
    """Prints a JSON object for each example: its class and probability, or outputs.

    A label is named as the class is.

    The outputs of a loss of one's own are no logits to it: they stay, beside the class.
    Raises `ConfigError` for more than `MOST_PRINTED` of an example, such as logits of
    tokens, on a terminal.
    """
    run.check_outputs()
    is_softmax = run.trainer.recipe.task.labels == "classes"
    names = dict(enumerate(run.trainer.experiment.data.class_names))
    with run.devices.explicit_transfers():
        for batch in _batches(run, examples):
            if "class" in batch and is_softmax:
                (logits,) = jax.tree.leaves(batch.pop("outputs"))
                # Of the class of the highest logits [B, K]: float64 [B].
                scores = logits.astype(np.float64)
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                batch["probability"] = (1 / shares.sum(axis=1)).round(4)
            if "class" in batch and "labels" in batch and names:
                labels = batch["labels"].tolist()  # Perhaps of no class.
                batch["labels"] = np.array([names.get(x, x) for x in labels], object)
            _check_printable(batch)
            sys.stdout.writelines(map(json_line, _rows(batch)))


def _check_printable(batch: dict[str, Any]) -> None:
    size = sum(math.prod(np.shape(x)[1:]) for x in jax.tree.leaves(batch))
    if size > MOST_PRINTED and sys.stdout.isatty():
        raise ConfigError(
            f"an example has {size:,} outputs, which no terminal has room for; "
            "--output=FILE.npz writes arrays, and --output=FILE.jsonl a line for each"
        )


def json_line(example: Any) -> str:
    """JSON, which has no NaN and no infinity: they are null, as pandas writes them."""
    try:
        return json.dumps(example, allow_nan=False, default=str) + "\n"
    except ValueError:
        finite = lambda x: None if isinstance(x, float) and not np.isfinite(x) else x  # noqa: E731
        return json.dumps(jax.tree.map(finite, example), default=str) + "\n"


def _rows(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for i in range(num_rows(batch)):
        yield jax.tree.map(lambda x, i=i: np.asarray(x[i]).tolist(), batch)


def _batches(run: Run, examples: Any) -> Iterator[dict[str, Any]]:
    """Yields outputs, and what is known of each example, in batches [B, ...]."""
    dataset = run.evaluation_set() if examples is None else examples.dataset
    files, first = np.array(examples.files if examples else ()), 0
    for batch in _predict(run.trainer, run.state, dataset):
        names, scores = class_scores(run.trainer, batch["outputs"])
        rows = num_rows(batch)
        if scores is not None:
            batch["class"] = names[scores.argmax(axis=1)]
        if len(files):
            batch = {"file": files[first : first + rows]} | batch
        first += rows
        yield batch


def class_scores(trainer: Trainer, outputs: Any) -> tuple[np.ndarray, Any]:
    """Names of K classes, and the outputs that score them, [B, K]: the only ones.

    The scores are None unless the task is of classes, or the data has names of classes
    and one whole number an example as its label, [B]: a loss of one's own, of any
    labels, says nothing of its outputs.
    """
    data, example = trainer.experiment.data, trainer.feed.example
    names = np.array(data.class_names or range(data.num_outputs or 0))
    labels = example.get("labels") if isinstance(example, dict) else None
    has_classes = getattr(labels, "ndim", 0) == 1 and labels.dtype.kind in "iu"
    is_named = has_classes and bool(data.class_names)
    leaves = jax.tree.leaves(outputs)
    is_of_classes = is_named or trainer.recipe.task.labels == "classes"
    shapes = [x.shape[1:] for x in leaves]
    return names, leaves[0] if is_of_classes and shapes == [names.shape] else None


def _predict(trainer: Trainer, state: TrainState, dataset: Any) -> Iterator[Any]:
    """Yields outputs and labels, if any, of each batch, which is read once."""
    labels: deque[dict[str, Any]] = deque()

    def read(index: int) -> dict[str, Any]:
        batch = dataset.batch(index)
        has_labels = isinstance(batch, dict) and "labels" in batch
        labels.append(detached({"labels": batch["labels"]} if has_labels else {}))
        return batch

    dataset_once = types.SimpleNamespace(num_batches=dataset.num_batches, batch=read)
    with ahead(dataset, 0, dataset.num_batches):
        for outputs in trainer.predict(state, dataset_once):
            yield {"outputs": in_dictionaries(outputs)} | labels.popleft()
