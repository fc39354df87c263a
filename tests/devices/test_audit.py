"""Every way in which a leaf can be astray has its own verdict."""

from concurrent.futures import ThreadPoolExecutor

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.devices import DeviceManager, device_put_replicated
from haiku_template.errors import PlacementError


@pytest.fixture
def two_devices():
    return DeviceManager.create("cpu:2,3")


def verdict(devices, leaf):
    (placement,) = devices.audit({"w": leaf})
    with pytest.raises(PlacementError, match=r"\['w'\]") as caught:
        devices.check({"good": devices.replicate(np.ones(2)), "w": leaf})
    assert placement.verdict in str(caught.value)
    return placement.verdict


def test_a_state_that_is_where_it_should_be_has_no_verdict(devices):
    state = devices.init(lambda: {"w": jnp.ones((2, 3)), "rng": jax.random.key(0)})
    devices.check(state)
    rows = {row.path: row for row in devices.audit(state)}
    row = rows["['w']"]
    assert row.shape == (2, 3) and row.dtype == "float32" and row.bytes == 24
    assert row.committed and row.memory_kind == "device" and row.verdict == ""
    assert row.where.startswith("cpu:0")


def test_a_numpy_leaf(devices):
    assert "host memory (NumPy)" in verdict(devices, np.ones(3))
    assert "host memory (NumPy)" in verdict(devices, 1.5)


def test_a_leaf_left_on_one_of_several(two_devices):
    leaf = jax.device_put(np.ones(3), two_devices.devices[1])
    assert "on 1 of the 2 devices" in verdict(two_devices, leaf)


def test_a_leaf_that_nobody_placed(two_devices):
    leaf = jnp.ones(3)
    assert not two_devices.audit(leaf)[0].committed
    assert "uncommitted" in verdict(two_devices, leaf)


def test_a_leaf_left_elsewhere_by_default_device(two_devices):
    used, other = two_devices.devices[0], jax.devices()[5]
    with jax.default_device(used), ThreadPoolExecutor(1) as pool:
        here = jnp.ones(3)
        there = pool.submit(lambda: jnp.ones(3)).result()
    with jax.default_device(other):
        elsewhere = jnp.ones(3)
    # The context held for this thread alone: the other one used JAX's own default.
    assert {*here.devices(), *there.devices()} == {used, jax.devices()[0]}
    for leaf in (there, elsewhere):
        assert "uncommitted" in verdict(two_devices, leaf)
        assert "jax.default_device" in verdict(two_devices, leaf)
    # On a device in use the same leaf is only not yet on all of them.
    assert "on 1 of the 2 devices" in verdict(two_devices, here)
    one = DeviceManager.create("cpu:2")
    assert one.audit(here)[0].verdict == ""


def test_a_leaf_from_dlpack_is_committed_elsewhere(two_devices):
    leaf = jnp.from_dlpack(np.ones(3, np.float32))
    assert two_devices.audit(leaf)[0].committed
    assert "does not use" in verdict(two_devices, leaf)


def test_a_stacked_copy(two_devices):
    leaf = device_put_replicated(np.ones(3), two_devices.devices)
    assert "stacked copy" in verdict(two_devices, leaf)


def test_a_leaf_that_is_sharded(two_devices):
    leaf = jnp.ones((4, 3))
    sharded = jax.device_put(leaf, two_devices.shard(np.ones(2)).sharding)
    assert "sharded, where the layout replicates" in verdict(two_devices, sharded)


def test_a_leaf_on_other_devices(two_devices):
    other = DeviceManager.create("cpu:4,5").replicate(np.ones(3))
    assert "does not use" in verdict(two_devices, other)


def test_a_tracer_left_by_init(one_device):
    def forward(x):
        return jax.jit(lambda x: hk.Linear(2)(x))(x)

    params = hk.transform(forward).init(jax.random.key(0), np.ones((1, 3)))
    rows = one_device.audit(params)
    assert {row.path for row in rows} == {"['linear']['b']", "['linear']['w']"}
    for row in rows:
        assert "tracer left by init" in row.verdict and "hk.scan" in row.verdict
    with pytest.raises(PlacementError, match=r"\['linear'\]\['b'\].*so are.*\['w'\]"):
        one_device.check(params)


@pytest.mark.parametrize("make", [jnp.asarray, jnp.from_dlpack])
def test_a_batch_that_is_on_a_device_already_is_refused_by_name(devices, make):
    batch = {"inputs": make(np.ones((8, 2), np.float32)), "labels": np.ones(8)}
    with pytest.raises(PlacementError, match=r"\['inputs'\] is a JAX array on cpu:0"):
        devices.shard(batch)


def test_a_leaf_that_a_step_has_taken_over(devices):
    leaf = devices.replicate(np.ones(3, np.float32))
    devices.compile(lambda state, batch: state + 1)(leaf, devices.shard(np.ones(8)))
    assert "deleted" in verdict(devices, leaf)
    (placement,) = devices.audit(leaf)
    assert (placement.where, placement.bytes) == ("nowhere (deleted)", 0)


def test_a_leaf_in_other_memory_of_its_devices_is_astray(devices):
    (leaf,) = jax.tree.leaves(devices.replicate(np.ones(4, np.float32)))
    pinned = jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
    (row,) = devices.audit({"a": pinned})
    assert row.memory_kind == "pinned_host" and "in pinned_host memory" in row.verdict
    with pytest.raises(PlacementError, match="pinned_host"):
        devices.check({"a": pinned})
    devices.check({"a": devices.replicate(pinned)})
