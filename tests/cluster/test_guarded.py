"""JAX's thread guard, under which runs of several processes are tested."""

import subprocess
import sys
import threading

import pytest

from tests.cluster.test_several import ENVIRONMENT, ROOT, TRAIN


def test_runs_are_tested_under_it():
    assert "tests.cluster.guarded" in TRAIN


def in_a_thread(address, index):
    """Computes with the other process in a second thread, without and with it."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from haiku_template import cluster

    cluster.join(address, 2, int(index))

    def gather():
        try:
            print(multihost_utils.process_allgather(np.ones(1)).sum())
        except ValueError as error:
            print("refused" if "thread guard" in str(error) else error)

    for guard in (False, True):
        with jax.thread_guard(guard):
            thread = threading.Thread(target=gather)
            thread.start()
            thread.join()


@pytest.mark.cluster
def test_a_computation_of_all_processes_that_another_thread_starts_is_refused(address):
    code = "import sys; from tests.cluster import test_guarded as test\n"
    code += "test.in_a_thread(*sys.argv[1:])"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(i)],
            env=ENVIRONMENT,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for run in runs:
        printed, _ = run.communicate(timeout=100)
        assert printed.splitlines()[-2:] == ["2.0", "refused"]
