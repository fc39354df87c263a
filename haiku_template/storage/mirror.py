"""Mirror of a run's checkpoints on a second disk: `config.mirror`.

Why: docs/decisions/storage.md#mirror
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from haiku_template import bounded
from haiku_template.bounded import exists, is_file, is_link
from haiku_template.errors import ConfigError, DamagedError, StorageError
from haiku_template.storage import checkpoint
from haiku_template.storage import manifest as manifests
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.checkpoint import UNFINISHED, Checkpoints, metrics_of
from haiku_template.storage.files import dispensable

logger = logging.getLogger(__name__)

# What a run needs beside its checkpoints to go on.
# The run's id is first: a config alone is another's.
NAMES = (workdirs.RUN, workdirs.CONFIG, workdirs.PROGRAM, workdirs.BASE)
MOST_BYTES = 2**24  # Of each of them.
PARTIAL = f".{workdirs.METRICS}.copied"
# At the end of a run, for copies of what is small; and bytes of others in a second.
CLOSING_SECONDS, COPIED_BYTES = 600.0, 20e6


class Mirror:
    """Copier of the checkpoints in a workdir to a folder on another disk.

    `update` starts a thread that copies what is new, as it was committed, and then
    removes what the workdir has no more. An error is a warning.
    """

    def __init__(self, workdir: Path, folder: Path, run: str) -> None:
        self._workdir, self.folder = workdir, folder
        try:
            self.checkpoints: Any = _Copies(workdir, folder, run)
        except StorageError as error:
            logger.warning("%s; the run goes on without a mirror to read", error)
            self.checkpoints = SimpleNamespace(steps=[], close=lambda: None)
        self._thread: threading.Thread | None = None
        self._is_stale = threading.Event()

    def update(self) -> None:
        """Starts to copy, or has the thread that copies do so once more."""
        self._is_stale.set()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._copy, daemon=True)
            self._thread.start()

    def give_back(self, step: int) -> None:
        """Copies a checkpoint into the workdir, which has none of it that is whole."""
        target = self._workdir / workdirs.CHECKPOINTS
        with dispensable(target / str(step)):
            _copy_or_warn(self.folder / workdirs.CHECKPOINTS, target, step)

    def close(self) -> None:
        """Waits for the copies, as long as a slow disk may need; then warns."""
        if self._thread is not None:
            size, files = 0, (self._workdir / workdirs.CHECKPOINTS).rglob("*")
            with contextlib.suppress(OSError):  # The disk may be gone.
                size = sum(x.stat().st_size for x in files if is_file(x))
            seconds = CLOSING_SECONDS + size / COPIED_BYTES
            self._thread.join(seconds)
            if self._thread.is_alive():
                fact = f"copying takes more than {seconds:.0f} s"
                logger.warning("%s is not up to date: %s", self.folder, fact)
            else:
                self._copy()  # What an update asked for as the thread ended.
        self.checkpoints.close()

    def _copy(self) -> None:
        while self._is_stale.is_set():
            self._is_stale.clear()
            try:
                copy_run(self._workdir, self.folder)
            except Exception as error:
                logger.warning(
                    f"the checkpoints are not copied to {self.folder}, which the next "
                    f"save tries again: {error}"
                )


class _Copies(Checkpoints):
    """Checkpoints of a mirror, to read."""

    def __init__(self, workdir: Path, folder: Path, run: str) -> None:
        self._workdir = workdir
        super().__init__(folder / workdirs.CHECKPOINTS, run=run)

    @property
    def steps(self) -> list[int]:
        """Steps on disk, but for those that the run went back from."""

        # Listed once: there may be thousands of steps.
        away = [*(self._workdir / workdirs.CHECKPOINTS).glob("*.rewound*")]

        def is_rewound(step: int) -> bool:
            marks = [x for x in away if x.name.startswith(f"{step}.rewound")]
            # The copy may be of a later save.
            copy = _manifest(self.directory / str(step)) if marks else None
            return any(_manifest(mark) == copy for mark in marks)

        return [step for step in super().steps if not is_rewound(step)]

    def restore(self, *args: Any) -> Any:
        """Restores as `Checkpoints.restore` does; what is not there is damaged."""
        try:
            return super().restore(*args)
        except StorageError as error:
            raise DamagedError(str(error)) from error

    def close(self) -> None:
        """Ends the threads of reading."""
        self.__exit__(None, None, None)


def copy_run(source: Path, target: Path) -> None:
    """Copies what a run needs to go on, and its checkpoints; removes older ones.

    Raises `OSError`, `ValueError` if the newest checkpoint is damaged, or `ConfigError`
    for a folder that another run has taken.
    """
    check(source, target)
    steps = workdirs.saved_steps(source / workdirs.CHECKPOINTS)
    folder = target / workdirs.CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.remove_unfinished(folder)
    for name in NAMES:
        if is_file(source / name):
            data = bounded.contents(source / name, MOST_BYTES)
            workdirs.write_atomically(target / name, data)
    for step in sorted(steps, reverse=True):
        if step == max(steps):
            _copy_step(source / workdirs.CHECKPOINTS / str(step), folder / str(step))
        else:
            _copy_or_warn(source / workdirs.CHECKPOINTS, folder, step)
    # What is newer may be the only copy that is whole.
    for step in {*workdirs.saved_steps(folder)} - {*steps}:
        if step < max(steps, default=0):
            checkpoint.remove(folder / str(step))
    _copy_metrics(source, target)  # Last: they may be long.


def _copy_metrics(source: Path, target: Path) -> None:
    """Copies the lines by which early stopping goes; an error is a warning."""
    if is_file(source / workdirs.METRICS):
        with dispensable(target / workdirs.METRICS):
            shutil.copyfile(source / workdirs.METRICS, target / PARTIAL)
            (target / PARTIAL).replace(target / workdirs.METRICS)


def _copy_step(source: Path, target: Path) -> None:
    """Copies a checkpoint, synced and under its name at once, if it is another."""
    if not exists(source):  # A newer one took its place.
        return
    if exists(target):
        is_same = _manifest(source) == _manifest(target)
        if is_same and metrics_of(source) in ({}, metrics_of(target)):  # {}: damaged.
            return
        checkpoint.remove(target)
    copy = target.with_name(f"{target.name}{UNFINISHED.strip('*')}.{time.time_ns()}")
    try:
        checkpoint.check_files(source)  # Nothing is copied without end.
        shutil.copytree(source, copy)
        if manifest := manifests.read(copy):
            manifests.check_sizes(manifest, copy)
    except (OSError, ValueError):
        if exists(source):
            raise
        return
    checkpoint.sync(copy)
    copy.rename(target)
    checkpoint.sync(target.parent, recursive=False)


def steps_of(workdir: Path, folder: Path | None) -> list[int]:
    """Steps of a run's mirror, without those that it went back from; [] of no mirror.

    Raises `ConfigError` for a mirror that cannot be read, which may have any.
    """
    if folder is None:
        return []
    try:
        if not workdirs.has_checkpoints(folder):
            return []
        check(workdir, folder)
        with _Copies(workdir, folder, workdirs.run_id(workdir)) as copies:
            return copies.steps
    except (OSError, StorageError) as error:
        raise ConfigError(
            f"config.mirror={folder} cannot be read, and may have steps that the run "
            f"is to go back from: {error}"
        ) from error


def bring_newest(workdir: Path, folder: Path | None, steps: list[int]) -> None:
    """Copies the newest of these steps that is whole from the mirror."""
    target = workdir / workdirs.CHECKPOINTS
    for step in sorted(steps, reverse=True):
        _copy_or_warn(folder / workdirs.CHECKPOINTS, target, step)
        if exists(target / str(step)):
            return


def leave_out(workdir: Path, folder: Path | None, first: int) -> None:
    """Marks the mirror's steps from `first` on as those that the run went back from.

    A mark has a step's manifest alone. A copy of it would be cut off by a kill.
    """
    for step in [step for step in steps_of(workdir, folder) if step >= first]:
        mark = workdirs.unused(workdir / workdirs.CHECKPOINTS / f"{step}.rewound")
        (mark / manifests.MANIFEST).mkdir(parents=True)
        if (data := _manifest(folder / workdirs.CHECKPOINTS / str(step))) is not None:
            file = mark / manifests.MANIFEST / manifests.MANIFEST
            workdirs.write_atomically(file, data)


def _manifest(step: Path) -> bytes | None:
    file = step / manifests.MANIFEST / manifests.MANIFEST
    return file.read_bytes() if is_file(file) else None


def check(workdir: Path, folder: Path) -> None:
    """Raises `ConfigError` for a mirror that is the workdir, or of another run."""
    workdirs.check_path(folder)
    if folder.resolve() == workdir.resolve():
        raise ConfigError(f"config.mirror={folder} is --workdir; use another disk")
    if exists(folder / workdirs.CONFIG) and not exists(folder / workdirs.RUN):
        raise ConfigError(
            f"config.mirror={folder} holds a {workdirs.CONFIG} that is no run's, and "
            "nothing is overwritten; use another folder"
        )
    run = workdirs.run_id(workdir)
    if run is None or not workdirs.has_checkpoints(folder):
        return
    try:
        other = workdirs.run_id(folder)
    except ConfigError as error:
        return logger.warning("whose mirror it is cannot be told: %s", error)
    if other != run:
        raise ConfigError(
            f"config.mirror={folder} holds the checkpoints of another run than "
            f"{workdir}; use another folder"
        )


def bring_back(workdir: Path, folder: Path, config: Any = None) -> None:
    """Copies a mirror's run into a workdir that has lost its checkpoints, or is new.

    Raises `ConfigError`, and copies nothing, for a run with another `config`.
    """
    check(workdir, folder)
    if workdirs.has_checkpoints(workdir) or not workdirs.has_checkpoints(folder):
        return
    if is_link(workdir / workdirs.CHECKPOINTS):
        return  # Which a run refuses.
    if config is not None:
        try:
            workdirs.check_same_run(folder, config, False)
        except ConfigError as error:
            sentence = str(error).replace("another --workdir", "another config.mirror")
            raise ConfigError(sentence) from error
    with workdirs.locked(workdir), workdirs.usable(workdir):
        steps = workdirs.saved_steps(folder / workdirs.CHECKPOINTS)
        logger.warning(
            f"{workdir} has no checkpoints: those of steps {steps} are copied there "
            f"from {folder}"
        )
        for name in NAMES:
            if is_file(folder / name) and not exists(workdir / name):
                data = bounded.contents(folder / name, MOST_BYTES)
                workdirs.write_atomically(workdir / name, data)
        if not exists(workdir / workdirs.METRICS):
            _copy_metrics(folder, workdir)
        copies = workdir / f"{workdirs.CHECKPOINTS}.copied"  # Half of them are no run.
        shutil.rmtree(copies, ignore_errors=True)
        copies.mkdir()
        for step in steps:
            _copy_or_warn(folder / workdirs.CHECKPOINTS, copies, step)
        if exists(checkpoints := workdir / workdirs.CHECKPOINTS):
            checkpoints.rename(workdirs.unused(workdir / f"{checkpoints.name}.before"))
        copies.rename(checkpoints)


def _copy_or_warn(source: Path, target: Path, step: int) -> None:
    try:
        _copy_step(source / str(step), target / str(step))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and _is_readable(source / str(step)):
            raise  # It is the target that fails.
        logger.warning("step %d in %s is damaged: %s", step, source.parent, error)


def _is_readable(folder: Path) -> bool:
    """Tests that each file of a checkpoint can be read to its end."""
    with contextlib.suppress(OSError, ValueError):
        checkpoint.check_files(folder)
        for file in filter(Path.is_file, folder.rglob("*")):
            shutil.copyfile(file, os.devnull)
        return True
    return False
