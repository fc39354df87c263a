"""Runs of several processes on this machine, joined by JAX's runtime."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL

import haiku as hk
import numpy as np
import pytest

from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment
from tests.runs import ROOT

LOCAL = str(ROOT / "launch/local.py")
LAUNCH = [sys.executable, LOCAL]
TRAIN = [sys.executable, "-m", "tests.cluster.guarded", "--config=configs/digits.py"]
SHORT = {"num_steps": 20, "log_every": 5, "save_every": 10, "eval_every": 10}
SHORT |= {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def command(workdir, devices, **changes):
    keys = [f"--config.{key}={value}" for key, value in (SHORT | changes).items()]
    return [*TRAIN, f"--simulate_devices={devices}", f"--workdir={workdir}", *keys]


def start(processes, *given, **changes):
    """Starts a run; its output goes to a file beside its workdir."""
    whole = [*LAUNCH, f"--processes={processes}", "--"]
    with Path(f"{given[0]}.out").open("w") as output:
        return subprocess.Popen(
            [*whole, *command(*given, **changes)],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(run, workdir, seconds=250):
    """Exit code, and what was printed."""
    code = run.wait(timeout=seconds)
    return code, Path(f"{workdir}.out").read_text()


def train(processes, *given, **changes):
    code, printed = finish(start(processes, *given, **changes), given[0])
    assert code == 0, printed
    return printed


def signalled(workdir, words, index, number):
    """Result of a long run of two; one gets a signal once `words` are printed."""
    run = start(2, workdir, 1, num_steps=100_000, eval_every=None)
    wait_for(lambda: words in Path(f"{workdir}.out").read_text())
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text()
    os.kill(int(children.split()[index]), number)
    return finish(run, workdir)


def metrics(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines
    ]


def assert_same(workdir, other, but=()):
    lines = [
        [line for line in metrics(path) if line["step"] not in but]
        for path in (workdir, other)
    ]
    for line, expected in zip(*lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of one process with four devices."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    train(1, workdir, 4)
    return workdir


@pytest.mark.parametrize(
    ("processes", "devices"),
    [
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.cluster),
    ],
)
def test_four_devices_are_four_in_any_number_of_processes(
    tmp_path, alone, processes, devices
):
    printed = train(processes, tmp_path / "run", devices)
    assert_same(tmp_path / "run", alone)
    # One of them shows the run.
    assert printed.count("step     20/20  loss") == 1
    assert f"4 x cpu: {', '.join(f'cpu:{i}' for i in range(devices))} in" in printed


def batches(folder):
    """Examples of each step's batch, those of process 0 first."""
    each = []
    for path in sorted(folder.iterdir()):
        lines = map(json.loads, path.read_text().splitlines())
        each.append({step: rows for step, rows in lines if step < SHORT["num_steps"]})
    assert all(parts.keys() == each[0].keys() for parts in each)
    return {step: sum((parts[step] for parts in each), []) for step in each[0]}


@pytest.mark.cluster
def test_four_devices_have_the_same_batches_in_any_number_of_processes(
    tmp_path, monkeypatch
):
    found = []
    for processes, devices in ((1, 4), (2, 2), (4, 1)):
        folder = tmp_path / f"batches{processes}"
        folder.mkdir()
        monkeypatch.setitem(ENVIRONMENT, "RECORDED_BATCHES", str(folder))
        changes = {"data.name": "tests.cluster.recorded:data"}
        train(processes, tmp_path / f"run{processes}", devices, **changes)
        found.append(batches(folder))
    assert len(found[0]) == SHORT["num_steps"]
    assert len(set(found[0][0])) == len(found[0][0]) == 128
    assert found[1] == found[0] and found[2] == found[0]


def scaled(num_outputs, **options):
    """Makes a model with a parameter that is initialized from data."""

    def forward(inputs):
        x = hk.Flatten()(inputs)
        scale = hk.get_parameter("scale", [64], init=lambda *_: 1 / (x.std(0) + 0.1))
        return hk.Linear(num_outputs)(x * scale)

    return hk.transform(forward)


