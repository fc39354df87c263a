"""What saves leave in memory: of Python's blocks, a few for each leaf of a state."""

import gc
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from haiku_template.storage import Checkpoints
from tests.runs import ROOT

LEAVES, SAVES = 10, 100
PER_LEAF = 8  # TensorStore keeps 4 in what it tells Orbax of where a leaf is.


@pytest.mark.slow
def test_a_hundred_saves_leave_little_in_memory(tmp_path):
    state = {"params": {f"layer{i}": jnp.ones((4, 4)) for i in range(LEAVES)}}
    with Checkpoints(tmp_path, keep_last=2, keep_best=1, run="a") as checkpoints:

        def save(first, last):
            for step in range(first, last):
                metrics = {"eval/loss": 1 / step} if step % 2 else None
                checkpoints.save(step, state, metrics)
            checkpoints.wait()
            gc.collect()
            return sys.getallocatedblocks()

        before, after = save(1, 30), save(30, 30 + SAVES)
    assert after - before < PER_LEAF * LEAVES * SAVES


GROWTH = """
import re, sys
from pathlib import Path
from benchmarks.faults import make_trainer
from haiku_template.runs import train
from haiku_template.storage import Checkpoints

def save(self, step, *args, save=Checkpoints.save):
    text = Path("/proc/self/status").read_text()
    print("at", step, re.search(r"RssAnon:\\s+(\\d+) kB", text)[1], flush=True)
    return save(self, step, *args)

Checkpoints.save = save
train(make_trainer(), num_steps=6000, workdir=sys.argv[1], save_every=20, keep_last=2)
"""


@pytest.mark.long
def test_a_run_that_saves_each_twenty_steps_grows_by_less_than_a_kb_a_step(tmp_path):
    """C41: memory of its own; the first two thousand steps fill what is kept.

    With one arena of malloc, as what several have free differs by megabytes.
    """
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        check=True,
    )
    rows = re.findall(r"(?m)^at (\d+) (\d+)$", done.stdout)
    kilobytes = {int(step): int(size) for step, size in rows}
    assert (kilobytes[6000] - kilobytes[2000]) / 4000 < 1
