"""Layouts of a train state: sharded, it computes what it does replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits, digits_resnet
from haiku_template.devices import DeviceManager, Layout, mean_over
from haiku_template.preflight.budget import check_budget
from haiku_template.runs import train
from haiku_template.storage.checkpoint import restore
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment
from haiku_template.training.optimizers import _usable, make_optimizer
from tests.runs import run_steps

MOMENTS, ALL = (("opt_state/*", "data"),), (("*", "data"),)
LAYOUTS = {"replicated": (), "moments": MOMENTS, "all": ALL}


def build(
    num_devices,
    rules=MOMENTS,
    base=digits,
    rank=None,
    accumulate=1,
    keys_of_config=(),
    **keys,
):
    config = base.get_config()
    config.update(dict(keys_of_config))
    config.steps_per_call = 1
    config.ema_decay, config.sharding = 0.9, rules
    config.accumulate_steps, config.finetuning.lora.rank = accumulate, rank
    config.optimizer.update({"clip_norm": 0.1, "weight_decay": 0.1} | keys)
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    return Experiment.from_config(config, devices).trainer(devices)


def bytes_on(device, tree):
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def assert_close(one, other, **tolerance):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("rules", [MOMENTS, ALL], ids=["moments", "all"])
def test_four_devices_keep_a_quarter_each_and_compute_the_same(rules):
    replicated, sharded = build(4, ()), build(4, rules)
    ends = [run_steps(trainer, 5) for trainer in (replicated, sharded)]
    states = [state for state, _ in ends]
    sharded.devices.check(states[1], sharded.layout)
    parts = ("opt_state",) if rules == MOMENTS else ("opt_state", "params")
    for device in sharded.devices.devices:
        for part in ("opt_state", "params", "ema_params"):
            full, share = (bytes_on(device, getattr(state, part)) for state in states)
            quarter = rules == ALL or part in parts
            assert share == pytest.approx(full / 4 if quarter else full, rel=1e-3)
    hosts = [
        trainer.devices.fetch(end)
        for trainer, end in zip((replicated, sharded), ends, strict=True)
    ]
    assert_close(*hosts, rtol=0, atol=1e-6)
    assert sharded._step.compiled._cache_size() == 1
    metrics = [
        t.evaluate(s) for t, s in zip((replicated, sharded), states, strict=True)
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6)
    budgets = [check_budget(trainer) for trainer in (replicated, sharded)]
    assert budgets[1].opt_state == bytes_on(
        sharded.devices.devices[0], states[1].opt_state
    )
    saved = budgets[0].opt_state - budgets[1].opt_state
    assert budgets[1].saved == {"sharding": saved}


@pytest.mark.slow(but="4-2-all")
@pytest.mark.parametrize("rules", [MOMENTS, ALL], ids=["moments", "all"])
@pytest.mark.parametrize(("rank", "accumulate"), [(4, 1), (4, 2), (None, 2)])
def test_lora_and_accumulation_compute_the_same(rules, rank, accumulate):
    keys = {"rank": rank, "accumulate": accumulate, "warmup_steps": 0}
    trainers = [build(4, layout, **keys) for layout in ((), rules)]
    ends = [run_steps(trainer, 5)[0] for trainer in trainers]
    trainers[1].devices.check(ends[1], trainers[1].layout)
    first, *hosts = [
        trainers[0].devices.fetch((x.params, x.ema_params, x.frozen))
        for x in (trainers[0].init(), *ends)
    ]
    assert_close(*hosts, rtol=0, atol=2e-6)
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), first[0], hosts[0][0])
    assert min(jax.tree.leaves(changes)) > 1e-3  # Of each leaf, adapters' A and B.
    assert bool(first[2]) == (rank is not None)
    leaves = (ends[1].opt_state, ends[1].frozen) if rules == ALL else ends[1].opt_state
    full = sum(leaf.nbytes for leaf in jax.tree.leaves(leaves))
    assert bytes_on(trainers[1].devices.devices[0], leaves) < 0.3 * full


@pytest.mark.slow(but="data-4")
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("axis", ["data", None])
def test_a_run_with_moments_in_the_hosts_memory_is_bitwise_the_same(
    tmp_path, num_devices, axis
):
    rules = (("opt_state/*", axis, "pinned_host"),)
    options = {"log_every": 1, "keep_best": 0}
    straight = train(
        build(num_devices, ()), num_steps=4, workdir=tmp_path / "a", **options
    )
    for stop in (2, 4):
        trainer = build(num_devices, rules)
        end = train(trainer, num_steps=stop, workdir=tmp_path / "b", **options)
    trainer.devices.check(end.state, trainer.layout)
    assert trainer._call.compiled._cache_size() == 1
    hosts = map(jax.device_get, (straight.state, end.state))
    assert_close(*hosts, rtol=0, atol=0)
    assert check_budget(trainer).opt_state < 100


def test_shard_moments_is_a_name_for_its_rule(tmp_path):
    named = build(4, (), shard_moments=True)
    assert named.layout == build(4).layout
    train(named, num_steps=1, workdir=tmp_path)  # Resumes in another, too.
    assert train(build(2, ()), num_steps=2, workdir=tmp_path).metrics


@pytest.mark.slow
@pytest.mark.parametrize("rules", [MOMENTS, ALL], ids=["moments", "all"])
def test_batch_norm_computes_the_same(rules):
    trainers = build(4, (), digits_resnet), build(4, rules, digits_resnet)
    ends = [run_steps(trainer, 5) for trainer in trainers]
    hosts = [
        t.devices.fetch(s.params) for t, (s, _) in zip(trainers, ends, strict=True)
    ]
    assert_close(*hosts, rtol=0, atol=1e-4)


@pytest.mark.slow(but="True")
@pytest.mark.parametrize("sharded", [False, True])
def test_on_one_device_it_changes_nothing_and_says_so(caplog, sharded):
    ends = [
        run_steps(build(1, rules), 3) for rules in ((), ALL if sharded else MOMENTS)
    ]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(a, b)
    assert check_budget(build(1)).saved == {}
    assert "config.sharding changes nothing: there is one device" in caplog.text


def test_what_no_number_of_devices_splits_is_said_once(caplog):
    check_budget(build(8, ALL))
    assert "leaves" not in caplog.text  # Small ones are not worth a word.
    odd = {"name": "mlp", "width": 250, "num_layers": 2, "dropout": 0.0}
    check_budget(build(8, ALL, keys_of_config={"model": odd}))
    (line,) = [x for x in caplog.messages if "leaves" in x]
    assert "params/mlp/~/linear_1/w [250, 250] whole on each device" in line
    assert "a multiple of the 8 devices; and 3 more" in line
    caplog.clear()


@pytest.mark.slow(but="4-moments-all")
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.long), 4])
def test_a_checkpoint_resumes_in_any_layout_on_any_number_of_devices(
    tmp_path, num_devices, before, after
):
    """On the same number in the same layout bitwise."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    options = {"log_every": 1, "keep_best": 0}
    before, after = LAYOUTS[before], LAYOUTS[after]
    ends = [train(build(4, before), num_steps=4, workdir=straight, **options).state]
    train(build(4, before), num_steps=2, workdir=stopped, **options)
    resumed = build(num_devices, after)
    end = train(resumed, num_steps=4, workdir=stopped, **options).state
    resumed.devices.check(end, resumed.layout)
    ends.append(end)
    same = num_devices == 4 and before == after
    tolerance = {"rtol": 0, "atol": 0 if same else 1e-6}
    assert_close(*map(jax.device_get, ends), **tolerance)
    losses = [
        [
            row["train/loss"]
            for row in read(folder / "metrics.jsonl")
            if "train/loss" in row
        ]
        for folder in (straight, stopped)
    ]
    np.testing.assert_allclose(*losses, **tolerance)


