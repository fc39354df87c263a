"""Workdir: the directory of a run, with its config, id, environment and lock."""

import contextlib
import errno
import fcntl
import glob
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from haiku_template.config import completed, differences, fixed
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.storage.files import dispensable

logger = logging.getLogger(__name__)

CONFIG, ENV, LOG, METRICS = "config.json", "env.json", "train.log", "metrics.jsonl"
CHECKPOINTS, TENSORBOARD, REPORT = "checkpoints", "tensorboard", "report.png"
PROFILE, BASE, CONFUSION = "profile", "base.json", "confusion.png"
LOCK, RUN = ".lock", "run.json"
PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "orbax-checkpoint", "grain")


def check(workdir: Path, config: dict[str, Any]) -> None:
    """Asserts that a run with this config may start in `workdir`; writes nothing.

    Raises:
      ConfigError: another run is writing there; it is another experiment's workdir
        (lists the differences), or one without its config, id or checkpoints; it holds
        exported files; or it cannot be a directory.
    """
    with usable(workdir):
        if is_locked(workdir):
            raise _already_running(workdir)
        _check_contents(workdir, config)


def _check_contents(workdir: Path, config: dict[str, Any]) -> None:
    """Asserts what `check` does, under the lock."""
    if glob.has_magic(str(workdir.absolute())):
        raise ConfigError(
            f"--workdir={workdir.absolute()} has one of * ? [ in its path, which Orbax "
            "takes for a pattern, and no checkpoint could be read; use another "
            "--workdir, or a symbolic link to it"
        )
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} is a file; it must be a directory")
    exported = sorted(path.name for path in workdir.glob("*.safetensors"))
    if exported:
        raise ConfigError(
            f"{workdir} holds {', '.join(exported)}, which was exported, and nothing "
            "is overwritten; use another --workdir (config.init_from starts from "
            "exported parameters, config.finetuning.adapters from adapters)"
        )
    saved = workdir / CONFIG
    if saved.exists() and not has_checkpoints(workdir):
        _check_saved_nothing(workdir)
        return  # A run that failed before it had anything to lose.
    if saved.exists():
        there, here = fixed(completed(read_json(saved))), fixed(completed(config))
        changed = differences(there, here)
        if changed:
            raise ConfigError(
                f"{workdir} belongs to a run with another config, and nothing was "
                f"changed there; use another --workdir or restore: {'; '.join(changed)}"
            )
        if run_id(workdir) is None:
            raise ConfigError(
                f"{workdir} holds checkpoints but no {RUN}, so it is not known whose "
                "they are; restore it, or use another --workdir (config.init_from "
                "starts from a run's parameters)"
            )
        return
    names = (METRICS, CHECKPOINTS, TENSORBOARD, REPORT, LOG, ENV)
    found = [name for name in names if (workdir / name).exists()]
    if found:
        raise ConfigError(
            f"{workdir} holds {', '.join(found)} but no {CONFIG}, so it is not known "
            "what made them; use another --workdir"
        )


def _check_saved_nothing(workdir: Path) -> None:
    """Asserts that the run has lost no checkpoint that it had."""
    file = workdir / RUN
    saved = read_json(file).get("saved") if file.exists() else None
    if saved is not None:
        raise ConfigError(
            f"the run in {workdir} saved checkpoints, the first of step {saved}, and "
            f"now there is none; restore {workdir / CHECKPOINTS}, or use another "
            f"--workdir, or remove {workdir} to start the run anew"
        )


def has_checkpoints(workdir: Path) -> bool:
    """True if a run has saved anything here."""
    return any(path.name.isdecimal() for path in (workdir / CHECKPOINTS).glob("*"))


def run_id(workdir: Path) -> str | None:
    """Id of the run, which its checkpoints carry; None if there is no run.json."""
    file = workdir / RUN
    return read_json(file).get("id") if file.exists() else None


def mark_saved(workdir: Path, step: int) -> None:
    """Records that the run has a checkpoint, by which a loss of all can be told."""
    run = read_json(workdir / RUN)
    if "saved" not in run:
        with dispensable(workdir / RUN):
            write_atomically(workdir / RUN, json.dumps(run | {"saved": step}) + "\n")


