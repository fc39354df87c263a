"""Predictions: outputs for each example of a data set, written to a file."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haiku_template.errors import ConfigError
from haiku_template.params import leaves_by_path
from haiku_template.pretrained import check_new, new_file
from haiku_template.runs.run import Run

Rows = dict[str, Any]


def write_predictions(run: Run, output: Path) -> int:
    """Writes outputs and labels, if any, of a run's evaluation set, in its order.

    `output` ends in `.npz`, which needs all of it in memory, or in `.jsonl`.

    Returns:
      The number of examples.

    Raises:
      ConfigError: another ending, `output` exists, no such checkpoint, or nothing to
        predict.
      StorageError: the checkpoint is damaged, or `output` cannot be written.
    """
    write = _writer(output)
    check_new(output)
    dataset = run.trainer.experiment.data.evaluation
    if dataset is None:
        raise ConfigError(f"the data set {run.config.data.name} has nothing to predict")
    state = run.state
    with new_file(output) as file, run.devices.explicit_transfers():
        batches = enumerate(run.trainer.predict(state))
        rows = ({"outputs": x, **_labels(dataset.batch(i))} for i, x in batches)
        return write(file, rows)


def _labels(batch: Rows) -> Rows:
    return {name: batch[name] for name in ("labels",) if name in batch}


def _writer(output: Path) -> Callable[[Path, Iterator[Rows]], int]:
    """Chooses the function that writes a file of this name."""
    writers = {".npz": _write_npz, ".jsonl": _write_jsonl}
    if output.suffix not in writers:
        raise ConfigError(
            f"--output={output} ends in neither .npz (arrays) nor .jsonl (one JSON "
            "object an example)"
        )
    return writers[output.suffix]


def _write_npz(file: Path, batches: Iterator[Rows]) -> int:
    """Writes arrays [N, ...] named `outputs` and `labels`, or `outputs/NAME`."""
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    np.savez(file, **leaves_by_path(joined, simple=True))
    return len(jax.tree.leaves(joined)[0])


def _write_jsonl(file: Path, batches: Iterator[Rows]) -> int:
    """Writes an object with `outputs` and `labels` for each example."""
    count = 0
    with file.open("w") as lines:
        for batch in batches:
            for row in range(len(jax.tree.leaves(batch)[0])):
                example = jax.tree.map(lambda x, row=row: x[row].tolist(), batch)
                lines.write(json.dumps(example) + "\n")
                count += 1
    return count
