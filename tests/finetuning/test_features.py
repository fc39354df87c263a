"""Training that begins at features: it equals training through the trunk."""

import logging
import resource
from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet, bucketed
from haiku_template.errors import ConfigError, StorageError
from haiku_template.finetuning import features
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.plan import Finetuning
from haiku_template.models.losses import classification
from haiku_template.params import flatten
from haiku_template.runs import Run, train
from haiku_template.runs.resume import with_features
from haiku_template.training import Experiment, own_loss
from tests.runs import placed, run_steps

RNG = np.random.default_rng(0)
WIDTH = 19  # No other axis has this length.


def examples(count, seed=0, name="x"):
    rng = np.random.default_rng(seed)
    return [
        {
            name: rng.normal(size=(int(size), 4)).astype(np.float32),
            "label": np.int32(rng.integers(3)),
        }
        for size in rng.integers(2, 7, count)
    ]


def texts(count=22, seed=0, sizes=(6,), name="x"):
    spec = BatchSpec(8, labels="any")
    held_out = examples(11, seed + 1, name)
    return bucketed(
        examples(count, seed, name), spec, sizes, evaluation=held_out, mask="mask"
    )


class Trunk(hk.Module):
    """Two layers, and a norm whose statistics are those of pretraining."""

    def __init__(self, rate=0.0, trains=False):
        super().__init__(name="trunk")
        self.rate, self.trains = rate, trains

    def __call__(self, x):  # [B, T, 4] -> [B, T, 5]
        x = jax.nn.relu(hk.Linear(WIDTH)(x))
        x = hk.BatchNorm(True, True, 0.9)(x, self.trains or hk.running_init())
        x = hk.dropout(hk.next_rng_key(), self.rate, x) if self.rate else x
        return hk.Linear(5)(x)


def forward(batch, is_training, rate=0.0, trains=False, axis_name=None):
    early = hk.Linear(4, name="early")(batch["x"])
    hidden = Trunk(rate * is_training, trains and is_training)(early)
    mask = batch["mask"][..., None]
    pooled = (hidden * mask).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1)
    norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis_name, name="norm")
    pooled = norm(pooled, is_training)
    if is_training:
        pooled = hk.dropout(hk.next_rng_key(), 0.3, pooled)
    pooled = hk.nets.MLP([6], name="neck")(pooled)
    return hk.Linear(3, name="head")(jnp.tanh(pooled))


def of_labels(outputs, batch):
    return classification(outputs, {"labels": batch["label"]})


def made(devices, tmp_path, tuning, data=None, model=forward, **options):
    options = {"optimizer": optax.adam(1e-2), "task": of_labels} | options
    return Experiment(
        model=hk.transform_with_state(partial(model, axis_name=devices.axis_name)),
        data=data or texts(),
        finetuning=tuning._replace(features_dir=str(tmp_path / "features")),
        **options,
    ).trainer(devices)


HEAD = ("head/*", "neck/*", "norm/*")
AT_TRUNK = Finetuning(train=HEAD, features="trunk")
AT_HEAD = Finetuning(train=("head/*",), features="head")
ADAPTED = Finetuning(lora=Lora(2, patterns=("head/w",)), features="neck")
IDS = ("a trunk's results", "a head's arguments", "adapters of a head")


