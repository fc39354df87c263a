"""What saves leave in memory: of Python's blocks, a few for each leaf of a state."""

import gc
import sys

import jax.numpy as jnp
import pytest

from haiku_template.storage import Checkpoints

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
