"""Models that return their own loss, of batches that are any tree of arrays."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.config import default_config, to_dict
from haiku_template.data import BatchSpec, Data, bucketed
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, PlacementError
from haiku_template.finetuning import Finetuning, Lora
from haiku_template.models import per_example
from haiku_template.preflight.checks import check_evaluation
from haiku_template.runs import Run, export_stablehlo, train, write_predictions
from haiku_template.testing import assert_devices_agree, assert_resumes_bitwise
from haiku_template.training import Experiment, Task, own_loss

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 6)).astype(np.float32)
Y = X[:, :1] * 2 - X[:, 1:2] + 1


class Pair(NamedTuple):
    """A batch without names that the package knows."""

    given: np.ndarray
    wanted: np.ndarray


class Rows:
    """The first rows of a tree of arrays, `size` in a batch."""

    def __init__(self, tree, count, size):
        self.tree, self.count, self.size = tree, count, size
        self.num_batches = -(-count // size)

    def batch(self, index):
        rows = slice(index % self.num_batches * self.size, None)
        return jax.tree.map(
            lambda x: x[: self.count][rows][: self.size].copy(), self.tree
        )


def errors(batch):
    given, wanted = jax.tree.leaves(batch)
    return jnp.square(hk.nets.MLP([8, 1])(given) - wanted)[..., 0]


def whole(batch, is_training):
    return jnp.mean(errors(batch))


def each(batch):
    loss = errors(batch)
    return loss, {"loss": 7 * loss, "of": {"root": jnp.sqrt(loss)}, "far": loss > 1.0}


def experiment(forward, count=48, size=16, tree=(X, Y), **parts):
    model = forward if isinstance(forward, tuple) else hk.transform(forward)
    data = Data(Rows(tree, 48, 16), Rows(tree, count, size))
    given = {"model": model, "task": own_loss, "data": data} | parts
    return Experiment(optimizer=optax.adam(1e-2), **given)


def fitted(devices, made, num_steps=3):
    trainer = made.trainer(devices)
    state, losses = trainer.init(), []
    for step in range(num_steps):
        batch = devices.shard(made.data.train.batch(step))
        state, scalars = trainer.step(state, batch)
        losses.append(float(devices.fetch(scalars["loss"])))
    with devices.explicit_transfers():
        return losses, trainer.evaluate(state), devices.fetch(state.params)


def by_hand(forward, params, count):
    """Per-example losses of the first examples, all in one batch."""
    apply = hk.without_apply_rng(hk.transform(forward)).apply
    return np.asarray(apply(params, (X[:count], Y[:count])), np.float64)


@pytest.mark.slow(but="four devices-40")
@pytest.mark.parametrize("count", [48, 40])
def test_a_loss_of_a_whole_batch_is_trained_and_evaluated_without_padding(
    devices, count
):
    _, metrics, params = fitted(devices, experiment(whole, count))
    found = metrics["eval/loss"]
    assert found == pytest.approx(by_hand(errors, params, count).mean(), rel=1e-6)


@pytest.mark.slow(but="four devices-37")
@pytest.mark.parametrize("count", [48, 37, 3])
def test_a_loss_for_each_example_is_exact_whatever_the_sizes(devices, count):
    _, metrics, params = fitted(devices, experiment(each, count))
    loss = by_hand(errors, params, count)
    assert metrics.keys() == {"eval/loss", "eval/of/root", "eval/far"}
    assert metrics["eval/loss"] == pytest.approx(loss.mean(), rel=1e-6)
    assert metrics["eval/of/root"] == pytest.approx(np.sqrt(loss).mean(), rel=1e-6)
    assert metrics["eval/far"] == pytest.approx((loss > 1).mean())


@pytest.mark.slow(but="one device")
def test_a_batch_may_be_any_tree_of_arrays(devices):
    expected = fitted(devices, experiment(whole))
    alike = Pair(X, Y), {"a": X, "b": {"c": Y}}, [X, Y], {"inputs": (X, Y)}
    for tree in alike:
        losses, metrics, _ = fitted(devices, experiment(whole, tree=tree))
        assert (losses, metrics) == expected[:2]


@pytest.mark.slow(but="one device")
def test_an_array_alone_is_a_batch(devices):
    def spread(batch):
        middle = hk.get_parameter("middle", [6], init=jnp.zeros)
        return jnp.sum(jnp.square(batch - middle), axis=1)

    losses, metrics, _ = fitted(devices, experiment(spread, 37, tree=X))
    assert losses[0] == pytest.approx(np.square(X[:16]).sum(axis=1).mean(), rel=1e-6)
    assert metrics["eval/loss"] < np.square(X[:37]).sum(axis=1).mean()


@pytest.mark.slow
def test_four_devices_and_micro_batches_equal_one_batch(one_device, four_devices):
    expected, metrics, _ = fitted(one_device, experiment(whole))
    for parts in (1, 2):
        made = experiment(whole, accumulate_steps=parts)
        losses, found, _ = fitted(four_devices, made)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert found["eval/loss"] == pytest.approx(metrics["eval/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"count": 42}, "42 examples in batches of 16, the last of 10"),
        ({"count": 40, "size": 10}, "40 examples in batches of 10, the last of 10"),
    ],
)
def test_a_batch_that_may_not_be_padded_and_does_not_split_is_refused_before_step_0(
    one_device, four_devices, tmp_path, parts, found
):
    words = f"{found}.*4 devices.*padding.*possible are .* numbers for each example"
    with pytest.raises(PlacementError, match=words):
        trainer = experiment(whole, **parts).trainer(four_devices)
        train(trainer, num_steps=1, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    made = experiment(whole)
    further = made.data._replace(evaluations={"odd": Rows((X, Y), 42, 16)})
    with pytest.raises(PlacementError, match="42 examples"):
        trainer = experiment(whole, data=further).trainer(four_devices)
        train(trainer, num_steps=1, workdir=tmp_path / "run")
    _, metrics, params = fitted(one_device, experiment(whole, **parts))
    loss = by_hand(errors, params, parts["count"])
    assert metrics["eval/loss"] == pytest.approx(loss.mean(), rel=1e-6)


@pytest.mark.parametrize("sets", [[1], {"": 1}, {2: 1}])
def test_evaluation_sets_have_names(sets):
    data = experiment(whole).data._replace(evaluations=sets)
    with pytest.raises(ConfigError, match=r"data\.evaluations=.*; possible is a dict"):
        experiment(whole, data=data)


@pytest.mark.parametrize("forward", [whole, each])
def test_a_run_says_if_its_evaluation_is_exact_for_a_mean_alone(
    one_device, caplog, forward
):
    check_evaluation(experiment(forward).trainer(one_device), "eval/loss")
    assert ("exact if that is a mean" in caplog.text) == (forward is whole)


def test_padding_cannot_get_into_the_loss_of_a_whole_batch(one_device):
    trainer = experiment(whole).trainer(one_device)
    batch = one_device.shard(((X[:4], Y[:4]), np.array([0, 1, 2, ~3], np.int32)))
    state, eval_step = trainer.init(), jax.jit(trainer.functions().eval_step)
    sums = one_device.fetch(eval_step(*state.of_model(), batch))
    assert np.isnan(sums["values"]["loss"])


@pytest.mark.slow(but="four")
def test_predictions_are_what_the_model_returns_for_each_example(devices):
    trainer = experiment(each, 37).trainer(devices)
    state = trainer.init()
    outputs = list(trainer.predict(state))
    loss, scalars = jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)
    expected = by_hand(errors, devices.fetch(state.params), 37)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(scalars["of"]["root"], np.sqrt(expected), rtol=1e-5)
    alone = experiment(whole).trainer(devices)
    with pytest.raises(
        ConfigError,
        match=r"returns \[\] for .* predictions are arrays of examples.*for each",
    ):
        list(alone.predict(alone.init()))


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda batch: hk.Linear(2)(batch[0]), r"own_loss takes.*\[16, 2\]; possible"),
        (lambda batch: (errors(batch), {}, batch), "own_loss takes.*possible are"),
        (lambda batch: (errors(batch), errors(batch)), "own_loss takes.*possible are"),
        (lambda batch: {"loss": errors(batch)}, "own_loss takes.*possible are"),
        (lambda batch: errors(batch)[:-1], r"'loss' has shape \[15\] for 16"),
        (lambda batch: (errors(batch), {"a": batch[0][0]}), r"'a' has shape \[6\]"),
    ],
)
def test_outputs_that_are_no_loss_are_refused(one_device, forward, words):
    trainer = experiment(forward).trainer(one_device)
    with pytest.raises(ConfigError, match=words):
        trainer.trace(trainer.feed.host_shapes()[0]).lower()


def test_a_task_that_takes_labels_refuses_a_batch_without_names(one_device):
    task = Task(lambda outputs, batch: {"loss": outputs}, "classes")
    for tree, found in (((X, Y), "arrays without names"), ({"x": X, "y": Y}, "x, y")):
        words = f"takes inputs and labels .classes.*have {found} alone"
        with pytest.raises(ConfigError, match=words):
            experiment(errors, tree=tree, task=task).trainer(one_device)


def test_a_model_that_fails_with_a_whole_batch_is_told_that_it_got_one(one_device):
    with pytest.raises(AttributeError) as caught:
        experiment(lambda x: hk.Flatten()(x), tree={"image": X, "kind": Y}).trainer(
            one_device
        )
    assert (
        "Of a batch of image, kind the model was given all."
        in caught.value.__notes__[0]
    )
    with pytest.raises(ValueError, match="to unpack") as caught:
        experiment(whole, tree={"inputs": X, "labels": Y}).trainer(one_device)
    assert (
        "of inputs, labels the model was given inputs alone."
        in caught.value.__notes__[0]
    )


PARTS = {"inputs": X, "targets": Y}


@pytest.mark.slow(but="one device")
def test_a_part_of_a_batch_may_be_named_inputs(devices):
    """As GraphCast, TAPIR and Perceiver name one of several."""
    expected = fitted(devices, experiment(each, 37))
    found = fitted(devices, experiment(each, 37, tree=PARTS))
    assert found[:2] == expected[:2]
    trainers = [experiment(each, 37, tree=x).trainer(devices) for x in (PARTS, (X, Y))]
    a, b = (list(x.predict(x.init())) for x in trainers)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"inputs": X}, "of inputs the model was given inputs alone."),
        (
            {"inputs": X, "labels": Y},
            "of inputs, labels the model was given inputs alone.",
        ),
        (
            {"inputs": X, "labels": Y, "mask": Y},
            "of inputs, labels, mask the model was given all.",
        ),
        ({"inputs": X, "mask": Y}, "of inputs, mask the model was given all."),
    ],
)
def test_what_a_model_with_its_own_loss_gets_is_said(one_device, tree, words):
    with pytest.raises(ZeroDivisionError) as caught:
        experiment(lambda batch: 1 / 0, tree=tree).trainer(one_device)
    assert words in caught.value.__notes__[0]


TOKENS = RNG.normal(size=(48, 16, 3)).astype(np.float32)
MASK = np.arange(16) < RNG.integers(1, 17, 48)[:, None]


def of_tokens(batch, weighs=True):
    """A mean over tokens, of each example with their number, or of a whole batch."""
    tokens, mask = batch
    wrong = jnp.square(hk.Linear(1)(tokens)[..., 0] - tokens.sum(axis=2)) * mask
    count = mask.sum(axis=1)
    if weighs:
        return wrong.sum(axis=1) / count, {"example_weight": count}
    return wrong.sum() / count.sum()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_mean_over_tokens_with_their_number_is_that_of_one_device(
    one_device, four_devices, parts
):
    tree = {"tree": (TOKENS, MASK)}
    expected, metrics, params = fitted(one_device, experiment(of_tokens, **tree))
    made = experiment(of_tokens, accumulate_steps=parts, **tree)
    losses, found, _ = fitted(four_devices, made)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert found["eval/loss"] == pytest.approx(metrics["eval/loss"], rel=1e-6)
    # Of all tokens of the set, whatever the batches.
    apply = hk.without_apply_rng(hk.transform(lambda x: of_tokens(x, False))).apply
    assert found["eval/loss"] == pytest.approx(
        float(apply(params, (TOKENS, MASK))), rel=1e-5
    )
    alone = lambda batch: of_tokens(batch, weighs=False)  # noqa: E731
    losses, *_ = fitted(four_devices, experiment(alone, **tree))
    assert abs(losses[0] / expected[0] - 1) > 2e-3


def test_without_a_loss_of_its_own_a_model_gets_inputs_alone(one_device):
    def task(outputs, batch):
        return {"loss": jnp.square(outputs - batch["targets"])[:, 0]}

    parts = {"task": task, "tree": PARTS}
    losses, *_ = fitted(one_device, experiment(lambda x: hk.Linear(1)(x), **parts))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ((X, 3.0), r"the batch's \[1\] is 3.0, without rows"),
        ((X, Y[:9]), r"\[0\] has 16 rows and .*\[1\] has 9"),
        ((), "the batch is empty"),
    ],
)
def test_leaves_without_rows_of_the_batch_are_refused_by_name(one_device, tree, words):
    rows = Rows((), 48, 16)
    rows.batch = lambda step: jax.tree.map(lambda x: x[:16] if np.ndim(x) else x, tree)
    with pytest.raises(PlacementError, match=words):
        experiment(whole, data=Data(rows, None)).trainer(one_device)


def test_arrays_of_another_byte_order_are_those_of_this_one(one_device):
    swapped = tuple(x.astype(x.dtype.newbyteorder()) for x in (X, Y))
    expected = fitted(one_device, experiment(each, 37))
    found = fitted(one_device, experiment(each, 37, tree=swapped))
    assert found[:2] == expected[:2]


@pytest.mark.parametrize("kind", ["U1", object, "M8[s]"])
def test_leaves_that_are_not_of_numbers_are_refused_by_name(one_device, kind):
    tree = {"x": X, "y": Y, "names": np.zeros(48, kind)}
    with pytest.raises(PlacementError, match=r"\['names'\] holds .*numbers alone"):
        experiment(whole, tree=tree).trainer(one_device)


def noisy(batch):
    given, wanted = batch
    given = given + jax.random.normal(hk.next_rng_key(), given.shape)
    return jnp.mean(jnp.square(hk.Linear(1)(given) - wanted), axis=-1)


@pytest.mark.slow(but="one device")
def test_a_loss_that_draws_gets_an_rng_in_training_and_evaluation(devices):
    losses, metrics, _ = fitted(devices, experiment(noisy, 37), 2)
    again, metrics_again, _ = fitted(devices, experiment(noisy, 37), 2)
    assert (losses, metrics) == (again, metrics_again)
    assert losses[0] != losses[1]


@pytest.mark.slow(but="one device")
def test_a_model_of_one_example_is_mapped_over_the_batch(devices):
    found = fitted(devices, experiment(per_example(hk.transform(noisy)), 37))
    assert found[0] != fitted(devices, experiment(noisy, 37))[0]
    plain = fitted(devices, experiment(per_example(hk.transform(whole)), 37))
    expected = fitted(devices, experiment(errors, 37))
    np.testing.assert_allclose(plain[0], expected[0], rtol=1e-5)
    assert plain[1]["eval/loss"] == pytest.approx(expected[1]["eval/loss"], rel=1e-5)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_mapped_model_takes_both_kinds_of_rng(make):
    model = per_example(hk.transform(noisy))
    params, state = model.init(make(0), (X[:4], Y[:4]), True)
    loss, _ = model.apply(params, state, make(1), (X[:4], Y[:4]), True)
    assert len(np.unique(loss)) == 4


def test_each_example_of_an_evaluation_draws_the_same_on_any_number_of_devices():
    results = []
    for count, size in ((1, 16), (4, 5), (3, 15)):
        devices = DeviceManager.create("cpu", num_devices=count)
        made = experiment(per_example(hk.transform(noisy)), 37, size)
        rows = Rows((X, Y), 48, 24)
        made = experiment(made.model, data=Data(rows, made.data.evaluation))
        trainer = made.trainer(devices)
        state = trainer.init()
        outputs = np.concatenate(list(trainer.predict(state)))
        metrics = trainer.evaluate(state)
        assert metrics["eval/loss"] == pytest.approx(outputs.mean(), rel=1e-6)
        results.append(outputs)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-5)
    assert len(np.unique(results[0])) == 37


def counted(batch):
    calls = hk.get_state("calls", [], init=jnp.zeros)
    hk.set_state("calls", calls + 1)
    return whole(batch, True)


def normed(batch, is_training):
    given, wanted = batch
    norm = hk.BatchNorm(True, True, 0.9)
    given = norm(given[None], is_training)[0]
    return jnp.mean(jnp.square(hk.Linear(1)(given) - wanted))


def test_state_of_a_mapped_model_may_not_depend_on_the_example(one_device):
    for forward, possible in ((counted, True), (normed, False)):
        model = per_example(hk.transform_with_state(forward))
        trainer = experiment(forward, model=model).trainer(one_device)
        state, batch = trainer.init(), one_device.shard((X[:16], Y[:16]))
        if possible:
            state, _ = trainer.step(state, batch)
            assert jax.tree.leaves(one_device.fetch(state.net_state)) == [1]
        else:
            with pytest.raises(ConfigError, match=r"its state \(batch_norm.*average"):
                trainer.step(state, batch)


def test_the_errors_of_a_mapped_model_are_its_own(one_device):
    def broken(batch):
        raise ValueError("a fault of the model")

    with pytest.raises(ValueError, match="a fault of the model"):
        experiment(per_example(hk.transform(broken))).trainer(one_device)


@pytest.mark.slow(but="one device")
def test_lora_trains_a_model_with_its_own_loss(devices):
    tuning = Finetuning(lora=Lora(2, 2.0, patterns=("*/w",)))
    losses, metrics, params = fitted(devices, experiment(each, finetuning=tuning), 20)
    assert losses[-1] < losses[0] and np.isfinite(metrics["eval/loss"])
    assert all("lora" in name for module in params.values() for name in module)


@pytest.mark.slow(but="four")
def test_a_step_of_one_s_own_gets_the_whole_batch(devices):
    def init(rng, batch):
        return {"params": {"w": jnp.zeros(batch.given.shape[1:])}}

    def step(state, batch, rng, axis_name):
        loss = jnp.mean(
            jnp.square(batch.given @ state.params["w"] - batch.wanted[:, 0])
        )
        loss = loss if axis_name is None else jax.lax.pmean(loss, axis_name)
        return state, {"loss": loss}

    data = Data(Rows(Pair(X, Y), 48, 16), None)
    trainer = Experiment(data=data, init=init, step=step).trainer(devices)
    batch = devices.shard(data.train.batch(0))
    _, scalars = trainer.step(trainer.init(), batch)
    found = float(devices.fetch(scalars["loss"]))
    assert found == pytest.approx(np.square(Y[:16]).mean(), rel=1e-6)


def originals(count):
    """Chains of 2 to 30 points, and a number to tell of each."""
    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        places = rng.normal(size=(int(rng.integers(2, 31)), 3)).astype(np.float32)
        made.append({"places": places, "wanted": np.abs(places).sum(axis=1)})
    return made


def chains(spec: BatchSpec, count):
    made = originals(count)
    held_out = made[: count // 3]
    return bucketed(made, spec, (8, 16, 32), evaluation=held_out, mask="mask")


def of_one_chain(num_outputs, axis_name, width, noise=0.0):
    def forward(chain):
        places = chain["places"]
        if noise:
            places += noise * jax.random.normal(hk.next_rng_key(), places.shape)
        error = jnp.square(hk.nets.MLP([width, 1])(places)[:, 0] - chain["wanted"])
        loss = jnp.sum(error * chain["mask"]) / jnp.sum(chain["mask"])
        return loss, {"largest": jnp.max(error * chain["mask"])}

    return hk.transform(forward)


def config_of_chains(**model):
    config = default_config()
    config.task = {"name": "own_loss"}
    config.data = {"name": f"{__name__}:chains", "count": 40, "placement": "host"}
    config.model = {
        "name": f"{__name__}:of_one_chain",
        "width": 8,
        "per_example": True,
    } | model
    config.batch_size, config.num_steps = 8, 6
    return config


@pytest.mark.slow
def test_a_config_of_padded_trees_on_several_devices_and_resumed(tmp_path):
    assert_devices_agree(config_of_chains(), tmp_path / "agree")
    assert_resumes_bitwise(config_of_chains(noise=0.1), tmp_path / "resume")


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_run_is_evaluated_predicted_and_exported(devices, tmp_path, noise):
    config = config_of_chains(noise=noise)
    experiment_of_config = Experiment.from_config(config, devices)
    how = {"num_steps": 6, "workdir": tmp_path / "run", "config": to_dict(config)}
    result = train(experiment_of_config.trainer(devices), **how)
    run = Run.open(tmp_path / "run", devices)
    assert run.evaluate()["eval/loss"] == result.metrics["eval/loss"]
    assert write_predictions(run, tmp_path / "outputs.npz") == 13
    with np.load(tmp_path / "outputs.npz") as file:
        outputs = dict(file)
    if not noise:  # Each alone, as it was before it was padded.
        apply = hk.without_apply_rng(of_one_chain(0, None, 8)).apply
        params, alone = devices.fetch(run.state.params), []
        for chain in originals(40)[:13]:
            mask = np.ones(len(chain["places"]), bool)
            alone.append(float(apply(params, chain | {"mask": mask})[0]))
        np.testing.assert_allclose(
            np.sort(outputs["outputs/0"]), np.sort(alone), rtol=1e-4
        )
    assert outputs["outputs/0"].mean() == pytest.approx(result.metrics["eval/loss"])
    assert outputs["outputs/1/largest"].shape == (13,)
    if noise:
        with pytest.raises(ConfigError, match="cannot be exported.*PRNG"):
            export_stablehlo(run, tmp_path / "exported")
        return
    export_stablehlo(run, tmp_path / "exported")
    program = (tmp_path / "exported" / "forward.stablehlo").read_bytes()
    forward = jax.export.deserialize(program)
    batch = experiment_of_config.data.evaluation.batch(1)
    longest = jax.tree.map(lambda x: np.zeros((5, 32, *x.shape[2:]), x.dtype), batch)
    for name, x in batch.items():
        longest[name][:, : x.shape[1]] = x
    loss, _ = forward.call(longest)
    np.testing.assert_allclose(loss, outputs["outputs/0"][8:], rtol=1e-5)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_per_example_is_true_or_false(one_device, value):
    config = config_of_chains(per_example=value)
    with pytest.raises(ConfigError, match="per_example=.*possible are True and False"):
        Experiment.from_config(config, one_device)
