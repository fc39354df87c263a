"""Parameters that are sharded are gathered where the model asks for them."""

import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.finetuning import Finetuning, Lora
from haiku_template.models import resnet
from haiku_template.params import flatten
from haiku_template.training import Experiment, classification
from haiku_text import models as text_models
from haiku_text import tasks as text_tasks
from tests.runs import run_steps

RNG = np.random.default_rng(0)
WIDTH = 128  # A matrix of 64 KiB, which is not gathered before the step.
INPUTS = RNG.normal(size=(48, WIDTH)).astype(np.float32)
LABELS = RNG.integers(0, 4, 48).astype(np.int32)
ALL = (("*", "data"),)
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


def data_of(inputs, labels, outputs, batch_size=24):
    spec = BatchSpec(batch_size)
    evaluation = EvaluationSet(inputs, labels, batch_size)
    return Data(ArrayDataset(inputs, labels, spec), evaluation, outputs)


def layer(x, name="layer"):
    return x + jnp.tanh(hk.Linear(WIDTH, name=name)(x))


def plain(x):
    return hk.Linear(4)(layer(layer(x)))


def shared(x):
    same = hk.Linear(WIDTH, name="same")
    return hk.Linear(4)(jnp.tanh(same(jnp.tanh(same(x)))))


def stacked(x):
    return hk.Linear(4)(hk.experimental.layer_stack(4)(layer)(x))


def scanned(x):
    body = hk.remat(lambda x: layer(x))
    return hk.Linear(4)(hk.experimental.layer_stack(3)(body)(x))


def looped(x):
    same = hk.Linear(WIDTH, name="same")
    x, _ = hk.scan(lambda x, _: (x + jnp.tanh(same(x)), None), x, None, length=3)
    return hk.Linear(4)(x)


def top_level(x):
    w = hk.get_parameter("w", (WIDTH, WIDTH), init=hk.initializers.RandomNormal(0.1))
    return hk.Linear(4)(jnp.tanh(x @ w))


def lifted(x):
    inner = hk.transform(layer)
    params = hk.lift(inner.init, name="lifted")(hk.maybe_next_rng_key(), x)
    return hk.Linear(4)(inner.apply(params, None, x))


def rematerialized(x):
    return hk.Linear(4)(hk.remat(lambda x: layer(layer(x)))(x))


FORWARDS = [plain, shared, stacked, scanned, looped, top_level, lifted]
FORWARDS += [rematerialized]


def losses(num_devices, steps=20, sharding=(), **parts):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    defaults = {
        "task": classification,
        "data": data_of(INPUTS, LABELS, 4),
        "optimizer": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)),
    }
    trainer = Experiment(**defaults | parts, sharding=sharding).trainer(devices)
    state, history = run_steps(trainer, steps)
    rows = [(float(x["loss"]), float(x["grad_norm"])) for x in history]
    return trainer, state, np.array(rows)


def model_of(forward):
    return hk.without_apply_rng(hk.transform(forward))


@pytest.mark.slow(but="stacked")
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_twenty_steps_are_those_of_one_device(forward):
    one, state, expected = losses(1, model=model_of(forward))
    trainer, sharded, found = losses(4, model=model_of(forward), sharding=ALL)
    assert any(x.sharding.spec for x in jax.tree.leaves(sharded.params))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    for path, leaf in flatten(state.params).items():
        np.testing.assert_allclose(flatten(sharded.params)[path], leaf, atol=2e-5)
    evaluation = one.evaluate(state)
    assert trainer.evaluate(sharded) == pytest.approx(evaluation, abs=2e-6)
    outputs = np.concatenate([*one.predict(state)])
    np.testing.assert_allclose(
        np.concatenate([*trainer.predict(sharded)]), outputs, atol=2e-5
    )


OPTIONS = {
    "accumulation": {"accumulate_steps": 3},
    "averages": {"ema_decay": 0.9},
    "muon": {"optimizer": optax.contrib.muon(1e-3)},
    "adafactor": {"optimizer": optax.adafactor(1e-3)},
}


@pytest.mark.slow(but="accumulation")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_give_the_numbers_of_one_device(options):
    _, _, expected = losses(1, 8, model=model_of(plain), **options)
    _, _, found = losses(4, 8, model=model_of(plain), sharding=ALL, **options)
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=2e-6)


