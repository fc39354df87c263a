"""Row C05 of the reliability bench: exact elastic runs of several processes."""

import hashlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.cluster.test_several import metrics, train

pytestmark = pytest.mark.cluster
# Its convolutions' last bits go by threads, its statistics are those of shares.
MODEL = "{'name': 'resnet', 'channels': (4,), 'blocks': 1}"
EXACT = {"exact_elastic": 8, "batch_size": 16, "log_every": 1, "model": MODEL}
EXACT |= {"eval_every": 4, "save_every": 4}
# Last step, processes, and devices of each, one after another.
RUNS = {
    "one device": [(8, 1, 1)],
    "four devices": [(8, 1, 4)],
    "two processes": [(8, 2, 2)],
    "moved": [(3, 2, 2), (8, 2, 1)],
}


def digest(workdir):
    """SHA-256 of the last state."""
    state = ocp.PyTreeCheckpointer().restore(workdir / "checkpoints/8/state")
    digests = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digests.update(np.asarray(leaf).tobytes())
    return digests.hexdigest()


@pytest.mark.timeout(1300)  # Of five runs, each with a limit of its own.
def test_processes_and_devices_change_no_bit(tmp_path):
    results = {}
    for name, parts in RUNS.items():
        workdir = tmp_path / name.replace(" ", "-")
        for stop, processes, devices in parts:
            train(processes, workdir, devices, num_steps=stop, **EXACT)
        losses = [x["train/loss"] for x in metrics(workdir) if "train/loss" in x]
        last = [x for x in metrics(workdir) if "eval/loss" in x][-1]
        results[name] = digest(workdir), losses, last
        assert len(losses) == 8
    assert all(result == results["one device"] for result in results.values()), results
