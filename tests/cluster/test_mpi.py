"""Runs under a real mpirun on this host."""

import os
import re
import shutil
import subprocess

import pytest

from tests.cluster.test_several import (
    ENVIRONMENT,
    ROOT,
    assert_same,
    command,
    train,
    wait_for,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"
    ),
]


def test_two_processes_of_mpirun_train_as_one_with_no_address_given(tmp_path):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = subprocess.run(
        ["mpirun", *root, "--oversubscribe", "-n", "2", *command(tmp_path / "run", 2)],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 x cpu: cpu:0, cpu:1 in process 0 of 2" in done.stdout
    train(1, tmp_path / "alone", 4)
    assert_same(tmp_path / "run", tmp_path / "alone")


# In place of ssh: the other host is this one, and knows no variables of the user's.
AGENT = """#!/bin/bash
shift
cd /
exec env -i PATH=/usr/bin:/bin HOME="$HOME" bash -c "$*"
"""


@pytest.fixture
def hosts(tmp_path):
    """Options of mpirun for two hosts, which are this one."""
    agent, file = tmp_path / "agent", tmp_path / "hosts"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    file.write_text("node1 slots=1\nnode2 slots=1\n")
    each = ["--map-by", "ppr:1:node"]
    return ["--mca", "plm_rsh_agent", str(agent), "--hostfile", str(file), *each]


def start(output, *given):
    """Starts launch/mpi.sh; its output goes to a file."""
    with output.open("w") as file:
        return subprocess.Popen(
            [str(ROOT / "launch/mpi.sh"), *given],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def test_processes_on_two_hosts_have_all_cores_and_the_variables(tmp_path, hosts):
    output = tmp_path / "out"
    words = "echo $OMPI_COMM_WORLD_LOCAL_SIZE $(nproc) $JAX_PLATFORMS $PYTHONPATH $PWD"
    assert start(output, *hosts, "bash", "-c", words).wait(timeout=60) == 0
    cores = len(os.sched_getaffinity(0))
    expected = f"1 {cores} cpu {ENVIRONMENT['PYTHONPATH']} {ROOT}"
    assert output.read_text().splitlines().count(expected) == 2


def test_sigterm_saves_a_run_which_resumes_on_two_hosts(tmp_path, hosts):
    workdir, output = tmp_path / "run", tmp_path / "out"
    long = command(workdir, 2, num_steps=100_000, eval_every=None)
    run = start(output, "-n", "2", "--oversubscribe", *long)
    wait_for((workdir / "checkpoints/10").is_dir)
    run.terminate()
    assert run.wait(timeout=120) == 75
    (step,) = set(re.findall(r"step (\d+) is saved", output.read_text()))
    assert (workdir / "checkpoints" / step).is_dir()
    short = command(workdir, 2, num_steps=int(step) + 5, eval_every=None)
    again = start(output, *hosts, *short)
    assert again.wait(timeout=250) == 0, output.read_text()
    assert f"resumed at step {step}" in output.read_text()
    assert "4 x cpu: cpu:0, cpu:1 in process 0 of 2" in output.read_text()


def test_a_failed_process_ends_the_others_and_gives_its_exit_code(tmp_path):
    script = "[ $OMPI_COMM_WORLD_RANK = 1 ] && exit 64; sleep 3; echo heard"
    output = tmp_path / "out"
    options = "-n", "2", "--oversubscribe"
    assert start(output, *options, "bash", "-c", script).wait(timeout=120) == 64
    assert "heard" in output.read_text()
