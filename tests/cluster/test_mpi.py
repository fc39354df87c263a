"""Runs under a real mpirun on this host."""

import os
import shutil
import subprocess

import pytest

from tests.cluster.test_several import ENVIRONMENT, ROOT, assert_same, command, train

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
