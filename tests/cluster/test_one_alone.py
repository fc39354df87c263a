"""What one of two processes alone meets: both compute the same until they end."""

import re
import subprocess
import sys

import pytest

from tests.cluster.test_several import ENVIRONMENT, ROOT, SHORT, by_hand

pytestmark = pytest.mark.cluster
SHARDED = "(('*','data'),)"
FULL = """
from jax.errors import JaxRuntimeError
from haiku_template.runs.guards import Guards
note, calls = Guards.note, []
def full(*args):
    calls.append(args)
    if index == 1 and len(calls) == 3:
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    return note(*args)
Guards.note = full
"""
FAILS = """
from haiku_template.storage.checkpoint import Checkpoints
write, calls = Checkpoints._write, []
def fails(*args, **kwargs):
    calls.append(args)
    if index == 0 and len(calls) == 1:
        raise OSError(28, "No space left on device")
    return write(*args, **kwargs)
Checkpoints._write = fails
"""
STALE = """
from haiku_template import bounded
read = bounded.read_json
def stale(path, *args, **kwargs):
    if index == 1 and str(path).endswith("metrics/metrics"):
        raise OSError(116, "Stale file handle")
    return read(path, *args, **kwargs)
bounded.read_json = stale
"""
GATHERS = """
import sys
from jax.errors import JaxRuntimeError
from haiku_template.devices import DeviceManager
gather = DeviceManager.gather
def fails(self, tree):
    if index == 1 and sys._getframe(1).f_code.co_name == "look":
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    return gather(self, tree)
DeviceManager.gather = fails
"""


def ends(workdir, address, patch="", *flags, config="digits", **changes):
    """Exit codes and errors of two processes that execute the patch."""
    keys = SHORT | {"data.placement": "host"} | changes
    whole = [sys.executable, "-m", "tests.cluster.patched", "--stall_seconds=40"]
    whole += [f"--config=configs/{config}.py", "--simulate_devices=1"]
    whole += [f"--workdir={workdir}", *(f"--config.{k}={x}" for k, x in keys.items())]
    whole += flags
    options = {"env": ENVIRONMENT | {"PATCH": patch}, "stdout": subprocess.DEVNULL}
    runs = by_hand(address, whole, whole, **options)
    errors = ended(runs)
    return [run.returncode for run in runs], errors


def ended(runs):
    """Errors of processes, none of which stays behind."""
    try:
        return [run.communicate(timeout=280)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()


def saved(workdir):
    names = [path.name for path in (workdir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())


def test_memory_that_is_full_in_one_is_said_by_both(tmp_path, address):
    codes, errors = ends(tmp_path / "run", address, FULL)
    assert codes == [77, 77], errors
    assert all("the memory of a device was full" in words for words in errors)


@pytest.mark.parametrize("key", ["save_minutes", "sharding"])
def test_a_batch_that_one_cannot_read_ends_the_call_of_none(tmp_path, address, key):
    """Calls of 10 steps; the batch of step 25 is not there."""
    changes = {key: {"save_minutes": 0, "sharding": SHARDED}[key], "save_every": None}
    changes |= {"data.name": "tests.cluster.unequal:late", "steps_per_call": 10}
    changes |= {"num_steps": 60, "log_every": 10, "eval_every": None}
    codes, errors = ends(tmp_path / "run", address, **changes)
    assert codes == [69, 1], errors
    assert "RuntimeError: shard 17 is not there" in errors[0]
    assert saved(tmp_path / "run")[-1] == 20


def test_hooks_of_both_hear_of_a_save_or_of_none(tmp_path, address):
    hooks = "('tests.cluster.unequal:evaluates',)"
    codes, errors = ends(tmp_path / "run", address, FAILS, hooks=hooks)
    assert codes == [0, 0], errors
    assert saved(tmp_path / "run") == [20]


def test_an_evaluation_that_one_cannot_read_is_made_by_both_or_none(tmp_path, address):
    assert ends(tmp_path / "run", address, num_steps=10)[0] == [0, 0]
    codes, errors = ends(tmp_path / "run", address, STALE)
    assert codes == [0, 0], errors


def test_a_hook_of_one_that_fails_between_collectives_ends_both(tmp_path, address):
    changes = {"hooks": "('histograms',)", "sharding": SHARDED}
    codes, errors = ends(tmp_path / "run", address, GATHERS, **changes)
    assert codes == [77, 77], errors


LATE = """
import time
from haiku_template.runs import limits, stopping
limits.POLL_SECONDS = 8 - 7.9 * index
class Late(stopping.RuntimeHandler):
    def __init__(self, stop):
        time.sleep(index)
        super().__init__(stop)
stopping.RuntimeHandler = Late
"""


def test_minutes_that_passed_before_one_listens_stop_both_at_one_step(
    tmp_path, address
):
    """The second one's have, as it begins, and the first one's have not yet."""
    changes = {"max_minutes": 1e-4, "num_steps": 100_000, "save_every": None}
    codes, errors = ends(tmp_path / "run", address, LATE, **changes)
    assert codes == [0, 0], errors
    assert len(saved(tmp_path / "run")) == 1


SCRIPT = """
import sys
from haiku_template.cluster import join
workdir, address, index, option = sys.argv[1:]
join(address, 2, int(index), workdir=workdir)
from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment
devices = DeviceManager.create("cpu", num_devices=1)
trainer = Experiment.from_config(digits.get_config(), devices).trainer(devices)
values = {"hooks": [print], "save_every": 10, "log_every": 5, "save_minutes": 1}
own = {option: values[option]} if index == "0" else {}
train(trainer, num_steps=20, workdir=workdir, **own)
"""


@pytest.mark.parametrize("option", ["hooks", "save_every", "log_every", "save_minutes"])
def test_an_option_of_a_script_that_one_alone_has_is_refused(tmp_path, address, option):
    (tmp_path / "script.py").write_text(SCRIPT)
    runs = [
        subprocess.Popen(
            [
                *(sys.executable, tmp_path / "script.py", tmp_path / "run"),
                *(address, str(index), option),
            ],
            cwd=ROOT,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for words in ended(runs):
        assert re.search(f"the processes of a run differ in .*{option}.*: ", words)
