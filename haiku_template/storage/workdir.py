"""Workdir: the directory of a run, with its config, id, environment and lock."""

import contextlib
import fcntl
import glob
import importlib.metadata
import json
import logging
import operator
import os
import platform
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import jax

from haiku_template import bounded
from haiku_template.bounded import exists, is_dir, is_file, is_link
from haiku_template.config import completed, differences, fixed
from haiku_template.devices import DeviceManager
from haiku_template.devices.processes import VARIABLES, options
from haiku_template.errors import ConfigError
from haiku_template.storage.files import appended, dispensable

logger = logging.getLogger(__name__)

CONFIG, ENV, LOG, METRICS = "config.json", "env.json", "train.log", "metrics.jsonl"
CHECKPOINTS, TENSORBOARD, REPORT = "checkpoints", "tensorboard", "report.png"
PROFILE, BASE, CONFUSION = "profile", "base.json", "confusion.png"
LOCK, RUN, LEFT_OUT = ".lock", "run.json", "left_out"
LOCK_SECONDS = 120.0  # More than a lease of NFS.
ASKED_TRIES, ASKED_SECONDS = 20, 0.05  # `is_locked` holds the lock for a moment.
GIT_SECONDS = 60.0  # To look at each file of a large repository on a network disk.
# Why: docs/decisions/storage.md#commit-file
COMMIT = "commit_success.txt"  # The last file that Orbax writes of a checkpoint.
RANKS = {"best_metric": "eval/loss", "best_mode": "min"}  # Of an earlier version.
PROCESSES, PROGRAM, IMAGES = "processes", "program.json", "images"
FLAGS = {*VARIABLES, "jax_default_matmul_precision", "jax_enable_x64"}
FLAGS |= {"jax_threefry_partitionable"}
PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "orbax-checkpoint", "grain")
# Why a run does not begin among such files.
EXPORTED = (
    ", which was exported, and nothing is overwritten; use another --workdir "
    "(config.init_from starts from exported parameters, config.finetuning.adapters "
    "from adapters)"
)
UNKNOWN = f" but no {CONFIG}, so it is not known what made them; use another --workdir"


def own(workdir: str | Path) -> Path:  # Why: docs/decisions/cluster.md#process-0
    """Workdir of this process: the run's for process 0, one within it for another."""
    workdir, index = Path(workdir), jax.process_index()
    with usable(workdir):
        for name in (CHECKPOINTS, TENSORBOARD, PROFILE, PROCESSES, IMAGES):
            if is_link(workdir / name):
                raise _of_link(workdir / name)
        return _make_inner(workdir, index) if index else workdir


def _of_link(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a link to {os.readlink(path)}, and a run writes to and removes "
        "from its own workdir alone; remove the link, or use another --workdir, which "
        "may be a link as a whole"
    )


def _make_inner(workdir: Path, index: int) -> Path:
    """Makes a workdir with the run's checkpoints to read, and a log of its own."""
    inner = workdir / PROCESSES / str(index)
    shutil.rmtree(inner, ignore_errors=True)
    inner.mkdir(parents=True, exist_ok=True)
    if has_checkpoints(workdir):
        (inner / CHECKPOINTS).symlink_to((workdir / CHECKPOINTS).absolute())
        for name in (CONFIG, RUN, METRICS, PROGRAM, BASE):
            if exists(workdir / name):
                original = bounded.opened(workdir / name)
                with original, (inner / name).open("xb") as copy:
                    shutil.copyfileobj(original, copy)
    return inner


def check(workdir: Path, config: dict[str, Any], mirrored: bool = False) -> None:
    """Asserts that a run with this config may start in `workdir`; writes nothing.

    Raises `ConfigError` if it is in use, of another run, or of exported files, or if
    its checkpoints are lost and not `mirrored`: those will be brought back.
    """
    with usable(workdir):
        if exists(workdir / LOCK):
            _wait_for_lock(workdir, lambda: not is_locked(workdir))
        _check_contents(workdir, config, mirrored)


