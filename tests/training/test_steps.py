"""Properties of one step, on one device and on four."""

import dataclasses
import functools
import re
import types
from collections import Counter

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import check_replicas, norm_over
from haiku_template.errors import PlacementError
from haiku_template.models import mlp, resnet
from haiku_template.runs import train
from haiku_template.training import Experiment, classification, regression, step
from haiku_template.training.optimizers import make_optimizer, make_schedule
from haiku_template.training.state import Recipe, TrainState, split_seed
from haiku_template.training.step import _accumulate
from tests.runs import run_steps

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(96, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 96).astype(np.int32)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(24)), EvaluationSet(INPUTS, LABELS, 24), 3
)


def trainer(devices, model=None, **options):
    options = {"task": classification, "optimizer": optax.sgd(0.1)} | options
    model = model or mlp(3, width=16)
    return Experiment(model=model, data=DATA, **options).trainer(devices)


def assert_close(a, b, atol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), atol=atol
        )


def params_of(state):
    return jax.device_get(state.params)


@pytest.mark.slow(but="four devices")
def test_a_step_is_gradient_descent_on_the_mean_loss(devices):
    made = trainer(devices)
    state, (scalars,) = run_steps(made)

    model = hk.without_apply_rng(mlp(3, width=16))
    params = devices.fetch(made.init()).params
    batch = DATA.train.batch(0)

    def loss(params):
        logits = model.apply(params, batch["inputs"], True)
        one_hot = jax.nn.one_hot(batch["labels"], 3)
        return -jnp.mean(jnp.sum(one_hot * jax.nn.log_softmax(logits), axis=1))

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert scalars["loss"] == pytest.approx(float(value), abs=1e-6)
    assert scalars["grad_norm"] == pytest.approx(
        float(optax.tree.norm(grads)), abs=1e-5
    )
    assert_close(params_of(state), expected, 1e-6)
    assert devices.fetch(state.step) == 1


@pytest.mark.parametrize("size", [4, 2**14])
def test_a_norm_of_half_precision_is_finite(size):
    norm = norm_over(None, {"w": jnp.full(size, 512, jnp.float16), "b": jnp.ones(1)})
    assert float(norm) == pytest.approx((size * 512**2 + 1) ** 0.5)


SIZES = [(), (0,), (1,), (7, 3), (64, 128), (3, 1025), (5, 7, 61), (4098,), (2, 2049)]


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_a_norm_by_rows_is_that_of_optax(dtype):
    """Of leaves small and large, whose sizes 4 divides and does not."""
    rng = np.random.default_rng(0)
    tree = [np.asarray(rng.normal(size=x) + 1, dtype) for x in SIZES]
    tree[-1] = tree[-1] * dtype(1 if dtype is np.float32 else 1j)
    for part in (tree, *([x] for x in tree), [*reversed(tree)], [*tree] * 9):
        norm = jax.jit(functools.partial(norm_over, None))(part)
        expected = np.sqrt(
            sum(np.sum(np.abs(np.float64(np.abs(x))) ** 2) for x in part)
        )
        np.testing.assert_allclose(norm, expected, 1e-6)
    assert norm_over(None, {}) == 0


def test_what_changes_gradients_after_their_norm_is_clipped_all_the_same(one_device):
    """As gradients of a module of one's own, made of those of the package."""

    def louder(recipe):
        gradients = step.make_gradients(recipe)

        def run(*args):
            grads, *others = gradients(*args)
            return jax.tree.map(lambda x: 1000 * x, grads), *others

        return run

    names = step.__dict__ | {"make_gradients": louder}
    config = digits.get_config()
    config.optimizer.update({"name": "sgd", "momentum": 0.0, "clip_norm": 0.5})
    config.optimizer.update({"schedule": "constant", "warmup_steps": 0})
    config.optimizer.update({"learning_rate": 1.0, "weight_decay": 0.0})
    experiment = Experiment.from_config(config, one_device)
    made = dataclasses.replace(experiment, steps=types.SimpleNamespace(**names))
    before = one_device.fetch((made := made.trainer(one_device)).init().params)
    after = params_of(run_steps(made, 1)[0])
    moved = optax.tree.norm(jax.tree.map(np.subtract, after, before))
    assert float(moved) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.slow(but="resnet")
@pytest.mark.parametrize("model", [mlp, resnet], ids=["mlp", "resnet"])
def test_four_devices_equal_one(one_device, four_devices, model):
    results = []
    for devices in (one_device, four_devices):
        options = {"channels": (4,), "blocks": 1} if model is resnet else {}
        made = trainer(devices, model(3, devices.axis_name, **options), ema_decay=0.9)
        state, history = run_steps(made, 5)
        check_replicas(state)
        results.append((devices.fetch(state), history))
    assert_close(*results, 1e-5)


@pytest.mark.slow
def test_a_norm_that_forgets_the_axis_is_found(four_devices):
    made = trainer(four_devices, resnet(3, axis_name=None, channels=(4,), blocks=1))
    state, _ = run_steps(made)
    with pytest.raises(PlacementError, match=r"net_state.*cross_replica_axis"):
        check_replicas(state)


