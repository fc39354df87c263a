"""Row C05 of the reliability bench: exact elastic runs have the same bits anywhere."""

import dataclasses
import hashlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from configs import digits
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager, exact
from haiku_template.errors import ConfigError
from haiku_template.models import mlp, resnet
from haiku_template.runs import Run, train
from haiku_template.runs.rewind import go_back
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification
from tests.runs import run_command

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(75, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 75)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(32)), EvaluationSet(INPUTS, LABELS, 20), 3
)


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """The tests' eight devices have eight threads; commands set it themselves."""
    monkeypatch.setenv("PJRT_NPROC", "8")


def with_dropout(inputs, is_training):
    x = hk.Flatten()(inputs)
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.3, x)
    return hk.nets.MLP([8, 3])(x)


def weighted(outputs, batch):
    values = classification(outputs, batch)
    return values | {"example_weight": (batch["labels"] == 1) + 0.5}


def with_complex_state(inputs):
    for dtype in ("float32", "complex64"):
        hk.get_state(dtype, (), jnp.dtype(dtype), init=jnp.zeros)
        hk.set_state(dtype, inputs.mean().astype(dtype))
    return hk.Linear(3)(hk.Flatten()(inputs))


def with_a_number(inputs):
    hk.get_state("rate", (), init=jnp.zeros)
    hk.set_state("rate", 0.5)  # Python's, of a weak type.
    return hk.nets.MLP([8, 3])(hk.Flatten()(inputs))


