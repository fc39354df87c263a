"""Layouts over the devices of several processes: what they train, save and restore."""

import json
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from haiku_template.devices import DeviceManager
from haiku_template.runs.export import export_safetensors
from haiku_template.runs.run import Run
from haiku_template.storage import Checkpoints
from haiku_template.storage import manifest as manifests
from tests.cluster.test_moments import KILLED, run
from tests.cluster.test_several import (
    ENVIRONMENT,
    ROOT,
    assert_same,
    by_hand,
    command,
    train,
    wait_for,
)
from tests.storage.test_verified import edit_manifest

pytestmark = pytest.mark.cluster
ALL = {"sharding": "(('*','data'),)"}
ON_HOST = {"sharding": "(('opt_state/*','data','pinned_host'),)"}


def saved(workdir, step):
    """Arrays of a checkpoint, on the host."""
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        shapes = checkpoints.saved(step)
        hosts = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return checkpoints.restore(step, hosts)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A sharded run of one process with two devices."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    train(1, workdir, 2, **ALL)
    return workdir


def test_two_processes_save_bitwise_what_one_saves(tmp_path, alone):
    workdir = tmp_path / "run"
    train(2, workdir, 1, **ALL)
    assert len([*workdir.glob("checkpoints/20/state/ocdbt.process_*")]) == 2
    for step in (10, 20):
        arrays = [saved(folder, step) for folder in (workdir, alone)]
        jax.tree.map(np.testing.assert_array_equal, *arrays)
    assert not (workdir / "processes/1/checkpoints").exists()


def test_a_run_goes_on_in_another_layout_on_other_processes(tmp_path, alone):
    workdir = tmp_path / "run"
    for processes, devices, stop, rules in (
        (2, 2, 10, ALL),
        (1, 1, 15, {}),
        (2, 1, 20, ON_HOST),
    ):
        train(processes, workdir, devices, num_steps=stop, **rules)
    # It is evaluated at its ends, too.
    assert_same(workdir, alone, but={15})


@pytest.mark.parametrize("index", [0, 1])
def test_sigterm_to_one_process_saves_the_shares_of_both(tmp_path, address, index):
    workdir = tmp_path / "run"
    long = command(workdir, 1, num_steps=100_000, eval_every=None, **ALL)
    runs = by_hand(address, long, long, stdout=subprocess.DEVNULL)
    wait_for((workdir / "checkpoints" / "10").is_dir)
    runs[index].send_signal(signal.SIGTERM)
    errors = [each.communicate(timeout=30)[1] for each in runs]
    assert [each.returncode for each in runs] == [75, 75], errors
    steps = [re.findall(r"SIGTERM received: step (\d+) is saved", x) for x in errors]
    assert steps[0] == steps[1] and len(steps[0]) == 1, errors
    step = int(steps[0][0])
    assert saved(workdir, step)["step"] == step


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_is_killed_while_both_save_leaves_a_run_to_resume(
    tmp_path, address, index, alone
):
    """The other's half of step 20 is no checkpoint."""
    codes, errors = run(tmp_path, address, f"{index}:save:SIGKILL", **ALL)
    assert (codes[index], codes[1 - index]) == (-signal.SIGKILL, 69), errors
    assert re.match(KILLED.format(index), errors[1 - index]), errors
    workdir = tmp_path / "run"
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        assert checkpoints.steps == [10]
    train(1, workdir, 2, **ALL)
    assert_same(workdir, alone)


@pytest.mark.parametrize("index", [0, 1])
def test_a_full_disk_of_one_ends_both_with_its_code(tmp_path, address, index):
    """The other waits within Orbax for its half."""
    write = "__import__('pathlib').Path('/dev/full').write_text(9_999 * ' ')"
    orbax = "__import__('orbax.checkpoint').checkpoint"
    fault = f"{index}:save:{orbax}.AsyncCheckpointer.save = property(lambda _: {write})"
    codes, errors = run(tmp_path, address, fault, **ALL)
    assert codes == [74, 74], errors
    for words in errors:
        assert "step 20 could not be saved in" in words and "No space left" in words


