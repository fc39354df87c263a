"""Checkpoints with Orbax, which this room alone calls."""

import contextlib
import functools
import json
import logging
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from haiku_template import bounded
from haiku_template.bounded import is_dir, is_file, is_link
from haiku_template.config import EXPORTED, differences
from haiku_template.devices.checks import shaped
from haiku_template.devices.layout import HOST, spans_processes
from haiku_template.devices.transfer import own
from haiku_template.errors import (
    ConfigError,
    DamagedError,
    MisfitError,
    StorageError,
    some,
)
from haiku_template.params import flatten
from haiku_template.storage import failures
from haiku_template.storage import manifest as manifests
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.files import dispensable

Metrics = dict[str, float]
Read = Callable[["Checkpoints", int], Any]  # Of a step.
logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)
UNFINISHED = "*.orbax-checkpoint-tmp*"  # Orbax renames them when they are complete.
STATE, METRICS = "state", "metrics"  # Folders in a checkpoint.
STEP, OPTIMIZER = "step", "opt_state"  # Fields of a state.
OTHER_OPTIMIZER = (
    "; these are the optimizer's, which is another, or of another version of optax or "
    "haiku_template: restore that, or use another --workdir (config.init_from starts "
    "from a run's parameters)"
)
CHECKSUM = "crc32"  # Of the metrics, among them.
SAVE_THREAD = "async_save"  # Orbax's name of it.
READS = 2  # Before a checkpoint counts as damaged.
OF_NO_FILE = MemoryError, jax.errors.JaxRuntimeError  # Of this machine, its devices.
BEST_OR_LATEST = "best or latest"  # The best, where any was evaluated.
REPLACED_TRIES = 20  # Of a run that saves all the time.
RETRY_SECONDS = (1.0, 2.0, 4.0)  # Before the last save is tried again.
CLEARED_TRIES, CLEARED_SECONDS = 5, 0.2  # After a save that failed.
CENTURY = 100 * 365 * 86400  # Limit of a save, by a clock that may be set.


