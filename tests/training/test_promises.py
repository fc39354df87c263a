"""Rows of the reliability bench that no other test holds as they are written."""

import jax
import numpy as np
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.runs import train
from tests.test_commands import digest, numbers
from tests.training.test_skipping import INPUTS, LABELS, trainer

RUN = {"log_every": 1, "save_every": 100, "keep_last": 1}


def made(count):
    data = ArrayDataset(INPUTS[:5].reshape(-1, 6), LABELS[:5].reshape(-1), BatchSpec(8))
    return trainer(Data(data, None, 2), 1, count)


@pytest.mark.slow(but="7")
@pytest.mark.parametrize("count", [1, 7])
def test_resumed_three_times_in_an_epoch_each_batch_comes_once(tmp_path, count):
    """C04: in the first of four epochs, and in the third; each step's loss is equal."""
    train(made(count), num_steps=20, workdir=tmp_path / "plain", **RUN)
    for stop in (1, 2, 4, 11, 12, 14, 20):
        train(made(count), num_steps=stop, workdir=tmp_path / "run", **RUN)
    assert digest(tmp_path / "run") == digest(tmp_path / "plain")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")


def test_no_program_of_a_run_has_a_large_constant(tmp_path, recwarn):
    """C27: JAX warns of constants above 1 MiB, and warnings are errors here."""
    before = jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 2**20)
    try:
        data = ArrayDataset(
            np.tile(INPUTS, (900, 1, 1)).reshape(-1, 6),
            np.tile(LABELS, (900, 1)).reshape(-1),
            BatchSpec(8),
        )
        assert data.inputs.nbytes > 2**22
        options = {"placement": "device"}
        run = {"num_steps": 3, "workdir": tmp_path}
        train(trainer(Data(data, None, 2), 4, 1, **options), **run)
        constant = np.ones(2**20, np.float32)
        with pytest.warns(UserWarning, match="onstant"):
            jax.jit(lambda x: x + constant).lower(1.0)
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)