@pytest.mark.cluster
def test_what_is_made_of_the_first_batch_is_made_of_that_of_all_processes(tmp_path):
    changes = {"model": "{'name': 'tests.cluster.test_several:scaled'}"}
    for processes, devices in ((1, 2), (2, 1)):
        printed = train(processes, tmp_path / f"{processes}", devices, **changes)
        assert "params/~/scale, from the first batch" in printed
    assert_same(tmp_path / "2", tmp_path / "1")


@pytest.mark.cluster
def test_a_run_resumes_on_other_processes(tmp_path, alone):
    workdir = tmp_path / "run"
    for processes, devices, stop in ((2, 2, 10), (4, 1, 15), (1, 4, 20)):
        train(processes, workdir, devices, num_steps=stop)
    # It is evaluated at its ends, too.
    assert_same(workdir, alone, but={15})


def by_hand(address, *commands, **more):
    """Starts a process with each command, as no launcher would."""
    shared = [f"--coordinator_address={address}", f"--num_processes={len(commands)}"]
    options = {"cwd": ROOT, "env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([*given, *shared, f"--process_id={i}"], **options | more)
        for i, given in enumerate(commands)
    ]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.cluster
def test_sigterm_to_one_process_saves_the_same_step_in_both(tmp_path, address, index):
    """Without a launcher, which would pass the signal on to the other."""
    workdir = tmp_path / "run"
    long = command(workdir, 1, num_steps=100_000, eval_every=None)
    runs = by_hand(address, long, long, stdout=DEVNULL)
    wait_for((workdir / "checkpoints" / "10").is_dir)
    runs[index].send_signal(signal.SIGTERM)
    errors = [run.communicate(timeout=20)[1] for run in runs]
    assert [run.returncode for run in runs] == [75, 75], errors
    saved = [re.findall(r"SIGTERM received: step (\d+) is saved", x) for x in errors]
    assert saved[0] == saved[1] and len(saved[0]) == 1, errors
    assert (workdir / "checkpoints" / saved[0][0]).is_dir()


@pytest.mark.cluster
def test_a_hangup_of_one_process_saves_as_sigterm_does(tmp_path, address):
    workdir = tmp_path / "run"
    long = command(workdir, 1, num_steps=100_000, eval_every=None)
    runs = by_hand(address, long, long, stdout=subprocess.DEVNULL)
    wait_for((workdir / "checkpoints" / "10").is_dir)
    runs[1].send_signal(signal.SIGHUP)
    errors = [run.communicate(timeout=20)[1] for run in runs]
    assert [run.returncode for run in runs] == [75, 75], errors
    assert "error: SIGHUP received: step" in errors[1]


@pytest.mark.cluster
def test_a_signal_before_the_first_step_ends_both_with_its_code(tmp_path, address):
    workdir = tmp_path / "run"
    long = command(workdir, 1, num_steps=100_000, eval_every=None)
    runs = by_hand(address, long, long, stdout=subprocess.DEVNULL)
    wait_for((workdir / "processes" / "1").is_dir)
    runs[1].send_signal(signal.SIGHUP)
    errors = [run.communicate(timeout=50)[1] for run in runs]
    assert [run.returncode for run in runs] == [75, 75], errors
    words = "SIGHUP received while nothing was being trained"
    assert errors[1].startswith(f"error: {words}") and words in errors[0], errors


@pytest.mark.cluster
def test_sigterm_before_the_first_step_of_a_resumed_run_is_not_lost(tmp_path):
    workdir = tmp_path / "run"
    train(2, workdir, 1, num_steps=10)
    code, printed = signalled(workdir, "resumed at step 10", 0, signal.SIGTERM)
    assert code == 75, printed


def refused(address, *commands):
    """Exit codes and errors of processes that are started by hand."""
    runs = by_hand(address, *commands)
    errors = [run.communicate(timeout=250)[1] for run in runs]
    assert not any("Traceback" in words for words in errors)
    return [run.returncode for run in runs], errors


