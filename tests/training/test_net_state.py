"""Network state keeps its leaves, whatever the model computes them in."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.errors import ConfigError
from haiku_template.runs import Run, train
from haiku_template.training import Experiment, classification
from tests.runs import run_steps

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(24, 3)).astype(np.float32)
LABELS = RNG.integers(0, 2, 24).astype(np.int32)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(8)), EvaluationSet(INPUTS, LABELS, 8), 2
)


def experiment(forward, **options):
    return Experiment(
        model=hk.transform_with_state(forward),
        task=classification,
        data=DATA,
        optimizer=optax.adam(0.01),
        **options,
    )


def last_features(x, is_training):
    """Keeps what it computed, as queues and carried states do."""
    h = hk.Linear(4)(x)
    hk.get_state("last", (4,), h.dtype, init=jnp.zeros)
    if is_training:
        hk.set_state("last", jax.lax.pmean(h.mean(0), "data"))
    hk.set_state("calls", hk.get_state("calls", (), jnp.int32, init=jnp.zeros) + 1)
    return hk.Linear(2)(h)


def alone(x, is_training):
    h = hk.Linear(4)(x)
    hk.get_state("last", (4,), h.dtype, init=jnp.zeros)
    if is_training:
        hk.set_state("last", h.mean(0))
    return hk.Linear(2)(h)


def carrying(x):
    h = hk.Linear(4)(x)
    carried = hk.get_state("carried", h.shape, h.dtype, init=jnp.zeros)
    hk.set_state("carried", h)
    return hk.Linear(2)(jnp.concatenate([h, carried], -1))


def of_all_rows(x):
    hk.get_state("rows", x.shape, init=jnp.zeros)
    hk.set_state("rows", x)
    return hk.Linear(2)(x)


def of_layers(x):
    """As Transformer-XL keeps its memory: a row of the batch is of the second axis."""
    memory = hk.get_state("memory", (2, *x.shape), x.dtype, init=jnp.zeros)
    hk.set_state("memory", jnp.stack([x, memory[0]]))
    return hk.Linear(2)(jnp.concatenate([x, *memory], axis=-1))


@pytest.mark.parametrize(
    ("forward", "name"),
    [(carrying, "carried"), (of_all_rows, "rows"), (of_layers, "memory")],
)
def test_a_state_with_a_row_for_each_example_is_named(devices, forward, name):
    """It was an error of shapes inside the model, of one row that nobody gave."""
    words = f"state ~/{name} has a row for each example.* train step of your own"
    with pytest.raises(ConfigError, match=words):
        experiment(forward).trainer(devices)


@pytest.mark.slow(but="quick")
@pytest.mark.parametrize("parts", [1, pytest.param(2, id="quick")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_state_in_the_compute_dtype_is_kept_in_float32(one_device, precision, parts):
    options = {"precision": precision, "accumulate_steps": parts}
    state, _ = run_steps(experiment(alone, **options).trainer(one_device), 2)
    last = state.net_state["~"]["last"]
    assert last.dtype == jnp.float32 and np.any(last)


def test_state_in_the_compute_dtype_is_kept_on_four_devices(four_devices):
    made = experiment(last_features, precision="bfloat16").trainer(four_devices)
    state, _ = run_steps(made, 2)
    assert state.net_state["~"]["last"].dtype == jnp.float32
    assert int(state.net_state["~"]["calls"]) == 2


@pytest.mark.slow
def test_a_run_with_state_in_the_compute_dtype_resumes(tmp_path, one_device):
    made = experiment(alone, precision="bfloat16")
    for steps in (2, 4):
        train(made.trainer(one_device), num_steps=steps, workdir=tmp_path)
    assert Run.open(tmp_path, one_device, "latest", made).step == 4


def turns_to_float(x):
    count = hk.get_state("count", (), jnp.int32, init=jnp.zeros)
    hk.set_state("count", count + 0.5)
    return hk.Linear(2)(x)


def sometimes(x):
    if not hk.running_init():
        hk.set_state("more", x.mean())
    return hk.Linear(2)(x)


@pytest.mark.parametrize(
    "forward, words",
    [
        (turns_to_float, r"count'\] is float32\[\] and was int32\[\]"),
        (sometimes, r"more'\] is float32\[\] and was not there"),
    ],
)
def test_other_leaves_than_the_first_are_refused_before_step_0(
    tmp_path, one_device, forward, words
):
    with pytest.raises(ConfigError, match=f"the model returns .*{words}"):
        train(experiment(forward).trainer(one_device), num_steps=1, workdir=tmp_path)
    assert not any(tmp_path.iterdir())


class OneDictionary:
    """Fills one dictionary with new arrays."""

    def __init__(self):
        self.filled = {}

    def batch(self, step):
        rows = np.arange(8) + 8 * step % 24
        self.filled.update(inputs=INPUTS[rows], labels=LABELS[rows])
        return self.filled


def test_each_step_has_its_own_batch_where_one_dictionary_is_filled_anew(devices):
    data = DATA._replace(train=OneDictionary())
    made = Experiment(
        model=hk.transform(lambda x: hk.Linear(2)(x)),
        task=classification,
        data=data,
        optimizer=optax.adam(0.01),
    ).trainer(devices)
    with made.batches(0, 3) as batches:
        labels = [devices.fetch(batch)["labels"].reshape(-1) for batch in batches]
    np.testing.assert_array_equal(labels, LABELS.reshape(3, 8))


def test_a_state_of_one_example_a_batch_is_no_state_of_rows(tmp_path, one_device):
    """Its batches are of one: more rows are not traced."""
    one = ArrayDataset(INPUTS, LABELS, BatchSpec(1))
    data = Data(one, EvaluationSet(INPUTS, LABELS, 1), 2)
    whole = dataclasses.replace(experiment(carrying), data=data)
    assert train(whole.trainer(one_device), num_steps=2, workdir=tmp_path).metrics
