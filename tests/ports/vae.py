"""dm-haiku's examples/vae.py: a variational auto-encoder, which draws as it runs."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.data import BatchSpec, digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment, own_loss


class Encoder(hk.Module):
    """Mean and deviation of the code of flat images."""

    def __call__(self, x):  # [B, D] -> [B, Z] twice
        hidden = jax.nn.relu(hk.Linear(128)(x))
        return hk.Linear(8)(hidden), jnp.exp(hk.Linear(8)(hidden))


class Decoder(hk.Module):
    """Logits of the pixels of a code."""

    def __init__(self, size, name=None):
        super().__init__(name=name)
        self.size = size

    def __call__(self, z):  # [B, Z] -> [B, D]
        return hk.Linear(self.size)(jax.nn.relu(hk.Linear(128)(z)))


def negative_elbo(images):
    """Bound on the likelihood of each of the images, and its two parts: [B]."""
    x = hk.Flatten()(images)
    mean, stddev = Encoder()(x)
    z = mean + stddev * jax.random.normal(hk.next_rng_key(), mean.shape)
    logits = Decoder(x.shape[-1])(z)
    log_likelihood = -jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), axis=-1)
    variance = jnp.square(stddev)
    kl = -0.5 * jnp.sum(1 + jnp.log(variance) - jnp.square(mean) - variance, axis=-1)
    return kl - log_likelihood, {"kl": kl, "log_likelihood": log_likelihood}


# The template.
def experiment(devices: DeviceManager) -> Experiment:
    return Experiment(
        model=hk.transform(negative_elbo),
        task=own_loss,
        data=digits(BatchSpec(128)),
        optimizer=optax.adam(1e-3),
    )


if __name__ == "__main__":
    devices = DeviceManager.create()
    train(experiment(devices).trainer(devices), num_steps=1000, workdir="runs/vae")
