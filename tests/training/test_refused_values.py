"""Values that would train something else: refused by name, whenever a run looks."""

import dataclasses
import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.config import RANGES
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.errors import ConfigError, NonFiniteError, PlacementError
from haiku_template.finetuning import Finetuning
from haiku_template.models import losses
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, Task, classification
from haiku_template.training.tasks import as_task, example_values
from haiku_text.models.logits import LazyLogits, token_losses
from haiku_text.tasks import language_model

RNG = np.random.default_rng(0)
LINEAR = hk.transform(lambda x: hk.Linear(2)(x))


class Batches:
    def __init__(self, make):
        self.batch = make


def made(devices, make, task=classification, model=LINEAR, **options):
    return Experiment(
        model=model,
        task=task,
        data=Data(Batches(make), None, 2),
        optimizer=optax.sgd(0.1),
        **options,
    ).trainer(devices)


def batch(labels=0, size=8, **more):
    inputs = RNG.normal(size=(size, 3)).astype(np.float32)
    return {"inputs": inputs, "labels": np.full(size, labels, np.int32)} | more


# Options of a script, which have the names of a config's keys.

FIELDS = {field.name for field in dataclasses.fields(Experiment)}
OPTIONS = FIELDS | {*inspect.signature(train).parameters}
KEYS = sorted({key for keys, *_ in RANGES for key in keys.split()} & OPTIONS)


@pytest.mark.parametrize("key", KEYS)
def test_an_option_out_of_its_range_is_refused_before_there_is_a_workdir(
    tmp_path, one_device, key
):
    trainer = made(one_device, lambda step: batch())
    for value in (-1, "x", float("nan"), [()]):
        with pytest.raises(ConfigError, match=rf"config\.{key}=.*; possible is"):
            if key in FIELDS:
                dataclasses.replace(trainer.experiment, **{key: value})
            else:
                options = {"num_steps": 2, "workdir": tmp_path} | {key: value}
                train(trainer, **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["keep_best", "keep_last", "log_every"])
def test_half_a_checkpoint_or_step_is_refused(tmp_path, one_device, key):
    trainer = made(one_device, lambda step: batch())
    with pytest.raises(ConfigError, match=rf"config\.{key}=1\.5; .*a whole number"):
        train(trainer, num_steps=2, workdir=tmp_path, **{key: 1.5})
    assert not any(tmp_path.iterdir())


def test_options_of_both_kinds_have_ranges():
    assert {"num_steps", "log_every", "sdc_replay", "seed", "ema_decay"} < set(KEYS)


# Broadcast losses.


def facts(batch):
    rows = len(batch["inputs"])
    return {"batch": batch, "mask": np.ones(rows, bool), "is_training": True}


@pytest.mark.parametrize("rows", [7, 8])
@pytest.mark.parametrize("shape", [(8, 8, 1), (8,)], ids=["images", "features"])
@pytest.mark.parametrize("labeled", [True, False])
def test_a_matrix_of_all_pairs_is_no_loss_whatever_the_size_of_inputs(
    rows, shape, labeled
):
    batch = {"inputs": np.ones((rows, *shape), np.float32)}
    batch |= {"labels": np.ones(rows, np.float32)} if labeled else {}
    means = np.ones((rows, 1), np.float32)
    task = as_task(lambda outputs: {"loss": outputs - outputs[:, 0]})
    if rows == 8 and shape == (8,) and not labeled:
        return  # Inputs [B, B] alone: such a loss may be one for each of their numbers.
    with pytest.raises(ConfigError, match=rf"shape \[{rows}, {rows}\].*the mean over"):
        example_values(task, outputs=means, **facts(batch))


@pytest.mark.parametrize("rows", [7, 8])
@pytest.mark.parametrize(
    "batch, shape",
    [
        (lambda rows: {"labels": np.ones((rows, 8))}, (8,)),
        (lambda rows: {"labels": np.ones((rows, 5, 8))}, (5,)),
        (lambda rows: {}, (8, 8)),
    ],
    ids=["tokens", "soft labels", "pixels"],
)
def test_losses_of_tokens_and_pixels_are_taken_at_any_batch_size(rows, batch, shape):
    batch = {"inputs": np.ones((rows, 8, 8))} | batch(rows)
    task = as_task(lambda outputs: {"loss": outputs})
    values, _ = example_values(task, outputs=np.ones((rows, *shape)), **facts(batch))
    assert values["loss"].shape == (rows,)


