"""dm-haiku's examples/mnist.py: a perceptron, an L2 penalty, averaged parameters."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.data import BatchSpec, digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment


def net_fn(images: jax.Array) -> jax.Array:
    """Multi-layer perceptron: [B, H, W, 1] to logits [B, 10]."""
    mlp = hk.Sequential(
        [
            hk.Flatten(),
            *(hk.Linear(300), jax.nn.relu),
            *(hk.Linear(100), jax.nn.relu),
            hk.Linear(10),
        ]
    )
    return mlp(images)


def loss_fn(logits, batch, params):
    """Cross-entropy with L2 regularization, and accuracy."""
    labels = batch["labels"]
    squares = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    accuracy = jnp.argmax(logits, axis=-1) == labels
    return {"loss": entropy + 1e-4 * 0.5 * squares, "accuracy": accuracy}


# The template.
def experiment(devices: DeviceManager) -> Experiment:
    return Experiment(
        model=hk.without_apply_rng(hk.transform(net_fn)),
        task=loss_fn,
        data=digits(BatchSpec(128)),
        optimizer=optax.adam(1e-3),
        ema_decay=0.97,
    )


if __name__ == "__main__":
    devices = DeviceManager.create()
    train(experiment(devices).trainer(devices), num_steps=1000, workdir="runs/mnist")