@pytest.mark.cluster
def test_a_process_waits_so_long_for_the_others_as_it_is_told(tmp_path, address):
    more = ["--num_processes=2", f"--coordinator_address={address}", "--join_seconds=2"]
    runs = [
        subprocess.run(
            [*command(tmp_path / "run", 1), *more, f"--process_id={index}"],
            cwd=ROOT,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        for index in range(2)
    ]
    assert [run.returncode for run in runs] == [69, 69]
    assert "1 of 2 processes joined" in runs[0].stderr
    assert all("within 2 s" in run.stderr for run in runs)


@pytest.mark.cluster
def test_a_run_waits_for_the_lock_of_its_stopped_process(tmp_path, address):
    workdir, port = tmp_path / "run", int(address.split(":")[1])
    long = command(workdir, 1, num_steps=100_000, eval_every=None)
    old = by_hand(address, long, long, stdout=DEVNULL, stderr=DEVNULL)
    wait_for((workdir / "checkpoints" / "10").is_dir)
    old[0].send_signal(signal.SIGSTOP)
    old[1].kill()
    names = [path.name for path in (workdir / "checkpoints").iterdir()]
    steps = max(int(name) for name in names if name.isdecimal())  # Not unfinished ones.
    short = command(workdir, 1, num_steps=steps + 100, eval_every=None)
    with (tmp_path / "errors").open("w") as errors:
        runs = by_hand(f"127.0.0.1:{port + 1}", short, short, stderr=errors)
    try:
        wait_for(lambda: "waiting up to 120 s" in (tmp_path / "errors").read_text())
    finally:
        old[0].kill()
        codes = [run.wait(timeout=100) for run in (*old, *runs)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]


@pytest.mark.cluster
def test_processes_that_were_told_something_else_say_what(tmp_path, address):
    workdir = tmp_path / "run"
    other = command(workdir, 1, **{"optimizer.learning_rate": 0.5})
    codes, errors = refused(address, command(workdir, 1), other)
    assert codes == [64, 64]
    for words in errors:
        assert "differ in config.optimizer.learning_rate: 0.001 in process 0" in words
        assert "and 0.5 in process 1" in words
    assert not workdir.exists()


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.cluster
def test_processes_with_other_data_say_how_much(tmp_path, address, augment):
    name = "augmented" if augment else "data"
    changes = {"data.name": f"tests.cluster.unequal:{name}"}
    whole = command(tmp_path / "run", 1, **changes)
    codes, errors = refused(address, whole, whole)
    assert codes == [64, 64], errors
    for words in errors:
        assert "size of the data: {'training': " in words
        assert "1437" in words and "1436" in words and "in process 1; " in words
    assert not any((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.cluster
def test_an_error_of_one_process_that_would_come_again_ends_both_with_its_code(
    tmp_path, address
):
    changes = {"data.name": "tests.cluster.unequal:unreadable"}
    whole = command(tmp_path / "run", 1, **changes, **{"data.placement": "host"})
    codes, errors = refused(address, whole, whole)
    assert codes == [64, 64], errors
    assert re.search(r"error: process 1 on \S+ ended at .*: shard 1 is not", errors[0])
    assert "error: shard 1 is not there" in errors[1]


@pytest.mark.cluster
def test_processes_skip_the_same_steps(tmp_path):
    """C21 and C22, of a NaN in the rows of process 1 alone."""
    changes = {"data.name": "tests.cluster.unequal:spoiled", "data.placement": "host"}
    limit = "max_consecutive_nonfinite"
    printed = train(2, tmp_path / "a", 1, **changes, **{limit: 3})
    assert "step 4 is skipped, as its loss is infinite or NaN" in printed
    assert "no value of its batch in process 0 of 2 stands out" in printed
    counts = [x.get("train/skipped_steps") for x in metrics(tmp_path / "a")]
    assert max(filter(None, counts)) == 3
    run = start(2, tmp_path / "b", 1, **changes, **{limit: 2})
    code, printed = finish(run, tmp_path / "b")
    assert code == 70, printed
    assert "the loss of step 12 (and of the 1 after it) is infinite or NaN" in printed


@pytest.mark.cluster
def test_a_process_that_does_not_see_the_checkpoints_is_named(tmp_path, address):
    """As one of another machine, with a workdir that is not shared."""
    train(1, tmp_path / "run", 2, num_steps=10)
    commands = [command(tmp_path / name, 1) for name in ("run", "elsewhere")]
    # Process 0 waits so long: if an odd hello ended it, a stranger could.
    codes, errors = refused(address, *([*c, "--join_seconds=20"] for c in commands))
    assert codes == [64, 64], errors
    for words in errors:
        assert "a workdir must be on a disk that all processes share" in words
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.cluster
def test_processes_with_other_numbers_of_devices_say_so(tmp_path, address):
    workdir = tmp_path / "run"
    codes, errors = refused(address, *(command(workdir, n) for n in (1, 2)))
    assert codes == [69, 69]
    for words in errors:
        assert "are 1 in process 0, 2 in process 1; each process needs" in words


SCRIPT = """
import sys
from haiku_template.cluster import join
from haiku_template.devices import DeviceManager
index = int(sys.argv[1])
join(sys.argv[2], 2, index)
devices = DeviceManager.create("cpu")
if index == 1:
    {ending}
devices.processes.agree({{"data": 1}})
"""


FAILS = "raise LookupError('no data')"


@pytest.mark.parametrize(
    "ending", ["pass", FAILS, f"print(1); __import__('os').close(1); {FAILS}"]
)
@pytest.mark.cluster
def test_a_script_ends_with_its_peers(tmp_path, address, ending):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(ending=ending))
    options = {"env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    runs = [
        subprocess.Popen([sys.executable, str(script), str(i), address], **options)
        for i in range(2)
    ]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    if ending == "pass":
        assert [run.returncode for run in runs] == [0, 0], errors
        return
    assert [run.returncode for run in runs] == [69, 1], errors
    last = errors[0].splitlines()[-1]
    assert re.match(
        r"error: process 1 on \S+ ended at .*: LookupError: no data; ", last
    )
    assert "LookupError: no data" in errors[1] and "Traceback" in errors[1]


PREDICTS = """
import sys
import numpy as np
from configs import digits
from haiku_template.cluster import join
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment
join(sys.argv[2], 2, int(sys.argv[1]))
devices = DeviceManager.create("cpu", simulate_devices=int(sys.argv[3]))
trainer = Experiment.from_config(digits.get_config(), devices).trainer(devices)
state = trainer.init()
devices.check(state, trainer.layout)
outputs = np.concatenate(list(trainer.predict(state)))
np.save(f"{sys.argv[4]}.{sys.argv[1]}.npy", outputs)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("devices", [1, 2])
def test_each_process_predicts_what_one_does(tmp_path, address, devices):
    script = tmp_path / "script.py"
    script.write_text(PREDICTS)
    last = [str(devices), str(tmp_path / "outputs")]
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), str(i), address, *last], env=ENVIRONMENT
        )
        for i in range(2)
    ]
    assert [run.wait(timeout=200) for run in runs] == [0, 0]
    one = DeviceManager.create("cpu", num_devices=1)
    trainer = Experiment.from_config(digits.get_config(), one).trainer(one)
    expected = np.concatenate(list(trainer.predict(trainer.init())))
    for i in range(2):
        outputs = np.load(tmp_path / f"outputs.{i}.npy")
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


AT_THE_END = """
import os, signal, sys, time
from haiku_template.cluster import join
index = int(sys.argv[1])
join(sys.argv[2], 3, index)
if index == 1:
    time.sleep(5)
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "codes"),
    [
        ("os._exit(3)", [69, 3, 69]),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(3)", [0, 0, 0]),
    ],
)
@pytest.mark.cluster
def test_processes_that_are_done_wait_for_no_longer_than_the_last(
    tmp_path, address, ending, codes
):
    script = tmp_path / "script.py"
    script.write_text(AT_THE_END.format(ending=ending))
    options = {"env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    runs = [
        subprocess.Popen([sys.executable, str(script), str(i), address], **options)
        for i in range(3)
    ]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == codes, errors
    for code, words in zip(codes, errors, strict=True):
        lost = re.fullmatch(r"error: process 1 on \S+ was killed .*\n", words)
        assert code != 69 or lost, words


@pytest.mark.cluster
def test_a_killed_process_ends_the_others_in_a_sentence(tmp_path):
    workdir = tmp_path / "run"
    _, printed = signalled(workdir, "step      5/", 1, signal.SIGKILL)
    assert re.search(r"error: process 1 on \S+ was killed at ", printed)
    assert "Traceback" not in printed


def wait_for(condition, seconds=250):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
