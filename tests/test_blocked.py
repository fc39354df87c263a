"""Signals to a run in which something blocks, and errors of the code of others.

Rows C13, C14 and C15 of the reliability bench. Real processes, whose data set, writer,
evaluation, hook or save waits for a minute, in Python or in C; all that was computed
before is saved, and the same command ends bitwise as one that nothing stopped.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optax
import pytest

from haiku_template.data import Data
from haiku_template.devices import DeviceManager
from haiku_template.models import mlp
from haiku_template.runs import train
from haiku_template.training import Experiment, classification
from tests.runs import UNDRAWN, run_command
from tests.test_commands import digest, numbers

ROOT = Path(__file__).parents[1]
BLOCKED = """
import ctypes, dataclasses, os, pathlib, time
from configs import digits
from haiku_template.data import digits as load
from haiku_template.models import mlp
from haiku_template.runs import stopping, watchdog

stopping.FORCE_SECONDS, watchdog.FIRST_TIMES = 6.0, 3

WHERE, HOW = os.environ.get("WHERE", ""), os.environ.get("HOW", "")


def block(where, now=True):
    once = HOW != "for good" and pathlib.Path("reached").exists()
    if now and where == WHERE and not once:
        pathlib.Path("reached").touch()
        if HOW != "in C":
            return time.sleep(3 if HOW == "slow" else 60)
        mutex = ctypes.create_string_buffer(64)  # Signals do not end a wait for it.
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)