@pytest.mark.slow(but="four devices")
def test_accumulation_leaves_the_result_as_it_is(devices):
    whole, history = run_steps(trainer(devices), 3)
    for parts in (2, 3, 6):
        parted, parted_history = run_steps(trainer(devices, accumulate_steps=parts), 3)
        assert_close(params_of(whole), params_of(parted), 1e-6)
        assert_close(history, parted_history, 1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_micro_batches_are_added_up_in_order_on_any_number_of_devices(
    axis_name, weighted
):
    """On several devices the last one comes after the loop, not in it."""
    # From the last to the first they would not add up to 4.
    batch = {"x": jnp.float32([1e8, -1e8, 3.0, 1.0]), "place": jnp.arange(4)}
    recipe = Recipe(*(None,) * 5, axis_name=axis_name, accumulate_steps=4)
    state = TrainState(*(None,) * len(TrainState._fields))

    def gradient(state, frozen, rng, batch):
        net_state = {"seen": 10 * state.net_state["seen"] + batch["place"][0]}
        weight = jnp.float32(1.0) if weighted else None
        draw = jax.random.uniform(rng)
        return {"w": batch["x"][0]}, (net_state, {"draw": draw}, weight)

    def run(batch):
        first = state._replace(net_state={"seen": jnp.int32(0)})
        return _accumulate(gradient, recipe, first, {}, jax.random.key(0), batch)

    grads, (net_state, scalars, weight) = jax.jit(run)(batch)
    assert float(grads["w"]) == 1.0 and weight == (4.0 if weighted else None)
    assert net_state["seen"] == 123
    draws = [jax.random.uniform(rng) for rng in jax.random.split(jax.random.key(0), 4)]
    assert float(scalars["draw"]) == float(sum(draws) / 4)
    made = jax.make_jaxpr(run)(batch).eqns
    loops = [e.params["length"] for e in made if e.primitive.name == "scan"]
    assert loops == [4 if axis_name is None else 3]
    barriers = [e for e in made if e.primitive.name == "optimization_barrier"]
    assert len(barriers) == (axis_name is not None)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 3])
def test_batch_norm_with_accumulation_sees_the_same_rows_on_any_number_of_devices(
    one_device, four_devices, parts
):
    results = []
    for devices in (one_device, four_devices):
        model = resnet(3, devices.axis_name, channels=(4,), blocks=1)
        state, history = run_steps(trainer(devices, model, accumulate_steps=parts), 5)
        results.append((devices.fetch(state), history))
    assert_close(*results, 1e-5)


@pytest.mark.slow
def test_accumulation_needs_less_memory(one_device):
    def temporary_bytes(parts):
        model = resnet(3, channels=(64,), blocks=1)
        made = trainer(one_device, model, accumulate_steps=parts)
        lowered = made.trace(made.feed.host_shapes()[0]).lower()
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # Mostly activations, of which a sixth is alive at a time.
    assert temporary_bytes(6) < 0.5 * temporary_bytes(1)


@pytest.mark.slow(but="four devices")
def test_dropout_differs_by_step_and_by_device_and_repeats(devices):
    made = trainer(devices, mlp(3, width=64, dropout=0.5), optimizer=optax.sgd(0.0))
    first = run_steps(made, 3)[1]
    again = run_steps(made, 3)[1]
    assert first == again
    same_batch = [
        run_steps(made, 1, made.init()._replace(step=devices.replicate(step)))[1]
        for step in (np.int32(0), np.int32(1))
    ]
    assert same_batch[0] != same_batch[1]


def test_no_two_uses_of_a_seed_draw_from_the_same_key():
    """Within what a run uses: keys that Haiku splits, steps, devices, adapters."""
    seeds = split_seed(0)
    children = range(300)
    chain, initial = seeds.params, []
    for _ in range(50):  # hk.PRNGSequence splits in two, again and again.
        chain, key = jax.random.split(chain)
        initial += [chain, key]
    steps = [jax.random.fold_in(seeds.steps, n) for n in children]
    on_devices = [jax.random.fold_in(key, n) for key in steps[:40] for n in range(8)]
    groups = [[seeds.adapters], [seeds.evaluation], steps + on_devices, initial]
    groups[0] += [jax.random.fold_in(seeds.adapters, n) for n in children]
    groups[1] += [jax.random.fold_in(seeds.evaluation, n) for n in children]
    data = [{jax.random.key_data(k).tobytes() for k in group} for group in groups]
    assert all(
        len(keys) == len(group) for keys, group in zip(data, groups, strict=True)
    )
    assert len(set.union(*data)) == sum(map(len, data))


def test_a_seed_gives_the_initial_parameters_that_it_always_gave(one_device):
    init = jax.jit(mlp(3, width=16).init, static_argnums=2)
    expected = init(jax.random.key(7), INPUTS[:1], True)
    state = trainer(one_device, seed=7).init()
    assert_close(params_of(state), expected, 1e-6)