def open_workdir(workdir: Path, config: dict[str, Any], devices: DeviceManager) -> None:
    """Writes the config, an id of the run and the environment; call it under the lock.

    A resumed run logs the differences in its environment.

    Raises:
      ConfigError: `check` refuses it, or the directory cannot be written to.
    """
    with usable(workdir):
        _check_contents(workdir, config)
        if not has_checkpoints(workdir):
            write_atomically(workdir / CONFIG, json.dumps(config, indent=2) + "\n")
            run = {"id": uuid.uuid4().hex}
            write_atomically(workdir / RUN, json.dumps(run) + "\n")
    env = environment(devices)
    with dispensable(workdir / ENV):
        _tell_changes(workdir / ENV, env)
        write_atomically(workdir / ENV, json.dumps(env, indent=2) + "\n")


def update_config(workdir: Path, now: dict[str, Any]) -> None:
    """Writes the config of a resumed run, and logs the differences."""
    before = read_json(workdir / CONFIG)
    changed = differences(completed(before), completed(now))
    for line in changed:
        logger.warning("this run resumes with another config: %s", line)
    schedule = now.get("optimizer", {}).get("schedule", "constant")
    if before.get("num_steps") != now.get("num_steps") and schedule != "constant":
        logger.warning(
            "the schedule %s of the learning rate now ends at step %s, and is another "
            "than before from here on",
            schedule,
            now.get("num_steps"),
        )
    if changed:
        with usable(workdir):
            write_atomically(workdir / CONFIG, json.dumps(now, indent=2) + "\n")


def _tell_changes(file: Path, env: dict[str, Any]) -> None:
    """Logs the differences from the environment that the run had before."""
    if not file.exists():
        return
    try:
        before = read_json(file)
    except ConfigError as error:
        logger.warning("what changed since the run stopped is not known: %s", error)
        return
    for line in differences(before | {"started": ""}, env | {"started": ""}):
        logger.warning("this run's environment changed: %s", line)


_HELD: set[IO[str]] = set()  # Lock files that this process holds.


def _forget_locks() -> None:
    """Closes the locks in a forked process, which may outlive the run."""
    while _HELD:
        _HELD.pop().close()


os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Locks `workdir`, made where needed, against other runs.

    Raises:
      ConfigError: another run is in it, or it cannot be written to.
    """
    with usable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / LOCK).open("a")
    try:
        _lock(file, workdir)
        _HELD.add(file)
        yield
    finally:
        _HELD.discard(file)
        file.close()


def _lock(file: IO[str], workdir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _already_running(workdir) from error
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): see to it that no other run writes there",
            workdir,
            error.strerror,
        )


def is_locked(workdir: Path) -> bool:
    """True if a run is writing to `workdir`, as far as its file system can tell."""
    try:
        with (workdir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _already_running(workdir: Path) -> ConfigError:
    return ConfigError(
        f"another run is writing to {workdir}; wait for it, or use another --workdir"
    )


@contextlib.contextmanager
def usable(workdir: Path) -> Iterator[None]:
    """Turns an error of the file system into a `ConfigError` of one sentence."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.EROFS: "its file system is read-only",
            errno.ENAMETOOLONG: "its name is too long",
            errno.ENOTDIR: "a part of its path is a file",
        }
        raise ConfigError(
            f"--workdir={workdir} cannot be written to: "
            f"{reasons.get(error.errno, error)}; use another"
        ) from error


def environment(devices: DeviceManager) -> dict[str, Any]:
    """Versions, devices and commit, as written to env.json."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": devices.platform,
        "device_kind": devices.devices[0].device_kind,
        "num_devices": devices.num_devices,
        "devices": devices.describe(),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the working directory's Git; `-dirty` when files are changed."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def read_json(path: Path) -> dict[str, Any]:
    """Reads the keys of a JSON file; raises `ConfigError` if it cannot be read."""
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__} and no keys")
        return values
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that it holds the old text or the new, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
