"""Each module of Haiku: its steps are those of a loop without this package.

On one device, and on four with all state sharded and all modules rematerialized.
"""

import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.models import remat
from haiku_template.params import flatten
from haiku_template.training import Experiment, classification
from tests.runs import run_steps

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4, 4, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 32).astype(np.int32)
DATA = from_split(Split(X, Y, X[:16], Y[:16]), BatchSpec(16))
STEPS, RATE = 3, 0.05


def in_time(core):
    """The last output of a recurrent core over the rows of an image."""

    def forward(x, is_training, axis):
        made, rows = core(), x.reshape(len(x), 4, -1).swapaxes(0, 1)
        state = made.initial_state(len(x))
        return hk.dynamic_unroll(made, rows, state)[0][-1]

    return forward


def over_images(core, *shape):
    """As `in_time`, of images of a shape, by a loop that is not rolled up."""

    def forward(x, is_training, axis):
        made, x = core(shape, 3, 3), x.reshape(len(x), *shape, 6)
        images = jnp.stack([x, x[:, ::-1]])
        return hk.static_unroll(made, images, made.initial_state(len(x)))[0][-1]

    return forward


def reset(x, is_training, axis):
    made, rows = hk.ResetCore(hk.GRU(4)), x.reshape(len(x), 4, -1).swapaxes(0, 1)
    begins = rows[..., 0] > 1
    return hk.dynamic_unroll(made, (rows, begins), made.initial_state(len(x)))[0][-1]


def convolution(name, *arguments, **keys):
    """A convolution of 1, 2 or 3 axes, as its name says."""
    shapes = {"1": (-1, 16, 6), "2": (-1, 4, 4, 6), "3": (-1, 4, 2, 2, 6)}
    shape = shapes[next(x for x in name if x.isdigit())]
    make = getattr(hk, name)
    return lambda x, *_: make(*arguments, **keys)(x.reshape(shape))


def module(make):
    """A module that maps images alone."""
    return lambda x, *_: make()(x)


def attention(x, *_):
    x = x.reshape(len(x), 4, -1)
    return hk.MultiHeadAttention(2, 3, w_init=hk.initializers.Orthogonal())(x, x, x)


def averages(x, is_training, axis):
    """State that each device would have of its own without the mesh axis."""
    mean = jax.lax.stop_gradient(x).mean()
    mean = mean if axis is None else jax.lax.pmean(mean, axis)
    return x * hk.ExponentialMovingAverage(0.9)(mean, update_stats=is_training)


def spectral(x, is_training, axis):
    w = hk.get_parameter("w", (6, 4), init=hk.initializers.RandomNormal(0.3))
    return x @ hk.SpectralNorm()(w, update_stats=is_training)


def batch_norm(x, is_training, axis):
    return hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis)(x, is_training)


def quantizer(make, *decay):
    def forward(x, is_training, axis):
        made = make(6, 8, 0.25, *decay, cross_replica_axis=axis)
        return made(x, is_training)["quantize"]  # Its loss is a share's.

    return forward


def embedding(x, *_):
    embed = hk.Embed(8, 4)
    tokens = jnp.clip(jnp.abs(x[..., 0]) * 4, 0, 7).astype(jnp.int32)
    return embed(tokens) @ embed.embeddings.T


def resnet(**keys):
    def forward(x, is_training, axis):
        keys["bn_config"] = {"decay_rate": 0.9, "cross_replica_axis": axis}
        net = hk.nets.ResNet((1, 1, 1, 1), 5, channels_per_group=(4, 4, 8, 8), **keys)
        return net(x, is_training)

    return forward


def mobile_net(x, is_training, axis):
    return hk.nets.MobileNetV1((1, 2), (4, 8), 5, use_bn=False)(x, is_training)


def scanned(x, *_):
    linear = hk.Linear(6)
    if hk.running_init():
        return linear(x)
    return hk.scan(lambda x, _: (jnp.tanh(linear(x)), None), x, None, length=3)[0]


