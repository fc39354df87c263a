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
SHARDED = "(('*','data'),)"
LONG = {"num_steps": 10**8, "log_every": 100, "eval_every": 10**7, "save_every": None}
SAVES = """
import errno, time
from haiku_template.storage import manifest
finalize = manifest.Handler.finalize
def patched(*args, **kwargs):
    print("it writes", flush=True)
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
LARGE = """
from haiku_template.cluster import rescue
from haiku_template.runs import stopping
rescue.SAVE_SECONDS = 2.0
stopping.WRITTEN_BYTES = 7e4  # It has a minute, as a gigabyte has.
"""
LATE = """
import time
from haiku_template.runs import limits
within = limits.within
def late(*args):
    limited = within(*args)
    return lambda *args, **kwargs: (time.sleep(12), limited(*args, **kwargs))[1]
if index == 1:
    limits.within = late
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


def children(run):
    """Processes that a launcher has started, upwards."""
    text = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text()
    return [*map(int, text.split())]


def terminated(workdir, patch, words="step    100/", **changes):
    """Exit code and output of a run whose processes get SIGTERM once it said words."""
    run = start(workdir, patch, **LONG | changes)
    wait_for(lambda: words in Path(f"{workdir}.out").read_text())
    for child in children(run):
        os.kill(child, signal.SIGTERM)
    return finish(run, workdir)


@pytest.mark.parametrize(
    ("layout", "words"),
    [("()", "step    100/"), (SHARDED, "step    100/"), (SHARDED, "it writes")],
)
def test_a_save_at_a_signal_has_its_time(tmp_path, layout, words):
    """Longer than a loop is to obey, and than others wait for a save that has begun."""
    workdir, slow = tmp_path / "run", LARGE + SAVES.format("time.sleep(20)")
    changes = {"sharding": layout, "save_every": 150, "keep_last": 1}
    code, printed = terminated(workdir, slow, words, **changes)
    step = saved_steps(workdir / "checkpoints")[-1]
    assert code == 75 and "nothing new" not in printed and "Traceback" not in printed
    assert printed.count(f"SIGTERM received: step {step} is saved") == 2, printed


def test_the_others_wait_for_a_save_of_process_0(tmp_path):
    """The first is waited for: longer than `--stall_seconds`, and a little more."""
    impatient = """
from haiku_template.cluster.joining import HEARTBEATS
HEARTBEATS[0].stall_seconds = 2.0
"""
    slow = LARGE + SAVES.format("time.sleep(40)") + impatient
    code, printed = finish(
        start(tmp_path / "run", slow, num_steps=15), tmp_path / "run"
    )
    assert code == 0 and "error: " not in printed, printed


def test_a_joint_save_has_no_limit(tmp_path):
    """By a clock that is set to another year while it writes."""
    years = "now = time.time; time.time = lambda: now() + 1e8"
    run = start(tmp_path / "run", SAVES.format(years), sharding=SHARDED)
    code, printed = finish(run, tmp_path / "run")
    assert code == 0 and "Timed out" not in printed, printed


def test_a_save_in_place_of_loops_has_its_time(tmp_path):
    """The batch of step 25 is not there for one of the processes."""
    changes = {"data.name": "tests.cluster.unequal:late", "save_every": None}
    changes |= {"steps_per_call": 10, "eval_every": None, "data.placement": "host"}
    slow = LARGE + SAVES.format("time.sleep(8)")
    run = start(tmp_path / "run", slow, num_steps=60, **changes)
    code, printed = finish(run, tmp_path / "run")
    assert code == 1 and "took more than" not in printed, printed
    assert saved_steps(tmp_path / "run/checkpoints") == [20], printed


def test_a_save_ends_after_another_process_was_killed(tmp_path):
    """Longer than a process has to end by itself."""
    workdir, slow = tmp_path / "run", LARGE + SAVES.format("time.sleep(20)")
    run = start(workdir, slow, **LONG | {"save_every": 150})
    wait_for(lambda: "it writes" in Path(f"{workdir}.out").read_text())
    os.kill(children(run)[1], signal.SIGKILL)
    code, printed = finish(run, workdir)
    assert code == 128 + signal.SIGKILL and "Traceback" not in printed, printed
    assert saved_steps(workdir / "checkpoints") == [150], printed


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
    code, printed = finish(start(workdir, LATE, **changes), workdir)
    assert code == 0 and "error: " not in printed, printed
    words = "stopped   after 0.5 minutes, as config.max_minutes says: step "
    assert printed.count(words) == 2, printed