# Labels that are none, and weights.


@pytest.mark.parametrize("label", [-1, -2, -100])
def test_labels_below_0_are_nan_and_those_of_no_weight_do_no_harm(label):
    labels = np.array([0, label, 1])
    logits = jnp.asarray(RNG.normal(size=(3, 2)).astype(np.float32))
    values = losses.classification(logits, {"labels": labels})
    assert np.isnan(values["loss"]).tolist() == [False, True, False]
    counts = losses.confusion(logits, {"labels": labels}, np.ones(3, bool))
    assert counts["confusion"].sum() == 2

    hidden, words = jnp.ones((1, 3, 4)), jnp.ones((5, 4))
    for outputs in (LazyLogits(hidden, words), hidden @ words.T):
        found = token_losses(outputs, labels[None], None)
        assert np.isnan(found[0]).tolist() == [False, True, False]

    def masked(hidden):
        mask = labels[None] >= 0
        batch = {"inputs": hidden, "labels": labels[None], "loss_mask": mask}
        values = language_model(hidden @ words.T, batch)
        return values["loss"].sum()

    assert np.isfinite(jax.grad(masked)(hidden)).all()


@pytest.mark.parametrize("log_every", [1, None])
def test_a_label_below_0_ends_a_run_in_a_sentence(tmp_path, one_device, log_every):
    trainer = made(one_device, lambda step: batch(-100 if step == 1 else 0))
    words = r"the batch of step 2 has -100 in its \['labels'\], row 0.*loss_mask"
    with pytest.raises(NonFiniteError, match=words):
        train(trainer, num_steps=2, workdir=tmp_path, log_every=log_every)


@pytest.mark.parametrize("weight", [-0.5, np.nan])
@pytest.mark.parametrize("name", ["example_weight", "mine"])
def test_weights_below_0_are_refused(tmp_path, one_device, weight, name):
    def task(outputs, batch):
        values = classification(outputs, batch)
        return {"loss": values["loss"], "example_weight": batch[name]}

    weights = np.float32([1, weight, 1, 1, 1, 1, 1, 1])
    trainer = made(one_device, lambda step: batch(0, **{name: weights}), task)
    words = r"in its \['example_weight'\], row 1"
    if name == "mine":
        is_nan = np.isnan(weight)
        words = r"in its \['mine'\], row 1" if is_nan else "example_weight below 0"
    with pytest.raises(NonFiniteError, match=words):
        train(trainer, num_steps=1, workdir=tmp_path)


def test_no_value_of_a_batch_with_a_weight_below_0_is_a_number(one_device):
    """XLA leaves a weight out where it makes a selection of a product with a bool."""

    def task(outputs, batch):
        rare = (batch["labels"] == 1).astype(jnp.float32)
        return classification(outputs, batch) | {"rare": rare, **weights}

    weights = {"example_weight": np.float32([1, -0.5, 1, 1, 1, 1, 1, 1])}
    trainer = made(one_device, lambda step: batch(0), task)
    _, scalars = trainer.step(trainer.init(), one_device.shard(batch(0)))
    assert np.isnan(one_device.fetch([scalars["loss"], scalars["rare"]])).all()


def test_labels_below_0_to_evaluate_on_are_told(tmp_path, one_device):
    trainer = made(one_device, lambda step: batch())
    data = trainer.experiment.data
    evaluation = EvaluationSet(batch()["inputs"], np.full(8, -1), 8)
    data = data._replace(evaluation=evaluation)
    trainer = Experiment(
        model=LINEAR, task=classification, data=data, optimizer=optax.sgd(0.1)
    ).trainer(one_device)
    with pytest.raises(NonFiniteError, match="its labels and weights are 0 or more"):
        train(trainer, num_steps=1, workdir=tmp_path)
    assert (tmp_path / "checkpoints" / "1").exists()  # Its state is finite.


def test_a_set_of_which_no_example_counts_is_named_and_the_state_saved(
    tmp_path, devices
):
    """It was said to be infinite or NaN, and its labels below 0."""

    def task(outputs, batch):
        values = classification(outputs, batch)
        return values | {"example_weight": batch["inputs"][:, 0]}

    given = batch()
    given["inputs"][:, 0] = 1
    unweighted = EvaluationSet(given["inputs"] * np.float32(0), given["labels"], 8)
    data = Data(Batches(lambda step: given), unweighted, 2)
    trainer = Experiment(
        model=LINEAR, task=task, data=data, optimizer=optax.sgd(0.1)
    ).trainer(devices)
    with pytest.raises(ConfigError, match="no example of the evaluation set counts"):
        train(trainer, num_steps=2, workdir=tmp_path)
    assert (tmp_path / "checkpoints" / "2").exists()


