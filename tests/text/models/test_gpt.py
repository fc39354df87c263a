"""GPT-2: its parameters, its mathematics written out in NumPy, causality, the cache."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.errors import ConfigError
from haiku_text.models import gpt, gpt_flops_per_token, multiply_out
from haiku_text.models.gpt import PRESETS

SMALL = {"num_layers": 2, "width": 24, "num_heads": 4, "context": 16}
VOCABULARY = 31
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCABULARY, (3, 16)).astype(np.uint16)


def small(**options):
    return gpt(VOCABULARY, **SMALL | options)


@pytest.fixture(scope="module")
def params():
    """Far from the initial values, where norms are ones and biases zeros."""
    start = jax.jit(lambda: small().init(jax.random.key(0), TOKENS, False))()
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.asarray, start))
    rng = np.random.default_rng(1)
    moved = [x + 0.2 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(treedef, moved)


def shapes(model):
    def init(tokens):
        return model.init(jax.random.key(0), tokens, True)

    return jax.eval_shape(init, np.zeros((1, 4), np.int32))


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("124M", 124_439_808),
        ("355M", 354_823_168),
        ("774M", 774_030_080),
        ("1558M", 1_557_611_200),
    ],
)
def test_presets_have_gpt_2_s_parameters(preset, count):
    leaves = jax.tree.leaves(shapes(gpt(50257, preset=preset)))
    assert sum(leaf.size for leaf in leaves) == count
    assert len(leaves) == 12 * PRESETS[preset].num_layers + 4


def test_names_and_shapes_are_one_for_each_tensor_of_the_published_model():
    width = SMALL["width"]
    block = {
        "attention/projection": {"w": (width, width), "b": (width,)},
        "attention/qkv": {"w": (width, 3 * width), "b": (3 * width,)},
        "mlp/down": {"w": (4 * width, width), "b": (width,)},
        "mlp/up": {"w": (width, 4 * width), "b": (4 * width,)},
        "norm_1": {"scale": (width,), "offset": (width,)},
        "norm_2": {"scale": (width,), "offset": (width,)},
    }
    expected = {
        "gpt/embed": {"embeddings": (VOCABULARY, width)},
        "gpt/positions": {"embeddings": (16, width)},
        "gpt/norm": {"scale": (width,), "offset": (width,)},
    }
    for i in range(SMALL["num_layers"]):
        expected |= {f"gpt/block_{i}/{name}": value for name, value in block.items()}
    assert jax.tree.map(lambda x: x.shape, shapes(small())) == expected
    assert jax.tree.map(lambda x: x.shape, shapes(small(remat=True))) == expected


@pytest.mark.slow
def test_initial_values_are_gpt_2_s():
    model = gpt(2000, num_layers=2, width=128, num_heads=2, context=500)
    start = jax.jit(lambda: model.init(jax.random.key(0), TOKENS, True))()
    for name, layer in start.items():
        for leaf, value in layer.items():
            residual = name.endswith(("projection", "down"))
            deviation = 0.02 / math.sqrt(2 * 2) if residual else 0.02
            if leaf in ("w", "embeddings"):
                assert np.std(value) == pytest.approx(deviation, rel=0.03), name
                assert abs(np.mean(value)) < 0.05 * deviation
            else:
                assert np.all(value == (leaf == "scale")), name


def reference(params, tokens):
    """GPT-2's logits for one example [T], in float64: [T, V]."""

    def linear(name, x):
        return x @ params[f"gpt/{name}"]["w"] + params[f"gpt/{name}"]["b"]

    def norm(name, x):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
        return x * params[f"gpt/{name}"]["scale"] + params[f"gpt/{name}"]["offset"]

    def attend(name, x):
        heads = []
        query, key, value = np.split(linear(f"{name}/qkv", x), 3, axis=1)
        for q, k, v in zip(
            *(
                np.split(part, SMALL["num_heads"], axis=1)
                for part in (query, key, value)
            ),
            strict=True,
        ):
            scores = q @ k.T / math.sqrt(q.shape[1])
            scores[np.triu_indices(len(x), 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v)
        return linear(f"{name}/projection", np.concatenate(heads, axis=1))

    def mlp(name, x):
        x = linear(f"{name}/up", x)
        x = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        return linear(f"{name}/down", x)

    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    embed = params["gpt/embed"]["embeddings"]
    x = embed[tokens] + params["gpt/positions"]["embeddings"][: len(tokens)]
    for i in range(SMALL["num_layers"]):
        x = x + attend(f"block_{i}/attention", norm(f"block_{i}/norm_1", x))
        x = x + mlp(f"block_{i}/mlp", norm(f"block_{i}/norm_2", x))
    return norm("norm", x) @ embed.T


@pytest.mark.slow(but="16")
@pytest.mark.parametrize("length", [1, 9, 16])
def test_logits_are_those_of_gpt_2_written_out(params, length):
    tokens = TOKENS[:, :length]
    logits = multiply_out(small().apply(params, None, tokens, False))
    expected = np.stack([reference(params, row) for row in tokens])
    assert logits.dtype == jnp.float32
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())


def test_an_output_depends_on_no_later_input_and_on_every_earlier_one(params):
    direction = RNG.normal(size=SMALL["width"]).astype(np.float32)

    @jax.jit
    def influences(positions):
        """The gradient of each output [T] for the vector of each input: [T, T, D]."""

        def outputs(positions):
            moved = {**params, "gpt/positions": {"embeddings": positions}}
            logits = small().apply(moved, None, TOKENS[:1], False)
            return logits.hidden[0] @ direction

        return jax.jacrev(outputs)(positions)

    sizes = np.abs(influences(params["gpt/positions"]["embeddings"])).max(axis=2)
    later = np.triu(np.ones((16, 16), bool), 1)
    assert np.all(sizes[later] == 0)
    assert np.all(sizes[~later] > 1e-4)


