"""A process on its own, whose disks are slow: nothing is given up that goes on."""

import os
import re
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

from haiku_template.runs.stopping import StopSignals
from haiku_template.storage.workdir import saved_steps
from tests.cluster.test_slow_disks import SAVES
from tests.runs import ROOT

RUN = {"num_steps": 20, "log_every": 10, "save_every": 10, "eval_every": None}
LONG = {"num_steps": 10**8, "save_every": 100}

pytestmark = pytest.mark.slow
# A state of some kilobytes has 20 s to be written, as one of 400 MB has.
LARGE = """
from haiku_template.runs import stopping
from haiku_template.storage import mirror
stopping.FORCE_SECONDS = mirror.CLOSING_SECONDS = 1.0
stopping.CALLS = 0.0  # However slow those of a test are.
measure = stopping.StopSignals.measure
def measured(self, state):
    measure(self, state)
    stopping.WRITTEN_BYTES = self.bytes / 20
stopping.StopSignals.measure = measured
"""
COPIES = """
import os, shutil, time
copytree = shutil.copytree
def patched(source, *args, **kwargs):
    if os.path.basename(source).isdecimal():
        time.sleep(15)
    return copytree(source, *args, **kwargs)
shutil.copytree = patched
mirror.COPIED_BYTES = 1e4
"""


def ended(workdir, patch, words=None, **changes):
    """Exit code and output of a run, which gets SIGTERM once it said words."""
    keys = [f"--config.{key}={value}" for key, value in (RUN | changes).items()]
    command = [sys.executable, "-m", "tests.cluster.patched", f"--workdir={workdir}"]
    run = subprocess.Popen(
        [*command, "--config=configs/digits.py", "--simulate_devices=1", *keys],
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PATCH": LARGE + patch},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with run:
        printed = ""
        for line in run.stdout:
            printed += line
            if words and words in line:
                words = run.send_signal(signal.SIGTERM)
    return run.returncode, printed


def test_a_save_at_a_signal_has_its_time_beside_one_that_is_under_way(tmp_path):
    """The first is waited for: the one that is under way is the second."""
    slow = SAVES.format("time.sleep(15)")
    code, printed = ended(tmp_path / "run", slow, "step    210/", **LONG)
    assert code == 75 and "did not end within" not in printed, printed
    step = saved_steps(tmp_path / "run/checkpoints")[-1]
    assert step > 200 and f"SIGTERM received: step {step} is saved" in printed


def test_a_state_of_many_small_arrays_has_its_time():
    """As 5,000 took 38 s on a machine whose two cores had six others' work."""
    listening = StopSignals()
    listening.measure({i: jnp.zeros(8) for i in range(5000)})
    assert listening.seconds > 45


def test_a_save_that_goes_on_does_not_hang(tmp_path):
    slow = SAVES.format("time.sleep(8)")
    code, printed = ended(tmp_path / "run", slow, watchdog_minutes=0.02, num_steps=30)
    assert code == 0 and "no progress" not in printed, printed
    assert saved_steps(tmp_path / "run/checkpoints") == [20, 30]


@pytest.mark.parametrize("words", [None, "step    160/"])
def test_copies_at_the_end_of_a_run_have_their_time(tmp_path, words):
    changes = {"mirror": tmp_path / "mirror"} | (LONG if words else {})
    code, printed = ended(tmp_path / "run", COPIES, words, **changes)
    assert code == (75 if words else 0) and "not up to date" not in printed, printed
    steps = saved_steps(tmp_path / "mirror/checkpoints")
    assert steps == saved_steps(tmp_path / "run/checkpoints"), printed
    said = re.search(r"SIGTERM received: step (\d+) is saved", printed)
    assert not words or int(said[1]) == steps[-1], printed