# float16.


def overflows(step, at):
    made = batch()
    made["inputs"] = np.full((8, 3), 60000 if step in at else 1, np.float32)
    return made


@pytest.mark.parametrize("log_every", [1, 3, 5, None])
def test_an_overflow_in_float16_is_counted_and_ends_no_run(
    tmp_path, one_device, log_every
):
    options = {"precision": "float16", "model": hk.transform(forward)}
    trainer = made(one_device, lambda step: overflows(step, {2, 4}), **options)
    train(trainer, num_steps=6, workdir=tmp_path, log_every=log_every, save_every=5)
    last = read(tmp_path / "metrics.jsonl")[-1]
    assert last["train/skipped_steps"] == 2
    assert last["train/loss_scale"] == 2.0**13


@pytest.mark.slow(but="None")
@pytest.mark.parametrize("log_every", [1, 7, None])
def test_a_loss_scale_that_cannot_shrink_ends_a_run(tmp_path, one_device, log_every):
    options = {"precision": "float16", "model": hk.transform(forward)}
    trainer = made(one_device, lambda step: overflows(step, range(2, 99)), **options)
    with pytest.raises(NonFiniteError, match="step 17 .* with a loss scale of 1;"):
        train(trainer, num_steps=30, workdir=tmp_path, log_every=log_every)


def forward(x):
    return hk.Linear(2)(jnp.square(x))


# Batches that change.


def shrinks(step):
    return batch(size=8 if step < 2 else 4)


def turns_to_half(step):
    made = batch()
    return made | ({"inputs": made["inputs"].astype(np.float16)} if step == 2 else {})


def loses_labels(step):
    return batch() if step < 2 else {"inputs": batch()["inputs"]}


@pytest.mark.parametrize(
    "make, words",
    [
        (shrinks, r"'inputs'\] is float32 of 4 rows in the batch of step 3, and .* 8"),
        (turns_to_half, r"'inputs'\] is float16 of 8 rows in .* step 3, and float32"),
        (loses_labels, r"'labels'\] is absent in the batch of step 3, and int32"),
    ],
)
def test_a_batch_unlike_the_first_is_refused(tmp_path, one_device, make, words):
    with pytest.raises(ConfigError, match=words):
        train(made(one_device, make), num_steps=4, workdir=tmp_path)


# Parts of another kind than their own.


def floats(outputs, batch):
    return {"loss": outputs[:, 0] ** 2}


def of_kind(**parts):
    parts = {"model": LINEAR, "task": floats, "optimizer": optax.sgd(0.1)} | parts
    data = parts.pop("data", Data(Batches(lambda step: batch()), None, 2))
    return Experiment(data=data, **parts)


SETS_TO_TRAIN = Batches(lambda step: batch())
SETS = EvaluationSet(np.ones((4, 3), np.float32), np.zeros(4, np.int32), 2)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"optimizer": "adam"}, r"'adam'\) is none.*optax.adam\(1e-3\).*for configs"),
        ({"optimizer": optax.adam}, r"<function adam.* such as optax.adam\(1e-3\)"),
        (
            {"optimizer": {"name": "adam"}},
            "{'name': 'adam'}. is none; it is what optax returns",
        ),
        ({"data": [1]}, "data=...\\) is a list, and Data is needed"),
        ({"data": Data([batch()], None, 2)}, r"train is a list; it needs batch\(step"),
        ({"data": Data(iter([]), None, 2)}, "train is a list_iterator"),
        ({"data": Data(SETS, [batch()], 2)}, "evaluation is a list; it needs num_bat"),
        ({"data": Data(SETS, {}, 2)}, "evaluation is a dict; it needs num_batches"),
    ],
)
def test_a_part_of_another_kind_is_refused_as_an_experiment_is_made(parts, words):
    with pytest.raises(ConfigError, match=words):
        of_kind(**parts)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            lambda outputs: {"loss": jnp.argmax(outputs, 1)},
            "'loss' is int32.*floating dtype",
        ),
        (lambda outputs: {"loss": outputs[:, 0] > 0}, "'loss' is bool.*no gradient"),
        (
            lambda outputs: {"loss": outputs[:, 0] * 1j},
            "'loss' is complex64; values are real",
        ),
        (
            lambda outputs: {"loss": outputs[:, 0], "z": outputs[:, 0] * 1j},
            "'z' is complex64; values are real",
        ),
    ],
)
def test_values_without_a_gradient_or_an_order_are_refused(one_device, task, words):
    trainer = made(one_device, lambda step: batch(), task=task)
    with pytest.raises(ConfigError, match=words):
        trainer.step(trainer.init(), one_device.shard(batch()))


