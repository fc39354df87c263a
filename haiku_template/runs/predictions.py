"""Predictions: outputs for each example of a data set, written to a file."""

import json
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haiku_template.data import ahead
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.pretrained import check_new, new_file
from haiku_template.runs.run import Run
from haiku_template.training import Trainer
from haiku_template.training.evaluation import num_rows
from haiku_template.training.state import TrainState


def write_predictions(run: Run, output: Path) -> int:
    """Writes outputs and labels, if any, of a run's evaluation set, in its order.

    `output` ends in `.npz`, for arrays [N, ...] named `outputs`, or `outputs/NAME`, and
    `labels`, which memory must hold; or in `.jsonl`, for an object with both a line.

    Returns the number of examples. Raises `ConfigError` for another ending, an `output`
    that exists, no such checkpoint, or nothing to predict; `StorageError` if the
    checkpoint is damaged, or `output` cannot be written.
    """
    if output.suffix not in (".npz", ".jsonl"):
        raise ConfigError(
            f"--output={output} ends in neither .npz (arrays) nor .jsonl (one JSON "
            "object an example)"
        )
    check_new(output)
    run.check_outputs()
    dataset, state, count = run.evaluation_set(), run.state, 0
    with new_file(output) as file, run.devices.explicit_transfers():
        batches = _predict(run.trainer, state, dataset)
        if output.suffix == ".npz":
            joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
            np.savez(file, **flatten(joined))
            return num_rows(joined)
        with file.open("w") as lines:
            for batch in batches:
                for i in range(num_rows(batch)):
                    example = jax.tree.map(lambda x, i=i: x[i].tolist(), batch)
                    lines.write(json.dumps(example) + "\n")
                count += num_rows(batch)
    return count


def _predict(trainer: Trainer, state: TrainState, dataset: Any) -> Iterator[Any]:
    """Yields outputs and labels, if any, of each batch, which is read once."""
    labels: deque[dict[str, Any]] = deque()

    def read(index: int) -> dict[str, Any]:
        batch = dataset.batch(index)
        has_labels = isinstance(batch, dict) and "labels" in batch
        labels.append({"labels": batch["labels"]} if has_labels else {})
        return batch

    dataset_once = types.SimpleNamespace(num_batches=dataset.num_batches, batch=read)
    with ahead(dataset, 0, dataset.num_batches):
        for outputs in trainer.predict(state, dataset_once):
            yield {"outputs": outputs} | labels.popleft()
