"""Packed examples: what each learns is what it learns alone, and nothing leaks."""

import json

import jax
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, each_shape
from haiku_template.data.examples import as_dataset, as_labelled
from haiku_template.errors import ConfigError
from haiku_template.runs import train
from haiku_template.training import Experiment
from haiku_text.data.jsonl import jsonl
from haiku_text.data.packing import PackedDataset
from haiku_text.data.texts import Completions, Tokens
from haiku_text.models import LazyLogits, gpt, token_losses
from haiku_text.tasks import language_model
from tests.runs import run_steps, with_data

SMALL = {"num_layers": 2, "width": 24, "num_heads": 4, "context": 32}
VOCABULARY = 40
SIZES = (9, 3, 12, 5, 2, 7, 1)  # Inputs of each example: 39 in windows of 32.
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def examples():
    """Tokens differ inside an example; the first third is prompt."""
    texts = [RNG.permutation(VOCABULARY)[: size + 1] for size in SIZES]
    prompts = [max(len(text) // 3, 1) for text in texts]
    return Completions(Tokens.create(texts), np.array(prompts))


@pytest.fixture(scope="module")
def params():
    """Far from the initial values, where little depends on anything."""
    model = gpt(VOCABULARY, **SMALL)
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), np.zeros((1, 4), np.int32), False)
    )
    return jax.tree.map(lambda x: np.float32(0.3 * RNG.normal(size=x.shape)), shapes)


@jax.jit
def losses(params, inputs, labels):
    outputs = gpt(VOCABULARY, **SMALL).apply(params, None, inputs, False)
    return token_losses(outputs, labels, None)


def unpacked(batch, rows=None):
    """The examples of a packed batch, a row each; rows that do not count fill up."""
    segments = batch["inputs"]["segments"]
    owns = [
        (row, segments[row] == number)
        for row in range(len(segments))
        for number in range(1, segments[row].max() + 1)
    ]
    shape = (rows or len(owns), segments.shape[1])
    arrays = {"inputs": batch["inputs"]["tokens"], "labels": batch["labels"]}
    arrays |= {"loss_mask": batch["loss_mask"]}
    alone = {name: np.zeros(shape, x.dtype) for name, x in arrays.items()}
    for i, (row, own) in enumerate(owns):
        for name, x in arrays.items():
            alone[name][i, : own.sum()] = x[row, own]
    return alone, owns


def test_losses_are_those_of_each_example_alone(examples, params):
    batch = PackedDataset(examples, 32, BatchSpec(2)).batch(0)
    alone, owns = unpacked(batch)
    assert len(owns) == len(SIZES) and len(batch["labels"]) == 2
    packed = np.asarray(losses(params, batch["inputs"], batch["labels"]))
    expected = np.asarray(losses(params, alone["inputs"], alone["labels"]))
    for i, (row, own) in enumerate(owns):
        wanted = expected[i][: own.sum()]
        np.testing.assert_allclose(packed[row, own], wanted, atol=1e-5)


def test_a_number_that_comes_back_is_another_example(params):
    tokens, labels = RNG.integers(0, VOCABULARY, (2, 1, 8))
    first, again = (
        losses(params, {"tokens": tokens, "segments": np.array([numbers])}, labels)
        for numbers in ([1, 1, 1, 2, 2, 3, 3, 3], [1, 1, 1, 0, 0, 1, 1, 1])
    )
    np.testing.assert_array_equal(first, again)


def test_no_gradient_of_an_example_s_loss_reaches_another(params):
    """Tried by hand, each fails: in `_attend_in_blocks` no comparison of segments, or
    `>=` in its place; `segments` not handed on by `_block`.
    """
    # Each token is once in the window: its row of the table is its embedding.
    tokens = np.random.default_rng(1).permutation(VOCABULARY)[None, :32]
    segments = np.repeat([1, 2, 3, 4, 0], [9, 12, 1, 6, 4])[None]
    labels = RNG.integers(0, VOCABULARY, (1, 32))
    inputs = {"tokens": tokens, "segments": segments}

    @jax.jit
    def gradients(table):
        """Gradients of the loss of each segment's last token: [5, V, D]."""

        def last(table):
            moved = params | {"gpt/embed": {"embeddings": table}}
            outputs = gpt(VOCABULARY, **SMALL).apply(moved, None, inputs, False)
            fixed = jax.lax.stop_gradient(outputs.embedding)  # As the output's.
            found = token_losses(LazyLogits(outputs.hidden, fixed), labels, None)
            return found[0, np.array([8, 20, 21, 27, 31])]

        return jax.jacrev(last)(table)

    sizes = np.abs(gradients(params["gpt/embed"]["embeddings"])).max(axis=2)
    own = segments == np.array([1, 2, 3, 4, 0])[:, None]
    assert np.all(sizes[:, tokens[0]][~own] == 0)
    assert np.all(sizes[:, tokens[0]][own] > 1e-5)


