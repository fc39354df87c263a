"""Logits that are not multiplied out: the product, and how it is differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_text.models import LazyLogits, multiply_out

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
        logits, pull = jax.vjp(function, HIDDEN, EMBEDDING)
        results.append((logits, *pull(GRADS)))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_plain_logits_are_what_they_are():
    assert multiply_out(GRADS) is GRADS


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_multiplied_as_it_is_and_added_up_in_float32(dtype):
    hidden, embedding = HIDDEN.astype(dtype), EMBEDDING.astype(dtype)
    logits = LazyLogits(hidden, embedding).multiply_out()
    exact = hidden.astype(np.float64) @ embedding.astype(np.float64).T
    # Rounded to half precision, the product would be a hundred times further away.
    np.testing.assert_allclose(logits, exact, atol=1e-5)

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