class Checkpoints:
    """Checkpoints of one run, newest last. Use as a context manager.

    Saves are asynchronous: `save` returns once the arrays are copied to the host, and
    the next `save`, or leaving the context, waits for the last to be on disk; so does
    `save` of what processes share in the host's memory. Of several processes the first
    saves; what is sharded over them all save together.

    The newest `keep_last` stay, and of those saved with metrics the `keep_best` whose
    `best_metric` is lowest (`best_mode` is `min`) or highest (`max`); of equals the
    earlier, whatever else is kept. `cleanup` removes what a killed save left; only for
    the one process that saves. Checkpoints of another `run` than this id are refused;
    None compares the step alone. Of saves that fail in a row the last of
    `max_failed_saves` is an error. `facts(step)`, which JSON can hold, are saved, too.
    Raises `StorageError` if the directory cannot be used.
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
        max_failed_saves: int = 1,
        facts: Callable[..., dict[str, Any]] = lambda step, **_: {},
    ) -> None:
        self._is_first = jax.process_index() == 0
        self.directory = directory.absolute()
        self._keep_last, self._keep_best = keep_last, keep_best
        self._metric, self._sign = best_metric, -1 if best_mode == "max" else 1
        self._run, self.facts = run, facts
        self._saving: int | None = None  # Step whose save may not be on disk.
        self.began = time.monotonic()  # The last save, or this run.
        # Step, state and metrics of the last save, until it is on disk.
        self._last: tuple[int, Any, Metrics | None] | None = None
        self.timer = self.mirror = None  # `runs/save_timer.py`, `storage/mirror.py`.
        self._is_trusted = False  # Until a save was read back.
        self._failures = failures.FailedSaves(max_failed_saves)
        self._stack, self._errors = contextlib.ExitStack(), []
        with failures.faults(f"{self.directory} cannot be used"):
            self._found = None
            with contextlib.suppress(ConfigError):
                self._found = workdirs.run_id(self.directory.parent)
            if cleanup and self._is_first:
                remove_unfinished(self.directory)
            if self._is_first:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._reader = self._writer = _checkpointer({jax.process_index()})

    def best_first(self, metrics: dict[int, Metrics]) -> list[int]:
        """Steps whose metric is a number, the best first and of equals the earlier."""
        key, sign = self._metric, self._sign
        ranks = [(sign * x.get(key, math.nan), step) for step, x in metrics.items()]
        # Why: docs/decisions/storage.md#ties
        return [step for rank, step in sorted(x for x in ranks if math.isfinite(x[0]))]

    # Why: docs/decisions/storage.md#steps
    def preserved(self, metrics: dict[int, Metrics]) -> set[int]:
        """Steps that stay on disk, of those with these metrics: newest and best."""
        newest = sorted(metrics, reverse=True)[: self._keep_last]
        return {*newest, *self.best_first(metrics)[: self._keep_best]}

    def unsaved_best(self, rows: Iterable[Metrics]) -> Iterator[str]:
        """Yields a line on the best evaluation, if all that is saved is worse."""
        key, saved = self._metric, self.metrics if self._keep_best else {}
        known = {step: x[key] for step, x in saved.items() if key in x}
        values = {x["step"]: x[key] for x in rows if x.get(key) is not None} | known
        ranked = self.best_first({step: {key: x} for step, x in values.items()})
        for best in ranked[: len(saved) > 0]:
            if values[best] not in known.values():
                yield (
                    f"best      {key} {values[best]:.4g} at step {best}, not saved: "
                    "see save_every"
                )

    def __enter__(self) -> "Checkpoints":
        self._errors = self._stack.enter_context(failures.muted())
        return self

    def __exit__(self, _: object, first: BaseException | None, *__: object) -> None:
        with self._stack:
            try:
                self.wait()
            except StorageError as error:
                if first is None:
                    raise
                if error is not first:
                    logger.warning("%s", error)
            finally:
                if self.mirror is not None:
                    self.mirror.close()
                for checkpointer in {self._reader, self._writer}:
                    checkpointer.close()
                if self._errors and not self.is_joint:
                    clear(self.directory)

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint on disk, upwards."""
        return workdirs.saved_steps(self.directory)

    @property
    def metrics(self) -> dict[int, Metrics]:
        """Metrics of each step on disk; {} for one that was not evaluated."""
        return {step: metrics_of(self.directory / str(step)) for step in self.steps}

    @property
    def latest(self) -> int | None:
        """Newest step; None without checkpoints."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """Best step by the metric; None when none was evaluated."""
        return next(iter(self.best_first(self.metrics)), None)

    @property
    def is_saving(self) -> bool:
        """True until the last save is on disk, or failed."""
        threads = (x for x in threading.enumerate() if x.name == SAVE_THREAD)
        return self._saving is not None and any(x.is_alive() for x in threads)

    @property
    def is_joint(self) -> bool:
        """True once all processes save together."""
        return self._writer is not self._reader

    @property
    def failed(self) -> int:
        """Number of saves that failed in a row."""
        return self._failures.count

    def warn_of_no_rank(self, metrics: Metrics) -> None:
        """Warns, once, of a step that has no rank: `best_metric` was not measured."""
        if self._metric not in metrics:
            fault = f"an evaluation has no best_metric={self._metric}, and its step"
            _warn_once(f"{fault} counts as none of the best; it has {some(metrics)}")

    def save(self, step: int, state: dict[str, Any], metrics: Metrics | None) -> bool:
        """Starts to save `state`; with metrics it may be kept as one of the best.

        Every process calls it. The first save waits until it is on disk, and is read
        back. False if it failed already; later it is known when the next one begins.
        `StorageError`: too many in a row failed.
        """
        joint = [*filter(spans_processes, jax.tree.leaves(state))]
        if not (self._is_first or joint):
            return True
        if joint:
            self._join()
        with self._failures.counted():
            self._finish()
        # Why: docs/decisions/storage.md#host-arrays
        state = _on_host(state)
        self._failures.error, self._last = None, (step, state, metrics)
        with self._failures.counted():
            self._begin(step, state, metrics)
            if any(x.sharding.memory_kind == HOST for x in joint):
                self._finish()  # Orbax has views of them, and the next step donates.
        return self._failures.error is None

    def add_metrics(self, step: int, metrics: Metrics | None) -> None:
        """Adds the metrics of a step that was saved before it was evaluated."""
        file = self.directory / str(step) / METRICS / METRICS
        if metrics and self._is_first and self._is_ours():
            with dispensable(file):
                workdirs.write_atomically(file, json.dumps(_checked(metrics)))
            if self.mirror is not None:
                self.mirror.update()

    def _join(self) -> None:
        """Saves with all processes from now on."""
        if not self.is_joint:
            # Why: docs/decisions/storage.md#joint-saves
            self._writer = _checkpointer(set(range(jax.process_count())))
            self._failures.most = 1

    def rescue(self, step: int, state: dict[str, Any]) -> bool:
        """Saves from this process's devices, and waits; removes nothing.

        What is sharded over processes all save together; False in all but the first.
        What is on the host Orbax saves in process 0 alone. `StorageError` if it fails.
        """
        is_joint = any(map(spans_processes, jax.tree.leaves(state)))
        with failures.faults(f"step {step} could not be saved in {self.directory}"):
            if is_joint:
                self._join()
                self._write(step, _on_host(state), None)
            else:
                leaves = flatten(_on_host(state))
                self._write(step, state, None, leaves=leaves, process=0)
            self._writer.wait_until_finished()
            if is_first := self._is_first or not is_joint:
                sync(self.directory / str(step))
        return is_first

    def without_batches(self) -> None:
        """Leaves the digest of a batch out of further saves."""
        self.facts = functools.partial(self.facts, has_batch=False)

    def check_room(self, state: Any, start: int, stop: int, every: int | None) -> None:
        """Raises `StorageError` without room, `ConfigError` for an empty array."""
        # Why: docs/decisions/storage.md#room
        every = 1 if self.timer else every or stop or 1
        saves = stop // every - start // every + (stop % every > 0)
        count = min(saves, stop - start, max(1, self._keep_last + 1 - len(self.steps)))
        leaves = flatten(state)
        if empty := [path for path, leaf in leaves.items() if not leaf.size]:
            raise ConfigError(
                f"Orbax saves no array without elements: {some(empty)}; have the model "
                "make them only where their size is above 0"
            )
        size = sum(leaf.nbytes for leaf in leaves.values())
        free = shutil.disk_usage(self.directory).free
        if self._is_first and count * size > free:
            raise self._of_full_disk(count, size, free)

    def _of_full_disk(self, count: int, size: int, free: int) -> StorageError:
        return StorageError(
            f"the checkpoints of this run need {count * size:,} bytes in "
            f"{self.directory} ({count} of {size:,}), and {free:,} are free there: "
            "make room, keep fewer (config.keep_last), or use another --workdir"
        )

    def _write(self, step: int, state: Any, metrics: Any, **changes: Any) -> None:
        manifest = manifests.of(state, self._run, step, self.facts) | changes
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            metrics=ocp.args.JsonSave(_checked(metrics or {})),
            manifest=manifests.Save(manifest),
        )
        ids = {"run": self._run, "step": step, manifests.MANIFEST: True}
        self._writer.save(self.directory / str(step), items, custom_metadata=ids)

    def _begin(self, step: int, state: dict[str, Any], metrics: Metrics | None) -> None:
        """Starts a save, unless there is one; reads back the first."""
        with failures.faults(f"{self.directory} cannot be listed"):
            if not self._is_ours():
                raise self._gone(step)
            if step in self.steps:
                return
        self._saving, self.began = step, time.monotonic()
        with self._fault():
            self._write(step, state, metrics)
            if self._is_trusted or not self._is_first:
                return
            self._writer.wait_until_finished()
            self._read_back(step, state)
        self._is_trusted = True
        self._finish()

    def _is_ours(self) -> bool:
        """Tests that the workdir was not moved, removed, or taken by another run."""
        with contextlib.suppress(ConfigError):  # One that cannot be read stays.
            run = workdirs.run_id(self.directory.parent)
            return not self._is_first or self._found in (None, run)
        return True

    def _gone(self, step: int) -> StorageError:
        return StorageError(
            f"step {step} is not saved: {self.directory.parent} was moved or removed, "
            "or is another run's by now"
        )

    def wait(self) -> None:
        """Waits until the last save is on disk; `StorageError` if it failed.

        It is tried again before, but not where processes save together.
        """
        for seconds in (*RETRY_SECONDS, None):
            with contextlib.suppress(StorageError):
                self._finish()
            if self._failures.error is None:
                return
            self._try_again(self._failures.error, seconds)

    def _try_again(self, error: StorageError, seconds: float | None) -> None:
        """Begins the last save anew, after so many seconds; raises `error` if None."""
        if seconds is None or self._last is None or self._writer is not self._reader:
            self._last = None
            raise error
        logger.warning("%s; it is tried again in %g s", error, seconds)
        time.sleep(seconds)
        self._failures.error = None
        try:
            self._begin(*self._last)
        except StorageError as again:
            self._failures.error = again

    def _finish(self) -> None:
        """Waits for a save, if one has begun; raises `StorageError` if it failed."""
        if self._saving is None:
            return
        with self._fault():
            self._writer.wait_until_finished()
            if self._is_first:
                sync(self.directory / str(self._saving))
        step, self._saving, self._last = self._saving, None, None
        self._failures.count, self._failures.error = 0, None
        if self._is_first and self._is_ours():
            if self._found is not None:
                workdirs.mark_saved(self.directory.parent, step)
            try:
                remove_unfinished(self.directory)
                # Metrics are read where they tell which to remove.
                steps = self.steps if len(self.steps) > self._keep_last else ()
                has_best = bool(steps and self._keep_best)
                metrics = self.metrics if has_best else dict.fromkeys(steps, {})
                for step in metrics.keys() - self.preserved(metrics):
                    remove(self.directory / str(step))
            except OSError as error:
                fact = f"an older checkpoint in {self.directory} is not removed"
                logger.warning(f"{fact}, which the next save tries again: {error}")
            if self.mirror is not None:
                self.mirror.update()

    def _fault(self) -> contextlib.AbstractContextManager[None]:
        sentence = f"step {self._saving} could not be saved in {self.directory}"
        return failures.faults(sentence, self._discard)

    def _discard(self, error: StorageError) -> None:
        """Removes what is left of the save that failed, so that another can begin."""
        step, self._saving, self._failures.error = self._saving, None, error
        self._errors.append(error)
        while True:  # Orbax has an error for each of its files.
            with contextlib.suppress(Exception):
                self._writer.wait_until_finished()
                break
        if self._writer is self._reader:
            clear(self.directory)
            with contextlib.suppress(OSError):
                if step in self.steps:
                    remove(self.directory / str(step))

    def _read_back(self, step: int, state: dict[str, Any]) -> None:
        """Asserts that a checkpoint can be read: its list, and its smallest field."""
        sizes = {k: sum(x.nbytes for x in jax.tree.leaves(v)) for k, v in state.items()}
        field = min(filter(sizes.get, sizes), key=sizes.__getitem__)
        arrays = self._load(step, {field: state[field]})[field]
        same = jax.tree.map(lambda a, b: _shares(a) == _shares(b), arrays, state[field])
        if not jax.tree.all(same):
            raise StorageError(
                f"the checkpoint of step {step} in {self.directory} was read back, and "
                f"its {field} is not what was saved"
            )

    def restore(
        self,
        step: int,
        abstract: Any,
        field: str | None = None,
        skip: Collection[str] = (),
        saved: dict[str, Any] | None = None,
    ) -> Any:
        """Restores the state of `step` straight to its devices.

        `abstract` is a pytree of `jax.ShapeDtypeStruct` with shardings, on any devices:
        of the complete state, or of one `field`, such as `params`, less the leaves
        (`module/name`) in `skip`. `saved` is what `saved(step)` listed, if it did.

        Raises:
          DamagedError: its bits are not those that were saved, or cannot be read.
          StorageError: no such step, or one of another structure: lists the leaves
            that differ. Nothing is loaded then.
        """
        saved = self.saved(step) if saved is None else saved
        # Paths are alike for tuples and for Orbax's lists.
        leaves = flatten(_forms(saved[field] if field else saved))
        leaves = {k: v for k, v in leaves.items() if k not in skip}
        if lines := differences(leaves, flatten(_forms(abstract))):
            is_optimizers = {x.partition("/")[0] for x in lines} == {OPTIMIZER}
            advice = OTHER_OPTIMIZER * is_optimizers
            raise MisfitError(
                f"the checkpoint of step {step} does not fit this model, and nothing "
                f"was loaded: {some(lines, 10, '; ')}{advice}"
            )
        tree = {field: abstract} if field else abstract
        has_step = getattr(saved.get(STEP), "shape", None) == ()
        if has_step:
            tree = tree | {STEP: tree.get(STEP, np.zeros((), saved[STEP].dtype))}
        state = self._load(step, tree)
        if has_step and (saved_step := int(np.asarray(state[STEP]))) != step:
            raise DamagedError(
                f"{self.directory / str(step)} is not the checkpoint that its name "
                f"says: its arrays are of step {saved_step}, put there from another"
            )
        self._check_bits(step, state)
        return state[field] if field else state

    def _check_bits(self, step: int, state: dict[str, Any]) -> None:
        folder = self.directory / str(step)
        with self._damage_as_error(step):
            manifest = manifests.read(folder)
            paths = manifests.altered(manifest, state) if manifest else []
            if manifest and (unaligned := manifests.unaligned(manifest, state)):
                from haiku_template.storage import shares

                # Processes share the reading.
                own = unaligned[jax.process_index() :: jax.process_count()]
                paths += shares.altered(folder / STATE, manifest, own)
        if paths:
            raise DamagedError(
                f"the checkpoint of step {step} in {self.directory} is damaged: "
                f"{len(paths)} of {len(jax.tree.leaves(state))} leaves are not what "
                f"was saved: {some(paths)}"
            )

    def _load(self, step: int, tree: dict[str, Any]) -> dict[str, Any]:
        """Loads fields of a state, to the devices that the leaves of `tree` name."""
        args = ocp.args.PyTreeRestore(
            tree,
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            partial_restore=True,
        )
        with self._damage_as_error(step):
            items = ocp.args.Composite(state=args)
            return self._reader.restore(self.directory / str(step), items).state

    def saved(self, step: int) -> dict[str, Any]:
        """Lists a checkpoint's shapes and dtypes by field.

        Raises:
          DamagedError: it cannot be read, is not what was saved, or of another run.
          StorageError: no such step.
        """
        if step not in self.steps:
            raise StorageError(
                f"there is no checkpoint of step {step} in {self.directory}; there are "
                f"{self.steps}"
            )
        folder = self.directory / str(step)
        with self._damage_as_error(step):
            check_files(folder)
            if manifest := manifests.read(folder):
                manifests.check_sizes(manifest, folder)
            listing = self._reader.metadata(folder)
            if (state := listing.item_metadata[STATE]) is None:
                raise ValueError("its arrays cannot be listed")
            metadata = listing.custom_metadata or {}
            _check_listed(metadata, manifest, state.tree)
        # Why: docs/decisions/storage.md#ids
        ids = manifest or metadata
        is_of_run = self._run in (None, ids.get("run"))
        is_early = self._run is None and not ids  # Before runs had ids.
        if not is_early and (not is_of_run or ids.get("step") != step):
            raise DamagedError(
                f"{folder} is not the checkpoint that its name says: it is of step "
                f"{ids.get('step')} of {'this' if is_of_run else 'another'} run"
            )
        return state.tree

    def saved_facts(self, step: int) -> dict[str, Any]:
        """Facts that were saved with a checkpoint; {} by an earlier version."""
        with self._damage_as_error(step):
            return (manifests.read(self.directory / str(step)) or {}).get("facts", {})

    def verify(self, step: int) -> bool:
        """Reads a checkpoint to the host; False if it has no digests to compare with.

        Raises `DamagedError` if it is of another run, or its bits are not those that
        were saved, or cannot be read.
        """
        saved = self.saved(step)  # Once: TensorStore never frees what it lists.
        # Arrays on the host that take no memory.
        blank = lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape)  # noqa: E731
        for field, leaves in saved.items():
            self.restore(step, jax.tree.map(blank, leaves), field, saved=saved)
        return manifests.read(self.directory / str(step)) is not None

    def set_aside(self, step: int) -> str:  # Why: docs/decisions/storage.md#fallback
        """Renames a damaged checkpoint, which counts no more; returns its new name."""
        folder = self.directory / str(step)
        away = workdirs.unused(folder.with_name(f"{step}.damaged"))
        with failures.faults(f"{folder} is damaged and cannot be renamed"):
            folder.rename(away)
        return away.name

    def _damage_as_error(self, step: int) -> contextlib.AbstractContextManager[None]:
        sentence = f"the checkpoint of step {step} in {self.directory} is damaged"
        return quiet(sentence, DamagedError)


def newest_whole(
    copies: Collection[tuple[int, int]],
    read: Callable[[tuple[int, int]], Any],
    agree: Callable[[str | None], str | None] = lambda damage: damage,
) -> tuple[tuple[int, int], Any, dict[tuple[int, int], str]]:
    """Reads the newest checkpoint that is not damaged: copy, value, damages by copy.

    A copy is a step and its place, of which larger ones are tried before. `read(copy)`
    gives the value; it is called again before a checkpoint counts as damaged, since a
    disk's error may pass. `agree` maps the damage that this process found, or None, to
    that of all processes. Raises `DamagedError` if all are damaged: names each.
    """
    damages: dict[tuple[int, int], str] = {}
    for copy in sorted(copies, reverse=True):
        value = damage = None
        for _ in range(READS):
            try:
                value, damage = read(copy), None
                break
            except DamagedError as error:
                damage = str(error)
        if (damage := agree(damage)) is None:
            return copy, value, damages
        damages[copy] = damage
    sentences = "; ".join(damages.values())
    if len(damages) == 1:
        raise DamagedError(sentences)
    raise DamagedError(
        f"none of the checkpoints of steps {sorted({step for step, _ in damages})} is "
        f"whole, and nothing was changed: {sentences}"
    )


def restore(workdir: Path, which: str, read: Read) -> tuple[int, Any]:
    """Restores a run's checkpoint: its step, and what `read(checkpoints, step)` gives.

    The run may be alive. `which` is `latest`, `best`, `BEST_OR_LATEST`, or a step. If
    the latest is damaged, it is the newest that is whole, with a warning.

    Raises:
      ConfigError: no such checkpoint.
      DamagedError: it is damaged.
      StorageError: it does not fit.
    """
    workdirs.check_path(workdir)
    try:
        return _restore(workdir, which, read)
    except DamagedError:
        # Why: docs/decisions/storage.md#fallback
        if which != "latest" or jax.process_count() > 1:
            raise
    (step, _), value, damages = newest_whole(
        [(step, 0) for step in workdirs.saved_steps(workdir / workdirs.CHECKPOINTS)],
        lambda copy: _restore(workdir, str(copy[0]), read)[1],
    )
    for damage in damages.values():
        logger.warning("%s; step %d is used", damage, step)
    return step, value


def _restore(workdir: Path, which: str, read: Read) -> tuple[int, Any]:
    """Restores as `restore` does, but nothing else than `which`."""
    folder = workdir / workdirs.CHECKPOINTS
    if not is_dir(folder):
        advice = EXPORTED * any(workdir.glob("*.safetensors"))
        raise ConfigError(f"{workdir} holds no checkpoints{advice}")
    ranks, run = workdirs.ranks(workdir), workdirs.run_id(workdir)
    for _ in range(REPLACED_TRIES):
        with Checkpoints(folder, run=run, **ranks) as checkpoints:
            step = _named_step(checkpoints, which, workdir)
            commit = _commit(folder / str(step))
            try:
                return step, read(checkpoints, step)
            except StorageError:
                if commit is not None and _commit(folder / str(step)) == commit:
                    raise
        logger.warning(f"the run replaced step {step} in {workdir} as it was read")
    raise StorageError(
        f"the run replaced {REPLACED_TRIES} steps in {workdir} as each was read: "
        "keep more (config.keep_last), or read one that stays (--checkpoint=best)"
    )


def _commit(folder: Path) -> tuple[int, int] | None:
    """Identity of a checkpoint; None of one that is gone."""
    # Opened: of a name alone NFS answers from memory, for a minute after it is gone.
    with contextlib.suppress(OSError), bounded.opened(folder / workdirs.COMMIT) as file:
        return (facts := os.fstat(file.fileno())).st_ino, facts.st_mtime_ns
    return None


def _named_step(checkpoints: Checkpoints, which: str, workdir: Path) -> int:
    steps = {"latest": checkpoints.latest, "best": checkpoints.best}
    steps[BEST_OR_LATEST] = checkpoints.best or checkpoints.latest
    step = steps.get(which, int(which) if which.isdecimal() else None)
    if not checkpoints.steps:
        raise ConfigError(
            f"{workdir} has no checkpoint yet; its run saves one by save_every or "
            "save_minutes, for a signal, and at its end"
        )
    if step is None or (which.isdecimal() and step not in checkpoints.steps):
        raise ConfigError(
            f"--checkpoint={which} is not in {workdir}; there are steps "
            f"{checkpoints.steps}, and best is {checkpoints.best}"
        )
    return step


def _add_checksums() -> None:  # Why: docs/decisions/patches.md#crc32c
    """Lets Orbax write a CRC-32C of each chunk, which every reader compares."""
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils

        build = tensorstore_utils._build_zarr3_metadata
    except (ImportError, AttributeError):
        return  # An Orbax without the name: the digests remain.
    if hasattr(build, "__wrapped__"):  # Also before this module was reloaded.
        return

    @functools.wraps(build)
    def with_checksum(*args: Any, **options: Any) -> dict[str, Any]:
        metadata = build(*args, **options)
        metadata["codecs"][0]["configuration"]["codecs"].append({"name": "crc32c"})
        return metadata

    tensorstore_utils._build_zarr3_metadata = with_checksum


def _checkpointer(members: set[int]) -> ocp.AsyncCheckpointer:
    """Makes Orbax's checkpointer, to which these processes are the only ones."""
    _add_checksums()
    processes = ocp.options.MultiprocessingOptions(
        primary_host=min(members),
        active_processes=members,  # Why: docs/decisions/cluster.md#orbax
        barrier_sync_key_prefix="_".join(map(str, ("process", *sorted(members)))),
    )
    replica = None if len(members) == 1 else 0  # None is the first that is here.
    array_handler = ocp.type_handlers.ArrayHandler(
        primary_host=min(members), replica_id=replica, use_replica_parallel=False
    )
    arrays = ocp.type_handlers.create_type_handler_registry(
        # Copies of the state, which nobody changes.
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, array_handler),
    )
    state = ocp.PyTreeCheckpointHandler(
        use_zarr3=True, multiprocessing_options=processes, type_handler_registry=arrays
    )
    metrics = ocp.JsonCheckpointHandler(METRICS, multiprocessing_options=processes)
    manifest = manifests.Handler(manifests.MANIFEST, multiprocessing_options=processes)
    # Why: docs/decisions/storage.md#failed-saves
    is_joint = len(members) > 1
    background = ocp.options.AsyncOptions(
        timeout_secs=CENTURY, create_directories_asynchronously=is_joint
    )
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(
                multiprocessing_options=processes, async_options=background
            ),
            state=state,
            metrics=metrics,
            manifest=manifest,
        ),
        multiprocessing_options=processes,
        async_options=background,
    )