@pytest.fixture
def path(tmp_path):
    rng, file = np.random.default_rng(0), tmp_path / "a.jsonl"
    rows = [
        {"prompt": f"{i:02}" + "x" * int(rng.integers(20)), "completion": "ab"[i % 2]}
        for i in range(90)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def trainer(devices, path, packing=True, **parts):
    spec = BatchSpec(8, labels="tokens")
    options = {"path": path, "context": 64, "validation_fraction": 0.2}
    data = jsonl(spec, packing=packing, **options)
    model = gpt(data.num_outputs, **SMALL | {"context": 64, "num_layers": 1})
    return Experiment(
        model=model, task=language_model, data=data, optimizer=optax.adam(1e-2), **parts
    ).trainer(devices)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_is_that_of_the_same_examples_unpacked(devices, path, parts):
    packed = trainer(devices, path, accumulate_steps=parts)
    state, (scalars,) = run_steps(packed, 1)

    class Alone:
        def batch(self, step):
            batch = packed.experiment.data.train.batch(step)
            return unpacked(batch, rows=80)[0]

    alone = with_data(packed, train=Alone())
    expected, (others,) = run_steps(alone, 1)
    assert scalars["loss"] == pytest.approx(float(others["loss"]), abs=1e-5)
    leaves = map(jax.tree.leaves, devices.fetch((state.params, expected.params)))
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)  # Adam divides small by small.


def test_evaluation_is_of_each_example_alone_as_without_packing(one_device, path):
    packed, plain = (trainer(one_device, path, packing) for packing in (True, False))
    state = packed.init()
    assert packed.evaluate(state) == plain.evaluate(state)
    assert "examples packed into" in packed.feed.placement
    assert "packed" not in plain.feed.placement


def test_new_examples_are_named_as_to_evaluate_or_as_to_train(one_device, path):
    data = trainer(one_device, path).experiment.data
    batch = data.evaluation.batch(0)
    for new in (batch["inputs"], {"inputs": batch["inputs"]}, batch):
        tokens = as_dataset(new, data, 8).batch(0)["inputs"]
        np.testing.assert_array_equal(tokens, batch["inputs"])
    labelled = as_labelled(batch, data, 8, "new").batch(0)
    assert labelled.keys() == batch.keys()
    window = data.train.batch(0)
    assert as_dataset(window["inputs"], data, 8).batch(0).keys() == {"inputs"}
    with pytest.raises(ConfigError, match="a batch of the run inputs/tokens, inputs/"):
        as_dataset({"token": batch["inputs"], "segment": batch["inputs"]}, data, 8)


def test_new_tokens_of_a_packed_run_are_of_any_length(path):
    """Windows and an evaluation of one length were no reason to refuse another."""
    spec = BatchSpec(8, labels="tokens")
    data = jsonl(spec, path=path, context=64, packing=True, num_buckets=1)
    lengths = [batch["labels"].shape[1] for batch in each_shape(data.evaluation)]
    for length in (*lengths, 5, 64):
        tokens = np.zeros((3, length), np.int32)
        assert as_dataset(tokens, data, 8).batch(0)["inputs"].shape == (3, length)
    assert len(lengths) == 1 and lengths[0] not in (5, 64)
    with pytest.raises(ConfigError, match=r"has the shape \[3\], and the run"):
        as_dataset(np.zeros(3, np.int32), data, 8)


@pytest.mark.slow
def test_a_resumed_run_is_bitwise_one_that_never_stopped(devices, path, tmp_path):
    results = []
    for stops in ((12,), (5, 12)):
        workdir = tmp_path / str(len(stops))
        for stop in stops:
            made = trainer(devices, path)
            result = train(made, num_steps=stop, workdir=workdir, log_every=1)
        results.append(result.metrics["train/loss"])
    assert results[0] == results[1] < np.log(256) - 0.5
