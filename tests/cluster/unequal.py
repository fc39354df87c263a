"""Digits, of which process 1 has one example less, other contents, or another order.

Or a batch that it cannot read.
"""

import dataclasses
import functools

import jax
import numpy as np

from haiku_template.data import ArrayDataset, from_iterator
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


def contents(spec):
    """The training set whose last example is another one in process 1."""
    found = digits(spec)
    inputs = found.train.inputs.copy()
    inputs[-1] += jax.process_index()
    return found._replace(train=dataclasses.replace(found.train, inputs=inputs))


def evaluation(spec):
    """Digits whose last example to evaluate on is another one in process 1."""
    found = digits(spec)
    labels = found.evaluation.labels.copy()
    labels[-1] = jax.process_index()
    evaluation = dataclasses.replace(found.evaluation, labels=labels)
    return found._replace(evaluation=evaluation)


def shuffled(spec):
    """Batches of a loader whose order has no seed."""
    found = digits(spec._replace(process_index=0, process_count=1))

    def batches():
        rng = np.random.default_rng()
        while True:
            rows = rng.permutation(len(found.train.inputs))[: spec.batch_size]
            yield found.train.gather(found.train.staged(), rows)

    return found._replace(train=from_iterator(batches))


class Unreadable(ArrayDataset):
    """A set whose batch of step 5, counted from 0, process 1 cannot read."""

    def fail(self, step):
        if step == 5:
            raise ConfigError("shard 1 is not there")

    def batch(self, step):
        if jax.process_index() == 1:
            self.fail(step)
        return super().batch(step)


class Late(Unreadable):
    """The same of step 24, and an error that may not come again."""

    def fail(self, step):
        if step == 24:
            raise RuntimeError("shard 17 is not there")


class Spoiled(ArrayDataset):
    """A set that is NaN in process 1 at a few steps, counted from 0."""

    def batch(self, step):
        batch = super().batch(step)
        if step in (3, 11, 12) and jax.process_index() == 1:
            batch["inputs"] = np.full_like(batch["inputs"], np.nan)
        return batch


def with_train(kind, spec):
    """Digits whose training set is of this kind."""
    found = digits(spec)
    return found._replace(train=kind(found.train.inputs, found.train.labels, spec))


unreadable = functools.partial(with_train, Unreadable)
late = functools.partial(with_train, Late)
spoiled = functools.partial(with_train, Spoiled)


def evaluates(trainer, workdir):
    """A hook that evaluates at each save, which all processes do together."""
    return lambda event: event.what == "save" and trainer.evaluate(event.state)
