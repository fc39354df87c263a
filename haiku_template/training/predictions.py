"""What a model gives for each example of a data set, written to a file."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import numpy as np
from ml_collections import config_dict

from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.models.logits import LazyLogits, multiply_out
from haiku_template.pretrained.writing import check_new, new_file
from haiku_template.runs.run import restore_run
from haiku_template.training.evaluation import num_rows, variables
from haiku_template.training.precision import Precision
from haiku_template.training.state import TrainState, split_seed
from haiku_template.training.trainer import Program, with_state

Rows = dict[str, Any]


def predict_checkpoint(
    config: config_dict.ConfigDict,
    devices: DeviceManager,
    workdir: Path,
    which: str,
    output: Path,
) -> tuple[int, int]:
    """Writes the outputs for a run's evaluation set, with the labels, in its order.

    Args:
      config: as saved in the workdir.
      devices: any; the run may have used others.
      workdir: of the run.
      which: `latest`, `best`, or a step.
      output: the file to write, `.npz` (which needs all of it in memory) or `.jsonl`.

    Returns:
      The step of the checkpoint, and the number of examples.

    Raises:
      ConfigError: another ending; no such checkpoint, or nothing to predict.
      StorageError: the checkpoint is damaged.
      ConfigError: `output` exists, or the base is not that of the run.
      StorageError: it cannot be written.
    """
    write = _writer(output)
    check_new(output)
    program, step, state = restore_run(config, devices, workdir, which)
    if program.data.evaluation is None:
        raise ConfigError(f"the data set {config.data.name} has nothing to predict")
    with new_file(output) as file, devices.explicit_transfers():
        examples = write(file, predictions(program, state))
    return step, examples


def predictions(program: Program, state: TrainState) -> Iterator[Rows]:
    """For each batch of the evaluation set, `outputs` and `labels`: trees [B, ...]."""
    labels: deque[Any] = deque()
    dataset = program.data.evaluation

    def inputs() -> Iterator[Any]:
        first = 0
        for index in range(dataset.num_batches):
            batch = dataset.batch(index)
            labels.append(batch["labels"])
            last = first + num_rows(batch)
            yield batch["inputs"], np.arange(first, last, dtype=np.int32)
            first = last

    step = program.devices.compile(
        _forward(program),
        donate_argnums=(),
        shared=[program.start.base],
        out="split",
    )
    for outputs in program.devices.map_batches(step, variables(state), inputs()):
        yield {"outputs": outputs, "labels": labels.popleft()}


def _forward(program: Program) -> Callable[[Any, Any, hk.Params], Any]:
    forward = program.parts["step"].make_forward(
        model=with_state(program.parts["model"]),
        preprocess=program.data.preprocess,
        precision=Precision.create(
            program.parts["precision"], program.devices.platform
        ),
        combine=program.start.plan.combine,
    )

    def predict(variables: Any, placed: Any, base: hk.Params) -> Any:
        inputs, places = placed
        # As in evaluation, for models that draw in each forward pass.
        rng = jax.random.fold_in(
            split_seed(program.parts["seed"]).evaluation, places[0]
        )
        return jax.tree.map(
            multiply_out,
            forward(variables, inputs, base, rng),
            is_leaf=lambda x: isinstance(x, LazyLogits),
        )

    return predict


def _writer(output: Path) -> Callable[[Path, Iterator[Rows]], int]:
    """What writes a file of this name, and returns the number of examples.

    Raises:
      ConfigError: nothing does.
    """
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
    leaves = jax.tree_util.tree_leaves_with_path(joined)
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }
    np.savez(file, **arrays)
    return len(leaves[0][1])


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
