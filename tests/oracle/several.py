"""Starts of a case by several processes: `launch/local.py`, and a command for each."""

import json
import os
import signal
import subprocess
import sys

from haiku_template.config import to_dict
from haiku_template.errors import NonFiniteError
from haiku_template.signals import EXIT_CODES
from tests.runs import ROOT, UNDRAWN

COMMAND = [sys.executable, "-m", "tests.oracle.process"]
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
    if ended.returncode not in _codes(halt):
        raise RuntimeError(f"exit code {ended.returncode}:\n{ended.stdout}")


def _codes(halt):
    """Exit codes that a start may have: 0 where it ends before it can be stopped."""
    if halt is None:
        return {0}
    number = getattr(signal, halt[-1])
    return {0, EXIT_CODES.get(number, 128 + number)}
