import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits_resnet
from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.models import resnet
from haiku_template.models.precision import Precision
from haiku_template.training import Experiment, classification
from tests.runs import run_steps

pytestmark = pytest.mark.usefixtures("optimized")
RNG = np.random.default_rng(0)
DATA = Data(
    ArrayDataset(
        RNG.normal(size=(16, 8, 8, 1)).astype(np.float32),
        RNG.integers(0, 3, 16).astype(np.int32),
        BatchSpec(16),
    ),
    None,
    3,
)


def made(devices, precision, model=None, **options):
    model = model or resnet(3, devices.axis_name, channels=(4,), blocks=1)
    options = {"task": classification, "optimizer": optax.sgd(0.1)} | options
    return Experiment(model=model, data=DATA, precision=precision, **options).trainer(
        devices
    )


def run(trainer, num_steps):
    """Steps that leave shapes and dtypes of the state as they are."""
    state = trainer.init()
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    state, history = run_steps(trainer, num_steps, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    return state, history


@functools.cache
def losses_in(precision, num_devices):
    """Of eight steps; what a state keeps is in float32 whatever they compute in."""
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    state, history = run(made(devices, precision), 8)
    for leaf in jax.tree.leaves((state.params, state.net_state)):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    return [scalars["loss"] for scalars in history]


@pytest.mark.slow(but="one device-bfloat16")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_follows_float32_and_keeps_the_state_in_it(devices, precision):
    losses = losses_in(precision, devices.num_devices)
    expected = losses_in("float32", devices.num_devices)
    np.testing.assert_allclose(losses, expected, rtol=0.1)
    assert losses != expected  # Something was rounded.


@pytest.mark.slow(but="[float16")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_layers_see_half_precision_and_norms_float32(one_device, precision):
    seen = {}

    class Spy(hk.BatchNorm):
        def __call__(self, inputs, is_training, **kwargs):
            seen["norm"] = inputs.dtype
            return super().__call__(inputs, is_training, **kwargs)

    def forward(inputs, is_training):
        x = hk.Linear(4)(hk.Flatten()(inputs))
        seen["linear"] = x.dtype
        x = Spy(True, True, 0.9)(x, is_training)
        seen["after"] = x.dtype
        return hk.Linear(3)(x)

    trainer = made(one_device, precision, hk.transform_with_state(forward))
    state = trainer.init()
    trainer.step(state, one_device.shard(DATA.train.batch(0)))
    half = jnp.dtype(precision)
    assert seen == {"linear": half, "norm": jnp.float32, "after": half}


@pytest.mark.slow(but="four devices")
def test_an_overflow_skips_the_update_and_lowers_the_scale(devices):
    def forward(inputs, is_training):
        # With a loss scale of 2^15 the gradient overflows float16.
        return 2.0**12 * hk.Linear(3)(hk.Flatten()(inputs))

    trainer = made(
        devices, "float16", hk.transform(forward), optimizer=optax.adam(1e-3)
    )
    start = devices.fetch(trainer.init())
    state, (scalars,) = run(trainer, 1)
    state = devices.fetch(state)
    assert scalars["loss_scale"] == 2.0**14
    assert state.step == 1
    for a, b in zip(
        jax.tree.leaves((start.params, start.opt_state)),
        jax.tree.leaves((state.params, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    state, history = run(trainer, 20)
    assert history[-1]["loss_scale"] < 2.0**14
    assert np.any(
        devices.fetch(state.params)["linear"]["w"] != start.params["linear"]["w"]
    )


def test_in_training_nothing_keeps_norms_apart(one_device):
    """The flag that the package sets does; a barrier is for exported programs."""
    trainer = made(one_device, "bfloat16")
    state, batch = trainer.init(), one_device.shard(DATA.train.batch(0))
    step = trainer.functions().step
    program = str(jax.make_jaxpr(step)(state.without_frozen(), {}, batch))
    assert "rsqrt" in program and "optimization_barrier" not in program


def test_no_layer_class_is_changed_for_others(one_device):
    trainer = made(one_device, "bfloat16")
    state = trainer.init()
    trainer.step(state, one_device.shard(DATA.train.batch(0)))
    plain = hk.transform(lambda x: hk.Linear(2)(x))
    params = plain.init(jax.random.key(0), jnp.ones((1, 3)))
    assert plain.apply(params, None, jnp.ones((1, 3))).dtype == jnp.float32
    assert hk.mixed_precision.get_policy(hk.BatchNorm) is None


def test_an_unknown_precision_lists_the_known():
    with pytest.raises(ValueError, match="fp16.*float32, bfloat16, float16"):
        Precision.create("fp16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)]
)
def test_evaluation_in_half_precision_follows_float32(one_device, precision):
    config = digits_resnet.get_config()
    results = []
    for name in ("float32", precision):
        config.precision = name
        trainer = Experiment.from_config(config, one_device).trainer(one_device)
        state = trainer.init()
        for step in range(20):
            batch = one_device.shard(trainer.experiment.data.train.batch(step))
            state, _ = trainer.step(state, batch)
        results.append(trainer.evaluate(state, trainer.experiment.data.evaluation))
    assert results[1]["eval/loss"] == pytest.approx(results[0]["eval/loss"], rel=0.1)
    assert results[1]["eval/accuracy"] == pytest.approx(
        results[0]["eval/accuracy"], abs=0.1
    )


def quantized(inputs, is_training):
    """Like the codebook of a VQ-VAE: float32 state is what a convolution gets."""
    inputs = hk.nets.VectorQuantizerEMA(4, 8, 0.25, 0.99)(
        hk.Conv2D(4, 3)(inputs), is_training
    )["quantize"]
    return hk.Linear(3)(hk.Flatten()(hk.Conv2D(4, 3)(inputs)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_an_error_of_mixed_dtypes_names_the_precision(precision, one_device):
    images = np.ones((8, 4, 4, 1), np.float32)
    trainer = Experiment(
        model=hk.transform_with_state(quantized),
        task=classification,
        optimizer=optax.sgd(0.1),
        data=Data(ArrayDataset(images, np.zeros(8, np.int32), BatchSpec(8)), None, 3),
        precision=precision,
    ).trainer
    if precision == "float32":
        run_steps(trainer(one_device))
        return
    with pytest.raises(TypeError, match="same dtypes") as caught:
        run_steps(trainer(one_device))
    assert f"are cast to {precision}; network state is" in caught.value.__notes__[0]
