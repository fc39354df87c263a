"""`haiku_template.train`, in which one process's devices flip a bit in one replay.

FLIPPED, `INDEX:CALL`, names the process, and the call of a step, counted from 0.
"""

import os

import jax
import numpy as np

from haiku_template import cli, signals, train
from haiku_template.training.trainer import Trainer

INDEX, CALL = map(int, os.environ["FLIPPED"].split(":"))
CALLS = []


def flipped(x: jax.Array) -> jax.Array:
    """Flips a bit of each copy, or share, that this process has."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        data.reshape(-1).view(np.uint8)[1] ^= 4
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def advance(self, state, steps, arrays, _advance=Trainer.advance):
    """Makes a call, after which this process has other parameters once."""
    state, scalars = _advance(self, state, steps, arrays)
    CALLS.append(steps)
    if cli.FLAGS.process_id == INDEX and len(CALLS) == CALL + 1:
        with jax.transfer_guard("allow"):
            state = state._replace(params=jax.tree.map(flipped, state.params))
    return state, scalars


if __name__ == "__main__":
    Trainer.advance = advance
    signals.install(signals.NOTHING_SAVED)
    cli.run(train.main)
