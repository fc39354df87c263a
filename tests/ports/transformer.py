"""dm-haiku's examples/transformer: a language model of characters, with its loss."""

from pydoc_data.topics import topics

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template.data import BatchSpec, bucketed
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment, own_loss

VOCAB, LENGTH, WIDTH = 128, 64, 64


def block(x, mask, rate):
    """One layer of attention and one of a perceptron, each in a residual branch."""
    for kind in ("attention", "dense"):
        h = hk.LayerNorm(-1, True, True)(x)
        if kind == "attention":
            scale = hk.initializers.VarianceScaling(0.5)
            attention = hk.MultiHeadAttention(4, 16, w_init=scale, model_size=WIDTH)
            h = attention(h, h, h, mask)
        else:
            h = hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(h)))
        x += hk.dropout(hk.next_rng_key(), rate, h) if rate else h
    return x


def loss_fn(data, is_training):
    """Cross-entropy of the next characters: one number for each example, [B]."""
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
    init = hk.initializers.TruncatedNormal(0.02)
    x = hk.Embed(VOCAB, WIDTH, w_init=init)(data["obs"])
    x += hk.get_parameter("positions", [LENGTH, WIDTH], init=init)
    for _ in range(2):
        x = block(x, mask, 0.1 if is_training else 0.0)
    logits = hk.Linear(VOCAB)(hk.LayerNorm(-1, True, True)(x))
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, data["target"])
    return jnp.mean(entropy, axis=1)


# The template.
def experiment(devices: DeviceManager) -> Experiment:
    text = "".join(topics.values()).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8)[: 2000 * LENGTH + 1].astype(np.int32)
    starts = range(0, len(codes) - 1, LENGTH)
    parts = [codes[n : n + LENGTH + 1] for n in starts]
    rows = [{"obs": part[:-1], "target": part[1:]} for part in parts]
    data = bucketed(rows[:1900], BatchSpec(32), (LENGTH,), evaluation=rows[1900:])
    model, adam = hk.transform(loss_fn), optax.adam(3e-3)
    return Experiment(model=model, task=own_loss, data=data, optimizer=adam)


if __name__ == "__main__":
    devices = DeviceManager.create()
    train(experiment(devices).trainer(devices), num_steps=500, workdir="runs/text")
