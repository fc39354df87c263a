"""Checkpoints with Orbax: the only module that calls it."""

import contextlib
import functools
import json
import logging
import math
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from haiku_template.errors import StorageError
from haiku_template.params import leaves_by_path

UNFINISHED = "*.orbax-checkpoint-tmp*"  # Orbax renames them when they are whole.


class Checkpoints:
    """Checkpoints of one run, newest last. Use as a context manager.

    Saves are asynchronous: `save` returns once the arrays are copied to the host, and
    the next `save`, or leaving the context, waits for the last to be on disk.

    Args:
      directory: made where needed.
      keep_last: number of the newest to keep.
      keep_best: number of the best to keep, among those saved with metrics.
      best_metric: name of the metric that ranks them.
      best_mode: `min` or `max`.
      cleanup: remove what a killed save left; only for the one process that saves.
      run: id of the run, saved with each checkpoint; those of another run are refused.
        None compares the step alone.

    Raises:
      StorageError: the directory cannot be used.
      ValueError: another `best_mode`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        best_metric: str = "eval/loss",
        best_mode: str = "min",
        cleanup: bool = False,
        run: str | None = None,
    ) -> None:
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={best_mode!r}; possible are min and max")
        self.directory = directory.absolute()
        self._metric = best_metric
        self._highest = best_mode == "max"
        self._run = run
        self._saving: Any = None  # Orbax's response to the last save.
        self._trusted = False  # True once a save was read back.
        # Otherwise the first save compiles a slice for each device and shape.
        context = ocp.Context()
        context.array.saving.use_replica_parallel = False
        when = ocp.training.save_decision_policies
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=self._rank,
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        try:
            # Orbax's own cleanup is a thread that a start which fails would outrun.
            for left in self.directory.glob(UNFINISHED) if cleanup else ():
                shutil.rmtree(left)
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                save_decision_policy=when.FixedIntervalPolicy(1),
                preservation_policy=policies.AnyPreservationPolicy(
                    [policies.LatestN(keep_last), best]
                ),
                context=context,
            )
        except (OSError, ValueError) as error:
            words = "".join(
                f"; {file} is damaged: remove {file.parent}, and this step counts as "
                "not evaluated"
                for file in _damaged_metrics(self.directory)
            )
            raise StorageError(
                f"{self.directory} cannot be used: {error}{words}"
            ) from error

    def _rank(self, metrics: dict[str, float]) -> float:
        """Rank that Orbax sorts by, upwards: the last are the best."""
        value = metrics.get(self._metric)
        if value is None or not math.isfinite(value):
            return float("-inf")
        return value if self._highest else -value

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                self._checkpointer.close()  # It has nothing to add.

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, upwards."""
        return [found.step for found in self._checkpointer.checkpoints]

    @property
    def evaluated(self) -> list[int]:
        """Steps that were evaluated before they were saved, upwards."""
        return [x.step for x in self._checkpointer.checkpoints if x.metrics]

    @property
    def latest(self) -> int | None:
        """Newest step; None without checkpoints."""
        return self.steps[-1] if self.steps else None

    @property
    def best(self) -> int | None:
        """Best step by the metric; None when none was evaluated."""
        known = [
            found
            for found in self._checkpointer.checkpoints
            if found.metrics and math.isfinite(self._rank(found.metrics))
        ]
        return max(known, key=lambda f: self._rank(f.metrics)).step if known else None

    def check_metric(self, metrics: dict[str, float]) -> None:
        """Raises `StorageError` unless `best_metric` is among the metrics."""
        if self._metric not in metrics:
            raise StorageError(
                f"best_metric={self._metric} is not measured; possible are "
                f"{', '.join(metrics)}"
            )

    def save(self, step: int, state: Any, metrics: dict[str, float] | None) -> None:
        """Starts to save `state`; with metrics it may be kept as one of the best.

        The first save waits until it is on disk, and is read back.

        Raises:
          StorageError: this save, or the one before it, failed.
        """
        if step in self.steps:
            return
        self.wait()
        try:
            self._saving = self._checkpointer.save_async(
                step,
                state,
                metrics=metrics,
                custom_metadata={"run": self._run, "step": step},
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise StorageError(
                f"the checkpoint of step {step} could not be saved in "
                f"{self.directory}: {error}"
            ) from error
        if not self._trusted:
            self.wait()
            self._read_back(step, state)
            self._trusted = True

    def wait(self) -> None:
        """Waits until the last save is on disk; raises `StorageError` if it failed."""
        saving, self._saving = self._saving, None
        try:
            if saving is not None:
                saving.result()  # Its event loop and thread would stay otherwise.
            self._checkpointer.wait()
        except (OSError, ValueError, RuntimeError) as error:
            raise StorageError(
                f"the last checkpoint in {self.directory} was not finished: {error}"
            ) from error

    def _read_back(self, step: int, state: Any) -> None:
        """Asserts that a checkpoint can be read: its list, and its smallest field."""
        fields = state if isinstance(state, dict) else state._asdict()
        sizes = {
            name: sum(leaf.nbytes for leaf in jax.tree.leaves(field))
            for name, field in fields.items()
        }
        part = min((name for name in sizes if sizes[name]), key=sizes.__getitem__)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            fields[part],
        )
        found = self.restore_part(step, part, abstract)
        read, written = jax.tree.leaves(found), jax.tree.leaves(fields[part])
        if not all(map(_same_bytes, read, written)):
            raise StorageError(
                f"the checkpoint of step {step} in {self.directory} was read back, and "
                f"its {part} is not what was saved"
            )

    def restore(self, step: int, abstract: Any) -> Any:
        """Restores the state of `step` straight to its devices.

        `abstract` is a pytree of `jax.ShapeDtypeStruct` with shardings, on any devices.

        Raises:
          StorageError: no such step, a damaged checkpoint, or one of another structure:
            lists the leaves that differ. Nothing is loaded then.
        """
        _check_fits(step, self.saved(step), abstract)
        with self._damage_as_error(step):
            return self._checkpointer.load(step, abstract)

    def restore_part(
        self, step: int, part: str, abstract: Any, skip: Collection[str] = ()
    ) -> Any:
        """Restores one field of the state of `step`, such as `params`.

        `abstract` is that field's, as for `restore`; `skip` names leaves
        (`module/name`) to leave out.

        Raises:
          StorageError: as for `restore`.
        """
        _check_fits(step, self.saved(step)[part], abstract, skip)
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        with self._damage_as_error(step), context:
            return self._checkpointer.load(step, {part: abstract})[part]

    def saved(self, step: int) -> dict[str, Any]:
        """Lists a checkpoint's shapes and dtypes by field.

        Raises:
          StorageError: no such step, or a damaged checkpoint.
        """
        if step not in self.steps:
            raise StorageError(
                f"there is no checkpoint of step {step} in {self.directory}; there are "
                f"{self.steps}"
            )
        with self._damage_as_error(step):
            found = self._checkpointer.metadata(step)
            if found.metadata is None:
                raise ValueError("its arrays cannot be listed")
        self._check_own(step, found.custom_metadata or {})
        return found.metadata

    def _check_own(self, step: int, held: dict[str, Any]) -> None:
        """Asserts that a checkpoint is of the step of its name, and of this run."""
        of_step, run = held.get("step"), held.get("run")
        if of_step == step and self._run in (None, run):
            return
        what = "another run" if self._run not in (None, run) else "this run"
        raise StorageError(
            f"{self.directory / str(step)} is not the checkpoint that its name says: "
            f"it is of step {of_step} of {what}; move it away, and those that are left "
            f"in {self.directory} count"
        )

    @contextlib.contextmanager
    def _damage_as_error(self, step: int) -> Iterator[None]:
        """Turns what Orbax raises into one sentence."""
        try:
            with quiet_orbax():
                yield
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            words = str(error).split("\n")[0].split(" [tensorstore_spec")[0][:300]
            raise StorageError(
                f"the checkpoint of step {step} in {self.directory} is damaged: {words}"
            ) from error


