"""What is read of a run that saves all the time, and removes what it saved before."""

import contextlib
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import pytest

from haiku_template.errors import DamagedError, StorageError
from haiku_template.storage import checkpoint, workdir
from haiku_template.storage.checkpoint import Checkpoints, restore

STATE = {"params": {"w": jnp.arange(8.0)}, "step": jnp.array(0, jnp.int32)}
ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
)


def read(checkpoints, step):
    return checkpoints.restore(step, ABSTRACT)["params"]["w"]


@contextlib.contextmanager
def saving(folder):
    """A run that keeps one checkpoint; gives a function that saves the next step."""
    with Checkpoints(folder / "checkpoints", keep_last=1) as checkpoints:
        steps = itertools.count(1)

        def save():
            step = next(steps)
            state = jax.tree.map(lambda x: x + step, STATE)
            checkpoints.save(step, state, None)
            checkpoints.wait()

        save()
        yield save


@pytest.mark.parametrize("disk", ["local", "nfs"])
def test_a_checkpoint_that_a_run_replaces_while_it_is_read_is_passed_by(
    tmp_path, caplog, monkeypatch, disk
):
    """Also on a disk where nobody on another machine sees the run's lock.

    There a file that is gone has its attributes still, and cannot be opened.
    """
    if disk == "nfs":
        monkeypatch.setattr(checkpoint.os, "stat", functools.cache(os.stat))
    with saving(tmp_path) as save:

        def slow(checkpoints, step):
            if step < 3:
                save()
            return read(checkpoints, step)

        step, w = restore(tmp_path, "latest", slow)
    assert step == 3 and w[0] == 3
    said = "the run replaced step {} in"
    assert [said.format(n) in x for n, x in enumerate(caplog.messages, 1)] == [True] * 2


def test_a_run_that_saves_faster_than_it_is_read_is_said_to_do_so(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint, "REPLACED_TRIES", 4)
    with saving(tmp_path) as save:

        def slow(checkpoints, step):
            save()
            return read(checkpoints, step)

        with pytest.raises(StorageError, match=r"replaced 4 .* \(config.keep_last\)"):
            restore(tmp_path, "latest", slow)


def test_a_checkpoint_of_a_live_run_that_is_damaged_is_read_once(tmp_path):
    """Of a large one each time takes minutes."""
    reads = []

    def counted(checkpoints, step):
        reads.append(step)
        return read(checkpoints, step)

    with saving(tmp_path), workdir.locked(tmp_path):
        for file in (tmp_path / "checkpoints/1/state").rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
        with pytest.raises(DamagedError):
            restore(tmp_path, "1", counted)
    assert reads == [1]
