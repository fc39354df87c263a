"""Adapters of tensors that are no matrices: AlphaFold's attention, convolutions."""

import functools
import logging

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import check_replicas
from haiku_template.errors import ConfigError
from haiku_template.finetuning.adapters import load_adapters, save_adapters
from haiku_template.finetuning.lora import A, B, Lora, adapt, init_adapters
from haiku_template.finetuning.plan import Finetuning, make_plan
from haiku_template.params import flatten
from haiku_template.runs import train
from haiku_template.training import Experiment, classification
from tests.runs import changed, run_steps

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(16, 6, 6, 3)).astype(np.float32)
LABELS = RNG.integers(0, 3, 16).astype(np.int32)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(8)), EvaluationSet(INPUTS, LABELS, 8), 3
)
AXES = (
    ("*/query_w", "in out out"),
    ("*/output_w", "in in out"),
    ("stack/w", "each in out"),
)
CONVOLUTIONS = ("conv*/w", "depthwise*/w")
LORA = Lora(rank=2, alpha=4.0, patterns=("linear/w", *CONVOLUTIONS), axes=AXES)
KNOWN = {
    "conv1_d/w": "in in out",
    "conv2_d/w": "in in in out",
    "conv2_d_transpose/w": "in in out in",
    "depthwise_conv2_d/w": "in in in out",
}


class Attention(hk.Module):
    """Weights in the axes that AlphaFold's have: [C, H, K] and [H, K, C]."""

    def __call__(self, x):  # [B, T, C]
        normal = hk.initializers.RandomNormal(0.3)
        width = x.shape[-1]
        query = hk.get_parameter("query_w", (width, 2, 4), init=normal)
        output = hk.get_parameter("output_w", (2, 4, width), init=normal)
        heads = jnp.tanh(jnp.einsum("btc,chk->bthk", x, query))
        return x + jnp.einsum("bthk,hkc->btc", heads, output)


class Stack(hk.Module):
    """Weights of three layers in one tensor [3, C, C], as `hk.layer_stack` has them."""

    def __call__(self, x):
        normal, width = hk.initializers.RandomNormal(0.3), x.shape[-1]
        layers = hk.get_parameter("w", (3, width, width), init=normal)
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, layers)[0]


def forward(images):
    x = jax.nn.relu(hk.Conv2D(8, 3, stride=2)(images))
    x = hk.DepthwiseConv2D(1, 3)(x)
    x = jax.nn.relu(hk.Conv2DTranspose(8, 2)(x))
    x = hk.Conv1D(8, 3)(x.reshape(len(x), -1, 8))
    x = Stack(name="stack")(Attention()(x))
    return hk.Linear(3)(x.mean(1))


MODEL = hk.without_apply_rng(hk.transform(forward))


@functools.cache
def made(devices, **options):
    """A trainer, which compiles its step once for all tests."""
    return Experiment(
        model=MODEL,
        task=classification,
        data=DATA,
        finetuning=Finetuning(lora=LORA),
        optimizer=optax.adam(1e-2),
        **options,
    ).trainer(devices)


def bits(tree):
    return {path: np.asarray(x).tobytes() for path, x in flatten(tree).items()}


def test_the_axes_of_haikus_convolutions_are_known_and_others_are_named(one_device):
    plan = made(one_device).recipe.plan
    named = {"attention/query_w": "in out out", "attention/output_w": "in in out"}
    assert dict(plan.lora.axes) == KNOWN | named | {"stack/w": "each in out"}
    assert plan.adapted == {*dict(plan.lora.axes), "linear/w"}
    shapes = {k: x.shape for k, x in flatten(made(one_device).abstract.params).items()}
    assert shapes["attention/query_w" + A] == (8, 2)
    assert shapes["attention/query_w" + B] == (2, 8)
    assert shapes["attention/output_w" + A] == (8, 2)
    assert shapes["stack/w" + A] == (3, 8, 2)
    assert shapes["conv2_d/w" + A] == (27, 2)
    assert shapes["depthwise_conv2_d/w" + A] == (9, 2)  # An input each, and the kernel.
    assert shapes["conv2_d_transpose/w" + B] == (2, 8)