def close(a, b, tolerance=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, leaf in flatten(a).items():
        np.testing.assert_allclose(flatten(b)[path], leaf, atol=tolerance, err_msg=path)


def no_dropout(batch, is_training, axis_name=None):
    del is_training  # In `init` alone.
    return forward(batch, hk.running_init(), axis_name=axis_name)


def own(batch, is_training, axis_name=None):
    """A model with a loss of its own, which takes labels from the batch."""
    logits = no_dropout(batch | {"x": batch["inputs"]}, is_training)
    return classification(logits, {"labels": batch["label"]})["loss"]


@pytest.mark.slow(but="one device-a trunk")
@pytest.mark.parametrize("tuning", [AT_TRUNK, AT_HEAD, ADAPTED], ids=IDS)
def test_losses_parameters_and_metrics_are_those_of_training_through_the_trunk(
    devices, tmp_path, tuning
):
    options = {"model": forward if tuning is AT_TRUNK else no_dropout}
    if tuning is ADAPTED:
        # One part of a batch of its own has the name that others have for all of it.
        options = {"model": own, "task": own_loss, "data": texts(name="inputs")}
    through = made(devices, tmp_path, tuning, ema_decay=0.9, **options)
    trainer = with_features(through)
    results = []
    for each in (through, trainer):
        state, history = run_steps(each, 7)
        losses = [float(scalars["loss"]) for scalars in history]
        state = state._replace(frozen={})
        results.append((losses, devices.fetch(state), each.evaluate(each.init())))
    (a, b), states, (before, now) = zip(*results, strict=True)
    assert a == pytest.approx(b, abs=1e-6) and len(set(a)) > 5
    close(*states)
    assert now == pytest.approx(before, abs=1e-6)
    # The trunk is not there, neither in memory nor in the program.
    left = {path.split("/")[0] for path in flatten(trainer.init().frozen)}
    assert not left & {"early", "trunk"}
    batch = trainer.experiment.data.train.batch(0)
    assert f"[4,{WIDTH}]" not in trainer.lower(batch).compile().as_text()
    batch = through.experiment.data.train.batch(0)
    assert f"[4,{WIDTH}]" in through.lower(batch).compile().as_text()


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_stands_for_one_through_the_trunk(
    tmp_path, one_device
):
    through = made(one_device, tmp_path, AT_TRUNK)
    files = tmp_path / "features"
    options = {"log_every": 1, "eval_every": 3}
    whole = train(through, workdir=tmp_path / "whole", num_steps=6, **options)
    (folder,) = files.iterdir()
    written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert written.keys() == {"train.npy", "eval.npy"}
    train(through, workdir=tmp_path / "parts", num_steps=3, **options)
    again = train(through, workdir=tmp_path / "parts", num_steps=6, **options)
    close(again.state.saved(), whole.state.saved(), 0)
    # One computation served three starts.
    assert written == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    # What is evaluated is the whole model, without files of features.
    (folder / "eval.npy").unlink()
    run = Run.open(tmp_path / "parts", one_device, "latest", through.experiment)
    assert {"early", "trunk"} <= {k.split("/")[0] for k in flatten(run.state.frozen)}
    for name, value in run.evaluate().items():
        assert value == pytest.approx(whole.metrics[name], abs=1e-6)
    params, _ = run.model()
    trunk = through.init().frozen["trunk/linear"]
    close({"trunk/linear": params["trunk/linear"]}, {"trunk/linear": trunk}, 0)


ARRAYS = RNG.normal(size=(20, 6)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 20).astype(np.int32)


def of_arrays(**changes):
    dataset = ArrayDataset(ARRAYS, CLASSES, BatchSpec(8), **changes)
    return Data(dataset, EvaluationSet(ARRAYS[:9], CLASSES[:9], 8), 3)


def plain(x, is_training, axis_name=None):
    del is_training, axis_name
    x = jax.nn.relu(hk.Linear(WIDTH, name="trunk")(x))
    return hk.Linear(3, name="head")(hk.LayerNorm(-1, True, True, name="norm")(x))


def arrays(devices, tmp_path, tuning=AT_HEAD, **options):
    """A trainer of arrays [N, 6], with labels."""
    options = {"data": of_arrays(), "model": plain, "task": classification} | options
    return made(devices, tmp_path, tuning, **options)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_features_have_the_bits_of_the_trunk_staged_or_not(
    tmp_path, one_device, precision
):
    through = arrays(one_device, tmp_path, precision=precision, accumulate_steps=2)
    trainer = with_features(through)
    words = trainer.experiment.data.train.inputs
    assert words.dtype == {"float32": np.uint32, "bfloat16": np.uint16}[precision]
    assert words.shape == (20, WIDTH) and not words.flags.owndata  # Mapped.
    results = [run_steps(each, 5) for each in (through, trainer)]
    staged = placed(through, "device")
    (tmp_path / "staged").mkdir()
    run = train(staged, workdir=tmp_path / "staged", num_steps=5, log_every=1)
    (a, one), (b, two) = results
    assert [x["loss"] for x in one] == [x["loss"] for x in two]
    close(a.params, b.params, 0)
    close(a.params, run.state.params, 1e-6)


def with_a_shortcut(x, is_training, axis_name=None):
    """Of the same features, and of inputs that are kept beside them."""
    return plain(x, is_training) + x[:, :3]


def test_what_is_stale_is_computed_anew(tmp_path, one_device):
    folders = set()

    def count(**options):
        with_features(arrays(one_device, tmp_path, **options))
        folders.update((tmp_path / "features").iterdir())
        return len(folders)

    assert [count(), count(), count(seed=1), count(seed=1)] == [1, 1, 2, 2]
    data = of_arrays()
    other = data.evaluation.inputs.copy()
    other[0, 0] += 1e-6
    held_out = EvaluationSet(other, data.evaluation.labels, 8)
    assert count(data=data._replace(evaluation=held_out)) == 3
    assert count(tuning=AT_HEAD._replace(features="trunk")) == 4
    assert count(precision="bfloat16") == 5
    assert count(model=lambda x, is_training, axis_name: plain(2 * x, False)) == 6
    assert count(data=data._replace(preprocess=lambda x: 3 * x)) == 7
    assert count(model=with_a_shortcut) == 8
    # Of the head, and of the optimizer, they are not.
    assert count(optimizer=optax.sgd(0.1), ema_decay=0.5) == 8


def test_files_are_whole_or_not_there_and_damage_is_said(
    tmp_path, one_device, monkeypatch
):
    def limited(folder, ordered, found, cut, write=features._write):
        found = {name: list(words) for name, words in found.items()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # As a full disk.
        try:
            write(folder, ordered, found, cut)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(features, "_write", limited)
        with pytest.raises(StorageError, match=r"features/\w+ cannot be written"):
            with_features(arrays(one_device, tmp_path))
    assert not any((tmp_path / "features").iterdir())
    with_features(arrays(one_device, tmp_path))
    (file,) = (tmp_path / "features").glob("*/train.npy")
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    cut, other = whole[:-1], whole.replace(b"<u4", b"<f4")
    for damaged in (cut, whole[:3], other, flipped, whole + b"0", whole[:-32]):
        file.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"train.npy cannot be read .* remove"):
            with_features(arrays(one_device, tmp_path))


@pytest.mark.slow
def test_what_training_would_compute_otherwise_is_said(tmp_path, one_device, caplog):
    for options, words in (
        ({}, False),
        ({"rate": 0.5}, True),
        ({"trains": True}, True),
    ):
        caplog.clear()
        model = partial(forward, **options)
        with caplog.at_level(logging.WARNING):
            trainer = with_features(made(one_device, tmp_path, AT_TRUNK, model=model))
        assert ("(dropout, batch statistics)" in caplog.text) is words
        if "trains" in options:  # Statistics of the trunk stay, those of the head move.
            first = trainer.init().net_state
            last = run_steps(trainer, 2)[0].net_state
            for module, values in last.items():
                moved = not np.array_equal(values["average"], first[module]["average"])
                assert moved is module.startswith("norm/")


class Head(hk.Module):
    """A head of many arguments, not all of them of examples."""

    def __call__(self, x, table=None, negative=False, *, extra=None):
        w = hk.get_parameter("w", (x.shape[-1], 3), init=hk.initializers.Orthogonal())
        y = x @ w if table is None else x @ w + (x @ table.T)[:, :3]
        y = y if extra is None else y + extra[:, None]
        return -y if negative else y


def trunk(x):
    return jax.nn.relu(hk.Linear(WIDTH, name="trunk")(x))


def shortcut(x, is_training, axis_name=None):
    hidden = trunk(x)
    return Head()(hk.Linear(7)(hidden)) + hk.Linear(3)(hidden)


def two_heads(x, is_training, axis_name=None):
    hidden = trunk(x)
    return Head(name="head_a")(hk.Linear(7)(hidden)) * Head(name="head_b")(hidden)


def arguments(x, is_training, axis_name=None):
    normal = hk.initializers.RandomNormal()
    table = hk.get_parameter("table", (5, WIDTH), init=normal)
    return Head()(trunk(x), table, True, extra=x[:, 0] * (x[:, 1] > 0))


def called_twice(x, is_training, axis_name=None):
    head, hidden = Head(), trunk(x)
    return head(hidden) - head(jnp.flip(hidden, 1)) ** 2


class Joined(hk.Module):
    """A head of a dictionary in its order."""

    def __call__(self, parts):
        return hk.Linear(3)(jnp.concatenate([*parts.values()], axis=1))


def in_order(x, is_training, axis_name=None):
    return Joined(name="head")({"b": trunk(x), "a": jnp.tanh(trunk(-x))})


@pytest.mark.slow(but="in_order")
@pytest.mark.parametrize(
    ("model", "left"),
    [
        (in_order, set()),
        (shortcut, {"linear_1", "trunk"}),
        (two_heads, set()),
        (arguments, {"~"}),
        (called_twice, set()),
        (with_a_shortcut, set()),
    ],
)
def test_what_goes_around_the_cut_is_still_computed(tmp_path, one_device, model, left):
    tuning = Finetuning(train=("head*",), features="head*")
    through = arrays(one_device, tmp_path, tuning, model=model)
    trainer = with_features(through)
    (a, one), (b, two) = (run_steps(each, 4) for each in (through, trainer))
    for before, now in zip(one, two, strict=True):
        assert before["loss"] == pytest.approx(now["loss"], abs=1e-6)
    close(a.params, b.params)
    assert {path.split("/")[0] for path in flatten(b.frozen)} == left


def with_inputs(outputs, batch):
    return classification(outputs, batch) | {"mean": batch["inputs"].mean(axis=1)}


def with_params(outputs, batch, params):
    return classification(outputs, batch) | {"norm": optax.tree.norm(params)}


def in_checkpoint(x, is_training, axis_name=None):
    return hk.remat(lambda x: plain(x, is_training))(x)


def in_scan(x, is_training, axis_name=None):
    return hk.scan(lambda c, row: (c, plain(row[None], is_training)[0]), 0, x)[1]


def mixed_by(mix):
    """A model whose features are a function of those of a whole batch."""
    return lambda x, is_training, axis_name=None: Head(name="head")(mix(trunk(x)))


def norm_of_the_batch(x):
    return hk.BatchNorm(True, True, 0.9)(x, True)


def by_python(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": mixed_by(lambda x: x - x.mean(axis=0))}, "depend on others in its"),
        ({"model": mixed_by(norm_of_the_batch)}, "depend on others in its batch"),
        ({"model": mixed_by(lambda x: x - 3e-2 * x.mean(axis=0))}, "depend on others"),
        ({"model": mixed_by(lambda x: x - 1e-6 * x.mean(axis=0))}, "depend on others"),
        (
            {
                "model": mixed_by(lambda x: x - 1e-2 * x.mean(axis=0)),
                "precision": "bfloat16",
            },
            "depend on others",
        ),
        (
            {"model": mixed_by(lambda x: x + 1e-3 * jnp.arange(len(x))[:, None])},
            "on its place",
        ),
        ({"model": mixed_by(lambda x: x * jnp.arange(len(x))[:, None])}, "others"),
        ({"model": mixed_by(by_python)}, "the trunk calls Python"),
        ({"model": mixed_by(lambda x: x + 1j)}, "features of complex64 are not real"),
        (
            {"tuning": AT_HEAD._replace(features="heat")},
            r"features='heat' fits no module that .*nearest is head.* first, head",
        ),
        (
            {"tuning": AT_HEAD._replace(train=("head/*", "trunk/b"))},
            "its features depend on trunk/b, which trains",
        ),
        (
            {"tuning": Finetuning(lora=Lora(2, patterns=("*/w",)), features="head")},
            "depend on trunk/w, which trains",
        ),
        ({"tuning": Finetuning(train=("trunk/*",), features="trunk")}, "leaves all of"),
        ({"data": of_arrays(augment=lambda x, rng: x)}, "data are augmented"),
        ({"task": with_params}, "the task takes params"),
        ({"model": in_checkpoint}, "is called inside of jax.checkpoint"),
        (
            {"model": in_scan},
            "called with arrays of examples, as none is inside",
        ),
        ({"init": lambda rng, batch: {}}, "are for the parameters of a model"),
    ],
)
def test_what_cannot_begin_at_features_is_one_sentence(
    tmp_path, one_device, options, words
):
    with pytest.raises(ConfigError, match=words) as error:
        with_features(arrays(one_device, tmp_path, **options))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "features").exists()