MODELS = {
    "number": lambda: hk.transform_with_state(with_a_number),
    "complex": lambda: hk.transform_with_state(with_complex_state),
    "mlp": lambda: mlp(3, width=8),
    "dropout": lambda: hk.transform(with_dropout),
    "resnet": lambda: resnet(3, channels=(4,), blocks=1, norm_decay=0.9),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def made(num_devices, model="mlp", **options):
    experiment = Experiment(
        model=MODELS[model](),
        task=options.pop("task", classification),
        data=DATA,
        optimizer=OPTIMIZER,
        exact_elastic=options.pop("shares", 8),
        **options,
    )
    return experiment.trainer(DeviceManager.create("cpu", num_devices=num_devices))


def digest(tree):
    digests = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        digests.update(np.asarray(leaf).tobytes())
    return digests.hexdigest()


def lines(workdir, name="step"):
    """Lines of metrics.jsonl that have a name, without times."""
    rows = [row for row in read(workdir / "metrics.jsonl") if name in row]
    return [{k: x for k, x in r.items() if not k.startswith("perf/")} for r in rows]


OPTIONS = {
    "dropout": {"model": "dropout", "accumulate_steps": 2},
    "weights": {"task": weighted, "ema_decay": 0.9},
    "float16": {"precision": "float16", "skips": True},
    "staged": {"placement": "device", "shares": 4},
    "resnet": {"model": "resnet"},
}


CASES = [  # And the numbers of devices.
    pytest.param("dropout", (1, 4), id="dropout"),
    pytest.param("dropout", (2, 4, 8), id="others", marks=pytest.mark.slow),
    pytest.param("staged", (1, 4), id="staged", marks=pytest.mark.slow),
    pytest.param("resnet", (1, 8), id="resnet", marks=pytest.mark.long),
    pytest.param("weights", (1, 8), id="weights", marks=pytest.mark.long),
    pytest.param("float16", (1, 8), id="float16", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "numbers"), CASES)
def test_runs_on_any_devices_have_the_same_bits(tmp_path, name, numbers):
    results = {}
    for n in numbers:
        workdir, trainer = tmp_path / str(n), made(n, **OPTIONS[name])
        result = train(trainer, num_steps=6, workdir=workdir, log_every=2, eval_every=3)
        results[n] = digest(result.state.saved()), lines(workdir)
        assert len(results[n][1]) > 3
    first, *others = results.values()
    assert all(result == first for result in others)


def test_a_complex_state_is_the_mean_of_all_shares():
    trainer, batch = made(4, "complex"), DATA.train.batch(0)
    state, _ = trainer.step(trainer.init(), trainer.devices.shard(batch))
    means = trainer.devices.fetch(state.net_state)["~"]
    for value in means.values():
        np.testing.assert_allclose(value, batch["inputs"].mean(), rtol=1e-4)


def test_a_state_that_is_a_python_number_is_of_one_type_on_any_devices(tmp_path):
    """A weak type goes to the update from one device alone, which XLA fuses anew."""
    results, options = {}, {"log_every": 1, "max_consecutive_nonfinite": 3}
    for n in (1, 4):
        trainer, workdir = made(n, "number"), tmp_path / str(n)
        traced = trainer.trace(trainer.feed.host_shapes()[0]).out_info
        assert not any(x.weak_type for x in jax.tree.leaves(traced))
        result = train(trainer, num_steps=6, workdir=workdir, **options)
        results[n] = digest(result.state.saved()), lines(workdir)
    assert results[1] == results[4]


def test_a_step_is_left_out_on_any_devices(tmp_path):
    results = {}
    for n in (1, 4):
        workdir, options = tmp_path / str(n), {"log_every": 1, "num_steps": 6}
        train(made(n), workdir=workdir, save_every=2, keep_last=9, **options)
        go_back(workdir, "4")
        result = train(made(n), workdir=workdir, **options)
        results[n] = digest(result.state.saved()), lines(workdir, "train/loss")
    assert results[1] == results[4]
    losses = {row["step"]: row["train/loss"] for row in results[1][1]}
    assert [step for step, loss in losses.items() if loss is None] == [4]


def test_devices_change_in_the_middle_of_a_run(tmp_path):
    for stop, n in ((3, 8), (5, 2), (6, 1), (9, 8)):
        moved = train(made(n), num_steps=stop, workdir=tmp_path / "moved", log_every=1)
    still = train(made(4), num_steps=9, workdir=tmp_path / "still", log_every=1)
    assert digest(moved.state.saved()) == digest(still.state.saved())
    moved, still = (lines(tmp_path / name, "train/loss") for name in ("moved", "still"))
    assert moved == still and len(moved) == 9


def test_by_default_devices_change_within_rounding(tmp_path):
    """C05: 50 steps on 8, 2, 1 and 8 devices, next to those on one."""
    for stop, n in ((15, 8), (25, 2), (35, 1), (50, 8)):
        trainer = made(n, shares=None)
        moved = train(trainer, num_steps=stop, workdir=tmp_path / "moved").state
    still = train(made(1, shares=None), num_steps=50, workdir=tmp_path / "still").state
    for x, y in zip(*map(jax.tree.leaves, (moved.params, still.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_it_is_the_mean_of_the_shares(tmp_path):
    """Next to the default mode, whose mean is of the whole batch at once."""
    exact = train(made(2), num_steps=5, workdir=tmp_path / "exact")
    default = train(made(2, shares=None), num_steps=5, workdir=tmp_path / "default")
    for x, y in zip(
        *map(jax.tree.leaves, (exact.state.params, default.state.params)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for name in ("eval/loss", "eval/accuracy"):
        assert exact.metrics[name] == pytest.approx(default.metrics[name], rel=1e-5)


def test_statistics_of_shares_are_averaged(tmp_path):
    trainer = made(2, "resnet")
    state = train(trainer, num_steps=1, workdir=tmp_path).state
    model, (batch,) = MODELS["resnet"](), [DATA.train.batch(0)]
    first = trainer.init()
    states = [
        model.apply(first.params, first.net_state, None, rows, True)[1]
        for rows in np.split(batch["inputs"], 8)
    ]
    for path in ("batchnorm_0/~/mean_ema",):
        names = [name for name in states[0] if path in name]
        for name in names:
            expected = np.mean([x[name]["hidden"] for x in states], axis=0)
            np.testing.assert_allclose(
                state.net_state[name]["hidden"], expected, rtol=1e-3, atol=1e-6
            )
        assert names


def test_a_finished_run_is_evaluated_on_any_number_of_devices(tmp_path):
    config = digits.get_config()
    config.exact_elastic, config.num_steps = 4, 2
    config.optimizer.warmup_steps = 0
    devices = DeviceManager.create("cpu", num_devices=2)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    metrics = train(trainer, num_steps=2, workdir=tmp_path).metrics
    for n in (1, 3):
        run = Run.open(tmp_path, DeviceManager.create("cpu", num_devices=n))
        assert run.trainer.experiment.exact_elastic == (4 if n == 1 else None)
        loss = run.trainer.evaluate(run.checkpoint[1])["eval/loss"]
        assert loss == pytest.approx(metrics["eval/loss"], rel=0 if n == 1 else 1e-5)


def test_another_number_of_shares_is_another_run(tmp_path):
    train(made(1), num_steps=2, workdir=tmp_path)
    for shares in (4, None):
        with pytest.raises(ConfigError, match="computed something else .*shares"):
            train(made(1, shares=shares), num_steps=3, workdir=tmp_path)


def own_step(state, batch, rng, axis_name):
    return state, {"loss": 0.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sharding": (("*", "data"),)}, "with config.sharding; leave one out"),
        ({"reduce_dtype": "bfloat16"}, "with config.reduce_dtype"),
        ({"steps_per_call": 5}, "with config.steps_per_call above 1"),
        ({"step": own_step}, "with a step of your own"),
        ({"shares": 3}, "do not divide a batch of 32; .* is 33"),
        ({"accumulate_steps": 8}, "do not divide a batch of 32; .* is 64"),
        ({"shares": 1}, "on 2 devices; possible are 1 devices"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_not_be_exact_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        made(2, **options)


def test_a_model_that_averages_over_devices_is_refused(tmp_path):
    devices = DeviceManager.create("cpu", num_devices=2)
    model = resnet(3, axis_name="data", channels=(4,), blocks=1)
    trainer = dataclasses.replace(made(2).experiment, model=model).trainer(devices)
    with pytest.raises(ConfigError, match="averages over the mesh axis 'data': make"):
        train(trainer, num_steps=1, workdir=tmp_path)


def test_a_script_without_a_number_of_threads_is_warned(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("PJRT_NPROC")
    exact._warn_of_threads.cache_clear()
    train(made(2), num_steps=1, workdir=tmp_path)
    assert "write export PJRT_NPROC=8 before a run of exact_elastic=8," in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("name", ["digits_resnet", "gpt_bytes"])
def test_a_command_on_8_2_1_and_8_devices_has_the_bits_of_one_that_stays(
    tmp_path, name
):
    flags = [f"--config=configs/{name}.py", "--config.exact_elastic=8"]
    flags += ["--config.batch_size=16", "--config.log_every=2"]
    flags += ["--config.optimizer.schedule=constant"]
    flags += ["--config.optimizer.warmup_steps=0", "--config.eval_every=100"]
    if name == "gpt_bytes":
        flags += ["--config.model.num_layers=1", "--config.model.width=32"]
        flags += ["--config.model.num_heads=2", "--config.data.context=32"]

    def run(workdir, stop, n):
        more = [f"--workdir={tmp_path / workdir}", f"--config.num_steps={stop}"]
        done = run_command("train", *flags, *more, f"--simulate_devices={n}")
        assert done.returncode == 0, done.stderr

    for stop, n in ((3, 8), (5, 2), (6, 1), (8, 8)):
        run("moved", stop, n)
    run("still", 8, 1)
    states = (
        ocp.PyTreeCheckpointer().restore(tmp_path / workdir / "checkpoints/8/state")
        for workdir in ("moved", "still")
    )
    assert len(set(map(digest, states))) == 1
    moved, still = (lines(tmp_path / name, "train/loss") for name in ("moved", "still"))
    assert moved[-1] == still[-1]
