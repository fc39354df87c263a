"""Starts of a case by several processes: `launch/local.py`, and a command for each."""

import json
import os
import subprocess
import sys

from haiku_template.config import to_dict
from haiku_template.errors import NonFiniteError
from tests.runs import ROOT, UNDRAWN

COMMAND = [sys.executable, "-m", "tests.oracle.process"]
HALTS = "a process is about to be stopped"  # As process.py says it.
SECONDS = 900.0  # Of a loaded machine, too.
# As tests compile: for a few steps.
QUICK = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start(config, workdir, devices, processes, halt=None, rewind=None):
    """Starts a run, which `halt`, (step, process or "all", signal), may stop.

    `devices` are those of all processes. Raises `NonFiniteError` where they end by it,
    and `RuntimeError`, with what they print, for another end than what was asked for.
    """
    file = workdir.parent / "config.json"
    file.write_text(json.dumps(to_dict(config)))
    flags = [f"--config={ROOT}/tests/oracle/process.py:{file}", f"--workdir={workdir}"]
    flags += [f"--simulate_devices={devices // processes}"]
    flags += [f"--rewind={rewind}"] if rewind else []
    launcher = [sys.executable, f"{ROOT}/launch/local.py", f"--processes={processes}"]
    environ = os.environ | QUICK | {"PYTHONPATH": UNDRAWN}
    ended = subprocess.run(
        [*launcher, "--", *COMMAND, *flags],
        env=environ | {"HALT": ":".join(map(str, halt or ()))},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    if ended.returncode == NonFiniteError.exit_code:
        raise NonFiniteError(ended.stdout)
    if ended.returncode not in _codes(halt, ended.stdout):
        raise RuntimeError(f"exit code {ended.returncode}:\n{ended.stdout}")


def _codes(halt, printed):
    """Exit codes that a start may have.

    One that ends early comes to no stop, and who is told to stop may be done before.
    """
    if HALTS not in printed:
        return {0}
    return {137} if halt[-1] == "SIGKILL" else {0, 75}
