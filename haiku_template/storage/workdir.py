"""The directory of a run: its config, its environment, its log."""

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from haiku_template.config import completed, differences
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIG, ENV, LOG, METRICS = "config.json", "env.json", "train.log", "metrics.jsonl"
CHECKPOINTS, TENSORBOARD, REPORT = "checkpoints", "tensorboard", "report.png"
PROFILE, BASE, CONFUSION = "profile", "base.json", "confusion.png"
LOCK = ".lock"
PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "numpy", "orbax-checkpoint", "grain")


def check(workdir: Path, config: dict[str, Any]) -> None:
    """Asserts that a run with this config may write to `workdir`; writes nothing.

    Raises:
      ConfigError: another experiment's workdir (lists the differences), a file, what
        was exported, or a directory that holds files with the names of a run's but no
        config.
    """
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
        return  # A run that failed before it had anything to lose.
    if saved.exists():
        changed = differences(completed(_read_json(saved)), completed(config))
        if changed:
            raise ConfigError(
                f"{workdir} belongs to a run with another config, and nothing was "
                f"changed there; use another --workdir or restore: {'; '.join(changed)}"
            )
        return
    names = (METRICS, CHECKPOINTS, TENSORBOARD, REPORT, LOG, ENV)
    found = [name for name in names if (workdir / name).exists()]
    if found:
        raise ConfigError(
            f"{workdir} holds {', '.join(found)} but no {CONFIG}, so it is not known "
            "what made them; use another --workdir"
        )


def has_checkpoints(workdir: Path) -> bool:
    """Whether a run has saved anything here."""
    return any(path.name.isdecimal() for path in (workdir / CHECKPOINTS).glob("*"))


def open_workdir(workdir: Path, config: dict[str, Any], devices: DeviceManager) -> None:
    """Makes `workdir` where needed, and saves the config and the environment.

    A resumed run logs what differs in its environment.

    Raises:
      ConfigError: see `check`; or the directory cannot be written to.
    """
    check(workdir, config)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not (workdir / CONFIG).exists() or not has_checkpoints(workdir):
            write_atomically(workdir / CONFIG, json.dumps(config, indent=2) + "\n")
        env = environment(devices)
        if (workdir / ENV).exists():
            before = _read_json(workdir / ENV)
            for line in differences(before | {"started": ""}, env | {"started": ""}):
                logger.warning("this run's environment changed: %s", line)
        write_atomically(workdir / ENV, json.dumps(env, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be written to: {error}"
        ) from error


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of `workdir`; the lock goes with the process.

    Raises:
      ConfigError: another run is in it, or it cannot be written to.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with (workdir / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is writing to {workdir}; wait for it, or use another "
            "--workdir"
        ) from error
    except PermissionError as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be written to: {error}"
        ) from error


def is_locked(workdir: Path) -> bool:
    """Whether a run is writing to `workdir`."""
    try:
        with (workdir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def environment(devices: DeviceManager) -> dict[str, Any]:
    """Versions, devices and commit, as saved in env.json."""
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
    """The git commit of the working directory; `-dirty` when files are changed."""
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that it holds the old text or the new, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
