"""Checkpoints with Orbax, which this room alone calls."""

import contextlib
import functools
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import checkpoint_manager
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils
from orbax.checkpoint.path import step as steps

from haiku_template import bounded
from haiku_template.config import differences
from haiku_template.errors import ConfigError, StorageError
from haiku_template.params import flatten
from haiku_template.storage import workdir as workdirs

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)
UNFINISHED = "*.orbax-checkpoint-tmp*"  # Orbax renames them when they are whole.
METRICS, STEP = "metrics/metrics", "step"  # In a checkpoint; and a field of a state.
BEST_OR_LATEST = "best or latest"  # The best, where any was evaluated.
# TensorStore never frees the names in its metrics, for which Orbax asks at each save.
tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0
REPLACED_TRIES, REPLACED_SECONDS = 20, 0.5  # Beside a run that saves all the time.


class Checkpoints:
    """Checkpoints of one run, newest last. Use as a context manager.

    Saves are asynchronous: `save` returns once the arrays are copied to the host, and
    the next `save`, or leaving the context, waits for the last to be on disk.

    The newest `keep_last` stay, and of those saved with metrics the `keep_best` whose
    `best_metric` is lowest (`best_mode` is `min`) or highest (`max`); of equals the
    earlier, whatever else is kept. `cleanup` removes
    what a killed save left; only for the one process that saves. Checkpoints of another
    `run` than this id are refused; None compares the step alone.

    Raises:
      StorageError: the directory cannot be used.
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
        self._saves = jax.process_index() == 0  # Others have a link to what it saves.
        self.directory = directory.absolute() if self._saves else directory.resolve()
        self._metric, self._highest, self._run = best_metric, best_mode == "max", run
        self._saving: Any = None  # Orbax's response to the last save.
        self._trusted = False  # True once a save was read back.
        context = _context()
        # Otherwise the first save compiles a slice for each device and shape.
        context.array.saving.use_replica_parallel = False
        kept = ocp.training.preservation_policies
        best = SimpleNamespace(
            should_preserve=lambda found, context: [
                x.step in self.best_first(found)[:keep_best] for x in found
            ]
        )
        self.policies = [kept.LatestN(keep_last), best]
        try:
            # Orbax's own cleanup is a thread that a start which fails would outrun.
            if cleanup and self._saves:
                _remove_unfinished(self.directory)
            if jax.process_count() > 1:
                # Orbax refuses to make a folder for some of the processes.
                self.directory.mkdir(parents=True, exist_ok=True)
                checkpoint_manager._create_root_directory = lambda *_, **__: None
                # It would ask for a signal as well, which `StopSignals` does.
                checkpoint_manager.utils.reached_preemption = lambda _: False
            self._checkpointer = ocp.training.Checkpointer(
                self.directory,
                preservation_policy=kept.AnyPreservationPolicy(self.policies),
                step_name_format=_Committed(),
                context=context,
            )
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.directory} cannot be used: {error}") from error

    def best_first(self, found: Sequence[Any]) -> list[int]:
        """Steps whose metric is a number, the best first and of equals the earlier."""
        sign = -1 if self._highest else 1
        known = [
            (x.metrics.get(self._metric, math.nan), x.step) for x in found if x.metrics
        ]
        ranks = [(sign * value, step) for value, step in known if math.isfinite(value)]
        return [step for _, step in sorted(ranks)]

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
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """Best step by the metric; None when none was evaluated."""
        return next(iter(self.best_first(self._checkpointer.checkpoints)), None)

    def check_metric(self, metrics: dict[str, float]) -> None:
        """Raises `StorageError` unless `best_metric` is among the metrics."""
        if self._metric not in metrics:
            raise StorageError(
                f"best_metric={self._metric} is not measured; possible are "
                f"{', '.join(metrics)}"
            )

    def save(
        self, step: int, state: dict[str, Any], metrics: dict[str, float] | None
    ) -> None:
        """Starts to save `state`; with metrics it may be kept as one of the best.

        The first save waits until it is on disk, and is read back.

        Raises:
          StorageError: this save, or the one before it, failed.
        """
        if not self._saves or step in self.steps:
            return
        self.wait()
        if jax.process_count() > 1:
            # Of JAX's arrays Orbax would wait for the other processes.
            state = jax.tree.map(np.asarray, state)
        held = {"run": self._run, "step": step}
        with _faults(f"step {step} could not be saved in {self.directory}"):
            self._saving = self._checkpointer.save_async(
                step, state, metrics=metrics, custom_metadata=held, force=True
            )
        if not self._trusted:
            self.wait()
            self._read_back(step, state)
            self._trusted = True

    def wait(self) -> None:
        """Waits until the last save is on disk; raises `StorageError` if it failed."""
        saving, self._saving = self._saving, None
        with _faults(f"the last checkpoint in {self.directory} was not finished"):
            if saving is not None:
                saving.result()  # Its event loop and thread would stay otherwise.
            self._checkpointer.wait()

    def _read_back(self, step: int, state: dict[str, Any]) -> None:
        """Asserts that a checkpoint can be read: its list, and its smallest field."""
        sizes = {k: sum(x.nbytes for x in jax.tree.leaves(v)) for k, v in state.items()}
        part = min(filter(sizes.get, sizes), key=sizes.__getitem__)
        found = self.restore(step, state[part], part)
        same = jax.tree.map(lambda a, b: _bytes(a) == _bytes(b), found, state[part])
        if not jax.tree.all(same):
            raise StorageError(
                f"the checkpoint of step {step} in {self.directory} was read back, and "
                f"its {part} is not what was saved"
            )

    def restore(
        self,
        step: int,
        abstract: Any,
        part: str | None = None,
        skip: Collection[str] = (),
    ) -> Any:
        """Restores the state of `step` straight to its devices.

        `abstract` is a pytree of `jax.ShapeDtypeStruct` with shardings, on any devices:
        of the whole state, or of its field `part`, such as `params`, less the leaves
        (`module/name`) in `skip`.

        Raises:
          StorageError: no such step, a damaged checkpoint, or one of another structure:
            lists the leaves that differ. Nothing is loaded then.
        """
        saved, context = self.saved(step), _context()
        _check_fits(step, saved[part] if part else saved, abstract, skip)
        context.pytree.loading.partial_load = part is not None
        tree = abstract if part is None else {part: abstract}
        if counts := getattr(saved.get(STEP), "shape", None) == ():
            tree = tree | {STEP: tree.get(STEP, np.zeros((), saved[STEP].dtype))}
        with self._damage_as_error(step), context:
            state = self._checkpointer.load(step, tree)
        if counts and (there := int(np.asarray(state[STEP]))) != step:
            raise StorageError(
                f"{self.directory / str(step)} is not the checkpoint that its name "
                f"says: its arrays are of step {there}, put there from another; move "
                f"it away, and those that are left in {self.directory} count"
            )
        return state if part is None else state[part]

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
            _check_files(self.directory / str(step))
            found = self._checkpointer.metadata(step)
            if found.metadata is None:
                raise ValueError("its arrays cannot be listed")
        held = found.custom_metadata or {}
        ours = self._run in (None, held.get("run"))
        if not ours or held.get("step") != step:
            raise StorageError(
                f"{self.directory / str(step)} is not the checkpoint that its name "
                f"says: it is of step {held.get('step')} of "
                f"{'this' if ours else 'another'} run; move it away, and those that "
                f"are left in {self.directory} count"
            )
        return found.metadata

    def _damage_as_error(self, step: int) -> contextlib.AbstractContextManager[None]:
        return quiet(f"the checkpoint of step {step} in {self.directory} is damaged")


def restore(
    workdir: Path, which: str, read: Callable[[Checkpoints, int], Any]
) -> tuple[int, Any]:
    """Restores a run's checkpoint: its step, and what `read(checkpoints, step)` gives.

    The run may be alive. `which` is `latest`, `best`, `BEST_OR_LATEST`, or a step.

    Raises:
      ConfigError: no such checkpoint.
      StorageError: it is damaged, or does not fit.
    """
    folder = workdir / workdirs.CHECKPOINTS
    if not folder.is_dir():
        raise ConfigError(f"{workdir} holds no checkpoints")
    keys = ("keep_last", "keep_best", "best_metric", "best_mode")
    config = workdirs.read_json(workdir / workdirs.CONFIG)
    options = {key: config[key] for key in keys if key in config}
    options["run"] = workdirs.run_id(workdir)
    for tries_left in range(REPLACED_TRIES, -1, -1):
        try:
            with Checkpoints(folder, **options) as checkpoints:
                step = _named_step(checkpoints, which, workdir)
                return step, read(checkpoints, step)
        except StorageError:
            # A run that is alive may have replaced it meanwhile.
            if not tries_left or not workdirs.is_locked(workdir):
                raise
        time.sleep(REPLACED_SECONDS)


def _named_step(checkpoints: Checkpoints, which: str, workdir: Path) -> int:
    named = {"latest": checkpoints.latest, "best": checkpoints.best}
    named[BEST_OR_LATEST] = checkpoints.best or checkpoints.latest
    step = named.get(which, int(which) if which.isdecimal() else None)
    if step not in checkpoints.steps:
        raise ConfigError(
            f"--checkpoint={which} is not in {workdir}; there are steps "
            f"{checkpoints.steps}, and best is {checkpoints.best}"
        )
    return step


def _context() -> Any:
    """Options of Orbax, to whom each process is the only one."""
    context, index = ocp.Context(), jax.process_index()
    if jax.process_count() == 1:
        return context
    context.multiprocessing.primary_host = index
    context.multiprocessing.active_processes = {index}
    context.multiprocessing.barrier_sync_key_prefix = f"process_{index}"
    return context


@contextlib.contextmanager
def quiet(sentence: str, kind: type[Exception] = StorageError) -> Iterator[None]:
    """Turns what Orbax raises into one sentence, and silences its log."""
    _ignore_abandoned_reads()
    orbax = logging.getLogger("absl")
    level = orbax.level
    orbax.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        words = str(error).split("\n")[0].split(" [tensorstore_spec")[0][:300]
        raise kind(f"{sentence}: {words}") from error
    finally:
        orbax.setLevel(level)


@contextlib.contextmanager
def _faults(sentence: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise StorageError(f"{sentence}: {error}") from error


def _bytes(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()


def _remove_unfinished(directory: Path) -> None:
    """Removes what a killed save left, and moves away what is no checkpoint.

    A folder without its commit file would be in the way of the same step's save.
    """
    for left in directory.glob(UNFINISHED):
        left.unlink() if left.is_symlink() else shutil.rmtree(left)
    for folder in directory.glob("*"):
        if folder.name.isdecimal() and not (folder / workdirs.COMMIT).is_file():
            away = folder.with_name(f"{folder.name}.incomplete.{time.time_ns()}")
            folder.rename(away)
            logger.warning(
                "%s has no %s, so it is no checkpoint: it is called %s now",
                *(folder, workdirs.COMMIT, away.name),
            )


class _Committed(type(steps.standard_name_format())):
    """Checkpoints by the names of their folders, if these have their commit file."""

    def _build_metadata(self, step_path: Any, step: int | None = None) -> Any:
        if not (step_path / workdirs.COMMIT).is_file():
            return None
        listed = super()._build_metadata(step_path, step)
        if listed is not None:  # Its own time is in a file that may be damaged.
            vars(listed)["_checkpoint_metadata"] = None
        return listed


def _metrics(manager: Any, step: int) -> dict[str, float] | None:
    """Reads the metrics of a checkpoint; None if there are none, or damaged ones."""
    file = Path(manager.directory) / str(step) / METRICS
    try:
        metrics = bounded.read_json(file)
        if all(isinstance(value, int | float) for value in metrics.values()):
            return metrics
        raise ValueError("it holds other things than numbers")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        words = f"{file} is damaged, and step {step} counts as not evaluated"
        _warn_once(f"{words}: {error}")
        return None


# Orbax raises for one damaged file, and no checkpoint of the run could be read.
checkpoint_manager.CheckpointManager._get_metrics = _metrics


def _check_files(folder: Path) -> None:
    """Raises `OSError` or `ValueError` for a file that Orbax would hang in."""
    for file in folder.rglob("*"):
        if not (file.is_dir() or file.is_relative_to(folder / "metrics")):
            bounded.opened(file).close()
    for file in (folder / "_CHECKPOINT_METADATA", *folder.glob("state/_*")):
        bounded.read_json(file, most=2**28)
    for file in folder.glob("*/array_metadatas/*"):
        bounded.read_json(file, most=2**28)


def _check_fits(step: int, saved: Any, abstract: Any, skip: Collection[str]) -> None:
    # Paths are alike for tuples and for Orbax's lists.
    trees = saved, abstract
    shapes = [jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", t) for t in trees]
    there, here = map(flatten, shapes)
    there = {path: leaf for path, leaf in there.items() if path not in skip}
    lines = differences(there, here)
    if lines:
        more = f" and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise StorageError(
            f"the checkpoint of step {step} does not fit this model, and nothing was "
            f"loaded: {'; '.join(lines[:10])}{more}"
        )


@functools.cache
def _ignore_abandoned_reads() -> None:
    """Silences errors of reads that Orbax gave up, at any later time."""
    asyncio, report = logging.getLogger("asyncio"), sys.unraisablehook
    asyncio.addFilter(lambda record: "never retrieved" not in record.getMessage())

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            report(unraisable)

    sys.unraisablehook = hook
