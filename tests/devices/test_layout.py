"""Layout: a value that says where each leaf of a state lives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from haiku_template.devices import Layout, check_replicas, mean_over
from haiku_template.devices.layout import device_bytes, spec_of
from haiku_template.errors import ConfigError, PlacementError

MOMENTS = (("moments/*", "data"),)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), ()),
        ((3,), ()),
        ((8,), ("data",)),
        ((3, 3, 12, 5), (None, None, "data")),
        ((4, 8), (None, "data")),
        ((8, 8), (None, "data")),
        ((16, 8), (None, "data")),  # The first may be a loop's.
        ((16, 6), ("data",)),
        ((0, 4), (None, "data")),
        ((2, 6), ()),
    ],
)
def test_the_largest_dimension_that_the_devices_divide_is_sharded(shape, spec):
    assert spec_of(shape, 4, "data") == spec
    assert spec_of(shape, 4, None) == ()


def make_state():
    tree = {"a": jnp.arange(24.0).reshape(3, 8), "odd": jnp.ones(3)}
    return {"params": tree, "moments": tree, "step": jnp.zeros((), jnp.int32)}


def test_a_sharded_leaf_is_born_as_shares_and_all_else_replicated(four_devices):
    layout = Layout(four_devices.devices, MOMENTS)
    shapes = four_devices.abstract(make_state, layout=layout)
    state = four_devices.init(make_state, layout=layout)
    assert jax.tree.map(lambda x: x.sharding, state) == layout.of(state)
    four_devices.check(state, layout)
    shares = [share.data.shape for share in state["moments"]["a"].addressable_shards]
    assert shares == [(3, 2)] * 4
    assert state["moments"]["odd"].is_fully_replicated
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state["params"]))
    fetched = four_devices.fetch(state)
    np.testing.assert_array_equal(fetched["moments"]["a"], fetched["params"]["a"])
    assert device_bytes(shapes) == 2 * 12 + 4 + 24 * 4 + 24 * 4 // 4


def test_the_first_rule_that_fits_holds(four_devices):
    rules = (("moments/*", None), ("*/a", "data"))
    places = Layout(four_devices.devices, rules).of(jax.eval_shape(make_state))
    assert places["params"]["a"].spec == PartitionSpec(None, "data")
    assert places["moments"]["a"].is_fully_replicated


def test_a_leaf_that_lives_elsewhere_than_its_layout_says_is_named(four_devices):
    layout = Layout(four_devices.devices, MOMENTS)
    state = four_devices.init(make_state)
    with pytest.raises(PlacementError, match=r"moments'\]\['a'\].*replicated, where"):
        four_devices.check(state, layout)
    state = four_devices.init(make_state, layout=layout)
    with pytest.raises(PlacementError, match=r"params'\]\['a'\].*sharded, where"):
        four_devices.check(state | {"params": state["moments"]}, layout)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            ("moments/*", "model"),
            "mesh axis 'model'; the mesh has the axis 'data' alone",
        ),
        (("moment/*", "data"), "no leaf of the state fits 'moment/\\*'"),
        (("params/*", None, "pinned_host"), "'pinned_host', for leaves of opt_state/"),
        (("opt_state/*", None, "disk"), "'disk'; possible is 'pinned_host'"),
    ],
)
def test_a_rule_of_nothing_is_refused(rule, words):
    with pytest.raises(ConfigError, match=words):
        Layout((), (rule,)).check(jax.eval_shape(make_state))


@pytest.mark.parametrize("axis", ["data", None])
def test_moments_may_live_in_the_hosts_memory(devices, axis):
    """And nowhere else; numbers [] stay on the devices."""
    layout = Layout(devices.devices, (("opt_state/*", axis, "pinned_host"),))

    def first():
        tree = make_state()
        return {"params": tree["params"], "opt_state": tree}

    def update(state, mean):
        return jax.tree.map(lambda x: x + mean.astype(x.dtype), state)

    shapes = devices.abstract(first, layout=layout)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    step = devices.compile(
        lambda state, batch: mean_over(devices.axis_name, batch.mean()),
        update=update,
        out_shardings=shardings,
    )
    state, batch = devices.init(first, layout=layout), np.ones(8, np.float32)
    with devices.explicit_transfers():
        state = step(state, devices.shard(batch))
        devices.check(state, layout)
        check_replicas(state)
        fetched = devices.fetch(state)
    for array, leaf in zip(*map(jax.tree.leaves, (fetched, state)), strict=True):
        if leaf.sharding.memory_kind == "pinned_host":
            # Views would keep a GPU's next step from donating them.
            views = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert not any(np.shares_memory(array, view) for view in views)
    places = jax.tree.map(lambda x: x.sharding.memory_kind, state["opt_state"])
    assert places["step"] != "pinned_host"
    assert {*places["params"].values(), *places["moments"].values()} == {"pinned_host"}
    np.testing.assert_array_equal(fetched["opt_state"]["moments"]["odd"], [2, 2, 2])
    assert device_bytes(shapes) == 24 * 4 + 3 * 4 + 4
    verdicts = [x.verdict for x in devices.audit(devices.replicate(fetched), layout)]
    assert (
        sum("in device memory, where the layout has it in" in x for x in verdicts) == 4
    )


def test_on_one_device_there_is_nothing_to_shard(one_device):
    layout = Layout(one_device.devices, (("*", "data"),))
    state = one_device.init(make_state, layout=layout)
    one_device.check(state, layout)
    assert {x.sharding for x in jax.tree.leaves(state)} == {one_device.replicated}


@pytest.mark.parametrize("rules", [(), MOMENTS, (("*", "data"),)])
def test_a_step_sees_its_share_of_a_batch_and_an_update_all_arrays(four_devices, rules):
    layout = Layout(four_devices.devices, rules)
    shapes = four_devices.abstract(make_state, layout=layout)

    def step(state, batch):  # Of whole parameters, and two of eight rows.
        assert state["params"]["a"].shape == (3, 8) and batch.shape == (2, 3)
        return jax.lax.pmean(batch.mean(0), "data")

    def update(state, mean):
        def add(x):
            return x + (mean[:, None] if x.ndim == 2 else mean)

        moved = jax.tree.map(add, state["params"])
        return state | {"params": moved, "step": state["step"] + 1}, {"mean": mean[0]}

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    compiled = four_devices.compile(
        step, update=update, out_shardings=(shardings, four_devices.replicated)
    )
    state = four_devices.init(make_state, layout=layout)
    batch = np.arange(24, dtype=np.float32).reshape(8, 3)
    with four_devices.explicit_transfers():
        for _ in range(3):
            state, scalars = compiled(state, four_devices.shard(batch))
            four_devices.check(state, layout)
    assert compiled.compiled._cache_size() == 1
    fetched, first = four_devices.fetch(state), make_state()
    expected = first["params"]["a"] + 3 * batch.mean(0)[:, None]
    np.testing.assert_allclose(fetched["params"]["a"], expected)
    np.testing.assert_array_equal(fetched["moments"]["a"], first["moments"]["a"])
    assert fetched["step"] == 3
    assert four_devices.fetch(scalars)["mean"] == batch[:, 0].mean()
