"""The language-model task: its mathematics, its memory, and whole runs with it."""

import functools
import math

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.config import default_config
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, experiment
from haiku_text.models import LazyLogits, gpt, multiply_out
from haiku_text.tasks import language_model, perplexity
from tests.runs import changed

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(3, 10, 8)).astype(np.float32)
EMBEDDING = RNG.normal(size=(13, 8)).astype(np.float32)
LABELS = RNG.integers(0, 13, (3, 10)).astype(np.uint16)
LAZY = LazyLogits(HIDDEN, EMBEDDING)


def expected_losses():
    """The cross-entropy of each token, in float64: [B, T]."""
    logits = HIDDEN.astype(np.float64) @ EMBEDDING.T.astype(np.float64)
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    return (
        log_sums - np.take_along_axis(logits, LABELS[..., None].astype(int), 2)[..., 0]
    )


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("outputs", [LAZY, multiply_out(LAZY)], ids=["lazy", "plain"])
def test_the_loss_is_the_mean_cross_entropy_of_an_example(outputs, chunk):
    values = language_model(outputs, {"labels": LABELS}, chunk=chunk)
    assert list(values) == ["loss"]
    expected = expected_losses().mean(axis=1)
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int32])
def test_labels_may_be_of_any_width(dtype):
    vocabulary = 300 if dtype == np.uint8 else 70_000
    last = min(vocabulary - 1, np.iinfo(dtype).max)
    logits = np.zeros((1, 2, vocabulary), np.float32)
    logits[..., last] = 50.0
    labels = np.array([[last, last]], dtype)
    np.testing.assert_allclose(language_model(logits, {"labels": labels})["loss"], 0)


@pytest.mark.parametrize("chunk", [None, 4])
def test_with_a_mask_only_its_tokens_count(chunk):
    mask = RNG.random((3, 10)) < 0.5
    mask[2] = False
    batch = {"labels": jnp.asarray(LABELS), "loss_mask": jnp.asarray(mask)}

    def total(hidden):
        loss = language_model(LazyLogits(hidden, EMBEDDING), batch, chunk=chunk)["loss"]
        return jnp.sum(loss), loss

    grads, loss = jax.jit(jax.grad(total, has_aux=True))(HIDDEN)
    expected = [
        row[m].mean() if m.any() else 0
        for row, m in zip(expected_losses(), mask, strict=True)
    ]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert np.all(grads[~mask] == 0) and np.all(np.any(grads[mask] != 0, axis=-1))