@contextlib.contextmanager
def quiet(sentence: str, kind: type[Exception] = StorageError) -> Iterator[None]:
    """Turns what Orbax raises into one sentence, and silences its log."""
    # Why: docs/decisions/storage.md#damage
    with failures.muted() as errors:
        try:
            yield
        except Exception as error:
            errors.append(error)
            logging.getLogger("asyncio").addFilter(_is_retrieved)
            if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, OF_NO_FILE):
                raise
            raise kind(f"{sentence}: {failures.root_cause(error)}") from error


def _is_retrieved(record: logging.LogRecord) -> bool:
    return "never retrieved" not in record.getMessage()


def _on_host(state: Any) -> Any:
    """Copies arrays to NumPy's, all at once, but those sharded over processes."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not spans_processes(leaf):
            leaf.copy_to_host_async()
    return jax.tree.map(
        lambda x: x if spans_processes(x) else own(np.asarray(x), x), state
    )


def _shares(array: Any) -> list[bytes]:
    """Bytes of an array, or of this process's shares of one that spans several."""
    shards = array.addressable_shards if spans_processes(array) else ()
    return [np.asarray(x).tobytes() for x in [s.data for s in shards] or [array]]


def remove_unfinished(directory: Path) -> None:
    """Removes what a killed save left, and moves away what is no checkpoint."""
    for path in directory.glob(UNFINISHED):
        path.unlink() if is_link(path) else shutil.rmtree(path)
    for folder in directory.glob("*"):
        if folder.name.isdecimal() and not is_file(folder / workdirs.COMMIT):
            _move_away(folder)


