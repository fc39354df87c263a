"""dm-haiku's examples/rnn: an LSTM of characters, here of words of any length."""

import builtins
import string

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template.data import BatchSpec, bucketed
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment, own_loss

NUM_CHARS = 128


def sequence_loss(batch):
    """Cross-entropy of the characters of a batch, time first: one number, []."""
    one_hot = jax.nn.one_hot(batch["input"].T, NUM_CHARS)
    core = hk.DeepRNN([hk.LSTM(64), jax.nn.relu, hk.LSTM(64), hk.Linear(NUM_CHARS)])
    initial_state = core.initial_state(one_hot.shape[1])
    logits, _ = hk.dynamic_unroll(core, one_hot, initial_state)
    log_probs = jax.nn.log_softmax(logits)
    one_hot_labels = jax.nn.one_hot(batch["target"].T, NUM_CHARS)
    entropy = -jnp.sum(one_hot_labels * log_probs, axis=-1)
    mask = batch["mask"].T
    # The mean over examples of the mean over their characters.
    return jnp.mean(jnp.sum(entropy * mask, axis=0) / jnp.sum(mask, axis=0))


# The template.
def examples():
    """Names of Python and NumPy: what to read, and what comes next."""
    modules = (builtins, string, np)  # Which others may leave private names in.
    public = {x for module in modules for x in dir(module) if x[0] != "_"}
    for name in sorted(public | {*dir(np.ndarray)}):
        codes = np.frombuffer(f"\n{name}\n".encode(), np.uint8).astype(np.int32)
        yield {"input": codes[:-1], "target": codes[1:]}


def experiment(devices: DeviceManager) -> Experiment:
    words = list(examples())
    held_out, rest = words[:640:5], words[1::5] + words[2::5] + words[3::5]
    how = {"sizes": (12, 32), "mask": "mask", "evaluation": held_out}
    data = bucketed(rest, BatchSpec(32), **how)
    model, adam = hk.transform(sequence_loss), optax.adam(3e-3)
    return Experiment(model=model, task=own_loss, data=data, optimizer=adam)


if __name__ == "__main__":
    devices = DeviceManager.create()
    train(experiment(devices).trainer(devices), num_steps=500, workdir="runs/rnn")
