"""Checkpoints with Orbax: the only module that calls it."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, or does not fit."""

    exit_code = 74


class Checkpoints:
    """The checkpoints of one run, newest last. Use as a context manager.

    Saves are asynchronous: `save` returns once the arrays are copied to the host, and
    the next `save`, or leaving the context, waits for the last to be on disk.

    Args:
      directory: made where needed.
      keep_last: how many of the newest stay.
      keep_best: how many of the best stay, among those saved with metrics.
      best_metric: the name of the metric that says which are best.
      best_mode: `min` or `max`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 0,
        best_metric: str = "eval/loss",
        best_mode: str = "min",
    ) -> None:
        self.directory = directory.absolute()
        self._metric = best_metric
        self._highest = best_mode == "max"
        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=self._rank,
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        try:
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                save_decision_policy=(
                    ocp.training.save_decision_policies.FixedIntervalPolicy(1)
                ),
                preservation_policy=policies.AnyPreservationPolicy(
                    [policies.LatestN(keep_last), best]
                ),
                cleanup_tmp_directories=True,
            )
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be used: {error}"
            ) from error

    def _rank(self, metrics: dict[str, float]) -> float:
        """Orbax sorts by this, upwards, and the last are the best."""
        if self._metric not in metrics:
            return float("-inf")
        value = metrics[self._metric]
        return value if self._highest else -value

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._checkpointer.close()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the last checkpoint in {self.directory} was not finished: {error}"
            ) from error

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, upwards."""
        return [found.step for found in self._checkpointer.checkpoints]

    @property
    def latest(self) -> int | None:
        """The newest step; None without checkpoints."""
        return self.steps[-1] if self.steps else None

    @property
    def best(self) -> int | None:
        """The step that is best by the metric; None when none was evaluated."""
        known = [
            found
            for found in self._checkpointer.checkpoints
            if found.metrics and self._metric in found.metrics
        ]
        return max(known, key=lambda f: self._rank(f.metrics)).step if known else None

    def save(self, step: int, state: Any, metrics: dict[str, float] | None) -> None:
        """Starts to save `state`; with metrics it may be kept as one of the best.

        Raises:
          CheckpointError: this save, or the one before it, failed.
        """
        if step in self.steps:
            return
        try:
            self._checkpointer.save_async(step, state, metrics=metrics)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be saved in "
                f"{self.directory}: {error}"
            ) from error

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        self._checkpointer.wait()

    def restore(self, step: int, abstract: Any) -> Any:
        """Reads the state of `step` straight to its devices.

        Args:
          step: one of `steps`.
          abstract: pytree of `jax.ShapeDtypeStruct` with shardings; any number and
            kind of devices, whatever the checkpoint was saved from.

        Raises:
          CheckpointError: no such step, a damaged checkpoint, or one of another
            structure: lists what is missing, unexpected and of another shape or dtype.
            Nothing is loaded then.
        """
        if step not in self.steps:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.directory}; there are "
                f"{self.steps}"
            )
        with self._damage_as_error(step):
            saved = self._checkpointer.metadata(step).metadata
            if saved is None:
                raise ValueError("its arrays cannot be listed")
        _check_fits(step, saved, abstract)
        with self._damage_as_error(step):
            return self._checkpointer.load(step, abstract)

    @contextlib.contextmanager
    def _damage_as_error(self, step: int) -> Iterator[None]:
        """Turns what Orbax raises, and logs at length, into one sentence."""
        noisy = [logging.getLogger(name) for name in ("absl", "asyncio")]
        levels, hook = [logger.level for logger in noisy], sys.unraisablehook
        for logger in noisy:
            logger.setLevel(logging.CRITICAL)
        sys.unraisablehook = _ignore
        try:
            yield
        except Exception as error:
            # This process stays quiet: the reads that Orbax abandons report
            # themselves, with tracebacks, whenever they end.
            words = str(error).split("\n")[0].split(" [tensorstore_spec")[0][:300]
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.directory} is damaged: {words}"
            ) from error
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)
        sys.unraisablehook = hook


def _ignore(_: object) -> None:
    """Takes the place of `sys.unraisablehook`."""


def _named_leaves(tree: Any) -> dict[str, str]:
    """Leaf names, the same for the tuples of a state and the lists Orbax makes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        "/".join(
            str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", ""))))
            for key in path
        ): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _check_fits(step: int, saved: Any, abstract: Any) -> None:
    there, wanted = _named_leaves(saved), _named_leaves(abstract)
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
        raise CheckpointError(
            f"the checkpoint of step {step} does not fit this model, and nothing was "
            f"loaded: {'; '.join(lines[:10])}{more}"
        )