def clear(directory: Path) -> None:
    """Removes what a failed save left, also what its threads write meanwhile."""
    # Why: docs/decisions/storage.md#stragglers
    pause = threading.Event()
    for _ in range(CLEARED_TRIES):
        with contextlib.suppress(OSError):
            remove_unfinished(directory)
        pause.wait(CLEARED_SECONDS)
        if not any(directory.glob(UNFINISHED)):
            return


def _move_away(folder: Path) -> None:  # Why: docs/decisions/storage.md#commit-file
    """Renames a folder that would be in the way of the same step's save."""
    away = folder.with_name(f"{folder.name}.incomplete.{time.time_ns()}")
    folder.rename(away)
    fault = f"{folder} has no {workdirs.COMMIT}, so it is no checkpoint"
    logger.warning(f"{fault}: it is called {away.name} now")


# Why: docs/decisions/storage.md#power-cut
def sync(folder: Path, recursive: bool = True) -> None:
    """Waits until a checkpoint and its name are on the disk, and not in its cache."""
    files = folder.rglob("*") if recursive else ()
    for path in (*files, folder, folder.parent):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def remove(folder: Path) -> None:
    """Removes a checkpoint, renamed first: its name never has a part of it."""
    away = folder.with_name(f"{folder.name}{UNFINISHED.strip('*')}.{time.time_ns()}")
    shutil.rmtree(folder.rename(away))