@pytest.mark.slow(but="[float16")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_gathers_half_the_bytes(precision):
    options = {"model": model_of(plain), "precision": precision}
    _, _, expected = losses(4, 5, **options)
    trainer, _, found = losses(4, 5, sharding=ALL, **options)
    np.testing.assert_allclose(found, expected, rtol=0.05)
    program = trainer.trace(trainer.feed.host_shapes()[0]).jaxpr.pretty_print()
    short = {"bfloat16": "bf16", "float16": "f16"}[precision]
    assert f":{short}[{WIDTH},{WIDTH}] = all_gather[" in program
    assert f":f32[{WIDTH},{WIDTH}] = all_gather[" not in program


def program_of(trainer):
    return trainer.trace(trainer.feed.host_shapes()[0]).lower().compile().as_text()


def counts(text):
    return {x: len(re.findall(rf" {x}(?:-start)?\(", text)) for x in COLLECTIVES}


def test_each_pass_gathers_a_parameter_once_and_scatters_its_gradient_once():
    """In the backward pass again only where a block is rematerialized."""
    bare = [("layer", "w"), ("layer_1", "w")]
    trainer, _, _ = losses(4, 1, model=model_of(plain), sharding=ALL)
    specs = trainer.specs.params
    shares = [(m, n) for m, leaves in specs.items() for n, x in leaves.items() if x]
    assert shares == bare
    text = program_of(trainer)
    matrix = rf"f32\[{WIDTH},{WIDTH}\]\S* all-gather\("
    assert len(re.findall(matrix, text)) == 2
    assert counts(text)["reduce-scatter"] == 2
    assert not re.search(rf"f32\[{WIDTH},{WIDTH}\]\S* all-reduce\(", text)


def test_a_rematerialized_block_gathers_again_and_keeps_nothing_whole():
    trainer, _, _ = losses(4, 1, model=model_of(rematerialized), sharding=ALL)
    # As lowered: on CPUs XLA of jax 0.10 makes one gather of two.
    lowered = trainer.trace(trainer.feed.host_shapes()[0]).lower().as_text()
    matrix = rf"all_gather.*-> tensor<{WIDTH}x{WIDTH}xf32>"
    assert len(re.findall(matrix, lowered)) == 4
    text = program_of(trainer)
    assert counts(text)["reduce-scatter"] == 2
    assert not re.search(rf"f32\[{WIDTH},{WIDTH}\]\S* all-reduce\(", text)


@pytest.mark.parametrize("forward", [plain, rematerialized], ids=lambda f: f.__name__)
def test_micro_batches_gather_anew_and_hold_nothing_whole_between(forward):
    """Else XLA's CPU compiler would gather once, before the loop over them."""
    options = {"model": model_of(forward), "accumulate_steps": 3}
    trainer, _, _ = losses(4, 1, sharding=ALL, **options)
    matrix, computation, places = rf"f32\[{WIDTH},{WIDTH}\]", "", {}
    for line in program_of(trainer).splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0]
        if re.search(rf"{matrix}\S* all-gather\(", line):
            places[computation] = places.get(computation, 0) + 1
        assert not (" while(" in line and re.search(matrix, line))
    passes = {2} if forward is plain else {2, 4}  # Some XLA computes nothing again.
    assert len(places) == 2  # In the loop, and after it.
    assert len({*places.values()}) == 1 and {*places.values()} <= passes
    assert "ENTRY" in places


def test_one_device_has_the_program_without_a_layout():
    programs = []
    for rules in ((), ALL):
        trainer, _, _ = losses(1, 1, model=model_of(plain), sharding=rules)
        programs.append(trainer.trace(trainer.feed.host_shapes()[0]).lower().as_text())
    assert programs[0] == programs[1]


def test_arguments_are_a_share_of_the_state():
    sizes = []
    for rules in ((), ALL):
        trainer, _, _ = losses(4, 1, model=model_of(plain), sharding=rules)
        compiled = trainer.trace(trainer.feed.host_shapes()[0]).lower().compile()
        sizes.append(compiled.memory_analysis().argument_size_in_bytes)
    state, frozen = trainer.abstract.without_frozen(), trainer.abstract.frozen
    assert not frozen
    of_state = [x.size * x.dtype.itemsize for x in jax.tree.leaves(state)]
    whole = [
        size
        for size, x in zip(of_state, jax.tree.leaves(state), strict=True)
        if x.sharding.is_fully_replicated
    ]
    assert 0 < sum(whole) < 100  # The step, Adam's count, a bias of 4 and its moments.
    others = sizes[0] - sum(of_state)  # The batch, and the number of steps.
    assert sizes[1] - others <= sum(of_state) / 4 + sum(whole)