def chosen(x, *_):
    one, other = hk.Linear(6), hk.Linear(6)
    if hk.running_init():
        return one(x) + other(x)
    x = hk.cond(x.shape[0] > 0, one, other, x)
    return hk.switch(1, [other, one], x)


def lifted(x, *_):
    inner = hk.transform(lambda x: hk.Linear(4)(x))
    params = hk.lift(inner.init, name="lifted")(hk.maybe_next_rng_key(), x)
    return inner.apply(params, None, x)


def with_getters(x, *_):
    double = lambda following, value, context: 2 * following(value)  # noqa: E731
    ones = lambda following, shape, dtype, init, context: following(  # noqa: E731
        shape, dtype, jnp.ones
    )
    with hk.custom_getter(double), hk.custom_creator(ones), hk.name_scope("scope"):
        return hk.Linear(4)(x)


def counted(x, is_training, axis):
    count = hk.get_state("count", (), jnp.int32, init=jnp.zeros)
    seen = hk.get_state("seen", (), jnp.bool_, init=jnp.zeros)
    if is_training:
        hk.set_state("count", count + 1)
        hk.set_state("seen", jnp.logical_or(seen, True))
    return x


NETS = {
    "AvgPool": module(lambda: hk.AvgPool((2, 2, 1), (2, 2, 1), "SAME")),
    "MaxPool": module(lambda: hk.MaxPool((2, 2, 1), (2, 2, 1), "SAME")),
    "BatchNorm": batch_norm,
    "Bias": module(hk.Bias),
    "Conv1D": convolution("Conv1D", 4, 3),
    "Conv1DLSTM": over_images(hk.Conv1DLSTM, 16),
    "Conv1DTranspose": convolution("Conv1DTranspose", 4, 3, 2),
    "Conv2D": convolution("Conv2D", 4, 3, feature_group_count=2),
    "Conv2DLSTM": over_images(hk.Conv2DLSTM, 4, 4),
    "Conv2DTranspose": convolution("Conv2DTranspose", 4, 3, 2),
    "Conv3D": convolution("Conv3D", 4, 3),
    "Conv3DLSTM": over_images(hk.Conv3DLSTM, 4, 2, 2),
    "Conv3DTranspose": convolution("Conv3DTranspose", 4, 3, 2),
    "ConvND": module(lambda: hk.ConvND(2, 4, 3)),
    "ConvNDTranspose": module(lambda: hk.ConvNDTranspose(2, 4, 3)),
    "DeepRNN": in_time(lambda: hk.DeepRNN([hk.LSTM(4), jax.nn.relu, hk.GRU(4)])),
    "DepthwiseConv1D": convolution("DepthwiseConv1D", 2, 3),
    "DepthwiseConv2D": convolution("DepthwiseConv2D", 2, 3),
    "DepthwiseConv3D": convolution("DepthwiseConv3D", 2, 3),
    "Embed": embedding,
    "ExponentialMovingAverage": averages,
    "Flatten": module(hk.Flatten),
    "GRU": in_time(lambda: hk.GRU(4)),
    "GroupNorm": module(lambda: hk.GroupNorm(2)),
    "IdentityCore": in_time(hk.IdentityCore),
    "InstanceNorm": module(lambda: hk.InstanceNorm(True, True)),
    "LSTM": in_time(lambda: hk.LSTM(4)),
    "LayerNorm": module(lambda: hk.LayerNorm(-1, True, True)),
    "Linear": module(lambda: hk.Linear(4)),
    "MLP": module(lambda: hk.nets.MLP([4, 5])),
    "MobileNetV1": mobile_net,
    "MultiHeadAttention": attention,
    "RMSNorm": module(lambda: hk.RMSNorm(-1)),
    "ResNet": resnet(bottleneck=True),
    "ResNet of version 2": resnet(resnet_v2=True, bottleneck=False),
    "ResetCore": reset,
    "Reshape": module(lambda: hk.Reshape((2, -1))),
    "SeparableDepthwiseConv2D": module(lambda: hk.SeparableDepthwiseConv2D(2, 3)),
    "Sequential": module(lambda: hk.Sequential([hk.Linear(4), jnp.tanh])),
    "SpectralNorm": spectral,
    "VanillaRNN": in_time(lambda: hk.VanillaRNN(4)),
    "VectorQuantizer": quantizer(hk.nets.VectorQuantizer),
    "VectorQuantizerEMA": quantizer(hk.nets.VectorQuantizerEMA, 0.9),
    # Not modules, but what they are put together with.
    "cond and switch": chosen,
    "getters": with_getters,
    "layer_stack": lambda x, *_: hk.layer_stack(3)(lambda x: x + hk.Linear(6)(x))(x),
    "lift": lifted,
    "map": lambda x, *_: hk.map(hk.Linear(4), x),
    "remat": lambda x, *_: hk.remat(hk.Linear(4))(x),
    "scan": scanned,
    "state of other dtypes": counted,
    "vmap": lambda x, *_: hk.vmap(hk.Linear(4), split_rng=False)(x),
}
# Abstract, of the tree of another model, or a ResNet of larger sizes.
NO_NETS = {"EMAParamsTree", "Module", "RNNCore", "SNParamsTree"}
NO_NETS |= {f"ResNet{depth}" for depth in (18, 34, 50, 101, 152, 200)}
QUICK = ("BatchNorm", "LSTM", "VectorQuantizerEMA", "layer_stack", "lift")


