"""Runs under a real Slurm of two nodes on this host."""

import re
import signal
import subprocess
import time

import pytest

from tests.cluster import slurm
from tests.cluster.test_several import ROOT, assert_same, command, train

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
]


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def srun(environ, *flags, **options):
    return subprocess.Popen(
        ["srun", "-N2", "-n2", *flags],
        env=environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_two_tasks_of_srun_train_as_one_process_with_no_address_given(
    tmp_path, environ
):
    run = srun(environ, *command(tmp_path / "run", 2))
    printed, _ = run.communicate(timeout=250)
    assert run.returncode == 0, printed
    assert "4 x cpu: cpu:0, cpu:1 in process 0 of 2" in printed
    train(1, tmp_path / "alone", 4)
    assert_same(tmp_path / "run", tmp_path / "alone")


def test_a_cancelled_job_saves_and_is_resumed(tmp_path, environ):
    workdir = tmp_path / "run"
    long = command(workdir, 1, num_steps=100_000, eval_every=None)
    run = srun(environ, "--job-name=long", *long)
    deadline = time.monotonic() + 250
    while not (workdir / "checkpoints" / "10").is_dir():
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.2)
    cancel = ["scancel", "--name=long", f"--signal={signal.SIGTERM.name[3:]}"]
    subprocess.run(cancel, env=environ, check=True)
    printed, _ = run.communicate(timeout=250)
    assert run.returncode == 75, printed
    (step,) = set(re.findall(r"step (\d+) is saved", printed))
    again = srun(
        environ, *command(workdir, 1, num_steps=int(step) + 5, eval_every=None)
    )
    printed, _ = again.communicate(timeout=250)
    assert again.returncode == 0, printed
    assert f"resumed at step {step}" in printed
