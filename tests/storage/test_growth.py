"""What saves leave in memory: of Python's blocks, a few for each leaf of a state."""

import gc
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
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
import os, re, sys
import jax
from pathlib import Path
from benchmarks.faults import make_trainer
from haiku_template.runs import train
from haiku_template.storage import Checkpoints

def save(self, step, *args, save=Checkpoints.save):
    text = Path("/proc/self/status").read_text()
    size = re.search(r"RssAnon:\\s+(\\d+) kB", text)[1]
    threads = re.search(r"Threads:\\s+(\\d+)", text)[1]
    files = len(os.listdir("/proc/self/fd"))
    print("at", step, size, files, threads, len(jax.live_arrays()), flush=True)
    return save(self, step, *args)

Checkpoints.save = save
steps, every = map(int, sys.argv[2:])
train(make_trainer(), num_steps=steps, workdir=sys.argv[1], save_every=every)
"""


@pytest.mark.long
@pytest.mark.parametrize(("steps", "every"), [(6000, 20), (20_000, 200)])
def test_a_run_that_saves_grows_by_less_than_a_kb_a_step(tmp_path, steps, every):
    """C41: memory of its own; the first third of the steps fills what is kept.

    With one arena of malloc, as what several have free differs by megabytes. Files,
    threads and arrays on devices are as many in the second half.
    """
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path / "run"), str(steps), str(every)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [[*map(int, words)] for mark, *words in filter(None, lines) if mark == "at"]
    rows = np.array([row for row in rows if row[0] > steps / 3])
    growth = rows[-1] - rows[0]
    assert rows[-1, 0] == steps and growth[1] < growth[0]
    early, late = np.array_split(rows[:, 2:], 2)
    assert (late.max(axis=0) <= early.max(axis=0) + 2).all()  # They come and go.
