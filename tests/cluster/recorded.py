"""Digits whose training set notes the batches that each process reads."""

import dataclasses
import json
import os
from pathlib import Path

import jax

from haiku_template.data import ArrayDataset, BatchSpec
from haiku_template.data.datasets import digits

FOLDER = "RECORDED_BATCHES"


@dataclasses.dataclass(frozen=True)
class Recorded(ArrayDataset):
    """A set that appends [step, numbers of its examples] to a file of its process.

    But not of whole batches, whose digest process 0 saves.
    """

    def rows(self, step):
        rows, path = (
            super().rows(step),
            Path(os.environ[FOLDER]) / str(jax.process_index()),
        )
        if self.spec.process_count == jax.process_count():
            with path.open("a") as file:
                file.write(json.dumps([step, rows.tolist()]) + "\n")
        return rows


def data(spec: BatchSpec):
    """Digits from the same arrays in the same order."""
    found = digits(spec)
    train = Recorded(found.train.inputs, found.train.labels, spec)
    return found._replace(train=train)
