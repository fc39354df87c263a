"""BERT: padding has no influence, poolings are what they say, errors are sentences.

That its numbers are Hugging Face's is tested in tests/pretrained.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.errors import ConfigError
from haiku_template.models import MODELS, attention
from haiku_template.registry import resolve
from haiku_text.data import text_lengths
from haiku_text.models import bert

SIZES = {
    "vocab_size": 20,
    "context": 8,
    "width": 16,
    "num_layers": 1,
    "num_heads": 4,
    "mlp_width": 32,
}
INPUTS = {
    "tokens": np.array([[2, 4, 5, 6, 3], [2, 7, 3, 0, 0]], np.int32),
    "mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32),
}


def make(num_outputs, **kwargs):
    """Random parameters, larger than initial ones, which would hide mistakes."""
    model = bert(num_outputs, **SIZES | kwargs)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), INPUTS, False))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.float32(0.5 * rng.normal(size=x.shape)), shapes)
    return params, jax.jit(model.apply, static_argnums=3)


def test_it_is_registered():
    assert resolve("model", "bert", MODELS) is bert


@pytest.mark.slow(but="3-cls")
@pytest.mark.parametrize(("num_outputs", "pooling"), [(3, "cls"), (None, "mean")])
def test_padding_has_no_influence(num_outputs, pooling):
    params, apply = make(num_outputs, pooling=pooling)
    expected = apply(params, None, INPUTS, False)
    assert expected.shape == (2, num_outputs or 16)
    other = {
        "tokens": INPUTS["tokens"] + 9 * (1 - INPUTS["mask"]),
        "mask": INPUTS["mask"],
    }
    np.testing.assert_allclose(apply(params, None, other, False), expected, atol=1e-6)
    longer = {k: np.pad(v, ((0, 0), (0, 3))) for k, v in INPUTS.items()}
    np.testing.assert_allclose(apply(params, None, longer, False), expected, atol=1e-6)
    seen = {**INPUTS, "mask": np.ones_like(INPUTS["mask"])}
    difference = apply(params, None, seen, False) - expected
    assert jnp.abs(difference[1]).max() > 1e-3  # The mask is what keeps them apart.


def test_by_lengths_it_computes_what_it_computes_by_the_mask(monkeypatch):
    """As on a GPU, but for the kernels: JAX's XLA takes the lengths for cuDNN."""
    params, apply = make(3, pooling="mean", num_layers=2)
    inputs = {**INPUTS, "lengths": text_lengths(INPUTS["mask"])}

    def results(model):
        def loss(params):
            logits = model.apply(params, None, inputs, False)
            return jnp.sum(jnp.square(logits)), logits

        return jax.tree.leaves(jax.jit(jax.grad(loss, has_aux=True))(params))

    def by_lengths(*args, mask, implementation, **kwargs):
        assert mask is None and implementation == "cudnn"
        return compute(*args, implementation="xla", **kwargs)

    def model():
        return bert(3, pooling="mean", **SIZES | {"num_layers": 2})

    expected, compute = results(model()), jax.nn.dot_product_attention
    monkeypatch.setattr(attention, "choose", lambda *args: "cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_lengths)
    for x, y in zip(results(model()), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(y).max()))


def test_cudnn_s_attention_needs_lengths_and_not_a_mask():
    params, apply = make(3, attention="xla")
    model = bert(3, **SIZES, attention="cudnn")
    with pytest.raises(ConfigError, match="a mask and no lengths; .*text_lengths"):
        model.apply(params, None, INPUTS, False)
    inputs = {**INPUTS, "lengths": text_lengths(INPUTS["mask"])}
    with pytest.raises(ConfigError, match="there is no NVIDIA GPU"):
        model.apply(params, None, inputs, False)


def test_each_token_sees_all_others():
    params, apply = make(None, pooling="cls")
    first = apply(params, None, INPUTS, False)
    changed = {**INPUTS, "tokens": INPUTS["tokens"].copy()}
    changed["tokens"][0, 4] = 9
    assert jnp.abs(apply(params, None, changed, False) - first)[0].max() > 1e-4


def test_token_types_are_zero_by_default():
    params, apply = make(3)
    zeros = np.zeros_like(INPUTS["tokens"])
    expected = apply(params, None, INPUTS, False)
    same = apply(params, None, {**INPUTS, "token_types": zeros}, False)
    other = apply(params, None, {**INPUTS, "token_types": zeros + 1}, False)
    np.testing.assert_array_equal(same, expected)
    assert jnp.abs(other - expected).max() > 1e-3


@pytest.mark.slow(but="mean")
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_sentence_vectors_have_length_one_and_finite_gradients(pooling):
    params, apply = make(None, pooling=pooling)
    vectors = apply(params, None, INPUTS, False)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    empty = {**INPUTS, "mask": INPUTS["mask"] * np.array([[1], [0]])}

    def loss(params):
        return jnp.sum(jnp.square(apply(params, None, empty, False) - 0.5))

    grads = jax.tree.leaves(jax.grad(loss)(params))
    assert all(bool(jnp.isfinite(grad).all()) for grad in grads)


def test_dropout_is_for_training_alone():
    params, apply = make(3, dropout=0.5)
    evaluated = apply(params, None, INPUTS, False)
    first, second = (apply(params, jax.random.key(i), INPUTS, True) for i in (0, 1))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(apply(params, None, INPUTS, False), evaluated)


@pytest.mark.slow
def test_rematerialisation_keeps_less_and_changes_no_value():
    values, kept = [], []
    for remat in (False, True):
        params, apply = make(3, num_layers=2, dropout=0.3, remat=remat)

        def loss(params, apply=apply):
            logits = apply(params, jax.random.key(0), INPUTS, True)
            return jnp.mean(jnp.square(logits))

        values.append(jax.jit(jax.value_and_grad(loss))(params))
        residuals = jax.eval_shape(lambda p, loss=loss: jax.vjp(loss, p)[1], params)
        kept.append(sum(x.size for x in jax.tree.leaves(residuals) if x.ndim >= 3))
    for x, y in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(x).max()))
    assert kept[1] < 0.5 * kept[0]


def test_the_pooler_belongs_to_cls_alone():
    assert "bert/pooler" in make(3, pooling="cls")[0]
    assert "bert/pooler" not in make(3, pooling="mean")[0]
    assert "bert/head" not in make(None)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pooling": "max"}, "pooling='max' is not known; possible are cls, mean"),
        ({"attention": "flash"}, "attention='flash'; possible are auto, xla, cudnn"),
        ({"num_heads": 3}, "num_heads divides width"),
        ({"dropout": 1.0}, "dropout is in"),
        ({"context": 0}, "sizes are 1 or more"),
    ],
)
def test_impossible_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        bert(3, **SIZES | arguments)


def test_a_text_longer_than_the_positions_is_refused():
    longer = {k: np.pad(v, ((0, 0), (0, 4))) for k, v in INPUTS.items()}
    model = bert(3, **SIZES)
    with pytest.raises(ConfigError, match="a text of 9 tokens is longer than the 8"):
        jax.eval_shape(lambda: model.init(jax.random.key(0), longer, False))
