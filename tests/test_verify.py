"""A model beside a function that knows nothing of the template, before training."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.errors import ConfigError
from haiku_template.finetuning import Finetuning
from haiku_template.runs import verification, verify
from haiku_template.training import Experiment, classification, own_loss

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)).astype(np.float32), np.arange(24) % 3


def net(inputs):
    hidden = jnp.tanh(hk.Linear(8)(inputs))
    return {"logits": hk.Linear(3)(hidden), "hidden": {"first": hidden}}


def forward(inputs, is_training):
    outputs = net(inputs)
    rate = 0.5 if is_training else 0.0
    logits = hk.dropout(hk.next_rng_key(), rate, outputs["logits"])
    return outputs | {"logits": logits}


def task(outputs, batch):
    return classification(outputs["logits"], batch)


def trainer(devices, **parts):
    data = from_split(Split(X[:16], Y[:16], X[16:], Y[16:]), BatchSpec(8))
    parts = {"model": hk.transform(forward), "task": task, "data": data} | parts
    return Experiment(optimizer=optax.sgd(0.1), **parts).trainer(devices)


def outputs_of(params, net_state, batch):
    """By hand, in NumPy's double precision."""
    assert net_state == {}
    hidden = np.tanh(batch["inputs"] @ params["linear"]["w"] + params["linear"]["b"])
    logits = hidden @ params["linear_1"]["w"] + params["linear_1"]["b"]
    return {"hidden": {"first": hidden}, "logits": logits}


def loss_of(params, net_state, batch):
    logits = outputs_of(params, net_state, batch)["logits"]
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return entropy.mean()


def test_a_model_that_is_the_same_is_found_so(devices):
    made = trainer(devices)
    state = made.init()
    found = list(verify(made, state, outputs_of))
    assert [x.name for x in found] == ["hidden/first", "logits"]
    assert all(x.difference < 1e-6 for x in found)
    (loss,) = verify(made, state, loss_of)
    assert loss.name == "loss" and loss.place == ()
    assert loss.here == pytest.approx(np.log(3), abs=0.5)
    assert loss.there == pytest.approx(loss.here, abs=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_function_gets_float32_where_a_frozen_part_is_stored_otherwise(
    one_device, dtype
):
    """A convolution takes one dtype alone; beside int8 biases are bfloat16."""
    plan = Finetuning(train=("linear_1/*",), base_dtype=dtype)
    made = trainer(one_device, finetuning=plan)

    def function(params, net_state, batch):
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
        return outputs_of(params, net_state, batch)

    assert len([*verify(made, made.init(), function, tolerance=1e-5)]) == 2


def test_the_largest_difference_is_named_with_its_place(one_device):
    made = trainer(one_device)

    def other(*args):
        outputs = outputs_of(*args)
        outputs["logits"] = outputs["logits"] * (1 + 1e-4)
        outputs["logits"][5, 2] += 7
        return outputs

    comparisons, words = verify(made, made.init(), other), "1 of 2 differ.*most of all "
    words += r"logits: \S+ here and \S+ there, a difference of 7.*at \[5, 2\]"
    assert next(comparisons).name == "hidden/first"
    with pytest.raises(ConfigError, match=words):
        list(comparisons)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_differs_unless_both_are(one_device, value):
    made = trainer(one_device)

    def other(*args):
        outputs = outputs_of(*args)
        outputs["logits"][1, 1] = value
        return outputs

    with pytest.raises(ConfigError, match=rf"{value} there.*at \[1, 1\]"):
        list(verify(made, made.init(), other))


@pytest.mark.parametrize("difference", [0, 6])
def test_imaginary_parts_are_compared(difference):
    values = np.array([1 + 2j, 3j], np.complex64)
    there = values.conj() if difference else values
    (compared,) = verification._compare({"": values}, {"": there})
    assert compared.difference == difference and compared.there in there
    assert ("0-3j there" in str(compared)) == bool(difference)


def test_where_neither_is_a_number_they_are_alike(one_device):
    nan = hk.transform(lambda x: hk.Linear(3)(x) * np.nan)
    made = trainer(one_device, model=nan, task=classification)
    (both,) = verify(made, made.init(), lambda *_: np.full((8, 3), np.nan))
    assert both.difference == 0


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"logits": np.zeros((8, 3))}, r"hidden/first \[8, 8\], .*function logits \[8"),
        (np.zeros((8, 3)), r"the function outputs \[8, 3\]; possible are the same"),
        ({}, "the function "),
        ("0.7", "the function returns array.'0.7'.* and no numbers"),
    ],
)
def test_other_names_or_shapes_are_a_sentence(one_device, there, words):
    made = trainer(one_device)
    with pytest.raises(ConfigError, match=words):
        list(verify(made, made.init(), lambda *_: there))


