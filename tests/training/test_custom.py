"""Parts of a user's own: train steps, first states, what a task asks for by name."""

import functools
import json

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager, mean_over
from haiku_template.errors import ConfigError, UnequalError
from haiku_template.preflight import fingerprint
from haiku_template.runs import Run, train
from haiku_template.runs.stablehlo import export_stablehlo
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, Task
from haiku_template.training.experiment import make_task
from haiku_template.training.tasks import as_task, example_values, facts_of

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(48, 3)).astype(np.float32)
LABELS = RNG.integers(0, 2, 48).astype(np.int32)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(8)), EvaluationSet(INPUTS, LABELS, 20), 2
)
MODEL = hk.without_apply_rng(hk.transform(lambda inputs: hk.Linear(2)(inputs)))
ADAM, SLOW = optax.adam(1e-2), optax.sgd(1e-3)


def init(rng, batch):
    """Two networks, each with an optimizer, and a copy that follows the first."""
    first, second = (MODEL.init(key, batch["inputs"]) for key in jax.random.split(rng))
    params = {"first": first, "second": second, "target": first}
    return {"params": params, "opt_state": (ADAM.init(first), SLOW.init(second))}


def step(state, batch, rng, axis_name):
    params, (adam, slow) = state.params, state.opt_state

    def distance(first, second, inputs):
        return jnp.mean((MODEL.apply(first, inputs) - MODEL.apply(second, inputs)) ** 2)

    given = params["first"], params["second"], batch["inputs"]
    loss, grads = jax.value_and_grad(distance, (0, 1))(*given)
    loss, (a, b) = mean_over(axis_name, (loss, grads))
    a, adam = ADAM.update(a, adam)
    b, slow = SLOW.update(b, slow)
    first = optax.apply_updates(params["first"], a)
    params = {
        "first": first,
        "second": optax.apply_updates(params["second"], b),
        "target": optax.incremental_update(first, params["target"], 0.1),
    }
    return state._replace(params=params, opt_state=(adam, slow)), {"loss": loss}


def task(params, batch):
    target = MODEL.apply(params["target"], batch["inputs"])
    return {"loss": jnp.sum(target**2, axis=1)}


def own(**changes):
    return Experiment(
        **{"data": DATA, "init": init, "step": step, "task": task} | changes
    )


@functools.cache
def own_trainer(num_devices):
    return own().trainer(DeviceManager.create("cpu", num_devices=num_devices))