def _check_contents(workdir: Path, config: dict[str, Any], mirrored: bool) -> None:
    """Asserts what `check` does, under the lock."""
    _check_whole_path(workdir)
    if exists(workdir) and not is_dir(workdir):
        raise ConfigError(f"--workdir={workdir} is a file; it must be a directory")
    if exported := sorted(path.name for path in workdir.glob("*.safetensors")):
        raise _of_others(workdir, exported, EXPORTED)
    if exists(workdir / CONFIG):
        return check_same_run(workdir, config, mirrored)
    names = (METRICS, CHECKPOINTS, TENSORBOARD, REPORT, LOG, ENV)
    if names := [name for name in names if exists(workdir / name)]:
        raise _of_others(workdir, names, UNKNOWN)


def _check_whole_path(workdir: Path) -> None:
    """Raises `ConfigError` for a path that Orbax or TensorStore take for another."""
    check_path(workdir)
    if glob.has_magic(str(workdir.absolute())):
        raise ConfigError(
            f"--workdir={workdir.absolute()} has one of * ? [ in its path, which Orbax "
            "takes for a pattern, and no checkpoint could be read; use another "
            "--workdir, or a symbolic link to it"
        )


def _of_others(workdir: Path, names: list[str], reason: str) -> ConfigError:
    return ConfigError(f"{workdir} holds {', '.join(names)}{reason}")


def check_path(path: Path) -> None:
    """Raises `ConfigError` for a path that TensorStore takes for another, or none."""
    text = str(path.absolute())
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(
            f"{text!a} is not UTF-8, or the locale is not, and no array could be saved "
            "or read there; rename the folder, or use a symbolic link to it, or "
            "LC_ALL=C.UTF-8"
        )
    if "\\" in text:
        raise ConfigError(
            f"{path.absolute()} has a backslash, which TensorStore takes for /, and no "
            "array could be read there; rename the folder, or use a symbolic link to it"
        )


def check_same_run(workdir: Path, config: dict[str, Any], mirrored: bool) -> None:
    """Raises `ConfigError` for another run's workdir, or one with missing files."""
    run = read_json(workdir / RUN)
    if (is_empty := not has_checkpoints(workdir)) and not mirrored:
        return _check_nothing_lost(workdir, run)
    saved = read_json(workdir / CONFIG)
    if lines := differences(fixed(completed(saved)), fixed(completed(config))):
        apart = "\n  " if len(lines) > 1 else " "
        raise ConfigError(
            f"{workdir} belongs to a run with another config, and nothing was changed "
            "there; use another --workdir (config.init_from starts from a run's "
            f"parameters) or restore:{apart}{apart.join(lines)}"
        )
    if "id" not in run and not is_empty:
        raise ConfigError(
            f"{workdir} holds checkpoints but no {RUN}, so it is not known whose they "
            "are; restore it, or, as the first versions wrote none, use another "
            "--workdir (config.init_from starts from a run's parameters)"
        )


def _check_nothing_lost(workdir: Path, run: dict[str, Any]) -> None:
    """Raises `ConfigError` unless a run without checkpoints never had any."""
    if "saved" in run:
        raise ConfigError(
            f"the run in {workdir} saved checkpoints, the first of step "
            f"{run['saved']}, and now there is none; restore "
            f"{workdir / CHECKPOINTS}, or use another --workdir, or remove "
            f"{workdir} to start the run anew"
        )
    metrics = workdir / METRICS
    if not run and is_file(metrics) and metrics.stat().st_size:
        raise ConfigError(
            f"{metrics} holds metrics of a run, and neither {RUN} nor {CHECKPOINTS} "
            "are there any more; restore them, or use another --workdir, or remove "
            f"{workdir} to start the run anew"
        )


def of_script(
    workdir: Path, config: dict[str, Any], ranks: dict[str, str]
) -> dict[str, Any]:
    """Config of a script's run: its experiment's, with `ranks`; {} without one.

    A run that has none, of an earlier version or another script, resumes without it.
    """
    is_empty = exists(workdir / CONFIG) and not read_json(workdir / CONFIG)
    return config | ranks if config and not is_empty else {}