def test_a_loss_of_the_models_own_is_compared(devices):
    def whole(inputs):
        return jnp.mean(jnp.square(hk.Linear(1)(inputs)))

    def by_hand(params, net_state, batch):
        linear = params["linear"]
        return np.square(batch["inputs"] @ linear["w"] + linear["b"]).mean()

    made = trainer(devices, model=hk.transform(whole), task=own_loss)
    (loss,) = verify(made, made.init(), by_hand)
    assert loss.difference < 1e-6
    with pytest.raises(ConfigError, match="predictions are arrays of examples"):
        list(verify(made, made.init(), lambda *_: np.zeros(8)))


def test_what_is_of_a_whole_batch_is_not_compared(devices, caplog):
    """It is of a device's share, and padded; one of examples is compared beside it."""

    def with_codebook(inputs):
        used = hk.get_parameter("codes", (3, 2), init=jnp.ones)
        return hk.Linear(1)(inputs), {"loss": jnp.mean(inputs), "codes": used, "one": 1}

    def by_hand(params, net_state, batch):
        linear = params["linear"]
        others = {"loss": 7.0, "codes": np.zeros((3, 2)), "one": 2}
        return batch["inputs"] @ linear["w"] + linear["b"], others

    parts = {"model": hk.transform(with_codebook)}
    parts["task"] = lambda outputs, batch: {"loss": jnp.mean(outputs[0], axis=1)}
    made = trainer(devices, **parts)
    (compared,) = verify(made, made.init(), by_hand)
    assert compared.name == "0"
    assert "not compared, as of a whole batch: 1/codes, 1/loss, 1/one" in caplog.text
    with pytest.raises(ConfigError, match="differ by more"):
        list(verify(made, made.init(), lambda *_: (np.zeros((8, 1)), by_hand(*_)[1])))


def test_a_function_that_trains_is_said_to_differ_for_it(one_device):
    """With BatchNorm; and the state that it returns is not taken for outputs."""

    def normed(inputs, is_training):
        return hk.Linear(3)(hk.BatchNorm(True, True, 0.9)(inputs, is_training))

    theirs = hk.transform_with_state(normed)
    made = trainer(one_device, model=theirs, task=classification)
    state = made.init()

    def published(is_training, params, net_state, batch):
        return theirs.apply(params, net_state, None, batch["inputs"], is_training)

    of_both = functools.partial(published, True)
    with pytest.raises(ConfigError, match="a pair, .* batch_norm/~/mean_ema/average "):
        list(verify(made, state, of_both))
    with pytest.raises(ConfigError, match="differ .* with is_training=False and the a"):
        list(verify(made, state, lambda *args: of_both(*args)[0]))
    (same,) = verify(made, state, lambda *args: published(False, *args)[0])
    assert same.difference < 1e-6


def test_errors_of_the_function_are_its_own(one_device):
    made = trainer(one_device)
    with pytest.raises(KeyError, match="nowhere"):
        list(verify(made, made.init(), lambda params, *_: params["nowhere"]))
    model = dataclasses.replace(made.experiment, init=lambda *_: {}, step=lambda *_: 0)
    made.experiment = dataclasses.replace(model, model=None)
    with pytest.raises(ConfigError, match="has no model"):
        list(verify(made, None, loss_of))


MINE = """
import numpy as np
from haiku_template.config import default_config

def get_config():
    config = default_config()
    config.model, config.num_steps = {"name": "mlp", "width": 8}, 1
    return config

def published(params, net_state, batch, factor=1.0):
    x = batch["inputs"].reshape(len(batch["inputs"]), -1)
    for i in range(3):
        layer = params[f"mlp/~/linear_{i}"]
        x = x @ layer["w"] + layer["b"]
        x = np.maximum(x, 0) if i < 2 else x
    return x * factor

def other(*args):
    return published(*args, factor=1.01)
"""


@pytest.mark.slow
def test_the_command_compares_before_training_and_after(tmp_path, command):
    (tmp_path / "mine.py").write_text(MINE)
    verify = lambda *flags: command("verify", *flags, cwd=tmp_path)  # noqa: E731
    done = verify("--config=mine.py", "--against=mine:published")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("outputs: ") and "the largest at [" in done.stdout
    done = verify("--config=mine.py", "--against=mine:other")
    assert done.returncode == 64, done.stderr
    assert "1 of 1 differ by more than 1e-05" in done.stderr
    assert "Traceback" not in done.stderr and "outputs: " in done.stdout
    assert (
        verify(
            "--config=mine.py", "--against=mine:other", "--tolerance=0.02"
        ).returncode
        == 0
    )
    for flags, words in (
        (["--against=mine:published"], "either --config or --workdir"),
        (["--config=mine.py"], "--against is needed"),
        (["--config=mine.py", "--against=mine:none"], "has no none"),
    ):
        done = verify(*flags)
        assert done.returncode == 64 and words in done.stderr, done.stderr
    trained = command("train", "--config=mine.py", "--workdir=run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    done = verify("--workdir=run", "--against=mine:published")
    assert done.returncode == 0, done.stderr
