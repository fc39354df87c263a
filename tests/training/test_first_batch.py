"""Parameters and state that depend on data are initialized from the first batch."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager, canonical_shapes
from haiku_template.devices.manager import COMPILE_ONCE
from haiku_template.errors import ConfigError
from haiku_template.finetuning import Finetuning, Lora
from haiku_template.params import flatten
from haiku_template.preflight import fingerprint
from haiku_template.preflight.budget import check_budget
from haiku_template.runs import train
from haiku_template.training import Experiment, classification
from haiku_template.training.state import split_seed

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(3, 2, (64, 8)).astype(np.float32)
LABELS = RNG.integers(0, 2, 64).astype(np.int32)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(16)), EvaluationSet(INPUTS, LABELS, 16), 2
)
FIRST = DATA.train.batch(0)["inputs"]


def parameter(name, value):
    return hk.get_parameter(name, value.shape, init=lambda *_: value)


def act_norm(x, is_training):
    x = (x - parameter("mean", x.mean(0))) * parameter("scale", 1 / (x.std(0) + 1e-6))
    return hk.Linear(2)(x)


def log_scale(x, is_training):
    x = x * jnp.exp(parameter("log_scale", -jnp.log(x.std(0) + 1e-6)))
    return hk.Linear(2)(x)


def weight_norm(x, is_training):
    v = hk.get_parameter("v", (8, 2), init=hk.initializers.RandomNormal())
    x = x @ (v / jnp.linalg.norm(v, axis=0))
    x = x * parameter("g", 1 / (x.std(0) + 1e-6))
    return x - parameter("b", x.mean(0))


def codebook(x, is_training):
    codes = parameter("codes", x[:4])
    distances = jnp.square(x[:, None] - codes).sum(-1)
    return hk.Linear(2)(jax.nn.softmax(-distances) @ codes)


def kept(x, is_training):
    """Whitens by network state that no `get_state` has zeros for."""
    if hk.running_init():
        hk.set_state("scale", 1 / (x.std(0) + 1e-6))
    return hk.Linear(2)(x * hk.get_state("scale"))


@jax.jit
def doubled_and_printed(x):
    jax.debug.callback(lambda x: None, x)
    return 2 * x


def printing(x, is_training):
    """Of what is printed inside of a compiled function, one leaf alone is made."""
    x = doubled_and_printed(x)
    return hk.Linear(2)(x - parameter("mean", x.mean(0)))


def plain(x, is_training):
    """Nothing here is of the data, but for what Haiku computes anew in each step."""
    jax.debug.callback(lambda x: None, x)
    x = hk.BatchNorm(True, True, 0.9)(x, is_training)
    return hk.Linear(2)(jax.nn.relu(hk.Linear(4)(x)))


FORWARDS = {
    "act_norm": (act_norm, ["params/~/mean", "params/~/scale"]),
    "log_scale": (log_scale, ["params/~/log_scale"]),
    "weight_norm": (weight_norm, ["params/~/b", "params/~/g"]),
    "codebook": (codebook, ["params/~/codes"]),
    "kept": (kept, ["net_state/~/scale"]),
    "printing": (printing, ["params/~/mean"]),
}


def experiment(forward, **options):
    parts = {
        "model": hk.transform_with_state(forward),
        "task": classification,
        "data": DATA,
        "optimizer": optax.sgd(0.01),
    }
    return Experiment(**parts | options)


def of_haiku(forward, seed=0):
    model = hk.transform_with_state(forward)
    return model.init(split_seed(seed).params, FIRST, True)


def assert_close(a, b):
    assert flatten(a).keys() == flatten(b).keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), a, b)


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("name", FORWARDS)
def test_what_depends_on_data_is_as_haiku_has_it(name, num_devices):
    forward, names = FORWARDS[name]
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    for precision in ("float32", "bfloat16"):
        trainer = experiment(forward, precision=precision).trainer(devices)
        assert [*trainer.initializer.from_batch] == names
        state = trainer.init()
        devices.check(state, trainer.layout)
        params, net_state = of_haiku(forward)
        assert_close(state.params, params)
        assert_close(state.net_state, net_state)


def test_a_first_state_that_depends_on_no_data_is_made_as_ever(one_device, monkeypatch):
    traces = []

    def counted(x, is_training):
        traces.append(x.shape)
        return plain(x, is_training)

    trainer = experiment(counted).trainer(one_device)
    assert trainer.initializer.from_batch == () and traces == [(1, 8)]
    text = trainer.initializer.lower(trainer.layout).as_text()
    assert "tensor<1x8xf32>" in text and "<16x8xf32>" not in text
    assert text.count("%arg", text.index("@main("), text.index("->")) == 1  # The seed.
    monkeypatch.setattr(ArrayDataset, "batch", None)  # Not read again.
    trainer.init()


@pytest.mark.parametrize("kind", ["model", "init", "adapters", "four"])
def test_another_seed_needs_no_other_program_of_the_first_state(kind):
    devices = DeviceManager.create("cpu", num_devices=4 if kind == "four" else 1)
    options = {"seed": 0}
    if kind == "adapters":
        lora = Lora(rank=1, patterns=("*linear/w",))
        options["finetuning"] = Finetuning(train=(), lora=lora)
    if kind == "init":
        data = DATA._replace(evaluation=None)
        first = lambda rng, _: {"params": {"w": jax.random.normal(rng, (8, 2))}}  # noqa: E731
        made = Experiment(data=data, init=first, step=custom_step, **options)
    else:
        made = experiment(plain, **options)
    trainers = [made.trainer(devices), made.trainer(devices).replace(seed=2**32 - 1)]
    texts = {x.initializer.lower(x.layout).as_text() for x in trainers}
    firsts, others = (flatten(x.init().params).values() for x in trainers)
    assert len(texts) == 1
    assert any((x != y).any() for x, y in zip(firsts, others, strict=True))
    for trainer in trainers:  # As with the seed inside.
        inside = functools.partial(trainer.functions().init, {})
        program = jax.jit(inside, compiler_options=COMPILE_ONCE)
        state, expected = trainer.init().without_frozen(), program()
        jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.parametrize("options", [{}, {"exact_elastic": 4}, {"skips": True}])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_another_seed_needs_no_other_program_of_a_step(num_devices, options):
    def forward(x, is_training):
        return hk.Linear(2)(hk.dropout(hk.next_rng_key(), 0.5, x))

    devices = DeviceManager.create("cpu", num_devices=num_devices)
    made = experiment(forward, **options)
    trainers = [dataclasses.replace(made, seed=n).trainer(devices) for n in (0, 1)]
    programs, losses = [], []
    for trainer in trainers:
        state, shapes = trainers[0].init(), trainer.feed.host_shapes()[0]
        texts = [trainer.trace(shapes).lower().as_text()]
        if not options:
            texts.append(trainer.lower_evaluation().as_text())
        programs.append(texts)
        losses.append(trainer.evaluate(state)["eval/loss"])
    assert programs[0] == programs[1] and losses[0] != losses[1]


def test_the_first_lines_say_what_is_of_the_first_batch(tmp_path, one_device):
    for num_steps in (1, 2):
        trainer = experiment(act_norm).trainer(one_device)
        result = train(trainer, num_steps=num_steps, workdir=tmp_path, log_every=1)
    assert np.isfinite(result.metrics["train/loss"])
    lines = (tmp_path / "train.log").read_text().splitlines()
    line = "params/~/mean, params/~/scale, from the first batch"
    assert [x.split(maxsplit=1)[1] for x in lines if x.startswith("init ")] == [line]
    assert sum("resumed at step 1" in line for line in lines) == 1


def test_the_fingerprint_is_that_of_any_number_of_devices():
    found = [
        fingerprint.of(
            experiment(codebook).trainer(DeviceManager.create("cpu", num_devices=n))
        )
        for n in (1, 4)
    ]
    assert found[0] == found[1]


def test_the_budget_has_the_first_batch(one_device):
    wide = np.zeros((64, 4096), np.float32)
    data = DATA._replace(train=ArrayDataset(wide, LABELS, BatchSpec(64)))

    def forward(x, is_training):
        return hk.Linear(2)(x[:, :8] + parameter("mean", x.mean(0)[:8]))

    trainer = experiment(forward, data=data._replace(evaluation=None))
    budget = check_budget(trainer.trainer(one_device), 2**30)
    assert budget.init_peak > wide.nbytes


def custom(rng, batch):
    scale = 1 / (batch["inputs"].std(0) + 1e-6)
    return {"params": {"scale": scale, "w": jax.random.normal(rng, (8, 2))}}


def custom_step(state, batch, rng, axis_name):
    return state, {"loss": jnp.zeros(())}


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_custom_init_gets_the_first_batch(num_devices):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    own = Experiment(data=DATA._replace(evaluation=None), init=custom, step=custom_step)
    trainer = own.trainer(devices)
    assert trainer.initializer.from_batch == ("params/scale",)
    expected = custom(split_seed(0).params, DATA.train.batch(0))["params"]
    assert_close(trainer.init().params, expected)


def test_frozen_parameters_are_of_the_first_batch_too(one_device):
    lora = Finetuning(train=("*linear/b",), lora=Lora(rank=1, patterns=("*linear/w",)))
    trainer = experiment(act_norm, finetuning=lora).trainer(one_device)
    state = trainer.init()
    expected, _ = of_haiku(act_norm)
    assert_close(state.frozen["~"], expected["~"])


def test_parameters_that_are_read_are_of_no_batch(one_device):
    expected, _ = of_haiku(act_norm, seed=1)
    expected["~"]["scale"] = jnp.full(8, 7.0)

    def source(shapes, skip, net_state, place):
        leaves = {k: x for k, x in flatten(expected).items() if k not in skip}
        return {k: place(k, x) for k, x in leaves.items()}, None

    options = {"init_from": source}
    trainer = experiment(act_norm, **options).trainer(one_device)
    assert trainer.initializer.from_batch == ()
    assert_close(trainer.init().params, expected)
    options["finetuning"] = Finetuning(fresh=("~/mean",))
    trainer = experiment(act_norm, **options).trainer(one_device)
    assert trainer.initializer.from_batch == ("params/~/mean",)
    params = trainer.init().params["~"]
    np.testing.assert_allclose(params["mean"], FIRST.mean(0), 1e-5)
    np.testing.assert_array_equal(params["scale"], 7)


def test_a_share_of_the_first_batch_is_refused(one_device):
    class Share:
        def batch(self, step):
            return {"inputs": INPUTS[:8], "labels": LABELS[:8]}

    trainer = experiment(act_norm, data=Data(Share(), None, 2)).trainer(one_device)
    shapes = canonical_shapes(trainer.feed.example, rows=16)  # Of two processes.
    trainer.initializer._example = shapes
    with pytest.raises(ConfigError, match="scale depend.*8 of the 16 examples"):
        trainer.init()
