"""What tests share: runs of commands, of steps, finished ones; a tree of a batch."""

import copy
import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax

from haiku_template.devices.compiled import pack
from haiku_template.preflight.budget import staged_if_it_fits
from haiku_template.runs import Run

ROOT = Path(__file__).parents[1]
# Exit codes of a run, and whether the same command may end otherwise the next time.
# What is in launch/ and docs/running.md goes by this table.
MAY_RESTART = {0: False, 1: True, 64: False, 69: True, 70: False, 71: True, 74: False}
MAY_RESTART |= {72: False, 75: True, 76: True, 77: False, 130: False, 137: True}
# For commands whose report no test reads: with a matplotlib that draws nothing.
UNDRAWN = os.pathsep.join([str(ROOT / "tests" / "undrawn"), str(ROOT)])


def run_command(name, *flags, cwd=ROOT, **variables):
    """Runs a command of the package in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", f"haiku_template.{name}", *flags],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": UNDRAWN} | variables,
        timeout=200,
        check=False,
    )


def run_steps(trainer, num_steps=1, state=None):
    """The state and the scalars of each step, one step in flight."""
    devices, history = trainer.devices, []
    state = trainer.init() if state is None else state
    for step in range(num_steps):
        batch = devices.shard(trainer.experiment.data.train.batch(step))
        state, scalars = trainer.step(state, batch)
        history.append(devices.fetch(scalars))
    return state, history


def evaluated(workdir, devices, which="latest"):
    """Step and metrics of a checkpoint."""
    run = Run.open(workdir, devices, which)
    return run.step, run.evaluate()


def placed(trainer, placement, limit=None):
    """The trainer with its training data on the host, on the devices, or `auto`."""
    trainer = changed(trainer, placement=placement)
    return staged_if_it_fits(trainer, limit) if placement == "auto" else trainer


@functools.partial(jax.jit, static_argnums=(1, 2))
def of_step(stack, place, axis):
    """A step's batch in a stack of them."""
    index = functools.partial(jax.lax.index_in_dim, keepdims=False)
    return jax.tree.map(lambda x: index(x, place, axis), stack)


def with_step(trainer, step):
    """The trainer with another function of (state, batch) for a step of the run."""
    other = copy.copy(trainer)
    other.experiment = dataclasses.replace(trainer.experiment, steps_per_call=1)
    stack, axis = trainer.feed.stack, 1 + (trainer.devices.num_devices > 1)

    def advance(state, steps, batch):
        if stack > 1:
            batch = of_step(batch, (steps[0] - 1) % stack, axis)
        state, scalars = step(trainer.unpacked(state), batch)
        return state, pack(scalars)

    other.advance = advance
    return other


def with_data(trainer, **sets):
    """The trainer of the same experiment with another `train` or `evaluation` set."""
    return changed(trainer, data=trainer.experiment.data._replace(**sets))


def changed(trainer, **parts):
    """The trainer of the same experiment with some of its parts changed."""
    return dataclasses.replace(trainer.experiment, **parts).trainer(trainer.devices)


@jax.tree_util.register_pytree_node_class
class Probe:
    """An array and its name, as of CLRS's data points: a tree to JAX alone."""

    def __init__(self, name, data):
        self.name, self.data = name, data

    def tree_flatten(self):
        return (self.data,), (self.name,)

    @classmethod
    def tree_unflatten(cls, names, data):
        return cls(*names, *data)
