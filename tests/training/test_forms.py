"""The forms that a model may have."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.models.forms import per_example, with_state
from haiku_template.params import ordered
from haiku_template.training import Experiment, regression
from tests.runs import run_steps

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(16, 5)).astype(np.float32)
LABELS = RNG.normal(size=(16, 2)).astype(np.float32)


def plain(inputs):
    return hk.Linear(2)(inputs)


def keyword(inputs, *, is_training):
    return hk.Linear(2)(inputs)


def documented(inputs, is_training):
    return hk.Linear(2)(inputs)


def optional(inputs, is_training=False, scale=1.0):
    return scale * hk.Linear(2)(inputs)


def of_an_option(inputs, scale=1.0):
    assert not isinstance(scale, bool)
    return scale * hk.Linear(2)(inputs)


def normed(inputs):
    return hk.Linear(2)(hk.BatchNorm(True, True, 0.9)(inputs, True))


FORWARDS = [plain, keyword, documented, optional, of_an_option]
FORWARDS += [functools.partial(optional, scale=1.0)]


def losses(devices, model):
    data = Data(
        ArrayDataset(INPUTS, LABELS, BatchSpec(8)), EvaluationSet(INPUTS, LABELS, 8), 2
    )
    trainer = Experiment(
        model=model, task=regression, data=data, optimizer=optax.sgd(0.1)
    ).trainer(devices)
    state, found = trainer.init(), []
    for step in range(3):
        batch = devices.shard(data.train.batch(step))
        state, scalars = trainer.step(state, batch)
        found.append(float(devices.fetch(scalars["loss"])))
    return [*found, trainer.evaluate(state)["eval/loss"]]


@pytest.fixture(scope="module")
def expected():
    devices = DeviceManager.create("cpu", num_devices=1)
    return losses(devices, hk.transform(documented))


@pytest.mark.slow(but="keyword")
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: getattr(f, "__name__", "p"))
def test_a_forward_function_may_leave_out_is_training(one_device, forward, expected):
    for make in (hk.transform, hk.transform_with_state):
        for model in (make(forward), hk.without_apply_rng(make(forward))):
            assert losses(one_device, model) == expected


def test_a_model_with_state_may_be_without_an_rng(one_device):
    model = hk.transform_with_state(normed)
    assert losses(one_device, hk.without_apply_rng(model)) == losses(one_device, model)


@pytest.mark.slow(but="four devices")
def test_a_model_that_draws_gets_an_rng_in_training_and_evaluation(devices):
    def forward(inputs):
        noise = jax.random.normal(hk.next_rng_key(), inputs.shape)
        return hk.Linear(2)(inputs + noise)

    found = losses(devices, hk.transform(forward))
    assert found == losses(devices, hk.transform(forward))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (
            lambda inputs, mask, is_training: inputs,
            r"forward\(inputs, mask, is_training",
        ),
        (lambda: 0, r"forward\(\)"),
    ],
)
def test_other_forms_are_refused_with_those_that_are_possible(forward, words):
    words += r".* possible are forward\(inputs, is_training\) and forward\(inputs\)"
    with pytest.raises(ConfigError, match=words):
        with_state(hk.transform(forward))


def several():
    layer = hk.Linear(2)
    return layer, (layer, lambda x: -layer(x))


SEVERAL = hk.multi_transform(several)


@pytest.mark.parametrize(
    "init",
    [SEVERAL.init, lambda rng, x: SEVERAL.init(rng, x), lambda *x: SEVERAL.init(*x)],
)
def test_a_model_made_by_hand_takes_what_its_apply_names(init):
    """Its init may name nothing: the inputs were its key, and a flag the inputs."""
    apply = lambda params, rng, x: SEVERAL.apply[1](params, rng, x)  # noqa: E731
    model = with_state(hk.Transformed(init, apply))
    params, state = model.init(jax.random.key(0), INPUTS, True)
    outputs, _ = model.apply(params, state, None, INPUTS, True)
    expected = SEVERAL.apply[0](params, None, INPUTS)
    np.testing.assert_array_equal(outputs, -expected)
    kept = hk.TransformedWithState(
        lambda *x: (init(*x), {}),
        lambda params, state, rng, x: (apply(params, rng, x), state),
    )
    outputs, _ = with_state(kept).apply(params, state, None, INPUTS, True)
    np.testing.assert_array_equal(outputs, -expected)


def test_a_model_made_by_hand_may_take_a_flag_and_no_rng():
    called = lambda params, x, is_training: SEVERAL.apply[1](params, None, x)  # noqa: E731
    init = lambda rng, *x: SEVERAL.init(rng, x[0])  # noqa: E731
    model = with_state(hk.Transformed(init, called))
    params, state = model.init(jax.random.key(0), INPUTS, True)
    outputs, _ = model.apply(params, state, None, INPUTS, True)
    np.testing.assert_array_equal(outputs, -SEVERAL.apply[0](params, None, INPUTS))


def starred(*args, is_training=False):
    return hk.Linear(2)(args[0])


def wide(*args, **kwargs):
    return hk.Linear(2)(args[0])


@pytest.mark.parametrize("forward", [starred, wide])
def test_a_starred_model_without_an_rng_is_given_none(one_device, forward):
    model = hk.transform(forward)
    assert losses(one_device, hk.without_apply_rng(model)) == losses(one_device, model)


@pytest.mark.parametrize("make", [hk.multi_transform, hk.multi_transform_with_state])
def test_a_model_of_several_functions_is_told_how_to_be_one(make):
    with pytest.raises(ConfigError, match=r"has several functions; possible is one"):
        with_state(make(several))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "mpl"}, "'mpl'.*did you mean mlp.*resnet"),
        ({"name": "resnet", "width": 8}, "resnet.*it takes channels, blocks"),
    ],
)
def test_a_model_that_is_not_there_is_refused_with_those_that_are(
    one_device, model, words
):
    config = digits.get_config()
    config.model = model
    with pytest.raises(ConfigError, match=words):
        Experiment.from_config(config, one_device)


def test_a_second_argument_that_is_no_is_training_is_not_taken_for_it():
    """`deterministic` is the opposite: a model would train without its dropout."""
    for forward in (
        lambda inputs, deterministic: inputs,
        lambda inputs, mask: inputs,
    ):
        with pytest.raises(ConfigError, match="possible are forward"):
            with_state(hk.transform(forward))
    with_state(hk.transform(lambda inputs, _: inputs))


def said(train):
    """Outputs that tell what a switch was."""
    return jnp.array({True: 1, False: 0}.get(train, -1))


SWITCHES = {  # And what the switch is of (training, evaluation).
    "keyword": (lambda x, *, train=True: said(train), (1, 0)),
    "of a default": (lambda x, *, training=True: said(training), (1, 0)),
    "third": (lambda x, rate=0.5, train=True: said(train) * (rate == 0.5), (1, 0)),
    "behind a mask": (lambda x, mask=None, is_training=True: said(is_training), (1, 0)),
    "a mode": (lambda x, train_mode: said(train_mode), (1, 0)),
    "by place": (lambda x, is_training, /: said(is_training), (1, 0)),
    "behind any": (lambda x, *rest, train=False: said(train) + len(rest), (1, 0)),
    "any behind an option": (lambda x, scale=2, *rest: said(scale), (-1, -1)),
    "any keywords behind any": (
        lambda x, mask=None, *rest, **options: said(options["is_training"]),
        (1, 0),
    ),
    "a phase": (lambda x, train_phase=True: said(train_phase), (1, 0)),
    "in one word": (lambda x, istraining=True: said(istraining), (1, 0)),
    "two": (lambda x, is_training, train=3: said(is_training) + said(train), (2, 0)),
    "any keywords": (lambda x, **options: said(options["is_training"]), (1, 0)),
    "unnamed": (lambda x, _: said(_), (1, 0)),
    "an option": (lambda x, pretrained=None: said(pretrained), (-1, -1)),
    "options": (lambda x, constraint=None, trainable=None: said(constraint), (-1, -1)),
    "beside an option": (
        lambda x, pretrained=None, is_training=True: (
            said(is_training) * said(pretrained)
        ),
        (-1, 0),
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_gets_is_training_wherever_it_stands_and_whatever_it_is_called(name):
    forward, expected = SWITCHES[name]
    model = with_state(hk.transform(forward))
    found = [model.apply({}, {}, None, np.ones(1), x)[0] for x in (True, False)]
    assert (*map(int, found),) == expected


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, deterministic=False: x,
        lambda x, *, inference=False: x,
        lambda x, mask=None, is_test=False: x,
        lambda x, eval_mode=False: x,
        lambda x, deterministic=False, *rest: x,
        lambda x, not_training=False: x,
        lambda x, is_train_or_not=True: x,
    ],
)
def test_a_switch_of_the_opposite_is_refused(forward):
    """With its default it would be the same in training and in evaluation."""
    with pytest.raises(ConfigError, match="would be the same in training and in"):
        with_state(hk.transform(forward))
    with_state(hk.transform(lambda x, test=None, trainable=True, eval=len: x))
    with_state(hk.transform(lambda x, is_training, deterministic=False: x))


def test_what_takes_any_arguments_gets_is_training():
    def inner(inputs, is_training):
        return inputs * (2 if is_training else 1)

    model = with_state(hk.transform(lambda *args: inner(*args)))
    outputs, _ = model.apply({}, {}, None, np.ones(1), True)
    assert outputs == 2


@pytest.mark.parametrize("form", [with_state, per_example])
def test_dictionaries_have_the_order_of_preprocess_and_model(one_device, form):
    """JAX sorts those that it maps over, and `values()` would be others."""
    seen = []

    def forward(inputs):
        seen.append([*inputs])
        (last, _) = inputs.values()
        return {
            "z": hk.Linear(2, name="one")(last),
            "a": hk.Linear(2, name="two")(last),
        }

    def task(outputs, batch):
        seen.append([*outputs])
        first, _ = outputs.values()
        return {"loss": jnp.square(first - batch["labels"]).mean(1)}

    data = Data(
        ArrayDataset(INPUTS, LABELS, BatchSpec(8)),
        EvaluationSet(INPUTS, LABELS, 8),
        preprocess=lambda x: {"b": x, "a": x[:, :3]},
    )
    model = hk.without_apply_rng(hk.transform(forward))
    trainer = Experiment(
        model=form(model), task=task, data=data, optimizer=optax.sgd(0.0)
    ).trainer(one_device)
    state = trainer.init()
    params = one_device.fetch(state.params)
    found = trainer.evaluate(state)["eval/loss"]
    outputs = model.apply(params, data.preprocess(INPUTS))["z"]
    assert found == pytest.approx(np.square(outputs - LABELS).mean(), rel=1e-6)
    run_steps(trainer)
    assert all(x in (["b", "a"], ["z", "a"]) for x in seen), seen


class Fixed(dict):
    """A dictionary that its owner registered, and that nobody may change."""

    def pop(self, *args):
        raise TypeError("immutable")


class Fresh:
    """Facts that are another object each time."""


jax.tree_util.register_pytree_node(
    Fixed, lambda x: ([*x.values()], (*x,)), lambda k, x: Fixed(zip(k, x, strict=True))
)


@jax.tree_util.register_pytree_node_class
class Odd:
    def __init__(self, x):
        self.x = x

    def tree_flatten(self):
        return (self.x,), Fresh()

    @classmethod
    def tree_unflatten(cls, facts, children):
        return cls(*children)


def test_trees_of_any_class_may_be_ordered():
    tree = (Odd({"b": 1, "a": 2}), Fixed(b=3, a=4), None, {}, [], {"d": {}, "c": 5})
    new = ordered(jax.tree.map(lambda x: x, tree), tree)
    assert [*new[0].x] == [*new[1]] == ["b", "a"] and [*new[5]] == ["d", "c"]
    assert jax.tree.leaves(new) == jax.tree.leaves(tree)


def made(rng, x):
    return hk.transform(documented).init(rng, x, True)


def applied(params, rng, x, is_training):
    return hk.transform(documented).apply(params, rng, x, is_training)


@pytest.mark.parametrize(
    "model",
    [
        hk.Transformed(made, applied),
        hk.Transformed(lambda rng, x, is_training: made(rng, x), applied),
        hk.Transformed(made, lambda params, rng, x: applied(params, rng, x, True)),
        hk.TransformedWithState(
            lambda rng, images: (made(rng, images), {}),
            lambda p, s, rng, x, is_training: (applied(p, rng, x, is_training), s),
        ),
        hk.TransformedWithState(
            lambda rng, images: (made(rng, images), {}),
            lambda p, s, x, train: (applied(p, None, x, train), s),
        ),
    ],
)
def test_init_and_apply_of_a_model_made_by_hand_may_differ(one_device, model, expected):
    """An object's `init(rng, images)` knows no flag, and its loss takes one."""
    assert losses(one_device, model) == expected


def test_a_model_may_have_immutable_dictionaries(one_device):
    """As code of 2021 made them; `jax.jit` refuses them beside `out_shardings`."""
    fixed = hk.data_structures.to_immutable_dict
    model = hk.transform_with_state(normed)

    def init(rng, inputs, is_training):
        return tuple(map(fixed, model.init(rng, inputs)))

    def apply(params, state, rng, inputs, is_training):
        outputs, state = model.apply(params, state, rng, inputs)
        return outputs, fixed(state)

    found = losses(one_device, hk.TransformedWithState(init, apply))
    assert found == losses(one_device, model)
