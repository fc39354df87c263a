"""Layers that the transformers share: what their backward passes keep and add up."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_text.models import bert, gpt, layers
from tests.text.models.test_logits import equations

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_positions_are_added_up_over_the_examples(dtype):
    grads = RNG.integers(-8, 9, (40, 3, 2)).astype(np.float32)
    positions = jnp.ones((3, 2), dtype)
    repeated, pull = jax.vjp(lambda x: layers.repeat(x, 40), positions)
    np.testing.assert_array_equal(repeated, np.ones((40, 3, 2)))
    (found,) = pull(jnp.asarray(grads, dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, grads.sum(axis=0))


TOKENS = np.zeros((4, 6), np.int32)
SIZES = {"width": 8, "num_heads": 2, "num_layers": 1, "context": 6}
MODELS = {
    "gpt": (gpt(16, **SIZES), TOKENS),
    "bert": (
        bert(3, vocab_size=16, mlp_width=16, **SIZES),
        {"tokens": TOKENS, "mask": np.ones_like(TOKENS)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_added_up_over_examples_in_a_layout_of_xla_s_choice(name):
    """Its choice for GPUs, the batch last, would hold for all other activations."""
    model, inputs = MODELS[name]
    rng = jax.random.key(0)
    params = jax.eval_shape(lambda: model.init(rng, inputs, False))

    def loss(params):
        outputs = model.apply(params, rng, inputs, True)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(outputs))

    found = list(equations(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))
    sums = [e for e in found if e.primitive.name == "reduce_sum"]
    over = [e.invars[0] for e in sums if e.params["axes"] == (0,)]
    over = [x for x in over if x.aval.ndim == 3]
    fixed = [e.outvars[0] for e in found if e.primitive.name == "layout_constraint"]
    assert len(over) == 1 and over[0] in fixed


@pytest.mark.parametrize("approximate", [True, False])
def test_of_gelu_the_backward_pass_keeps_what_goes_in_and_what_comes_out(approximate):
    def forward(x):
        return layers.feed_forward(x, 32, approximate)

    model = hk.without_apply_rng(hk.transform(forward))
    x = RNG.normal(size=(2, 5, 8)).astype(np.float32)
    params = model.init(jax.random.key(0), x)
    kept = jax.eval_shape(lambda *args: jax.vjp(model.apply, *args)[1], params, x)
    assert [k.size for k in jax.tree.leaves(kept)].count(2 * 5 * 32) == 2

    def plain(params, x):
        up, down = (params[f"mlp/{name}"] for name in ("up", "down"))
        y = jax.nn.gelu(x @ up["w"] + up["b"], approximate=approximate)
        return y @ down["w"] + down["b"]

    grads, expected = (
        jax.vjp(function, params, x)[1](jnp.ones_like(x))
        for function in (model.apply, plain)
    )
    for a, b in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("token", [-100, -1, 5])
def test_a_token_that_a_table_lacks_has_no_embedding(token):
    rows = layers.look_up(jnp.ones((5, 2)), jnp.array([[token, 4]]))
    np.testing.assert_array_equal(np.isnan(rows), [[[True] * 2, [False] * 2]])