def ranks(workdir: Path) -> dict[str, str]:
    """Metric and mode that a run's checkpoints are ranked by, as options of it."""
    values = RANKS | read_json(workdir / CONFIG)
    with contextlib.suppress(ConfigError):  # An earlier version's has none, either.
        values |= read_json(workdir / RUN)
    return {name: values[name] for name in RANKS}


def has_checkpoints(workdir: Path) -> bool:
    """True if a run has saved anything here."""
    return bool(saved_steps(workdir / CHECKPOINTS))


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps of the folders that have the commit file of a complete checkpoint."""
    names = [file.parent.name for file in checkpoints.glob(f"*/{COMMIT}")]
    return sorted(int(name) for name in names if name.isdecimal())


def run_id(workdir: Path) -> str | None:  # Why: docs/decisions/storage.md#run-id
    """Id of the run, which its checkpoints carry; None if there is no run.json."""
    return read_json(workdir / RUN).get("id")


def chosen(workdir: Path, name: str, otherwise: Any) -> Any:
    """Value that a run which has begun chose; None if there is no such run.

    `otherwise` is that of runs whose run.json has none. `ConfigError`: it is of another
    type.
    """
    if not has_checkpoints(workdir):
        return None
    value = read_json(workdir / RUN).get(name, otherwise)
    if type(value) is not type(otherwise):
        raise ConfigError(f"{workdir / RUN} cannot be read: its {name} is {value!r}")
    return value


def left_out(workdir: Path, name: str = RUN, key: str = LEFT_OUT) -> list[int]:
    """Steps whose updates the run leaves out, as `--rewind` said; upwards."""
    steps = read_json(workdir / name).get(key, [])
    if not (isinstance(steps, list) and {*map(type, steps)} <= {int}):
        raise ConfigError(f"{workdir / name} cannot be read: its {key} are no steps")
    return steps


def unused(path: Path) -> Path:
    """The path, or one beside it if something is there."""
    is_there = os.path.lexists(path)
    return path.with_name(f"{path.name}.{time.time_ns()}") if is_there else path


def mark_saved(workdir: Path, step: int) -> None:
    """Records that the run has a checkpoint, by which a loss of all can be told."""
    with dispensable(workdir / RUN):
        if "saved" not in (run := read_json(workdir / RUN)):
            write_json(workdir / RUN, run | {"saved": step})


def open_workdir(
    workdir: Path,
    config: dict[str, Any],
    devices: DeviceManager,
    num_steps: int | None = None,
    ranks: dict[str, str] = RANKS,
    choices: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the config, an id of the run and the environment, which it returns.

    Call it under the lock. `choices` are for all starts, the rest of this.
    `ConfigError`: `check` refuses it, or the directory cannot be written to.
    """
    with usable(workdir):
        _check_contents(workdir, config, False)
        if not has_checkpoints(workdir):
            write_json(workdir / CONFIG, config)
            run = {"id": uuid.uuid4().hex} | (choices or {})
            write_json(workdir / RUN, run | ranks)
            if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
                _warn_of_new_start(workdir)
        elif (run := read_json(workdir / RUN)) != run | ranks:  # A script's may change.
            write_json(workdir / RUN, run | ranks)
    env = environment(devices)
    with dispensable(workdir / ENV):
        started = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        started["num_steps"] = num_steps
        write_json(workdir / ENV, started | env)
    return env


def _warn_of_new_start(workdir: Path) -> None:
    restarts = f"SLURM_RESTART_COUNT={os.environ['SLURM_RESTART_COUNT']}"
    logger.warning(
        f"this job was queued again ({restarts}), and {workdir} has no checkpoint: the "
        f"run starts at step 0; if it had saved any, {workdir} is on another node's "
        "own disk, and must be on one that all share"
    )