def a_loss(outputs):
    return {"loss": outputs[:, 0] ** 2}


@pytest.mark.parametrize("value", [{"a": jnp.ones(4)}, None, "x", (jnp.ones(4), 1)])
@pytest.mark.parametrize("whose", ["task", "step"])
def test_a_value_that_is_no_array_is_named(one_device, whose, value):
    parts = {"task": lambda outputs: a_loss(outputs) | {"aux": value}}
    if whose == "step":
        step = lambda state, *args: (state, {"loss": jnp.ones(()), "aux": value})  # noqa: E731
        parts = {"step": step}
    trainer = of_kind(**parts).trainer(one_device)
    words = f"the {whose}'s 'aux' is a {type(value).__name__}; possible are arrays"
    with pytest.raises(ConfigError, match=words):
        trainer.step(trainer.init(), one_device.shard(batch()))


@pytest.mark.parametrize("derived", [3.0, None, {"p": None}, {"p": np.ones(3)}])
def test_what_is_derived_is_numbers_by_name_before_a_step_is_made(
    tmp_path, one_device, derived
):
    task = Task(a_loss, derive=lambda averages, counts: derived)
    trainer = of_kind(data=Data(SETS_TO_TRAIN, SETS, 2), task=task).trainer(one_device)
    with pytest.raises(ConfigError, match="return a dictionary of numbers by name"):
        train(trainer, num_steps=2, workdir=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["labels", "targets", "y"])
def test_a_task_of_labels_alone_is_told_that_it_gets_the_batch(one_device, name):
    task = eval(f"lambda logits, {name}: {{'loss': logits[:, 0] - {name}}}")
    trainer = made(one_device, lambda step: batch(), task=task)
    words = f"takes logits, {name}, .*use batch.'labels'"
    with pytest.raises(ConfigError, match=words):
        trainer.step(trainer.init(), one_device.shard(batch()))


def test_a_number_of_mistakes_may_be_the_loss_of_an_evaluation(one_device):
    def task(outputs, is_training):
        value = outputs[:, 0] ** 2
        return {"loss": value if is_training else (value > 1).astype(jnp.int32)}

    trainer = of_kind(data=Data(SETS_TO_TRAIN, SETS, 2), task=task).trainer(one_device)
    state, _ = trainer.step(trainer.init(), one_device.shard(SETS_TO_TRAIN.batch(0)))
    assert 0 <= trainer.evaluate(state)["eval/loss"] <= 1


@pytest.mark.parametrize("option", ["hooks", "writers"])
@pytest.mark.parametrize("value", [print, "csv", ["csv"], 5, [None]])
def test_functions_of_a_run_are_a_list_of_them(tmp_path, one_device, option, value):
    trainer = made(one_device, lambda step: batch(), task=floats)
    with pytest.raises(ConfigError, match=f"{option}=.*no list of functions"):
        train(trainer, num_steps=1, workdir=tmp_path, **{option: value})
    assert not any(tmp_path.iterdir())


def test_numpys_whole_numbers_are_whole_numbers(tmp_path, one_device):
    options = {"num_steps": np.int64(2), "log_every": np.int32(1)}
    rows = batch()
    data = Data(Batches(lambda step: rows), None, 2)
    experiment = of_kind(data=data, steps_per_call=np.int64(2), seed=np.int64(3))
    for _ in range(2):  # The second resumes.
        train(experiment.trainer(one_device), workdir=tmp_path / "run", **options)
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 2
    with pytest.raises(ConfigError, match=r"save_every=\[1 2\]"):
        train(
            experiment.trainer(one_device),
            workdir=tmp_path / "other",
            save_every=np.array([1, 2]),
            **options,
        )


@pytest.mark.parametrize("size", [0, -5, "32", 2.5])
def test_a_batch_has_a_whole_number_of_examples(size):
    with pytest.raises(
        ConfigError, match=f"of {size!r} examples cannot .*; possible is a"
    ):
        ArrayDataset(SETS.inputs, SETS.labels, BatchSpec(size))