@pytest.mark.slow
def test_a_resnet_with_norms_over_the_batch(monkeypatch):
    # An input of a ReLU that is zero but for rounding made one norm of forty differ by
    # 5e-5, and in another set of images all later losses by 1e-5.
    monkeypatch.setattr(jax.nn, "relu", jax.nn.gelu)
    images = RNG.normal(size=(48, 8, 8, 3)).astype(np.float32)
    parts = {
        "model": resnet(num_outputs=4, axis_name="data", channels=(32, 64), blocks=1),
        "data": data_of(images, LABELS, 4),
        "optimizer": optax.sgd(1e-2),
    }
    _, _, found = losses(4, sharding=ALL, **parts)
    _, _, replicated = losses(4, **parts)
    np.testing.assert_allclose(found, replicated, rtol=2e-6)
    parts["model"] = resnet(num_outputs=4, axis_name=None, channels=(32, 64), blocks=1)
    _, _, expected = losses(1, **parts)
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=2e-6)


@pytest.mark.slow
def test_digits_lose_what_they_lose_on_one_device():
    histories = []
    for num_devices, rules in ((1, ()), (4, ALL)):
        config = digits.get_config()
        config.sharding = rules
        devices = DeviceManager.create("cpu", num_devices=num_devices)
        trainer = Experiment.from_config(config, devices).trainer(devices)
        histories.append([float(x["loss"]) for x in run_steps(trainer, 20)[1]])
    np.testing.assert_allclose(*histories, rtol=2e-6)


TOKENS = RNG.integers(0, 64, (48, 16)).astype(np.int32)


def gpt(**options):
    sizes = {"width": WIDTH, "num_layers": 2, "num_heads": 2, "context": 16}
    return {
        "model": text_models.gpt(
            num_outputs=64, axis_name=None, dropout=0.0, **sizes, **options
        ),
        "task": text_tasks.language_model,
        "data": data_of(TOKENS, TOKENS, 64),
    }


@pytest.mark.slow(but="whole")
@pytest.mark.parametrize("remat", [False, True], ids=["whole", "remat"])
def test_a_language_model(remat):
    _, _, expected = losses(1, **gpt(remat=remat))
    _, _, found = losses(4, sharding=ALL, **gpt(remat=remat))
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=2e-6)
    np.testing.assert_allclose(found, expected, rtol=5e-6)


LORA = Lora(rank=4, dropout=0.0)


@pytest.mark.slow(but="int8")
@pytest.mark.parametrize("dtype", ["float32", "int8", "nf4"])
def test_frozen_parameters_are_sharded_in_their_form(dtype):
    tuning = Finetuning(lora=LORA, base_dtype=dtype)
    parts = {"model": model_of(plain), "finetuning": tuning}
    one, state, expected = losses(1, 8, **parts)
    trainer, sharded, found = losses(4, 8, sharding=ALL, **parts)
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=2e-6)
    leaves = flatten(sharded.frozen)
    large = [k for k, x in leaves.items() if x.nbytes >= 2**14]
    assert large or dtype == "nf4"
    assert all(leaves[k].sharding.spec for k in large)
    merged, expected_merged = trainer.merged(sharded)[0], one.merged(state)[0]
    for path, leaf in flatten(expected_merged).items():
        np.testing.assert_allclose(
            np.asarray(flatten(merged)[path], np.float32),
            np.asarray(leaf, np.float32),
            atol=1e-5,
        )


def test_a_custom_step_sees_whole_parameters():
    def step(state, batch, axis_name):
        shapes = [x.shape for x in jax.tree.leaves(state.params)]
        assert (WIDTH, WIDTH) in shapes
        return state, {"loss": jnp.float32(0)}

    devices = DeviceManager.create("cpu", num_devices=4)
    experiment = Experiment(
        model=model_of(plain),
        task=classification,
        data=data_of(INPUTS, LABELS, 4),
        optimizer=optax.sgd(0.1),
        step=step,
        sharding=ALL,
    )
    assert experiment.trainer(devices).specs is None