def update_config(workdir: Path, config: dict[str, Any]) -> None:
    """Writes the config of a resumed run, and logs the differences."""
    saved = read_json(workdir / CONFIG)
    lines = differences(completed(saved), completed(config))
    for line in lines:
        logger.warning("this run resumes with another config: %s", line)
    schedule = config.get("optimizer", {}).get("schedule", "constant")
    if saved.get("num_steps") != config.get("num_steps") and schedule != "constant":
        logger.warning(
            f"the schedule {schedule} of the learning rate now ends at step "
            f"{config.get('num_steps')}, and is another than before from here on"
        )
    if lines:
        with usable(workdir):
            write_json(workdir / CONFIG, config)


_LOCKS = contextlib.ExitStack()  # Locks: a forked process may outlive the run.
os.register_at_fork(after_in_child=_LOCKS.close)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes `workdir` and locks it against other runs, or raises `ConfigError`."""
    with usable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        file = appended(workdir / LOCK)
    with file:
        try:
            _wait_for_lock(workdir, lambda: _lock(file))
        except OSError as error:
            fault = f"{workdir} cannot be locked ({error.strerror})"
            logger.warning("%s: see to it that no other run writes there", fault)
        _LOCKS.callback(file.close)
        yield


def is_locked(workdir: Path) -> bool:  # Why: docs/decisions/storage.md#shared-lock
    """True if a run is writing to `workdir`, as far as its file system can tell."""
    try:
        with bounded.opened(workdir / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _lock(file: IO) -> bool:  # Why: docs/decisions/storage.md#lock
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _wait_for_lock(workdir: Path, is_free: Callable[[], bool]) -> None:
    """Returns once the lock is free; raises `ConfigError` if another run keeps it."""
    for _ in range(ASKED_TRIES):
        if is_free():
            return
        time.sleep(ASKED_SECONDS)
    _wait_for_lease(workdir, is_free)


def _wait_for_lease(workdir: Path, is_free: Callable[[], bool]) -> None:
    """Waits in a run of several for the lock of a lost process, as `_wait_for_lock`.

    It is a stopped one, or one of a node that is cut off, and may outlive all others.
    """
    sentence = f"another run is writing to {workdir}"
    if jax.process_count() == 1:
        raise ConfigError(f"{sentence}; wait for it, or use another --workdir")
    logger.warning("%s; waiting up to %.0f s for its end", sentence, LOCK_SECONDS)
    deadline = time.monotonic() + LOCK_SECONDS
    while not is_free():
        if time.monotonic() > deadline:
            error = ConfigError(
                f"{sentence}, also after {LOCK_SECONDS:.0f} s: end what is left of it, "
                "or use another --workdir; the same command resumes the run then"
            )
            error.exit_code = 75  # It need not come again.
            raise error
        time.sleep(LOCK_SECONDS / 120)


@contextlib.contextmanager
def usable(workdir: Path) -> Iterator[None]:
    """Turns an error of the file system into a `ConfigError` of one sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be written to: "
            f"{bounded.dangling(workdir) or error}; use another"
        ) from error


def environment(devices: DeviceManager) -> dict[str, Any]:
    """Versions, devices, flags and commit, for env.json and each save."""
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": devices.platform,
        "device_kind": devices.devices[0].device_kind,
        "num_devices": devices.num_devices,
        "devices": devices.describe(),
        "flags": {k: x for k, x in options().items() if k in FLAGS and x},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # An extra.
        return importlib.metadata.version(package)
    return None


def _commit() -> str | None:
    """Commit of the working directory's Git; `-dirty` when files are changed."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=GIT_SECONDS
        ).strip()
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object, {} without a file; raises `ConfigError` if it is damaged."""
    try:
        return bounded.read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes an object, as `write_atomically` does; whole numbers may be NumPy's."""
    write_atomically(path, json.dumps(values, indent=2, default=operator.index) + "\n")


def write_atomically(path: Path, contents: str | bytes | Iterable[str | bytes]) -> None:
    """Writes a file so that it holds the old contents or the new, whatever happens."""
    parts = [contents] if isinstance(contents, str | bytes) else contents
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # Perhaps a link.
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