@pytest.mark.parametrize(
    ("axes", "shape", "factors"),
    [
        ("in out", (5, 4), "ir,ro->io"),
        ("out in", (4, 5), "ir,ro->oi"),
        ("in out out", (5, 2, 3), "cr,rhk->chk"),
        ("in in out", (2, 3, 5), "hkr,rc->hkc"),
        ("in out in", (2, 5, 3), "abr,ro->aob"),
        ("in in out in", (2, 3, 5, 4), "hwir,ro->hwoi"),
        ("each in out", (3, 5, 4), "lir,lro->lio"),
        ("in each out out", (5, 3, 2, 4), "lir,lrhk->ilhk"),
    ],
)
def test_a_change_is_the_product_of_its_factors_in_the_axes_of_the_tensor(
    axes, shape, factors
):
    lora = Lora(rank=2, alpha=6.0, axes=(("m/w", axes),))
    made = init_adapters(lora, {"m/w": shape}, jax.random.key(0))
    assert not made["m/w" + B].any() and made["m/w" + A].all()
    b = jax.random.normal(jax.random.key(1), made["m/w" + B].shape)
    leaves = made | {"m/w": jnp.ones(shape), "m/w" + B: b}
    found = adapt(lora, ["m/w"], leaves, None, np.float32)["m/w"].use(np.float32)
    given, whole = factors.split("->")
    sizes = dict(zip(whole, shape, strict=True)) | {"r": 2}
    parts = [
        np.asarray(leaves["m/w" + suffix]).reshape([sizes[x] for x in letters])
        for suffix, letters in zip((A, B), given.split(","), strict=True)
    ]
    expected = 1 + 3 * np.einsum(factors, *parts)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.linalg.matrix_rank(parts[0].reshape(-1, 2)) == 2


def test_dropout_is_of_the_rows_of_each_a():
    lora = Lora(rank=2, dropout=0.5, axes=(("m/w", "each in out"),))
    shape = (3, 40, 4)
    leaves = init_adapters(lora, {"m/w": shape}, jax.random.key(0))
    leaves |= {"m/w": jnp.zeros(shape), "m/w" + B: jnp.ones((3, 2, 4))}
    adapted = adapt(lora, ["m/w"], leaves, jax.random.key(1), np.float32)["m/w"]
    dropped = ~adapted.use(np.float32).any(axis=2)
    assert (dropped.sum(axis=1) > 10).all() and (dropped.sum(axis=1) < 30).all()
    assert (dropped[0] != dropped[1]).any()


@pytest.mark.slow
def test_merged_equals_unmerged_and_what_is_frozen_stays_bitwise(devices):
    trainer = made(devices)
    first = bits(devices.fetch(trainer.init().frozen))
    before = trainer.evaluate(trainer.init())
    state, _ = run_steps(trainer, 20)
    check_replicas(state)
    assert bits(devices.fetch(state.frozen)) == first
    for path, leaf in flatten(devices.fetch(state.params)).items():
        assert leaf.any(), path
    whole = changed(trainer, finetuning=Finetuning())
    merged, _ = trainer.merged(state)
    plain = whole.init()._replace(params=merged)
    assert jax.tree.structure(merged) == jax.tree.structure(whole.abstract.params)
    expected = trainer.evaluate(state)
    assert whole.evaluate(plain) == pytest.approx(expected, abs=1e-6)
    assert expected["eval/loss"] < before["eval/loss"] - 0.01


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_its_adapters_come_back_bitwise(tmp_path, one_device):
    trainer = made(one_device)
    whole = train(trainer, workdir=tmp_path / "whole", num_steps=4).state
    train(trainer, workdir=tmp_path / "parts", num_steps=2)
    state = train(trainer, workdir=tmp_path / "parts", num_steps=4).state
    assert bits(state.params) == bits(whole.params)
    file, lora = tmp_path / "adapters.safetensors", trainer.recipe.plan.lora
    save_adapters(file, state.params, state.frozen, lora, one_device, step=4)
    parts = trainer.abstract.params, state.frozen
    loaded = load_adapters(file, *parts, lora, one_device)
    assert bits(loaded) == bits(state.params)
    # Of the same shapes, but of other axes.
    other = dict(lora.axes) | {"attention/query_w": "out in out"}
    lora = lora._replace(axes=tuple(sorted(other.items())))
    with pytest.raises(ConfigError, match=r"have axes .*'in out out'.* it is .*'out i"):
        load_adapters(file, *parts, lora, one_device)


