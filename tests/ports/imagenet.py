"""dm-haiku's examples/imagenet: a ResNet with BatchNorm, float16 and a loss scale."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.data import BatchSpec, digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment


def forward_fn(axis_name):
    """A small hk.nets.ResNet; its statistics are of the batch on all devices."""

    def forward(images, is_training):
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=10,
            bottleneck=False,
            channels_per_group=(8, 16, 16, 16),
            bn_config={"decay_rate": 0.9, "cross_replica_axis": axis_name},
        )
        images = jnp.repeat(jnp.repeat(images, 2, axis=1), 2, axis=2)
        return net(images, is_training)

    return hk.transform_with_state(forward)


def loss_fn(logits, batch, params):
    """Smoothed cross-entropy; weight decay of all but the normalization."""
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 10), 0.1)
    decayed = [
        jnp.sum(jnp.square(value))
        for module, _, value in hk.data_structures.traverse(params)
        if "batchnorm" not in module
    ]
    loss = optax.softmax_cross_entropy(logits, labels) + 1e-4 * 0.5 * sum(decayed)
    top_1 = jnp.argmax(logits, axis=-1) == batch["labels"]
    return {"loss": loss, "top_1_acc": top_1}


# The template.
def experiment(devices: DeviceManager) -> Experiment:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 10, 80)
    return Experiment(
        model=forward_fn(devices.axis_name),
        task=loss_fn,
        data=digits(BatchSpec(64)),
        optimizer=optax.sgd(schedule, momentum=0.9, nesterov=True),
        schedule=schedule,
        precision="float16",
    )


if __name__ == "__main__":
    devices = DeviceManager.create()
    train(experiment(devices).trainer(devices), num_steps=80, workdir="runs/imagenet")