def model_of(name, axis):
    def forward(inputs, is_training):
        features = NETS[name](inputs, is_training, axis)
        return hk.Linear(3, name="head")(features.reshape(len(inputs), -1))

    return hk.transform_with_state(forward)


def trained(name, devices, change=lambda model: model, **options):
    """Parameters and network state after some steps, and those before them."""
    trainer = Experiment(
        model=change(model_of(name, devices.axis_name)),
        task=classification,
        data=DATA,
        optimizer=optax.sgd(RATE),
        **options,
    ).trainer(devices)
    first = trainer.init()
    before = devices.fetch((first.params, first.net_state))
    state, _ = run_steps(trainer, STEPS, first)
    return devices.fetch((state.params, state.net_state)), before


def by_hand(name, params, net_state):
    """The same steps, without this package."""
    net, optimizer = model_of(name, None), optax.sgd(RATE)

    @jax.jit
    def step(params, net_state, opt_state, inputs, labels):
        def loss(params):
            logits, new = net.apply(params, net_state, None, inputs, True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), new

        grads, net_state = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), net_state, opt_state

    opt_state = optimizer.init(params)
    for i in range(STEPS):
        batch = DATA.train.batch(i)
        state = params, net_state, opt_state
        params, net_state, opt_state = step(*state, batch["inputs"], batch["labels"])
    return params, net_state


def assert_close(got, expected, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for path, x in flatten(expected).items():
        y = flatten(got)[path]
        np.testing.assert_allclose(y, x, rtol=tolerance, atol=tolerance, err_msg=path)


def test_no_module_of_haiku_is_left_out():
    found = {
        name
        for room in (hk, hk.nets)
        for name, x in inspect.getmembers(room, inspect.isclass)
        if issubclass(x, hk.Module)
    }
    assert len(found) > 40 and found == {*NETS} & found | NO_NETS


@pytest.mark.parametrize(
    "name",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in NETS],
)
def test_its_steps_are_those_of_a_loop_by_hand(name, one_device, four_devices):
    one, before = trained(name, one_device)
    assert_close(one, by_hand(name, *before), 2e-6)
    everything = (("*", "data"),)
    again = lambda model: remat(model, ("*",))  # noqa: E731
    assert_close(trained(name, four_devices, again, sharding=everything)[0], one, 1e-5)