def numbers(workdir):
    rows = read(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


@pytest.mark.slow(but="four devices")
def test_a_custom_step_with_a_state_of_its_own_is_resumed_bitwise(tmp_path, devices):
    options = {"log_every": 1, "eval_every": 2}
    trainer = own_trainer(devices.num_devices)
    whole = train(trainer, num_steps=4, workdir=tmp_path / "a", **options)
    start = trainer.init().params["target"]
    trainer = own().trainer(devices)
    for stop in (2, 4):
        parts = train(trainer, num_steps=stop, workdir=tmp_path / "b", **options)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    for a, b in zip(*map(jax.tree.leaves, (whole.state, parts.state)), strict=True):
        np.testing.assert_array_equal(a, b)
    end = whole.state.params["target"]
    assert not np.allclose(start["linear"]["w"], end["linear"]["w"])


def test_a_custom_step_is_the_same_on_four_devices(tmp_path):
    found = []
    for num_devices in (1, 4):
        workdir = tmp_path / str(num_devices)
        train(own_trainer(num_devices), num_steps=4, workdir=workdir, log_every=1)
        found.append(numbers(workdir))
    for a, b in zip(*found, strict=True):
        assert a == pytest.approx(b, abs=1e-6)


def test_a_metric_that_is_not_averaged_is_named_after_the_first_step(tmp_path):
    """Of all scalars it is one alone, and no log line is due before step 50."""

    def with_metrics(state, batch, rng, axis_name):
        new, scalars = step(state, batch, rng, axis_name)
        lowest, highest = jnp.min(batch["inputs"]), jnp.max(batch["inputs"])
        return new, scalars | {"lowest": lowest, "whole": mean_over(axis_name, highest)}

    trainer = own(step=with_metrics).trainer(DeviceManager.create("cpu", num_devices=4))
    words = r"1 of 3 leaves differ .*: \['lowest'\] .* averages gradients and scalars"
    with pytest.raises(UnequalError, match=words):
        train(trainer, num_steps=60, workdir=tmp_path)
    assert not read(tmp_path / "metrics.jsonl")
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def test_a_state_with_an_axis_of_devices_is_said_to_be_none_for_any_number(tmp_path):
    """It is right on four devices; the step is traced for one, too, for resuming."""

    def with_keys(rng, batch):
        keys = jax.random.key_data(jax.random.split(rng, 4))
        return init(rng, batch) | {"net_state": {"keys": keys}}

    def with_own_key(state, batch, rng, axis_name):
        device = 0 if axis_name is None else jax.lax.axis_index(axis_name)
        keys = state.net_state["keys"][device][None]
        if axis_name is not None:
            keys = jax.lax.all_gather(keys, axis_name, tiled=True)
        new, scalars = step(state, batch, rng, axis_name)
        return new._replace(net_state={"keys": keys}), scalars

    devices = DeviceManager.create("cpu", num_devices=4)
    trainer = own(init=with_keys, step=with_own_key).trainer(devices)
    words = r"'keys'\] is uint32\[1, 2\] and was uint32\[4, 2\].* any number of devices"
    with pytest.raises(ConfigError, match=words):
        train(trainer, num_steps=1, workdir=tmp_path)


def test_a_custom_step_needs_no_task_without_an_evaluation_set(tmp_path, one_device):
    experiment = own(task=None, data=DATA._replace(evaluation=None))
    result = train(experiment.trainer(one_device), num_steps=2, workdir=tmp_path)
    assert set(result.metrics) >= {"train/loss"} and "eval/loss" not in result.metrics


def lacks_loss(state, batch, rng, axis_name):
    return state, {"value": jnp.zeros(())}


def grows(state, batch, rng, axis_name):
    return state._replace(net_state={"more": jnp.zeros(2)}), {"loss": jnp.zeros(())}


def only_state(state, batch, rng, axis_name):
    return state


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": only_state}, "must return the new state and a dictionary of scalars"),
        ({"task": None}, "has no task"),
        ({"step": None}, "has no model, no optimizer"),
        ({"init": None}, "has no model"),
        ({"init_from": lambda *_: None}, "init makes the whole first state"),
        (
            {"init": lambda rng, batch: {"weights": 0}},
            "init returns .'weights'.*params",
        ),
        ({"init": lambda rng, batch: 0}, "init returns int"),
        ({"step": lacks_loss}, "scalars of shapes .'value': ..*'loss'"),
        ({"step": grows}, r"net_state\['more'\] is float32\[2\] and was not there"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_step_0(
    tmp_path, one_device, changes, words
):
    with pytest.raises(ConfigError, match=words):
        trainer = own(**changes).trainer(one_device)
        train(trainer, num_steps=1, workdir=tmp_path)
    assert not any(tmp_path.iterdir())


def plain(**changes):
    parts = {"data": DATA, "model": MODEL, "optimizer": optax.sgd(0.1)}
    return Experiment(**parts | changes)


def cross_entropy(outputs, batch):
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(outputs, batch["labels"])


def with_decay(batch, params, logits):
    norm = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return {"loss": cross_entropy(logits, batch) + 0.1 * norm}


def tokens(outputs, batch):
    """Three values an example, of which the last counts twice."""
    loss = cross_entropy(outputs, batch)
    weights = jnp.tile(jnp.array([1.0, 1.0, 2.0]), (len(loss), 1))
    return {"loss": jnp.stack([loss, loss, loss + 2], 1), "example_weight": weights}


def whole_batch(outputs, batch, mask):
    loss = jnp.where(mask, cross_entropy(outputs, batch), 0)
    return {"loss": jnp.sum(loss) / jnp.sum(mask)}


def of_the_step(outputs, batch, step, rng, is_training):
    noise = jax.random.uniform(rng)
    ones = jnp.ones(len(outputs))
    return {
        "loss": cross_entropy(outputs, batch),
        "step": step * ones,
        "rng": noise * ones,
    }


def measured(task, devices):
    trainer = plain(task=task).trainer(devices)
    state, scalars = trainer.init(), None
    for n in range(2):
        state, scalars = trainer.step(state, devices.shard(DATA.train.batch(n)))
    return devices.fetch(scalars), trainer.evaluate(state)


@pytest.mark.slow(but="four devices")
def test_a_task_gets_what_it_asks_for_by_name(devices):
    trained, evaluated = measured(
        lambda logits, batch: {"loss": cross_entropy(logits, batch)}, devices
    )
    base, eval_base = trained["loss"], evaluated["eval/loss"]
    assert measured(with_decay, devices)[0]["loss"] > base
    trained, evaluated = measured(tokens, devices)
    assert trained["loss"] == pytest.approx(base + 1, abs=1e-6)
    assert evaluated["eval/loss"] == pytest.approx(eval_base + 1, abs=1e-6)
    trained, evaluated = measured(of_the_step, devices)
    assert trained["step"] == 1 and evaluated["eval/step"] == 2
    assert 0 < trained["rng"] < 1


def test_a_loss_of_the_whole_batch_is_exact_in_evaluation(one_device):
    trained, evaluated = measured(whole_batch, one_device)
    expected = measured(
        lambda outputs, batch: {"loss": cross_entropy(outputs, batch)}, one_device
    )
    assert trained["loss"] == pytest.approx(expected[0]["loss"], abs=1e-6)
    assert evaluated["eval/loss"] == pytest.approx(expected[1]["eval/loss"], abs=1e-6)


def test_a_mean_of_code_that_stays_is_of_each_example_by_vmap(one_device):
    def theirs(outputs, labels):
        return jnp.mean(cross_entropy(outputs, {"labels": labels}))

    def of_one(*row):
        return theirs(*(x[None] for x in row))

    def by_vmap(outputs, batch):
        return {"loss": jax.vmap(of_one)(outputs, batch["labels"])}

    def by_hand(outputs, batch):
        return {"loss": cross_entropy(outputs, batch)}

    both = [measured(task, one_device) for task in (by_vmap, by_hand)]
    assert both[0][1]["eval/loss"] == pytest.approx(both[1][1]["eval/loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            lambda outputs, batch: {"loss": jnp.mean(outputs)},
            r"'loss' is one number for .* return one for each, \[B\], without a mean "
            r"over them .*its jax\.vmap .* own_loss.* padding in evaluation: let it",
        ),
        (
            lambda outputs, batch: {"loss": outputs[:3, 0]},
            r"shape \[3\] for 8 examples",
        ),
        (
            lambda outputs, batch: outputs,
            r"an array \[.*must return a dictionary",
        ),
        (
            lambda outputs, batch: Task(cross_entropy),
            "returns Task; .* or the Task be named itself: module:TASK",
        ),
        (lambda a, b, c: {}, "the task takes a, b, c; possible are outputs, inputs, "),
        (
            lambda params, net_state, batch: {"loss": batch["inputs"].mean(-1)},
            "the task takes net_state; possible are outputs, inputs, batch",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused_before_step_0(
    tmp_path, one_device, task, words
):
    with pytest.raises(ConfigError, match=words):
        train(plain(task=task).trainer(one_device), num_steps=1, workdir=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"derive": lambda averages: {}},
            r"task's derive takes \(averages\), .* called with \(averages, counts\)",
        ),
        (
            {"count": lambda outputs, batch: {}},
            r"count takes \(outputs, batch\), .* with \(outputs, batch, mask\)",
        ),
    ],
    ids=["derive", "count"],
)
def test_a_part_of_a_task_with_other_arguments_is_refused_before_step_0(parts, words):
    with pytest.raises(ConfigError, match=words):
        as_task(Task(cross_entropy, **parts))


def test_further_evaluation_sets_have_metrics_of_their_own(tmp_path, devices):
    shifted = EvaluationSet(INPUTS[:30] + 1, LABELS[:30], 20)
    data = DATA._replace(evaluations={"shifted": shifted})
    trainer = plain(
        data=data, task=lambda outputs, batch: {"loss": cross_entropy(outputs, batch)}
    ).trainer(devices)
    best = {"best_metric": "eval/shifted/loss"}
    result = train(trainer, num_steps=2, workdir=tmp_path, **best)
    found = result.metrics["eval/shifted/loss"]
    assert found != result.metrics["eval/loss"]
    alone = trainer.measure(result.state, shifted)[0]["eval/loss"]
    assert found == alone
    with pytest.raises(ConfigError, match="eval/shifted/loss"):
        train(trainer, num_steps=2, workdir=tmp_path / "b", best_metric="eval/none")


def test_evaluation_batches_with_other_names_are_named(tmp_path, one_device):
    class Images:
        def batch(self, step):
            return {"image": INPUTS[:8], "label": LABELS[:8]}

    trainer = plain(
        data=Data(Images(), EvaluationSet({"image": INPUTS}, LABELS, 8), 2),
        model=hk.transform(lambda batch: hk.Linear(2)(batch["image"])),
        task=lambda outputs, batch: {"loss": outputs[:, 0] * batch["label"]},
    ).trainer(one_device)
    words = "asks for 'label'; .*set has inputs, labels, and .* train on image, label"
    with pytest.raises(ConfigError, match=words):
        train(trainer, num_steps=2, workdir=tmp_path)


def test_evaluation_batches_may_have_names_that_training_has_not(tmp_path, devices):
    """As two views of an image are trained on, and the image itself is evaluated."""

    class Views:
        def batch(self, step):
            return {"first": INPUTS[:8], "second": -INPUTS[:8]}

    def forward(batch, is_training):
        names = ("first", "second") if is_training else ("image",)
        net = hk.Linear(2)
        return [net(batch[name]) for name in names]

    class Images:
        num_batches = 2

        def batch(self, index):
            return {"image": INPUTS[8 * index :][:8]}

    def make(devices):
        return plain(
            data=Data(Views(), Images(), 2),
            model=hk.transform(forward),
            task=lambda outputs: {"loss": jnp.square(sum(outputs)).sum(1)},
        )

    train(make(devices).trainer(devices), num_steps=2, workdir=tmp_path)
    run = Run.open(tmp_path, devices, experiment=make)
    outputs = np.concatenate([x for (x,) in run.trainer.predict(run.state)])
    expected = np.square(outputs).sum(axis=1).mean()
    assert run.evaluate()["eval/loss"] == pytest.approx(expected, rel=1e-5)
    if devices.num_devices == 1:
        export_stablehlo(run, tmp_path / "exported")
        described = json.loads((tmp_path / "exported/forward.json").read_text())
        assert [*described["inputs"]] == ["image"], described


def test_the_lengths_of_what_is_evaluated_are_no_code(one_device):
    """As the first batch of a set in buckets, which other texts may change."""

    def cross_entropy_of(outputs, batch):
        return {"loss": cross_entropy(outputs, batch)}

    def digest(length):
        data = DATA._replace(
            train=ArrayDataset(np.ones((16, 5, 2)), LABELS[:16], BatchSpec(8)),
            evaluation=EvaluationSet(np.ones((16, length, 2)), LABELS[:16], 8),
        )
        model = hk.transform(lambda x: hk.Linear(2)(x.mean(1)))
        made = plain(data=data, model=model, task=cross_entropy_of)
        return fingerprint.of(made.trainer(one_device))["evaluation step"]

    assert digest(3) == digest(7)


def test_keys_of_the_config_are_no_facts_of_a_task():
    def task(logits, batch, step, *, smoothing):
        """As those of a project, whose keys have no defaults."""

    facts = {"logits": "outputs", "batch": "batch", "step": "step"}
    assert facts_of(task, {"smoothing": 0.1}) == facts
    with pytest.raises(ConfigError, match="the task takes logits, smoothing"):
        facts_of(task)


def test_weights_of_another_shape_than_the_values_are_refused():
    # They would broadcast, to a sum in place of an average.
    task = as_task(lambda x, batch: {"loss": x, "example_weight": batch["labels"]})
    batch = {"inputs": np.ones((8, 3)), "labels": np.ones((8, 1))}
    facts = {"batch": batch, "mask": np.ones(8, bool), "is_training": True}
    with pytest.raises(ConfigError, match=r"'loss' has shape \[8, 3\], .*\[8, 1\]"):
        example_values(task, outputs=batch["inputs"], **facts)


def test_a_fact_of_a_task_is_no_key_of_the_config():
    config = digits.get_config()
    config.task = {"name": "tests.training.test_custom:with_step", "step": 3}
    with pytest.raises(ConfigError, match="with_step got multiple values .*'step'"):
        make_task(config)


def with_step(outputs, batch, step):
    return {"loss": outputs * step}


def test_a_task_called_by_hand_gets_outputs_and_batch_by_name():
    def task(batch, outputs, step=0):
        return {"loss": outputs - batch["labels"] + step}

    values = as_task(task)(np.array([3]), {"labels": np.array([1])}, step=10)
    assert values["loss"] == [12]


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_averages_have_counts_and_keys_as_they_are(one_device, steps_per_call):
    def counting_init(rng, batch):
        return {"params": {"w": jnp.ones(3), "n": jnp.zeros((), jnp.int32), "key": rng}}

    def counting(state, batch, rng, axis_name):
        w, n, key = (state.params[name] for name in ("w", "n", "key"))
        params = {"w": w / 2, "n": n + 1, "key": jax.random.fold_in(key, n)}
        return state._replace(params=params), {"loss": w.sum()}

    trainer = Experiment(
        data=DATA._replace(evaluation=None),
        init=counting_init,
        step=counting,
        ema_decay=0.5,
        steps_per_call=steps_per_call,
    ).trainer(one_device)
    state = trainer.init()
    with trainer.calls(0, 4, lambda step: step % 2 == 0) as calls:
        for steps, arrays in calls:
            state, _ = trainer.advance(state, steps, arrays)
    averages = state.ema_params
    assert averages["n"] == 4 and averages["n"].dtype == jnp.int32
    assert jax.random.key_data(averages["key"]).tolist() == (
        jax.random.key_data(state.params["key"]).tolist()
    )
    mean = 1.0
    for step in range(1, 5):
        mean = (mean + 0.5**step) / 2
    np.testing.assert_allclose(averages["w"], mean, rtol=1e-6)


def test_a_custom_state_may_have_immutable_dictionaries(one_device):
    """Published code of 2021 makes them of its parameters, in each step anew."""
    fixed = hk.data_structures.to_immutable_dict

    def fixed_init(rng, batch):
        first = init(rng, batch)
        return first | {"params": fixed(first["params"])}

    def fixed_step(state, batch, rng, axis_name):
        new, scalars = step(state, batch, rng, axis_name)
        return new._replace(params=fixed(new.params)), scalars

    params = []
    fixed_trainer = own(init=fixed_init, step=fixed_step).trainer(one_device)
    for trainer in (own_trainer(1), fixed_trainer):
        batch = one_device.shard(DATA.train.batch(0))
        state, _ = trainer.step(trainer.init(), batch)
        params.append(one_device.fetch(state.params))
    jax.tree.map(np.testing.assert_array_equal, *params)
