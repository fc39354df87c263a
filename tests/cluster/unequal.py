"""Digits, of which process 1 has one example less, or a batch that it cannot read."""

import dataclasses

import jax

from haiku_template.data import ArrayDataset
from haiku_template.data.datasets import digits
from haiku_template.errors import ConfigError


def data(spec):
    """The training set without its last example in process 1."""
    found = digits(spec)
    n = len(found.train.inputs) - jax.process_index()
    arrays = {"inputs": found.train.inputs[:n], "labels": found.train.labels[:n]}
    return found._replace(train=dataclasses.replace(found.train, **arrays))


def augmented(spec):
    """The same, with inputs that the host augments: nothing of it can be staged."""
    found = data(spec)
    train = dataclasses.replace(found.train, augment=lambda inputs, _: inputs)
    return found._replace(train=train)


class Unreadable(ArrayDataset):
    """A set whose batch of step 5 process 1 cannot read."""

    def batch(self, step):
        if step == 5 and jax.process_index() == 1:
            raise ConfigError("shard 1 is not there")
        return super().batch(step)


def unreadable(spec):
    """Such a training set."""
    found = digits(spec)
    train = Unreadable(found.train.inputs, found.train.labels, spec)
    return found._replace(train=train)