def _same_bytes(a: jax.Array, b: jax.Array) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _damaged_metrics(directory: Path) -> list[Path]:
    """Metrics files of evaluated steps that cannot be read."""
    damaged = []
    for file in sorted(directory.glob("*/metrics/metrics")):
        try:
            json.loads(file.read_text())
        except (OSError, ValueError):
            damaged.append(file)
    return damaged


def _named_leaves(tree: Any) -> dict[str, str]:
    """Dtype and shape of each leaf by name, alike for tuples and for Orbax's lists."""
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves_by_path(tree, simple=True).items()
    }


def _check_fits(
    step: int, saved: Any, abstract: Any, skip: Collection[str] = ()
) -> None:
    there, wanted = _named_leaves(saved), _named_leaves(abstract)
    there = {name: leaf for name, leaf in there.items() if name not in skip}
    lines = [f"missing {name} {wanted[name]}" for name in wanted if name not in there]
    lines += [
        f"unexpected {name} {there[name]}" for name in there if name not in wanted
    ]
    lines += [
        f"{name} is {there[name]} there and {wanted[name]} here"
        for name in wanted
        if name in there and there[name] != wanted[name]
    ]
    if lines:
        more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise StorageError(
            f"the checkpoint of step {step} does not fit this model, and nothing was "
            f"loaded: {'; '.join(lines[:10])}{more}"
        )


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silences Orbax's log about a checkpoint that it cannot read."""
    orbax = logging.getLogger("absl")
    level = orbax.level
    orbax.setLevel(logging.CRITICAL)
    _ignore_abandoned_reads()
    try:
        yield
    finally:
        orbax.setLevel(level)


@functools.cache
def _ignore_abandoned_reads() -> None:
    """Silences errors of reads that Orbax gave up, at any later time."""
    logging.getLogger("asyncio").addFilter(
        lambda record: "never retrieved" not in record.getMessage()
    )
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            report(unraisable)

    sys.unraisablehook = hook
