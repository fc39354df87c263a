"""Two processes, where one of them waits for a disk that the other does not."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from haiku_template.storage.workdir import saved_steps
from tests.cluster.test_several import (
    ENVIRONMENT,
    LAUNCH,
    ROOT,
    SHORT,
    finish,
    train,
    wait_for,
)

pytestmark = pytest.mark.cluster
LONG = {"num_steps": 10**8, "log_every": 100, "eval_every": 10**7, "save_every": None}
SAVES = """
import errno, time
from haiku_template.storage import manifest
finalize = manifest.Handler.finalize
def patched(*args, **kwargs):
    {}
    return finalize(*args, **kwargs)
manifest.Handler.finalize = patched
"""
COPIES = """
import time
from haiku_template.storage.mirror import Mirror
give_back = Mirror.give_back
Mirror.give_back = lambda *args: (time.sleep(12), give_back(*args))

from haiku_template.runs import resume
restored = resume._restored
def patched(trainer, checkpoints, num_steps):
    result = restored(trainer, checkpoints, num_steps)
    assert (checkpoints.directory / "20/manifest").exists(), "it is not copied yet"
    return result
resume._restored = patched
"""
READS = """
import time
if index == 1:
    time.sleep(12)
"""


def start(workdir, patch, **changes):
    keys = [f"--config.{key}={value}" for key, value in (SHORT | changes).items()]
    command = [sys.executable, "-m", "tests.cluster.patched", f"--workdir={workdir}"]
    command += ["--config=configs/digits.py", "--simulate_devices=1", *keys]
    with Path(f"{workdir}.out").open("w") as output:
        return subprocess.Popen(
            [*LAUNCH, "--processes=2", "--", *command],
            cwd=ROOT,
            env=ENVIRONMENT | {"PATCH": patch},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def terminated(workdir, patch, **changes):
    """Exit code and output of a run, both of whose processes get SIGTERM."""
    run = start(workdir, patch, **LONG | changes)
    wait_for(lambda: "step    100/" in Path(f"{workdir}.out").read_text())
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text()
    for child in children.split():
        os.kill(int(child), signal.SIGTERM)
    return finish(run, workdir)


def test_a_save_at_a_signal_has_its_time(tmp_path):
    """Longer than the time in which a loop is to obey."""
    workdir = tmp_path / "run"
    code, printed = terminated(workdir, SAVES.format("time.sleep(12)"))
    (step,) = saved_steps(workdir / "checkpoints")
    assert code == 75 and "nothing new" not in printed and "Traceback" not in printed
    assert printed.count(f"SIGTERM received: step {step} is saved") == 2, printed


def test_no_process_says_that_a_step_is_saved_which_is_not(tmp_path):
    full = "raise OSError(errno.ENOSPC, 'No space left on device')"
    code, printed = terminated(tmp_path / "run", SAVES.format(full))
    assert code == 74 and "is saved" not in printed, printed
    assert printed.count("error: ") == 2 and "No space left on device" in printed


def test_all_wait_for_a_copy_of_the_mirror(tmp_path):
    workdir, mirror = tmp_path / "run", tmp_path / "mirror"
    train(2, workdir, 1, mirror=mirror)
    shutil.rmtree(workdir / "checkpoints/20/manifest")
    changes = {"mirror": mirror, "num_steps": 25}
    code, printed = finish(start(workdir, COPIES, **changes), workdir)
    assert code == 0 and "step 20 is that of" in printed, printed
    assert saved_steps(workdir / "checkpoints") == [20, 25]


def test_a_limit_in_minutes_is_one_where_one_process_came_late(tmp_path):
    workdir = tmp_path / "run"
    changes = LONG | {"max_minutes": 0.5}
    code, printed = finish(start(workdir, READS, **changes), workdir)
    assert code == 0 and "error: " not in printed, printed
    words = "stopped   after 0.5 minutes, as config.max_minutes says: step "
    assert printed.count(words) == 2, printed
