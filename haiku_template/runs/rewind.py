"""Going back to the last good step, and on without the steps that went wrong."""

import copy
import logging
import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.data.dataset import whole_batches
from haiku_template.devices.compiled import pack
from haiku_template.errors import ConfigError
from haiku_template.storage import mirror as mirrors
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.files import dispensable
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

RECORD = "nonfinite.json"  # Steps that may have made a state infinite or NaN.
AUTO = "auto"


def record(workdir: Path, dataset: Any, steps: Collection[int]) -> None:
    """Records the steps that ended a run, and the numbers of their rows if known."""
    rows = getattr(whole_batches(dataset), "rows", None)
    numbers = {n: np.asarray(rows(n - 1)).tolist() for n in steps if callable(rows)}
    with dispensable(workdir / RECORD):
        workdirs.write_json(workdir / RECORD, {"steps": [*steps], "rows": numbers})


def steps_of(text: str, workdir: Path) -> set[int]:
    """Reads `auto`, the recorded steps if any, or numbers such as `812,815:820`.

    Both ends of an interval are left out. Raises `ConfigError`.
    """
    if text == AUTO:
        return {*workdirs.left_out(workdir, RECORD, "steps")}
    steps: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"([1-9]\d{0,9})(?::(\d{1,10}))?", word)
        interval = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not 0 < len(interval) <= 10_000:
            raise ConfigError(
                f"--rewind={text} is not understood; possible are {AUTO}, the steps "
                "that ended the run, and steps such as 812,815:820, 10,000 at most"
            )
        steps |= {*interval}
    return steps


def go_back(
    workdir: Path, text: str, mirror: Path | None = None, last: int | None = None
) -> None:
    """Makes the next start of a run leave steps out, from the checkpoint before them.

    Newer checkpoints are renamed; those that `mirror` alone has stay there, unread.
    Nothing happens for steps that are left out already: the same command resumes the
    run. Raises `ConfigError` if the steps are not understood or beyond the `last`, the
    run has no checkpoint before them, or is running, or the mirror cannot be read.
    """
    with workdirs.locked(workdir), workdirs.usable(workdir):
        run = workdirs.read_json(workdir / workdirs.RUN)
        before = workdirs.left_out(workdir)
        steps = {*before} | steps_of(text, workdir)
        if last is not None and max(steps.difference(before), default=0) > last:
            raise ConfigError(f"--rewind={text} is beyond config.num_steps={last}")
        if text == AUTO and not steps:
            logger.warning("--rewind=auto: no step is recorded, and none is left out")
        if new := sorted(steps.difference(before)):
            _set_aside(workdir, new[0], mirror)
            # Last: who is killed before does it again.
            values = run | {workdirs.LEFT_OUT: sorted(steps)}
            workdirs.write_json(workdir / workdirs.RUN, values)


def _set_aside(workdir: Path, first: int, mirror: Path | None) -> None:
    folder = workdir / workdirs.CHECKPOINTS
    copies = mirrors.steps_of(workdir, mirror)
    saved = workdirs.saved_steps(folder)
    if min(saved, default=first) >= first:
        mirrors.bring_newest(workdir, mirror, [step for step in copies if step < first])
    if not (there := workdirs.saved_steps(folder)) or there[0] >= first:
        raise ConfigError(
            f"--rewind goes back to a checkpoint before step {first}, and {folder} has "
            f"{saved or 'none'}; a new run with a smaller config.save_every has one, "
            "and config.max_consecutive_nonfinite skips such steps"
        )
    for step in [step for step in saved[::-1] if step >= first]:
        folder.joinpath(str(step)).rename(workdirs.unused(folder / f"{step}.rewound"))
    # Else the run would go on from a copy that has the steps' updates.
    mirrors.leave_out(workdir, mirror, first)


# Why: docs/decisions/training.md#left-out
def leaving_out(trainer: Trainer, steps: Collection[int]) -> Trainer:
    """Makes the trainer whose calls leave these steps' updates out.

    All of the state but its step stays as it was, and the step's scalars are NaN.
    """
    other = copy.copy(trainer)
    other.left_out = frozenset(steps)
    following = jax.jit(lambda step: step + 1)

    def calls(start: int, stop: int, ends: Any) -> AbstractContextManager:
        alone = other.left_out | {step - 1 for step in steps}
        return trainer.calls(start, stop, lambda step: step in alone or ends(step))

    def advance(state: Any, call: range, arrays: Any) -> Any:
        if call[-1] not in other.left_out:
            return trainer.advance(state, call, arrays)
        with trainer.devices.implicit_transfers():  # Of a model's constants, traced.
            scalars = _scalars(trainer)
        missing = trainer.devices.replicate(jax.tree.map(_missing, scalars))
        state = trainer.unpacked(state)
        return trainer.packed(state._replace(step=following(state.step))), missing

    other.calls, other.advance = calls, advance
    return other


def _scalars(trainer: Trainer) -> Any:
    """Shapes of a call's scalars; by shares, its trace is of their gradients."""
    if trainer.experiment.exact_elastic is None:
        return trainer.trace(trainer.feed.host_shapes()[0]).out_info[1]
    state, step = trainer.abstract, trainer.functions().step
    _, scalars = jax.eval_shape(step, *state.arguments(), trainer.feed.example)
    return jax.eval_shape(pack, scalars)


def _missing(x: jax.ShapeDtypeStruct) -> np.ndarray:
    value = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    return np.full(x.shape, value, x.dtype)