SHAPES = {
    "a/attention": {"query_w": jax.ShapeDtypeStruct((8, 2, 4), jnp.float32)},
    "a/linear": {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)},
    "a/conv": {"w": jax.ShapeDtypeStruct((3, 3, 8, 4), jnp.float32)},
}


@pytest.mark.parametrize(
    ("patterns", "axes", "words"),
    [
        (
            ("*/query_w",),
            (),
            r"a/attention/query_w \[8, 2, 4\] is neither .* which of its axes are "
            r"inputs; possible are config.finetuning.lora.axes=\(\('a/attention/query_w"
            r"', 'in out out'\),\), 'in in out', and for a stack .* 'each in out'",
        ),
        (("*/conv/w",), (), r"a/conv/w \[3, 3, 8, 4\] .* 'each in in out'"),
        ((), (("*/query", "in out"),), r"lora.axes .*'\*/query' fits none of the 3"),
        (
            (),
            (("*/query_w", "in out"),),
            r"'in out'\) is for 2 axes, and a/attention/query_w has the shape ",
        ),
        (
            (),
            (("*/query_w", "c h k"),),
            "a word for each axis of a tensor, each, in, o",
        ),
        ((), (("*/query_w", "in in in"),), "a word for each axis"),
        ((), (("*/query_w",),), "each is a pattern and a word"),
        (("*/key_w",), (("*/query_w", "in out out"),), r"'\*/key_w' fits none of the"),
    ],
)
def test_what_is_not_known_is_said_in_one_sentence(patterns, axes, words):
    lora = Lora(rank=2, patterns=patterns, axes=axes)
    with pytest.raises(ConfigError, match=words) as error:
        make_plan(Finetuning(lora=lora), SHAPES)
    assert "\n" not in str(error.value)


def test_a_pattern_that_fits_matrices_means_them_and_says_what_it_leaves(caplog):
    with caplog.at_level(logging.WARNING):
        plan = make_plan(Finetuning(lora=Lora(rank=2)), SHAPES, {"a/conv/w": "x"})
    assert plan.adapted == {"a/linear/w"} and plan.lora.axes == ()
    words = "'*/w' fits 1 parameter of more than two axes, too (a/conv/w [3, 3, 8, 4])"
    assert words in caplog.text
    caplog.clear()
    axes = (("*/conv/w", "in in in out"), ("*/w", "out out in in"))
    plan = make_plan(Finetuning(lora=Lora(rank=2, axes=axes)), SHAPES)
    assert plan.adapted == {"a/linear/w", "a/conv/w"} and not caplog.text
    assert plan.lora.axes == (("a/conv/w", "in in in out"),)  # The first that fits.


class Layer(hk.Module):
    """A layer whose parameters have AlphaFold's names."""

    def __call__(self, x):
        w = hk.get_parameter("output_w", (6, 6), init=hk.initializers.Orthogonal())
        return x + x @ w + hk.get_parameter("output_b", (6,), init=jnp.zeros)


def test_a_bias_of_a_stack_of_layers_is_no_matrix(one_device):
    def stacked(images):
        x = hk.Bias(bias_dims=[1, 2], name="table")(images.mean(3)).mean(1)
        x = hk.layer_stack(3)(lambda x: Layer(name="layer")(jnp.tanh(x)))(x)
        return hk.Linear(3)(x)

    trainer = Experiment(
        model=hk.without_apply_rng(hk.transform(stacked)),
        task=classification,
        data=DATA,
        finetuning=Finetuning(
            lora=Lora(2, patterns=("*",), axes=(("*/layer/output_w", "each in out"),))
        ),
        optimizer=optax.adam(1e-2),
    ).trainer(one_device)
    adapted = {path.rpartition("/")[2] for path in trainer.recipe.plan.adapted}
    assert adapted == {"output_w", "w", "b"} and len(trainer.recipe.plan.adapted) == 3
    params = flatten(run_steps(trainer, 2)[0].params)
    assert all(np.any(x) for path, x in params.items() if path.endswith(B))


def test_adapters_are_float32_also_where_others_are_not():
    shapes = {"a/w": (4, 3), "b/w": (0, 3)}
    with jax.enable_x64(True):
        adapters = init_adapters(Lora(2), shapes, jax.random.key(0))
    assert {x.dtype for x in adapters.values()} == {np.dtype("float32")}
