"""An experiment on inputs of two arrays, numbers and a town, as a user writes it."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.config import default_config
from haiku_template.data import Split

TOWNS = 4


def arrays(num_examples=70):
    """Inputs [N, 3] and [N], and classes [N] that depend on both."""
    rng = np.random.default_rng(0)
    inputs = {
        "numbers": rng.normal(size=(num_examples, 3)).astype(np.float32),
        "town": rng.integers(TOWNS, size=num_examples).astype(np.int32),
    }
    labels = inputs["numbers"].sum(axis=1) + inputs["town"] > 1.5
    return inputs, labels.astype(np.int32)


def split(kind=dict):
    """Inputs as a dictionary, or as a tuple; the first 16 are the test part."""
    inputs, labels = arrays()
    tree = inputs if kind is dict else tuple(inputs.values())
    return Split(tree, labels, jax.tree.map(lambda x: x[:16], tree), labels[:16])


def model(num_outputs, axis_name, width=8):
    """Logits [B, K] of a number for each town, and of the numbers."""

    def forward(inputs, is_training):
        inputs = inputs.values() if isinstance(inputs, dict) else inputs
        vectors, numbers = sorted(inputs, key=lambda x: x.ndim)
        x = jnp.concatenate([numbers, hk.Embed(TOWNS, 2)(vectors)], axis=1)
        return hk.nets.MLP([width, num_outputs])(x)

    return hk.transform(forward)


def by_name(parts):
    """Arrays as they are named in a file: `x_train/town`."""
    named = {}
    for part, tree in parts._asdict().items():
        leaves = enumerate(tree) if isinstance(tree, tuple) else ()
        leaves = tree.items() if isinstance(tree, dict) else leaves
        named |= {f"{part}/{name}": leaf for name, leaf in leaves} or {part: tree}
    return named


def get_config(path="data.npz"):
    """The same from a file, by a command."""
    config = default_config()
    config.num_steps, config.batch_size = 6, 8
    config.model = {"name": "tests.several_inputs:model"}
    config.data = {"name": "npz", "path": path}
    return config
