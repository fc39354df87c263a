"""Metrics on disk: one JSON object a line, and TensorBoard events."""

import json
import math
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from haiku_template.storage import workdir as names


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard events. Use as a context manager.

    A run that goes on from step n takes back what was written after n, so that the
    file is the same as if the run had never stopped.

    Args:
      workdir: where the files are.
      start: the step that the run goes on from; 0 for a new one.
    """

    def __init__(self, workdir: Path, start: int) -> None:
        self._path = workdir / names.METRICS
        kept = [json.dumps(row) for row in read(self._path) if row["step"] <= start]
        names.write_atomically(self._path, "".join(f"{line}\n" for line in kept))
        self._file = self._path.open("a", buffering=1)
        self._events = SummaryWriter(
            str(workdir / names.TENSORBOARD), purge_step=start + 1 if start else None
        )

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._events.close()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Adds one line: `step` and the metrics, in full precision; null for NaN."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, less one that a kill cut off; [] without a file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