def test_features_that_padding_changes_are_refused(tmp_path, one_device):
    def without_mask(batch, is_training, axis_name=None):
        hidden = jax.nn.relu(hk.Linear(5, name="trunk")(batch["x"]) + 1)
        return hk.Linear(3, name="head")(hidden.mean(axis=1))

    data = texts(sizes=(4, 6))
    with pytest.raises(ConfigError, match="on its place or on padding"):
        with_features(
            made(one_device, tmp_path, AT_HEAD, data=data, model=without_mask)
        )


def counting(x, is_training, axis_name=None):
    """A trunk whose features follow the number of its calls."""
    count = hk.get_state("count", (), init=jnp.zeros)
    hk.set_state("count", count + is_training)
    return hk.Linear(3, name="head")(trunk(x) * (1 + count))


@pytest.mark.parametrize(("model", "said"), [(counting, True), (plain, False)])
def test_state_that_training_moves_and_features_stay_without_is_said(
    tmp_path, one_device, caplog, model, said
):
    with_features(arrays(one_device, tmp_path, model=model))
    assert ("training would compute other features" in caplog.text) is said


def test_a_task_that_reads_inputs_is_refused(tmp_path, one_device):
    trainer = with_features(arrays(one_device, tmp_path, task=with_inputs))
    with pytest.raises(ConfigError, match="the task reads inputs of a batch"):
        run_steps(trainer, 1)


@pytest.mark.slow
def test_examples_of_other_lengths_have_features_behind_what_pools_them(
    tmp_path, one_device
):
    lengths = texts(sizes=(4, 6))
    with pytest.raises(ConfigError, match="name a module behind what pools them"):
        with_features(made(one_device, tmp_path, AT_TRUNK, data=lengths))
    through = made(one_device, tmp_path, AT_HEAD, data=lengths, model=no_dropout)
    results = [run_steps(x, 4) for x in (through, with_features(through))]
    (a, one), (b, two) = results
    for before, now in zip(one, two, strict=True):
        assert before["loss"] == pytest.approx(now["loss"], abs=1e-6)
    close(a.params, b.params)