@dataclasses.dataclass
class Blocking:
    dataset: object
    where: str
    at: int

    def __getattr__(self, name):
        if name in ("dataset", "staged", "rows", "gather"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def batch(self, index):
        time.sleep(SLEEP)
        block(self.where, index == self.at)
        return self.dataset.batch(index)


def data(spec):
    made = load(spec)
    return made._replace(
        train=Blocking(made.train, "data", 25),
        evaluation=Blocking(made.evaluation, "evaluation", 1),
    )


def model(num_outputs, axis_name):
    block("model")
    return mlp(num_outputs)


def writer(workdir, step):
    return lambda step, metrics: block("writer", step == 20)


def rename(*args, _rename=os.rename, **kwargs):
    block("save", "/20.orbax" in str(args[0]))
    return _rename(*args, **kwargs)


os.rename = rename


def get_config():
    config = digits.get_config()
    config.num_steps, config.log_every, config.save_every = 40, 5, 10
    config.eval_every, config.steps_per_call = 20, 1
    config.optimizer.warmup_steps = 10
    config.data = {"name": "blocked:data"}
    config.model = {"name": "blocked:model"}
    config.writers = ("blocked:writer",)
    return config
"""


def start(folder, name, where="", how="", command="train", arguments=None):
    train_flags = ["--config=blocked.py", f"--workdir={folder / name}"]
    env = {"PYTHONPATH": f"{folder}:{UNDRAWN}", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", f"haiku_template.{command}"),
            *(arguments or train_flags),
        ],
        text=True,
        cwd=folder,
        env=os.environ | env | {"WHERE": where, "HOW": how},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def ended(process, seconds=100):
    try:
        _, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, errors


def reach(folder, process):
    deadline = time.monotonic() + 100
    while not (folder / "reached").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "blocked.py").write_text(BLOCKED.replace("SLEEP", "0.0"))
    process = start(folder, "plain")
    code, errors = ended(process)
    assert code == 0, errors
    return folder


def finish(folder, name):
    """Lets a stopped run end: it is, bitwise, as one that nothing stopped."""
    code, errors = ended(start(folder, name))
    assert code == 0, errors
    assert digest(folder / name) == digest(folder / "plain")
    assert numbers(folder / name) == numbers(folder / "plain")


def stopped(folder, name, where, how, *signals):
    """Sends signals to a run that is blocked; its code, its errors, and seconds."""
    (folder / "reached").unlink(missing_ok=True)
    process = start(folder, name, where, how)
    reach(folder, process)
    time.sleep(0.5)
    begun = time.monotonic()
    for count, number in enumerate(signals):
        time.sleep(1.5 * (count > 0))
        process.send_signal(number)
    code, errors = ended(process, 60)
    assert errors.count("error: ") == 1 and "Traceback" not in errors, errors
    print(where, how, signals, code, round(time.monotonic() - begun, 1))
    return code, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "how"),
    [
        *itertools.product(("data", "evaluation", "writer"), ("in Python", "in C")),
        ("data", "for good"),  # Also for who asks for the same batch again.
    ],
)
def test_what_blocks_is_left_and_all_that_was_computed_is_saved(folder, where, how):
    """C13: within 20 s, here a few."""
    name = f"{where}-{how[3:]}"
    code, errors = stopped(folder, name, where, how, signal.SIGTERM)
    step = 25 if where == "data" else 20
    said = f"error: SIGTERM received: step {step} is saved, and the same command"
    assert code == 75 and said in errors, errors
    finish(folder, name)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "evaluation", "writer", "save"])
def test_what_is_slow_is_waited_for_or_left_and_nothing_is_lost(folder, where):
    """C15: Ctrl-C while something takes 3 s, as a save on a slow disk."""
    name = f"slow-{where}"
    code, errors = stopped(folder, name, where, "slow", signal.SIGINT)
    said = re.search(r"error: SIGINT received: step (\d+) is saved, and", errors)
    assert code == 130 and said and int(said[1]) in range(20, 40), errors
    finish(folder, name)


@pytest.mark.slow
def test_a_command_that_compiles_for_long_ends_before_that(folder):
    """C13: its main thread is in C when the signal comes."""
    code, errors = stopped(folder, "model", "model", "in C", signal.SIGTERM)
    assert code == 75 and "SIGTERM received while nothing was being trained" in errors


@pytest.mark.slow
@pytest.mark.parametrize("second", [None, "SIGTERM", "SIGINT"])
def test_a_save_that_blocks_is_left_and_the_checkpoint_before_is_whole(folder, second):
    """C14, C15: at a second signal, or after a while (here 6 s, and not 20)."""
    name = f"save-{second}"
    more = [signal.Signals[second]] if second else []
    code, errors = stopped(folder, name, "save", "", signal.SIGTERM, *more)
    said = f"{second} received again" if second else "did not end within 6 s"
    assert code == (130 if second == "SIGINT" else 75) and said in errors, errors
    told = "SIGTERM received: the run saves and ends after the call that is under way"
    assert (told in errors) == (second is None), errors  # Within 3 s nothing is.
    steps = [x.name for x in (folder / name / "checkpoints").iterdir()]
    assert "10" in steps and "20" not in steps
    finish(folder, name)


def trainer(fault=None):
    class Set:
        def batch(self, step):
            if step == fault:
                raise OSError("the disk is gone")
            rng = np.random.default_rng(step)
            x = rng.normal(size=(8, 5)).astype(np.float32)
            return {"inputs": x, "labels": (x[:, 0] > 0).astype(np.int32)}

    return Experiment(
        model=mlp(2, width=4),
        task=classification,
        data=Data(Set(), None, 2),
        optimizer=optax.adam(1e-2),
    ).trainer(DeviceManager.create("cpu", num_devices=1))


@pytest.mark.parametrize("where", ["data", "hook", "save"])
def test_an_error_of_others_code_is_raised_once_the_last_state_is_saved(
    tmp_path, where
):
    """An error at the eighth batch; in a hook of the seventh step, or of a save."""
    fault = 7 if where == "data" else None
    steps = {"hook": ("step", 7), "save": ("save", 6)}.get(where)

    def hook(event):
        if (event.what, event.step) == steps and not (tmp_path / "past").exists():
            raise OSError("the service is gone")

    options = {"num_steps": 12, "log_every": 1, "save_every": 3, "hooks": [hook]}
    train(trainer(), workdir=tmp_path / "plain", **options | {"hooks": []})
    with pytest.raises(OSError, match="is gone"):
        train(trainer(fault), workdir=tmp_path / "run", **options)
    saved = max(int(x.name) for x in (tmp_path / "run/checkpoints").iterdir())
    assert saved == (6 if where == "save" else 7)
    (tmp_path / "past").touch()
    train(trainer(), workdir=tmp_path / "run", **options)
    assert digest(tmp_path / "run") == digest(tmp_path / "plain")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")


CALLED_BACK = """
import jax, numpy as np
import haiku as hk
from haiku_template.config import default_config

calls = []


def count(x):
    calls.append(x)
    if len(calls) > 12:
        raise RuntimeError("the simulator is gone")
    return np.float32(0)


def model(num_outputs, axis_name):
    def forward(inputs):
        form = jax.ShapeDtypeStruct((), np.float32)
        zero = jax.pure_callback(count, form, inputs[0, 0, 0, 0])
        return hk.nets.MLP([num_outputs])(hk.Flatten()(inputs)) + zero

    return hk.without_apply_rng(hk.transform(forward))


def get_config():
    config = default_config()
    config.num_steps, config.save_every, config.log_every = 20, 2, 2
    config.model, config.steps_per_call = {"name": "config:model"}, 1
    return config
"""


def test_an_error_on_devices_is_told_once_and_the_checkpoint_before_is_whole(tmp_path):
    """Two devices, which report it after the call: the state is of no use by then."""
    (tmp_path / "config.py").write_text(CALLED_BACK)
    arguments = ["train", "--config=config.py", "--workdir=run", "--device=cpu"]
    arguments += ["--simulate_devices=2", "--config.data.placement=host"]
    path = os.pathsep.join([str(tmp_path), UNDRAWN])
    done = run_command(*arguments, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 1 and "the simulator is gone" in done.stderr
    assert "cannot be read from its devices, and is not saved" in done.stderr
    assert "another exception occurred" not in done.stderr
    done = run_command("checkpoints", "--workdir=run", cwd=tmp_path)
    assert done.returncode == 0 and "verified" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_other_commands_end_where_their_data_blocks_and_leave_no_half_file(
    folder, command
):
    """C13: in C, where no handler of Python runs."""
    (folder / "reached").unlink(missing_ok=True)
    flags = ["--output=new.npz"] if command == "predict" else []
    arguments = [f"--workdir={folder / 'plain'}", "--trust=.", *flags]
    process = start(folder, "plain", "evaluation", "in C", command, arguments)
    reach(folder, process)
    process.terminate()
    code, errors = ended(process, 40)
    assert code == 75 and errors.count("error: SIGTERM received: the") == 1, errors
    assert not list(folder.glob("*new*"))