@functools.cache
def compiled(is_new):
    """The forward pass with a cache, which is made anew or given."""
    if is_new:
        return jax.jit(lambda p, x: small().apply(p, None, x, False, "new"))
    return jax.jit(lambda p, x, cache: small().apply(p, None, x, False, cache))


def whole(params):
    return multiply_out(
        jax.jit(small().apply, static_argnums=3)(params, None, TOKENS, False)
    )


@pytest.mark.slow(but="pieces2")
@pytest.mark.parametrize("pieces", [(16,), (1,) * 16, (5, 1, 1, 7, 2)])
def test_with_a_cache_the_outputs_are_the_same(params, pieces):
    cache, done, parts = (), 0, []
    for size in pieces:
        piece = TOKENS[:, done : done + size]
        logits, *cache = compiled(not cache)(params, piece, *cache)
        parts.append(multiply_out(logits))
        done += size
    np.testing.assert_array_equal(cache[0].lengths, [16, 16, 16])
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole(params), atol=1e-5)


def test_rows_of_a_cache_may_differ_in_length(params):
    lengths = np.array([3, 9, 6], np.int32)
    padded = np.where(np.arange(9) < lengths[:, None], TOKENS[:, :9], 5)
    padded = padded.astype(TOKENS.dtype)
    _, cache = compiled(True)(params, padded)
    cache = cache._replace(lengths=jnp.asarray(lengths))  # The padding is forgotten.
    expected = whole(params)
    for step in range(4):
        tokens = TOKENS[np.arange(3), lengths + step][:, None]
        logits, cache = compiled(False)(params, tokens, cache)
        np.testing.assert_allclose(
            multiply_out(logits)[:, 0],
            expected[np.arange(3), lengths + step],
            atol=1e-5,
        )


def test_dropout_acts_in_training_alone(params):
    model = small(dropout=0.5)
    a, again, b = (
        model.apply(params, jax.random.key(seed), TOKENS, True).hidden
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(a, again)
    assert np.all(np.any(a != b, axis=-1))
    without = small().apply(params, None, TOKENS, True).hidden
    evaluated = model.apply(params, None, TOKENS, False).hidden
    np.testing.assert_array_equal(evaluated, without)


@pytest.mark.slow
def test_rematerialisation_keeps_less_and_changes_no_value(params):
    values, kept = [], []
    for remat in (False, True):
        model = small(remat=remat, dropout=0.3)

        def loss(params, model=model):
            logits = model.apply(params, jax.random.key(3), TOKENS, True)
            return jnp.mean(jnp.square(logits.hidden))

        values.append(jax.jit(jax.value_and_grad(loss))(params))
        # What the backward pass was given, besides the parameters.
        residuals = jax.eval_shape(lambda p, loss=loss: jax.vjp(loss, p)[1], params)
        kept.append(sum(x.size for x in jax.tree.leaves(residuals) if x.ndim >= 3))
    for x, y in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6 * max(1, np.abs(x).max()))
    assert kept[1] < 0.5 * kept[0]


def test_tokens_beyond_the_vocabulary_are_not_taken_for_others(params):
    tokens = TOKENS.copy()
    tokens[1, 5] = VOCABULARY
    logits = multiply_out(small().apply(params, None, tokens, False))
    assert np.all(np.isnan(logits[1]))  # Of its example, and of no other.
    assert np.all(np.isfinite(logits[0])) and np.all(np.isfinite(logits[2]))


def test_more_tokens_than_the_context_are_refused(params):
    tokens = np.zeros((1, 17), np.int32)
    with pytest.raises(
        ConfigError, match="sees 16 tokens at once and was given 17"
    ) as e:
        small().apply(params, None, tokens, False)
    assert e.value.exit_code == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "1.5B"}, "preset='1.5B'; possible are 124M, 355M, 774M, 1558M"),
        ({"num_heads": 5}, "width=24, num_heads=5.*a multiple of num_heads"),
        ({"num_layers": 0}, "num_layers=0.*1 or more"),
        ({"dropout": 1.0}, "dropout=1.0; possible is 0 or more, and below 1"),
        ({"attention": "flash"}, "attention='flash'; possible are auto, xla, cudnn"),
    ],
)
def test_impossible_values_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        small(**options)


def test_what_is_given_goes_before_the_preset():
    params = shapes(gpt(100, preset="355M", num_layers=2, context=64))
    assert params["gpt/positions"]["embeddings"].shape == (64, 1024)
    assert "gpt/block_1/norm_1" in params and "gpt/block_2/norm_1" not in params


@pytest.mark.parametrize("options", [{"preset": "124M"}, SMALL])
def test_flops_are_six_for_each_parameter_and_those_of_attention(options):
    params = shapes(gpt(VOCABULARY, **options))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    context, width = params["gpt/positions"]["embeddings"].shape
    layers = sum(name.endswith("norm_1") for name in params)
    expected = 6 * (count - context * width) + 12 * layers * width * 7
    keys = options | {"dropout": 0.1}  # All keys of config.model may be given.
    assert gpt_flops_per_token(VOCABULARY, 7, **keys) == expected
    assert gpt_flops_per_token(VOCABULARY, **keys) == gpt_flops_per_token(
        VOCABULARY, context, **keys
    )
