"""The ResNet: shapes, and whose statistics its normalisation uses."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest

from haiku_template.models import resnet

SMALL = {"channels": (4, 8), "blocks": 1}
# Each example larger than the one before, so that devices' shares differ in mean.
STEPS = np.random.default_rng(0).normal(size=(2, 8, 8, 8, 3)).astype(np.float32)
STEPS *= np.linspace(0.5, 4, 8, dtype=np.float32)[:, None, None, None]


@functools.cache
def train(devices, axis_name):
    """Outputs [steps, B, K] in training on `STEPS`, and the last network state."""
    model = resnet(5, axis_name, **SMALL)

    def step(variables, inputs):
        outputs, net_state = model.apply(*variables, None, inputs, True)
        if devices.axis_name is not None:
            outputs = jax.lax.all_gather(outputs, devices.axis_name, tiled=True)
        return outputs, net_state

    params, net_state = devices.init(
        lambda key: model.init(key, STEPS[0], True), jax.random.key(0)
    )
    compiled = devices.compile(step, donate_argnums=())
    rows = []
    for inputs in STEPS:
        outputs, net_state = jax.block_until_ready(
            compiled((params, net_state), devices.shard(inputs))
        )
        rows.append(devices.fetch(outputs))
    # Of one device: without the axis name they differ.
    return np.stack(rows), jax.tree.map(
        lambda leaf: np.asarray(leaf.addressable_data(0)), net_state
    )


def init(model):
    return jax.jit(model.init, static_argnums=2)(jax.random.key(0), STEPS[0], True)


def abstract_init(model):
    """Shapes of the parameters and the network state; nothing is computed."""
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), STEPS[0])


def largest_difference(tree, other):
    differences = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), tree, other)
    return max(jax.tree.leaves(differences))


@pytest.fixture(scope="module")
def trained():
    """Parameters and a network state that has seen batches, on one device."""
    model = resnet(5, **SMALL)
    params, net_state = init(model)
    apply = jax.jit(model.apply, static_argnums=4)
    for inputs in STEPS:
        _, net_state = apply(params, net_state, None, inputs, True)
    return apply, params, net_state


@pytest.mark.parametrize("num_outputs", [1, 7])
@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (3, 7, 5, 1)])
def test_outputs_are_one_row_an_example(shape, num_outputs):
    model = resnet(num_outputs, channels=(4, 8, 16), blocks=2)

    def forward(inputs):
        params, net_state = model.init(jax.random.key(0), inputs, True)
        return [
            model.apply(params, net_state, None, inputs, is_training)[0]
            for is_training in (True, False)
        ]

    for outputs in jax.eval_shape(forward, np.ones(shape, np.float32)):
        assert outputs.shape == (shape[0], num_outputs)


def test_each_group_after_the_first_halves_height_and_width():
    shapes = []

    def record(call, args, kwargs, context):
        outputs = call(*args, **kwargs)
        group = isinstance(context.module, hk.nets.ResNet.BlockGroup)
        if group and context.method_name == "__call__":
            shapes.append(outputs.shape)
        return outputs

    model = resnet(5, channels=(4, 8, 16), blocks=1)
    with hk.intercept_methods(record):
        abstract_init(model)
    assert shapes == [(8, 8, 8, 4), (8, 4, 4, 8), (8, 2, 2, 16)]


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_have_two_convolutions_each(blocks):
    model = resnet(5, channels=(4, 8), blocks=blocks)
    params, _ = abstract_init(model)
    kernels = [layer["w"] for layer in params.values() if "w" in layer]
    # The stem, the blocks of two groups, the projection of the second, and the head.
    assert len(kernels) == 1 + 2 * 2 * blocks + 1 + 1


def test_running_statistics_decay_as_asked():
    model = resnet(5, channels=(4,), blocks=1, norm_decay=0.75)
    params, start = init(model)
    apply = jax.jit(lambda state, x: model.apply(params, state, None, x, True)[1])

    def averages(net_state):
        return [state["average"] for state in net_state.values()]

    first, second = apply(start, STEPS[0]), apply(start, STEPS[1])
    expected = [
        (0.75 * a + b) / (0.75 + 1)
        for a, b in zip(averages(first), averages(second), strict=True)
    ]
    assert largest_difference(averages(apply(first, STEPS[1])), expected) < 1e-5


@pytest.mark.slow
def test_four_devices_give_the_outputs_and_statistics_of_one(one_device, four_devices):
    outputs, net_state = train(one_device, one_device.axis_name)
    outputs_of_four, net_state_of_four = train(four_devices, four_devices.axis_name)
    np.testing.assert_allclose(outputs_of_four, outputs, atol=1e-5)
    assert largest_difference(net_state_of_four, net_state) < 1e-5


@pytest.mark.slow
def test_without_the_axis_name_four_devices_give_others(one_device, four_devices):
    outputs, net_state = train(one_device, None)
    outputs_of_four, net_state_of_four = train(four_devices, None)
    assert np.max(np.abs(outputs_of_four - outputs)) > 1e-2
    assert largest_difference(net_state_of_four, net_state) > 1e-2


def test_in_evaluation_an_example_does_not_depend_on_its_batch(trained):
    apply, params, net_state = trained
    whole, _ = apply(params, net_state, None, STEPS[0], False)
    alone, _ = apply(params, net_state, None, STEPS[0][3:4], False)
    np.testing.assert_allclose(whole[3:4], alone, atol=1e-5)


def test_in_training_an_example_depends_on_its_batch(trained):
    apply, params, net_state = trained
    whole, _ = apply(params, net_state, None, STEPS[0], True)
    part, _ = apply(params, net_state, None, STEPS[0][:4], True)
    assert np.max(np.abs(whole[:4] - part)) > 1e-2


def test_evaluation_leaves_the_running_statistics_as_they_are(trained):
    apply, params, net_state = trained
    _, after = apply(params, net_state, None, STEPS[1], False)
    assert largest_difference(after, net_state) == 0
    _, after = apply(params, net_state, None, STEPS[1], True)
    assert largest_difference(after, net_state) > 1e-3


def test_every_running_statistic_counts_in_evaluation(trained):
    apply, params, net_state = trained
    outputs, _ = apply(params, net_state, None, STEPS[0], False)
    # A mean and a variance each: the stem's norm, two a block, one a projection.
    assert len(net_state) == 2 * (1 + 2 + 3)
    for module, state in net_state.items():
        other = {**state, "average": np.full_like(state["average"], 9)}
        moved, _ = apply(params, {**net_state, module: other}, None, STEPS[0], False)
        assert np.max(np.abs(moved - outputs)) > 1e-4, module


@pytest.mark.parametrize(
    "keys",
    [
        {"channels": ()},
        {"channels": 4},
        {"channels": (0,)},
        {"channels": (8.5,)},
        {"channels": "ab"},
        {"blocks": 0},
        {"norm_decay": 1.5},
        {"norm_decay": -1.0},
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(keys):
    with pytest.raises(ValueError, match=r"are not all possible: channels are one or"):
        resnet(10, **keys)