# What Orbax does not save.


@pytest.mark.parametrize("only", [False, True])
def test_a_leaf_without_elements_is_refused_before_step_0(tmp_path, one_device, only):
    def forward(inputs):
        side = hk.Linear(2, w_init=jnp.zeros, name="side")(inputs[:, :0])
        return side if only else side + hk.Linear(2)(inputs)

    trainer = of_kind(model=hk.transform(forward)).trainer(one_device)
    words = "no array without elements: .*params/side/w.*; have the model make them"
    with pytest.raises(ConfigError, match=words):
        train(trainer, num_steps=1, workdir=tmp_path)


@pytest.mark.parametrize("part", ["optimizer", "model"])
def test_a_key_of_jax_in_the_state_is_refused_before_step_0(tmp_path, devices, part):
    def forward(inputs):
        hk.get_state("key", [], init=lambda *_: jax.random.key(0))
        return hk.Linear(2)(inputs)

    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(0))
    parts = {"model": hk.transform_with_state(forward)}
    if part == "optimizer":
        parts = {"optimizer": optax.chain(noise, optax.sgd(0.1))}
    words = r"key'?\]? holds key<fry>, .*; jax.random.key_data has its numbers"
    with pytest.raises(PlacementError, match=words):
        train(of_kind(**parts).trainer(devices), num_steps=1, workdir=tmp_path)


# Complex parameters.


def wave(inputs):
    """|w|^2 is least at 0; it begins at 1 + 1j."""
    ones = lambda shape, dtype: jnp.full(shape, 1 + 1j, dtype)  # noqa: E731
    w = hk.get_parameter("w", (3,), jnp.complex64, init=ones)
    return jnp.stack([w.real.sum() + inputs[:, 0] * 0, w.imag.sum() * inputs[:, 0]], 1)


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.05), optax.adam(0.05)])
def test_complex_parameters_descend_in_both_parts(
    tmp_path, devices, accumulate_steps, optimizer
):
    data = Data(Batches(lambda step: {"inputs": np.ones((8, 1), np.float32)}), None, 2)
    trainer = of_kind(
        data=data,
        model=hk.transform(wave),
        task=lambda outputs: {"loss": jnp.sum(outputs**2, axis=1)},
        optimizer=optimizer,
        accumulate_steps=accumulate_steps,
        precision="float32",
    ).trainer(devices)
    result = train(trainer, num_steps=60, workdir=tmp_path / "run", log_every=1)
    losses = [row["train/loss"] for row in read(tmp_path / "run" / "metrics.jsonl")]
    assert losses[0] == pytest.approx(18, rel=1e-5) and losses[-1] < 0.1
    weights = devices.fetch(result.state.params)["~"]["w"]
    assert np.abs(weights).max() < 0.1


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.05, mu_dtype=jnp.bfloat16),
        optax.chain(optax.clip(1.0), optax.lion(0.05, mu_dtype=jnp.float32)),
        optax.sgd(0.05, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    ],
)
def test_moments_without_imaginary_parts_are_refused(one_device, optimizer):
    data = Data(Batches(lambda step: {"inputs": np.ones((8, 1), np.float32)}), None, 2)
    words = r"~/w is complex64, .* its moment \S*~/w as b?float.*leave out optimizer.mu"
    with pytest.raises(ConfigError, match=words):
        of_kind(
            data=data,
            model=hk.transform(wave),
            task=lambda outputs: {"loss": jnp.sum(outputs**2, axis=1)},
            optimizer=optimizer,
            precision="float32",
        ).trainer(one_device)


# Parameters without a gradient.


def permuted(x):
    def order(shape, dtype):
        return jnp.arange(shape[0], dtype=dtype)

    return hk.Linear(2)(x[:, hk.get_parameter("order", [3], jnp.int32, order)])


def test_a_parameter_of_whole_numbers_does_not_train(one_device):
    model = hk.transform(permuted)
    with pytest.raises(ConfigError, match="~/order would train, and int32 has no"):
        made(one_device, lambda step: batch(), model=model)
    others = Finetuning(train=("linear/*",))
    trainer = made(one_device, lambda step: batch(), model=model, finetuning=others)
    state = trainer.init()
    new, scalars = trainer.step(state, one_device.shard(batch()))
    assert np.isfinite(scalars["loss"]) and new.frozen["~"]["order"].dtype == np.int32
