"""Logits that are not multiplied out: their product, their loss, and the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_text.models import LazyLogits, logits, multiply_out, token_losses

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(2, 5, 8)).astype(np.float32)
EMBEDDING = RNG.normal(size=(11, 8)).astype(np.float32)
GRADS = RNG.normal(size=(2, 5, 11)).astype(np.float32)


def test_the_product_and_its_gradients_are_those_of_einsum():
    def plain(hidden, embedding):
        return jnp.einsum("btd,vd->btv", hidden, embedding)

    def lazy(hidden, embedding):
        return multiply_out(LazyLogits(hidden, embedding))

    results = []
    for function in (plain, lazy):
        product, pull = jax.vjp(function, HIDDEN, EMBEDDING)
        results.append((product, *pull(GRADS)))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_plain_logits_are_what_they_are():
    assert multiply_out(GRADS) is GRADS


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_multiplied_as_it_is_and_added_up_in_float32(dtype):
    hidden, embedding = HIDDEN.astype(dtype), EMBEDDING.astype(dtype)
    found = LazyLogits(hidden, embedding).multiply_out()
    exact = hidden.astype(np.float64) @ embedding.astype(np.float64).T
    # Rounded to half precision, the product would be a hundred times further away.
    np.testing.assert_allclose(found, exact, atol=1e-5)

    def loss(hidden, embedding):
        return jnp.sum(LazyLogits(hidden, embedding).multiply_out() ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, embedding)
    products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 3
    for product in products:
        assert [x.aval.dtype for x in product.invars] == [dtype, dtype]
        assert product.outvars[0].aval.dtype == jnp.float32


def equations(jaxpr):
    """All equations of a jaxpr, those inside calls as well."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


# A vocabulary that is filled up to 1,152 columns.
WIDE = (RNG.normal(size=(1100, 8)) / 2).astype(np.float32)
LABELS = RNG.integers(0, 1100, (2, 5)).astype(np.int32)
WEIGHTS = RNG.random((2, 5)).astype(np.float32)


def in_full(hidden, embedding):
    """The loss of float32 logits that exist all at once."""
    product = jnp.einsum("btd,vd->btv", hidden, embedding, precision="highest")
    losses = optax.softmax_cross_entropy_with_integer_labels(product, LABELS)
    return jnp.sum(WEIGHTS * losses), losses


def in_tiles(hidden, embedding, chunk=None):
    losses = token_losses(LazyLogits(hidden, embedding), LABELS, chunk)
    return jnp.sum(WEIGHTS * losses), losses


def with_gradients(function, *factors):
    gradient = jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))
    (_, losses), grads = gradient(*factors)
    return [np.asarray(x, np.float32) for x in (losses, *grads)]


@pytest.fixture(params=[3, 5, 8192])
def tile(request, monkeypatch):
    """Tokens of a tile, of ten: with some left over, in two halves, and in one."""
    monkeypatch.setattr(logits, "TILE", request.param)


def test_in_tiles_float32_is_that_of_all_logits_at_once(tile):
    expected = with_gradients(in_full, HIDDEN, WIDE)
    found = with_gradients(in_tiles, HIDDEN, WIDE)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for x, y in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    # Without a gradient, as in evaluation.
    np.testing.assert_allclose(in_tiles(HIDDEN, WIDE)[1], expected[0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_in_tiles_half_precision_stays_near_float32(tile, dtype):
    factors = HIDDEN.astype(dtype), WIDE.astype(dtype)
    expected = with_gradients(in_full, *(x.astype(np.float32) for x in factors))
    found = with_gradients(in_tiles, *factors)
    # Logits of up to 8, rounded to 8 bits; gradients of up to 1 and 3.
    for x, y, bound in zip(found, expected, (0.03, 0.03, 0.03), strict=True):
        np.testing.assert_allclose(x, y, atol=bound)


def test_gradients_of_the_embedding_are_rounded_once_however_many_tiles(monkeypatch):
    hidden = jnp.ones((1, 600, 1), jnp.bfloat16)
    embedding = jnp.zeros((2, 1), jnp.bfloat16)

    def loss(embedding):
        labels = jnp.zeros((1, 600), jnp.int32)
        return jnp.sum(token_losses(LazyLogits(hidden, embedding), labels, None))

    monkeypatch.setattr(logits, "TILE", 1)
    # Added up in bfloat16, halves stop to count at 128.
    assert jax.grad(loss)(embedding).tolist() == [[-300.0], [300.0]]


def test_labels_that_the_vocabulary_lacks_give_nan_and_no_others_do():
    labels = LABELS.copy()
    labels[0, 1], labels[1, 2], labels[1, 4] = 1100, -1, 1152
    losses = token_losses(LazyLogits(HIDDEN, WIDE), labels, None)
    lacking = (labels < 0) | (labels >= 1100)
    np.testing.assert_array_equal(np.isnan(losses), lacking)
    np.testing.assert_allclose(losses[~lacking], in_full(HIDDEN, WIDE)[1][~lacking])


@pytest.mark.parametrize("rows", [10, 5])
def test_half_precision_has_no_logits_in_float32(monkeypatch, rows):
    """Not where arrays must exist: as the results of products, and of loops."""
    monkeypatch.setattr(logits, "TILE", rows)
    factors = HIDDEN.astype(jnp.bfloat16), WIDE.astype(jnp.bfloat16)
    gradient = jax.make_jaxpr(jax.grad(lambda *x: in_tiles(*x)[0], (0, 1)))(*factors)
    found = list(equations(gradient.jaxpr))
    products = [e for e in found if e.primitive.name == "dot_general"]
    loops = [e for e in found if e.primitive.name == "scan"]
    assert (len(products), len(loops)) == (4, 2)
    results = [x.aval for e in products + loops for x in e.outvars]
    wide = {(x.shape, x.dtype.name) for x in results if x.shape[-1] > 1000}
    assert wide == {((rows, 1152), "bfloat16")}
    for product in products:
        assert {x.aval.dtype.name for x in product.invars} == {"bfloat16"}
    # In two tiles, those of all tokens are nowhere.
    assert rows == 10 or max(x.aval.size for e in found for x in e.outvars) < 11_000