def test_dropout_masks_differ_between_devices(four_devices):
    def forward(inputs, is_training):
        noise = jax.random.normal(hk.next_rng_key(), (len(inputs), 3))
        return noise + 0 * hk.Linear(3)(hk.Flatten()(inputs))

    same = DATA.train.batch(0)["inputs"][:1]
    data = Data(
        ArrayDataset(np.repeat(same, 4, 0), np.zeros(4, np.int32), BatchSpec(4)),
        None,
        3,
    )

    def values(logits, batch):
        return {"loss": logits[:, 0], "square": jnp.square(logits[:, 0])}

    made = Experiment(
        model=hk.transform(forward), task=values, data=data, optimizer=optax.sgd(0.1)
    ).trainer(four_devices)
    state = made.init()
    _, scalars = made.step(state, four_devices.shard(data.train.batch(0)))
    scalars = four_devices.fetch(scalars)
    # One row a device: equal noise would have no variance.
    assert scalars["square"] - scalars["loss"] ** 2 > 1e-3


@pytest.mark.slow(but="four devices")
def test_ema_is_the_average_of_the_parameters(devices):
    made = trainer(devices, ema_decay=0.5)
    start = devices.fetch(made.init()).params
    state, _ = run_steps(made, 1)
    expected = jax.tree.map(lambda a, b: (a + b) / 2, start, params_of(state))
    assert_close(devices.fetch(state.ema_params), expected, 1e-6)


def test_the_learning_rate_is_reported_and_used(one_device):
    schedule = make_schedule("linear", learning_rate=0.2, num_steps=10)
    made = trainer(one_device, optimizer=optax.sgd(schedule), schedule=schedule)
    _, history = run_steps(made, 2)
    assert history[0]["learning_rate"] == pytest.approx(0.2)
    assert history[1]["learning_rate"] == pytest.approx(0.18)


@pytest.mark.slow(but="four devices")
def test_regression_reports_its_errors(devices):
    labels = RNG.normal(size=(24, 3)).astype(np.float32)
    data = Data(ArrayDataset(INPUTS[:24], labels, BatchSpec(24)), None, 3)
    made = Experiment(
        model=mlp(3, width=8), task=regression, data=data, optimizer=optax.sgd(0.0)
    ).trainer(devices)
    state = made.init()
    params = devices.fetch(state).params
    _, scalars = made.step(state, devices.shard(data.train.batch(0)))
    batch = data.train.batch(0)
    model = hk.without_apply_rng(mlp(3, width=8))
    outputs = jax.jit(model.apply, static_argnums=2)(params, batch["inputs"], True)
    errors = np.asarray(outputs) - batch["labels"]
    scalars = devices.fetch(scalars)
    assert scalars["loss"] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert scalars["absolute_error"] == pytest.approx(np.mean(abs(errors)), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_each_optimizer_lowers_the_loss_on_four_devices(four_devices, name):
    rate = {"adamw": 1e-2, "sgd": 0.3, "lion": 3e-3, "adafactor": 0.1}[name]
    schedule = make_schedule("constant", learning_rate=rate, num_steps=40)
    optimizer = make_optimizer(name, schedule, weight_decay=1e-4, clip_norm=1.0)
    made = trainer(four_devices, optimizer=optimizer)
    state, history = run_steps(made, 40)
    check_replicas(state)
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_each_start_of_a_run_compiles_its_step_once(
    tmp_path, one_device, caplog, placement
):
    """C26: 100 steps of calls and epochs of other lengths, and a last batch cut off."""
    data = DATA._replace(evaluation=EvaluationSet(INPUTS[:90], LABELS[:90], 24))
    for stop in (100, 110):
        made = Experiment(
            model=mlp(3, width=16),
            task=classification,
            data=data,
            optimizer=optax.sgd(0.1),
            placement=placement,
        ).trainer(one_device)
        caplog.clear()
        with jax.log_compiles():
            train(
                made,
                num_steps=stop,
                workdir=tmp_path,
                log_every=7,
                eval_every=30,
                save_every=45,
            )
        names = re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)
        counts = Counter(names)
        assert [counts[name] for name in ("train_step", "eval_step")] == [1, 1], counts


def test_a_start_traces_a_model_s_init_once_for_each_use(tmp_path, one_device):
    """For shapes, the budget's program, and the fingerprint; deep ones take seconds."""
    net, traces = mlp(3, width=16), []

    def init(*args):
        traces.append(args)
        return net.init(*args)

    made = Experiment(
        model=hk.Transformed(init, net.apply),
        task=classification,
        data=DATA,
        optimizer=optax.sgd(0.1),
        placement="auto",
    ).trainer(one_device)
    assert len(traces) == 1
    train(made, num_steps=2, workdir=tmp_path, memory_limit=2**30)
    assert len(traces) == 3


def test_one_compilation_and_no_implicit_transfer(devices, monkeypatch):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else 0
    )
    made = trainer(devices, ema_decay=0.9)
    state = made.init()
    batches = [devices.shard(DATA.train.batch(step)) for step in range(20)]
    compiled.clear()
    with devices.explicit_transfers():
        for batch in batches:
            state, scalars = made.step(state, batch)
            jax.block_until_ready(scalars)
    assert len(compiled) == 1