def test_bits_per_byte_are_the_loss_in_other_units():
    batch = {"labels": LABELS}
    values = language_model(LAZY, batch, bytes_per_token=4.0)
    np.testing.assert_allclose(
        values["bits_per_byte"],
        expected_losses().mean(axis=1) / math.log(2) / 4,
        rtol=1e-5,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunk", [3, 5])
def test_in_chunks_values_and_gradients_are_the_same(chunk, dtype):
    def loss(lazy, chunk):
        return jnp.mean(language_model(lazy, {"labels": LABELS}, chunk=chunk)["loss"])

    lazy = jax.tree.map(lambda x: jnp.asarray(x, dtype), LAZY)
    whole, parts = (
        jax.jit(jax.value_and_grad(functools.partial(loss, chunk=c)))(lazy)
        for c in (None, chunk)
    )
    # Sums of bfloat16 products are rounded once, however many chunks there are.
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-3
    for x, y in zip(*map(jax.tree.leaves, (whole, parts)), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=tolerance)


def test_in_chunks_no_more_logits_live_than_those_of_one_chunk():
    rows, tokens, width, vocabulary, chunk = 4, 256, 16, 4096, 32
    logits = 4 * rows * tokens * vocabulary

    def temporaries(chunk):
        def loss(lazy, labels):
            return jnp.mean(
                language_model(lazy, {"labels": labels}, chunk=chunk)["loss"]
            )

        lazy = LazyLogits(
            jax.ShapeDtypeStruct((rows, tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
        )
        labels = jax.ShapeDtypeStruct((rows, tokens), np.uint16)
        compiled = jax.jit(jax.value_and_grad(loss)).lower(lazy, labels).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(None) > logits
    # Logits and their gradients, of one chunk in eight, and the embedding's gradients.
    assert temporaries(chunk) < 0.45 * logits


def test_labels_beyond_the_vocabulary_are_not_taken_for_others():
    labels = LABELS.copy()
    labels[1, 3] = 13
    loss = language_model(LAZY, {"labels": labels}, chunk=4)["loss"]
    assert np.isnan(loss[1]) and np.all(np.isfinite(loss[np.array([0, 2])]))


@pytest.mark.parametrize(
    ("outputs", "options", "words"),
    [
        (HIDDEN[:, :9], {}, r"labels \[B, T\]; these are \[3, 9, 8\] and \[3, 10\]"),
        (HIDDEN[:, 0], {}, r"these are \[3, 8\] and \[3, 10\]"),
        (LAZY, {"chunk": 0}, "chunk=0; possible are None and more than 0"),
        (LAZY, {"bytes_per_token": -1.0}, r"bytes_per_token=-1\.0; possible"),
    ],
)
def test_what_does_not_fit_is_refused(outputs, options, words):
    with pytest.raises(ConfigError, match=words) as error:
        language_model(outputs, {"labels": LABELS}, **options)
    assert error.value.exit_code == 64


def test_perplexity_is_the_exponential_of_the_loss():
    assert perplexity({"loss": 2.0}, {}) == {"perplexity": math.exp(2)}
    assert perplexity({"loss": 1e4}, {}) == {"perplexity": math.inf}
    assert math.isnan(perplexity({"loss": math.nan}, {})["perplexity"])


@pytest.mark.slow(but="four devices-4")
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_masked_loss_is_the_mean_over_all_tokens_that_count(devices, parts):
    """Of the whole batch, over any number of devices and micro-batches."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 16, (16, 9)).astype(np.int32)
    mask = rng.random((16, 8)) < rng.random((16, 1)) ** 3
    mask[[0, 5, 6, 7]] = False  # One device has nothing to learn from.
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}

    class Masked:
        num_batches = 4

        def batch(self, step):
            return {name: x.copy() for name, x in batch.items()}

    class Held(Masked):
        def batch(self, step):
            return {name: x[4 * step :][:4].copy() for name, x in batch.items()}

    def forward(tokens, is_training):
        return hk.Linear(16)(jax.nn.one_hot(tokens, 16))

    trainer = Experiment(
        model=hk.transform(forward),
        task=language_model,
        data=Data(Masked(), Held(), 16),
        optimizer=optax.sgd(1.0),
        accumulate_steps=parts,
    ).trainer(devices)
    state = trainer.init()
    params = devices.fetch(state.params)

    def loss(params):
        logits = hk.without_apply_rng(hk.transform(forward)).apply(
            params, batch["inputs"], True
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        )
        return jnp.sum(losses * mask) / mask.sum()

    value, grads = jax.value_and_grad(loss)(params)
    metrics = trainer.evaluate(state)
    assert metrics["eval/loss"] == pytest.approx(float(value), rel=1e-5)
    assert metrics["eval/perplexity"] == pytest.approx(math.exp(value), rel=1e-5)
    state, scalars = trainer.step(state, devices.shard(batch))
    assert set(devices.fetch(scalars)) == {"loss", "grad_norm"}
    assert float(devices.fetch(scalars)["loss"]) == pytest.approx(
        float(value), rel=1e-5
    )
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    for x, y in zip(
        *map(jax.tree.leaves, (devices.fetch(state.params), expected)), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-6)


# Whole runs: a language with one word, which is learnt in a few steps.
TEXT = np.frombuffer(b"abcdefgh" * 40, np.uint8) % 16
MODEL = {"num_layers": 1, "width": 16, "num_heads": 2, "context": 12, "remat": True}


def text_data(spec):
    windows = np.stack([TEXT[i : i + 13] for i in range(64)])
    inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
    return Data(
        ArrayDataset(inputs, labels, spec),
        EvaluationSet(inputs[:10], labels[:10], 4),
        num_outputs=16,
    )


def made(devices, **options):
    options = {"optimizer": optax.adam(3e-3), "model": gpt(16, **MODEL)} | options
    return Experiment(
        task=functools.partial(language_model, chunk=5, bytes_per_token=1.0),
        data=text_data(BatchSpec(8)),
        **options,
    ).trainer(devices)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The lines of metrics of a run on one device, and of the same on four."""
    rows = {}
    for n in (1, 4):
        workdir = tmp_path_factory.mktemp(f"on_{n}")
        trainer = made(DeviceManager.create("cpu", num_devices=n))
        train(trainer, num_steps=40, workdir=workdir, log_every=1)
        rows[n] = read(workdir / "metrics.jsonl")
        assert "perplexity" in (workdir / "train.log").read_text()
    return rows


def losses_in(rows):
    return [row[k] for row in rows for k in ("train/loss", "eval/loss") if k in row]


@pytest.mark.parametrize("prefix", ["train/", "eval/"])
@pytest.mark.slow
def test_a_run_reports_perplexity_of_the_averages_and_learns(runs, prefix):
    found = [row for row in runs[1] if f"{prefix}loss" in row]
    assert len(found) == (40 if prefix == "train/" else 1)
    for row in found:
        loss, bits = row[f"{prefix}loss"], row[f"{prefix}bits_per_byte"]
        assert row[f"{prefix}perplexity"] == pytest.approx(math.exp(loss))
        assert bits == pytest.approx(loss / math.log(2), rel=1e-5)
    assert runs[1][0]["train/perplexity"] > 10
    assert found[-1][f"{prefix}perplexity"] < 6


@pytest.mark.slow
def test_four_devices_agree_with_one(runs):
    one, four = losses_in(runs[1]), losses_in(runs[4])
    np.testing.assert_allclose(one, four, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_half_precision_reaches_the_loss_and_stays_near_float32(runs, one_device):
    seen = []

    def spy(outputs, batch):
        seen.append([x.dtype for x in outputs])
        return language_model(outputs, batch, chunk=5)

    trainer = changed(made(one_device, precision="bfloat16"), task=spy)
    state = trainer.init()
    losses = []
    for step in range(10):
        batch = one_device.shard(trainer.experiment.data.train.batch(step))
        state, scalars = trainer.step(state, batch)
        losses.append(float(one_device.fetch(scalars)["loss"]))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))
    assert all(dtypes == [jnp.bfloat16] * 2 for dtypes in seen)
    expected = losses_in(runs[1])[:10]
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    assert losses != expected


def test_plain_logits_of_a_model_of_one_s_own_are_trained_on(one_device):
    def forward(tokens, is_training):
        return hk.Linear(16)(jax.nn.one_hot(tokens, 16))

    trainer = made(one_device, model=hk.transform(forward))
    state = trainer.init()
    losses = []
    for step in range(30):
        batch = one_device.shard(trainer.experiment.data.train.batch(step))
        state, scalars = trainer.step(state, batch)
        losses.append(float(one_device.fetch(scalars)["loss"]))
    assert losses[-1] < 0.98 * losses[0]


def test_a_config_names_all_of_it(one_device):
    config = default_config()
    config.batch_size = 8
    config.task = {"name": "language_model", "chunk": 5, "bytes_per_token": 1.0}
    config.data = {"name": f"{__name__}:text_data"}
    config.model = {"name": "gpt", **MODEL}
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    metrics = trainer.evaluate(trainer.init())
    assert set(metrics) == {"eval/loss", "eval/perplexity", "eval/bits_per_byte"}
    assert metrics["eval/loss"] == pytest.approx(math.log(16), rel=0.01)
    config.model.num_head = 3
    with pytest.raises(experiment.ConfigError, match="num_head.*num_heads, context"):
        Experiment.from_config(config, one_device).trainer(one_device)