def metrics_of(folder: Path) -> Metrics:
    """Reads the metrics of a checkpoint; {} if there are none, or damaged ones."""
    file = folder / METRICS / METRICS
    try:
        metrics = bounded.read_json(file)
        if not all(isinstance(value, int | float) for value in metrics.values()):
            raise ValueError("it holds other things than numbers")
        checksum = metrics.pop(CHECKSUM, None)  # None of earlier versions.
        if checksum is not None and _checked(metrics).get(CHECKSUM) != checksum:
            raise ValueError("its checksum is another")
        return metrics
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        sentence = f"{file} is damaged, and step {folder.name} counts as not evaluated"
        _warn_once(f"{sentence}: {error}")
        return {}


def _checked(metrics: Metrics) -> Metrics:
    """Adds a checksum to the metrics to save, if there are any."""
    text = json.dumps(metrics, sort_keys=True).encode()
    return metrics | ({CHECKSUM: zlib.crc32(text)} if metrics else {})


def check_plain(folder: Path, but: Path | None = None) -> None:
    """Raises `OSError` for what may never end when it is read, but in one folder."""
    for file in folder.rglob("*"):
        is_folder = is_dir(file) and not is_link(file)  # It may be any folder.
        if not (is_folder or but and file.is_relative_to(but)):
            bounded.opened(file).close()


def check_files(folder: Path) -> None:
    """Raises `OSError` or `ValueError` for a file that Orbax would hang in."""
    check_plain(folder, but=folder / "metrics")
    lists = (*folder.glob("state/_*"), *folder.glob("*/array_metadatas/*"))
    for file in (folder / "_CHECKPOINT_METADATA", *lists):
        bounded.read_json(file, most=2**28)


def _check_listed(
    metadata: dict[str, Any], manifest: dict[str, Any] | None, saved: Any
) -> None:
    """Raises `ValueError` unless a checkpoint's lists are those of one save."""
    if manifest is None:
        if manifests.MANIFEST in metadata:
            raise ValueError(f"its {manifests.MANIFEST} is missing")
        return  # Of an earlier version.
    for name in metadata.keys() & {"run", "step"}:
        if manifest[name] != metadata[name]:
            raise ValueError(
                f"its metadata are of {name} {metadata[name]}, and its "
                f"{manifests.MANIFEST} is of {name} {manifest[name]}"
            )
    if lines := differences(manifests.forms(manifest), flatten(_forms(saved))):
        raise ValueError(f"its leaves are not those that were saved: {some(lines)}")


def _forms(tree: Any) -> Any:
    return jax.tree.map(shaped, tree)
