"""Trains a config once for each combination of values, each in a workdir of its own.

    python -m haiku_template.sweep --config=configs/digits.py --workdir=runs/sweep \\
        'optimizer.learning_rate=1e-4,3e-4,1e-3' seed=0,1

One process imports JAX once and makes run after run; with `--parallel=N` so many
processes make one each, and share what --device lists (gpu:0,1,2,3). The same command
resumes: runs that are done are passed by. A run that ends early, such as one that does
not fit the memory, is said, and the next one begins. At the end comes the table of
`python -m haiku_template.runs`. Exit codes: 0 all are done, or ended by
`config.max_minutes`, else as of `train`.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from absl import flags

from haiku_template import cli, config, signals
from haiku_template.combinations import Member, combinations, shares
from haiku_template.errors import (
    ConfigError,
    DataError,
    MemoryFullError,
    NonFiniteError,
    PlacementError,
    ReplicaError,
    StorageError,
    memory_full,
)

FLAGS = cli.FLAGS
cli.define_config()
flags.DEFINE_string("workdir", None, "Folder of the runs, a workdir for each.")
flags.DEFINE_integer("parallel", 1, "Processes that train at a time.", lower_bound=1)
flags.DEFINE_string("only", None, "Name of the one combination to train.")
flags.adopt_module_key_flags(cli)
POLL_SECONDS = 0.1
# Errors that end one run of a sweep, and not the others.
OF_A_RUN = ConfigError, NonFiniteError, MemoryFullError, StorageError, DataError
OF_A_RUN += (PlacementError,)
ENDING = "received: the runs end, and save; the same command resumes them"


def main(words: list[str]) -> None:
    """Trains all combinations that are not done, and prints the table."""
    cli.need("config", "workdir")
    folder = Path(FLAGS.workdir)
    members = combinations(FLAGS.config, folder, words, FLAGS.only)
    train = _train_here if FLAGS.parallel == 1 else _train_in_processes
    codes = train(members)
    faults = {name: code for name, code in codes.items() if code}
    if FLAGS.only is None:
        from haiku_template.runs import comparison

        try:
            comparison.show(folder, comparison.summarize_runs(folder))
        except ConfigError:  # No run has begun.
            if not faults:
                raise
    if faults:
        resumes = signals.RESUMED.issuperset(faults.values())
        error = NonFiniteError(
            f"{len(faults)} of {len(members)} runs ended early, each with its line "
            f"above: {' '.join(faults)}{'; the same command resumes them' * resumes}"
        )
        error.exit_code = next(iter(faults.values()))
        raise error


def _train_here(members: list[Member]) -> dict[str, int]:
    """Trains one after another in this process; returns the exit code of each."""
    counts = {member.config.exact_elastic for member in members}
    if len(counts) == 1 and (count := counts.pop()):
        # Why: docs/decisions/training.md#threads
        os.environ.setdefault("PJRT_NPROC", str(count))
    devices = cli.device_manager()  # From here on JAX is imported.
    import jax

    from haiku_template.runs import start

    codes = {}
    for number, member in enumerate(members, 1):
        name, state = member.workdir.name, ""
        try:
            state = _state(member)
            print(f"run       {number}/{len(members)} {name}{state and f', {state}'}")
            if not state:
                codes[name] = 0
                start.run(member.config, devices, str(member.workdir))
        except (RuntimeError, ValueError) as error:  # As which JAX raises XLA's.
            full = memory_full(error)
            # A device whose replicas differ is no other run's, either.
            is_others = isinstance(error, ReplicaError)
            is_own = full or (isinstance(error, OF_A_RUN) and not is_others)
            if FLAGS.only is not None or not is_own:
                raise
            signals.say(f"error: {name}: {full or error}")
            codes[name] = (full or error).exit_code
        if not state:
            jax.clear_caches()  # Programs of this run; what they hold on devices.
            gc.collect()
    return codes


def _state(member: Member) -> str:
    """State of a run with nothing to do; raises `ConfigError` for another's workdir."""
    from haiku_template.runs import comparison, start
    from haiku_template.storage import metrics, workdir

    values = config.to_dict(member.config)
    workdir.check(member.workdir, values, start.is_copied(member.config.mirror))
    saved = workdir.read_json(member.workdir / workdir.CONFIG)
    epochs = values.get("num_epochs")
    if epochs is not None and saved.get("num_epochs") == epochs:
        values["num_steps"] = saved["num_steps"]
    rows = metrics.sampled(member.workdir / workdir.METRICS)
    state = comparison.state_of(member.workdir, values, rows)
    return state if state in ("done", comparison.EARLY) else ""


def _train_in_processes(members: list[Member]) -> dict[str, int]:
    """Trains so many at a time, each in a process; returns the exit code of each."""
    device = "cpu" if FLAGS.simulate_devices else FLAGS.device
    places, waiting = shares(device, FLAGS.parallel), list(members)
    running: dict[subprocess.Popen, tuple[str, str, Any]] = {}
    codes: dict[str, int] = {}
    ends = signals.called(lambda *_: _end(running), ENDING)
    with contextlib.ExitStack() as files, ends:
        files.callback(_end, running)  # An error leaves no process behind.
        while waiting or running:
            while waiting and places:
                name, place = waiting.pop(0).workdir.name, places.pop(0)
                errors = files.enter_context(tempfile.TemporaryFile("w+"))
                _say(f"run       {name}{place and f' on {place}'}")
                running[_start(name, place, errors)] = name, place, errors
            time.sleep(POLL_SECONDS)
            for process in [x for x in running if x.poll() is not None]:
                name, place, errors = running.pop(process)
                places.append(place)
                code = process.returncode
                codes[name] = code if code >= 0 else 128 - code  # As a shell does.
                with errors:
                    errors.seek(0)
                    lines = errors.read().strip().splitlines()
                word = "killed" if code < 0 else "ended"
                word = (lines or [word])[-1] if code else "done"
                _say(f"          {name}: {word}")
    return codes


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # Its reader may be gone: the runs go on.
        print(line, flush=True)


def _end(running: Iterable[subprocess.Popen]) -> None:
    """Ends processes, and waits: in a container they end with this one."""
    processes = [*running]
    for process in processes:
        process.terminate()
    # `wait` may wait here for a lock that the interrupted `poll` has.
    while any(_is_alive(process.pid) for process in processes):
        time.sleep(POLL_SECONDS)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _start(name: str, place: str, errors: Any) -> subprocess.Popen:
    own = ["--parallel=1", f"--only={name}", *[f"--device={place}"] * bool(place)]
    # Of equal flags the last counts, and behind `--` there is none.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    words = [*sys.argv[1:end], *own, *sys.argv[end:]]
    command = [sys.executable, "-m", "haiku_template.sweep", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)


if __name__ == "__main__":
    cli.run(main, arguments=True)
