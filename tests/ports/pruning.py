"""dm-haiku's examples/mnist_pruning.py: the smallest weights become and stay zero."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.data import BatchSpec, digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment, classification

SPARSITY, BEGIN, END = 0.9, 50, 150  # Zhu and Gupta's schedule, in steps.


class PruneState(NamedTuple):
    step: jax.Array
    masks: hk.Params  # Of bools.


def prune():
    """Masks matrices by magnitude, more of each step by step, in place of updates."""

    def init(params):
        ones = jax.tree.map(lambda w: jnp.ones(w.shape, bool), params)
        return PruneState(jnp.zeros([], jnp.int32), ones)

    def update(updates, state, params):
        share = jnp.clip((state.step - BEGIN) / (END - BEGIN), 0, 1)
        sparsity = SPARSITY - SPARSITY * (1 - share) ** 3
        moved = optax.apply_updates(params, updates)

        def masked(w, mask):
            if w.ndim < 2:
                return mask
            sizes = jnp.where(mask, jnp.abs(w), -1.0)  # What is pruned stays so.
            count = jnp.int32(jnp.round(sparsity * w.size))
            return mask & (sizes > jnp.sort(sizes, axis=None)[count - 1] * (count > 0))

        masks = jax.tree.map(masked, moved, state.masks)
        updates = jax.tree.map(lambda w, m, p: w * m - p, moved, masks, params)
        return updates, PruneState(state.step + 1, masks)

    return optax.GradientTransformation(init, update)


# The template.
def experiment(devices: DeviceManager) -> Experiment:
    model = hk.transform(lambda x: hk.nets.MLP([200, 100, 10])(hk.Flatten()(x)))
    optimizer = optax.chain(optax.adam(3e-3), prune())
    data = digits(BatchSpec(128))
    return Experiment(model=model, task=classification, optimizer=optimizer, data=data)


if __name__ == "__main__":
    devices = DeviceManager.create()
    train(experiment(devices).trainer(devices), num_steps=300, workdir="runs/pruning")