ORDERS = {name: [name] * 4 for name in LAYOUTS}
ORDERS["mixed"] = ["all", "moments", "replicated", "all"]


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(names, id=name, marks=getattr(pytest.mark, mark))
        for (name, names), mark in zip(
            ORDERS.items(), ("long", "long", "long", "slow"), strict=True
        )
    ],
)
def test_from_4_to_1_to_8_to_3_devices_a_run_has_the_bits_that_were_saved(
    tmp_path, order
):
    """Its numbers stay those of one device, up to rounding."""
    saved, batch = None, {"batch_size": 24}
    for i, (num_devices, name) in enumerate(zip((4, 1, 8, 3), order, strict=True), 1):
        trainer = build(num_devices, LAYOUTS[name], keys_of_config=batch)
        if saved is not None:
            abstract = trainer.abstract.saved()
            step, state = restore(
                tmp_path,
                "latest",
                lambda x, step: x.restore(step, abstract),  # noqa: B023
            )
            trainer.devices.check(state, Layout(trainer.layout.devices, LAYOUTS[name]))
            assert step == 2 * (i - 1)
            assert_close(saved, jax.device_get(state), rtol=0, atol=0)
        end = train(trainer, num_steps=2 * i, workdir=tmp_path, keep_best=0).state
        saved = jax.device_get(end.saved())
    one = build(1, (), keys_of_config=batch)
    expected, _ = run_steps(one, 8)
    assert_close(jax.device_get(expected.saved()), saved, rtol=0, atol=2e-6)


def updated(name, rules, steps=3):
    """Parameters after some steps on four devices, and the layout that they have."""
    devices = DeviceManager.create("cpu", num_devices=4)
    optimizer = make_optimizer(name, lambda step: 0.1, clip_norm=1.0)
    layout = Layout(devices.devices, rules)
    rng = np.random.default_rng(0)
    first = {"w": rng.normal(size=(8, 12)), "b": rng.normal(size=8)}
    first = jax.tree.map(np.float32, first)

    def init():
        params = jax.tree.map(jnp.asarray, first)
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state, batch):
        def loss(params):
            return jnp.mean((batch @ params["w"].T + params["b"]) ** 2)

        return mean_over("data", jax.value_and_grad(loss)(state["params"]))

    def update(state, results):
        value, grads = results
        updates, opt_state = optimizer.update(
            grads, state["opt_state"], state["params"], value=value
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    shapes = devices.abstract(init, layout=layout)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    compiled = devices.compile(step, update=update, out_shardings=shardings)
    state = devices.init(init, layout=layout)
    for i in range(steps):
        batch = np.random.default_rng(i).normal(size=(8, 12)).astype(np.float32)
        state = compiled(state, devices.shard(batch))
    devices.check(state, layout)
    return devices.fetch(state["params"])


@pytest.mark.slow(but="[muon]")
@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
@pytest.mark.parametrize("name", _usable())
def test_every_optimizer_computes_the_same_in_every_layout(name):
    expected = updated(name, ())
    for rules in (MOMENTS, ALL):
        assert_close(updated(name, rules), expected, rtol=2e-6, atol=2e-6)
