"""dm-haiku's examples/mnist_gan: two networks, two optimizers, a step of one's own."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template.data import Data
from haiku_template.devices import DeviceManager, mean_over
from haiku_template.runs import train
from haiku_template.training import Experiment

MEAN, STDDEV = np.float32([1.5, -1.0]), np.float32([0.3, 0.6])


def generate(noise):  # [B, 4] -> [B, 2]
    return hk.nets.MLP([32, 32, 2])(noise)


def discriminate(points):  # [B, 2] -> [B]
    return hk.nets.MLP([32, 32, 1], activation=jax.nn.tanh)(points)[:, 0]


NETS = {"generator": generate, "discriminator": discriminate}
NETS = {k: hk.without_apply_rng(hk.transform(net)) for k, net in NETS.items()}
ADAM = optax.adam(1e-3, b1=0.0)


# The template.
class Points:
    def batch(self, step):
        rng = np.random.default_rng(step)
        return MEAN + STDDEV * rng.normal(size=(128, 2)).astype(np.float32)


def init(rng, points):
    inputs, rngs = (jnp.zeros((1, 4)), points[:1]), jax.random.split(rng)
    given = zip(NETS.items(), rngs, inputs, strict=True)
    params = {name: net.init(rng, x) for (name, net), rng, x in given}
    return {"params": params, "opt_state": {k: ADAM.init(params[k]) for k in params}}


def step(state, points, rng, axis_name):
    noise = jax.random.normal(rng, (len(points), 4))

    def loss(own, name):
        params = state.params | {name: own}
        fake = NETS["generator"].apply(params["generator"], noise)
        said = [NETS["discriminator"].apply(params["discriminator"], fake)]
        if name == "generator":
            return jnp.mean(jax.nn.softplus(-said[0]))
        said += [-NETS["discriminator"].apply(params["discriminator"], points)]
        return jnp.mean(jax.nn.softplus(jnp.stack(said)))

    params, opt_state, scalars = dict(state.params), dict(state.opt_state), {}
    for name in NETS:
        made = jax.value_and_grad(loss)(state.params[name], name)
        scalars[name], grads = mean_over(axis_name, made)
        updates, opt_state[name] = ADAM.update(grads, opt_state[name])
        params[name] = optax.apply_updates(params[name], updates)
    scalars["loss"] = scalars["discriminator"]
    return state._replace(params=params, opt_state=opt_state), scalars


def experiment(devices: DeviceManager) -> Experiment:
    return Experiment(data=Data(Points(), None), init=init, step=step)


if __name__ == "__main__":
    devices = DeviceManager.create()
    train(experiment(devices).trainer(devices), num_steps=2000, workdir="runs/gan")