@pytest.mark.parametrize("process", [0, 1])
def test_a_damaged_share_of_one_process_is_passed_by_in_both(tmp_path, alone, process):
    workdir = tmp_path / "run"
    train(2, workdir, 1, **ALL)
    step = workdir / "checkpoints/20"
    files = step.glob(f"state/ocdbt.process_{process}/d/*")
    file = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    train(2, workdir, 1, **ALL)
    assert step.with_name("20.damaged").is_dir()
    assert_same(workdir, alone)


@pytest.mark.parametrize(
    ("saving", "reading"),
    [((2, 2), (2, 2)), ((2, 2), (1, 1)), ((2, 2), (2, 1)), ((1, 2), (2, 1))],
)
def test_arrays_of_another_save_are_passed_by_on_other_processes_and_devices(
    tmp_path, saving, reading
):
    """Their checksums are right, and their digests are of another save."""
    runs = [tmp_path / name for name in "ab"]
    for seed, workdir in enumerate(runs):
        train(saving[0], workdir, saving[1], seed=seed, **ALL)
    steps = [workdir / "checkpoints/20" for workdir in runs]
    entries = manifests.read(steps[0])["leaves"].values()
    counts = {len(entry.get("shares", ())) for entry in entries}
    assert counts == ({0, 4} if saving[0] > 1 else {0})
    shutil.rmtree(steps[0] / "state")
    shutil.copytree(steps[1] / "state", steps[0] / "state")
    edit_manifest(steps[0], files=manifests.sizes(steps[0]))
    printed = train(reading[0], runs[0], reading[1], **ALL)
    assert (runs[0] / "checkpoints/20.damaged").is_dir()
    assert "leaves are not what was saved" in printed


READS = """
import sys
from pathlib import Path
from haiku_template.cluster import join
from haiku_template.devices import DeviceManager, check_processes, check_replicas
from haiku_template.runs.run import Run
from tests.cluster.test_sharded_processes import results
index, address, workdir, output = int(sys.argv[1]), *sys.argv[2:]
join(address, 2, index)
run = Run.open(workdir, DeviceManager.create("cpu", simulate_devices=2))
assert not run.state.params["mlp/~/linear_0"]["w"].is_fully_replicated
run.devices.check(run.state, run.trainer.layout)
check_replicas(run.state)
check_processes(run.devices.processes, run.state)
results(run, Path(f"{output}.{index}"))
"""


def results(run, folder):
    """Writes what a run evaluates to, predicts and exports."""
    folder.mkdir()
    metrics = np.array([*run.evaluate().values()])
    outputs = np.concatenate([*run.trainer.predict(run.state)])
    np.savez(folder / "results.npz", metrics=metrics, outputs=outputs)
    export_safetensors(run, folder / "exported")


def test_two_processes_evaluate_predict_and_export_what_one_does(
    tmp_path, address, alone
):
    script = tmp_path / "script.py"
    script.write_text(READS)
    last = [address, str(alone), str(tmp_path / "results")]
    runs = [
        subprocess.Popen([sys.executable, str(script), str(i), *last], env=ENVIRONMENT)
        for i in range(2)
    ]
    assert [each.wait(timeout=200) for each in runs] == [0, 0]
    results(Run.open(alone, DeviceManager.create("cpu", num_devices=1)), tmp_path / "1")
    expected = np.load(tmp_path / "1/results.npz")
    model = (tmp_path / "1/exported/model.safetensors").read_bytes()
    for i in range(2):
        folder = tmp_path / f"results.{i}"
        for name, array in np.load(folder / "results.npz").items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5)
        assert (folder / "exported/model.safetensors").read_bytes() == model


def test_no_damage_is_restored_wrong_by_two_processes(tmp_path, address):
    """C07, C08: each fifth of the table of one process, and none wrong in all of it."""
    command = [sys.executable, "-m", "tests.cluster.damaged", address]
    runs = [
        subprocess.Popen(
            [*command, str(index), str(tmp_path), "200", "10", "5"],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    printed = [run.communicate(timeout=280)[0] for run in runs]
    result = json.loads(printed[0].splitlines()[-1])
    assert not result["wrong"] and [run.returncode for run in runs] == [0, 0]
    _, before, newest = result["counts"]
    assert before > 60 and newest > 0
