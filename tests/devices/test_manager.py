import threading

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.devices import (
    DeviceManager,
    check_replicas,
    describe,
    mean_over,
    sum_over,
)
from haiku_template.errors import DeviceError, PlacementError


def test_init_is_born_replicated(devices):
    tree = devices.init(lambda: {"w": jnp.ones((2, 3)), "rng": jax.random.key(0)})
    for leaf in jax.tree.leaves(tree):
        assert leaf.devices() == set(devices.devices)
        assert leaf.is_fully_replicated
    assert tree["w"].shape == (2, 3)


@pytest.mark.usefixtures("optimized")
def test_init_gives_the_values_of_a_plain_jit(devices):
    def make():
        return jax.random.truncated_normal(jax.random.key(0), -2, 2, (64, 65))

    np.testing.assert_array_equal(devices.init(make), jax.jit(make)())


def test_init_lets_modules_average_over_the_axis(devices):
    def forward(x):
        norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=devices.axis_name)
        return norm(x, is_training=True)

    model = hk.transform_with_state(forward)
    tree = devices.init(lambda: model.init(jax.random.key(0), jnp.ones((2, 3))))
    assert tree[0]["batch_norm"]["scale"].shape == (1, 3)


def test_abstract_says_what_init_gives(devices):
    def init():
        return {"w": jnp.ones((2, 3), jnp.bfloat16), "step": jnp.int32(0)}

    real, promised = devices.init(init), devices.abstract(init)
    for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(promised), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)


def test_shard_gives_each_device_its_rows(devices):
    batch = {"x": np.arange(8.0, dtype=np.float32).reshape(8, 1)}
    placed = devices.shard(batch)["x"]
    rows = 8 // devices.num_devices
    for i, shard in enumerate(placed.addressable_shards):
        assert shard.device == devices.devices[i]
        expected = batch["x"][i * rows : (i + 1) * rows]
        np.testing.assert_array_equal(np.reshape(shard.data, (rows, 1)), expected)


def test_a_step_sees_its_share_and_averages_over_all(devices):
    def step(state, batch):
        mean = mean_over(devices.axis_name, jnp.mean(batch["x"]))
        total = sum_over(devices.axis_name, jnp.sum(batch["x"]))
        return state + mean, total

    compiled = devices.compile(step)
    state = devices.init(lambda: jnp.float32(0))
    batch = {"x": np.arange(8, dtype=np.float32)}
    with devices.explicit_transfers():
        new, total = compiled(state, devices.shard(batch))
        assert (devices.fetch(new), devices.fetch(total)) == (3.5, 28)
    assert state.is_deleted()  # Its memory was donated.
    assert new.sharding.is_equivalent_to(devices.replicated, 0)


def test_real_arrays_alone_travel_in_half_precision(four_devices):
    """1 + 2**-10 is 1 in bfloat16, and 65537 is 65536."""

    def step(state, batch):
        total = {"real": jnp.full(2, 1 + 2**-10), "whole": jnp.full(2, 65537)}
        total |= {"number": jnp.float32(1 + 2**-10), "flag": jnp.array([True])}
        return sum_over(four_devices.axis_name, total, "bfloat16"), state

    compiled = four_devices.compile(step, donate_argnums=())
    state = four_devices.replicate(np.float32(0))
    total, _ = compiled(state, four_devices.shard(np.zeros(4, np.float32)))
    total = four_devices.fetch(total)
    assert total["real"].dtype == np.float32
    np.testing.assert_array_equal(total["real"], [4, 4])
    np.testing.assert_array_equal(total["whole"], [4 * 65537] * 2)
    assert total["number"] == 4 + 2**-8 and total["flag"].tolist() == [4]


def test_replicate_adds_no_device_axis(devices):
    tree = devices.replicate({"w": np.ones((2, 3)), "on device": jnp.ones(4)})
    assert tree["w"].shape == (2, 3) and tree["on device"].shape == (4,)
    assert all(leaf.devices() == set(devices.devices) for leaf in jax.tree.leaves(tree))


def test_fetch_gives_numpy_without_gathering(devices):
    fetched = devices.fetch(devices.replicate({"w": np.arange(3)}))
    assert type(fetched["w"]) is np.ndarray
    np.testing.assert_array_equal(fetched["w"], [0, 1, 2])


def test_implicit_copies_are_errors_inside_explicit_transfers(devices):
    step = jax.jit(lambda x: x + 1)
    with devices.explicit_transfers():
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            step(np.ones(3))
        with devices.implicit_transfers():
            step(np.ones(3))


def test_some_devices_can_be_used_and_others_left():
    devices = DeviceManager.create("cpu:5,2")
    assert [device.id for device in devices.devices] == [5, 2]
    placed = devices.shard(np.arange(4))
    assert placed.devices() == set(devices.devices)


def test_on_host_makes_arrays_on_the_cpu():
    devices = DeviceManager.create("cpu:3")
    with devices.on_host():
        assert jnp.ones(3).devices() == {jax.devices("cpu")[0]}


def test_shard_works_in_another_thread_as_in_this_one():
    devices = DeviceManager.create("cpu:3")
    placed = []
    thread = threading.Thread(target=lambda: placed.append(devices.shard(np.ones(3))))
    thread.start()
    thread.join()
    assert placed[0].devices() == {jax.devices()[3]}


@pytest.mark.parametrize(
    ("rows", "parts", "words"),
    [
        (10, 1, "10 examples.*4 devices.*8 or 12"),
        (3, 1, "nearest batch sizes that can are 4"),
        (12, 2, "4 devices x 2 accumulation steps.*8 or 16"),
        (0, 1, "0 examples"),
    ],
)
def test_a_batch_that_cannot_be_sharded_names_the_nearest(
    four_devices, rows, parts, words
):
    with pytest.raises(PlacementError, match=words):
        four_devices.check_batch_size(rows, parts)


def test_shard_refuses_rows_that_the_devices_do_not_divide(four_devices):
    with pytest.raises(PlacementError, match="6 examples"):
        four_devices.shard({"x": np.ones((6, 2))})


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("cuda", {}, "auto, cpu, gpu, tpu"),
        ("auto:1", {}, "not understood"),
        ("cpu:9", {}, "names cpu:9, and there are 8"),
        ("cpu:1,1", {}, "twice"),
        ("cpu", {"num_devices": 9}, "num_devices=9.*there are 8"),
        ("cpu", {"num_devices": 0}, "asks for no device"),
        ("cpu:0,1", {"num_devices": 3}, "names 2 devices"),
        ("gpu", {"simulate_devices": 2}, "simulates CPU devices"),
        ("cpu", {"simulate_devices": 9}, "after JAX had started with 8"),
        ("cpu", {"fallback": "gpu"}, "possible are error and cpu"),
        ("cpu", {"gpu_memory_fraction": 0.5}, "after JAX had started"),
        ("cpu", {"gpu_memory_fraction": 1.5}, "share of the card's memory"),
        ("gpu", {}, "--device=gpu.*no"),
        ("gpu:1", {}, "--device=gpu:1"),
        ("tpu", {}, "--device=tpu"),
    ],
)
def test_what_cannot_be_had_is_an_error_that_says_why(spec, options, words):
    with pytest.raises(DeviceError, match=words):
        DeviceManager.create(spec, **options)


def test_fallback_runs_on_the_cpu_and_says_so(caplog):
    devices = DeviceManager.create("gpu", fallback="cpu")
    assert devices.platform == "cpu"
    assert "RUNNING ON THE CPU" in caplog.text
    assert "--fallback=cpu, because --device=gpu" in devices.reason


def test_fallback_does_not_hide_another_mistake():
    with pytest.raises(DeviceError, match="there are 8"):
        DeviceManager.create("cpu:9", fallback="cpu")


def test_simulated_devices_run_one_step_at_a_time(one_device, four_devices):
    assert four_devices.steps_in_flight == 1
    assert one_device.steps_in_flight > 1


def test_describe_tells_where(four_devices):
    assert describe(np.ones(3)) == "host (NumPy)"
    assert describe(jax.device_put(1, jax.devices()[2])) == "cpu:2"
    assert describe(four_devices.replicate(np.ones(3))) == "cpu:0-3 replicated"
    assert describe(four_devices.shard(np.ones(4))) == "cpu:0-3 sharded"
    assert "cpu:1,4 replicated" in describe(
        DeviceManager.create("cpu:4,1").replicate(np.ones(3))
    )


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "bool", "uint16", "complex64"]
)
def test_a_leaf_that_differs_between_devices_is_found_and_named(four_devices, dtype):
    good = four_devices.replicate({"w": np.ones((3, 2)), "rng": jax.random.key(0)})
    check_replicas(good)
    values = [np.zeros(5, dtype) for _ in four_devices.devices]
    values[2][3] = 1
    leaf = jax.make_array_from_single_device_arrays(
        (5,),
        four_devices.replicated,
        [
            jax.device_put(value, device)
            for value, device in zip(values, four_devices.devices, strict=True)
        ],
    )
    with pytest.raises(PlacementError, match=r"1 of 3 leaves.*\['bad'\]\['w'\]"):
        check_replicas(good | {"bad": {"w": leaf}})


def test_swapped_values_count_as_a_difference(four_devices):
    values = [np.array([1, 2], np.float32)] * 3 + [np.array([2, 1], np.float32)]
    leaf = jax.make_array_from_single_device_arrays(
        (2,),
        four_devices.replicated,
        [
            jax.device_put(v, d)
            for v, d in zip(values, four_devices.devices, strict=True)
        ],
    )
    with pytest.raises(PlacementError, match="differ"):
        check_replicas(leaf)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.arange(8) + 2**40, "1099511627776 as int64.*int32"),
        (np.full(8, -(2**31) - 1), "-2147483649"),
        (np.full(8, 2**32, np.uint64), "4294967296 as uint64.*uint32"),
        (np.full(8, 1e300), r"1e\+300 as float64.*float32"),
        (np.full(8, 1e300j), "complex128.*complex64"),
    ],
)
def test_values_that_do_not_fit_32_bits_are_refused_by_name(devices, values, words):
    for place in (devices.shard, devices.replicate):
        with pytest.raises(PlacementError, match=rf"\['x'\] holds .*{words}"):
            place({"good": np.ones(8), "x": values})


def test_64_bit_values_that_fit_arrive(devices):
    batch = {"i": np.arange(8) - 2**31, "u": np.full(8, 2**32 - 1, np.uint64)}
    batch |= {"f": np.array([0.1, np.inf, -np.inf, np.nan, 3e38, 0, 1, 2])}
    for place in (devices.shard, devices.replicate):
        fetched = devices.fetch(place(batch))
        for name, values in batch.items():
            expected = values.astype(fetched[name].dtype)
            np.testing.assert_array_equal(fetched[name].reshape(-1), expected)


def test_words_are_refused_by_name(devices):
    for place in (devices.shard, devices.replicate):
        with pytest.raises(PlacementError, match=r"\['x'\] holds <U1.*numbers"):
            place({"x": np.array(list("abcdefgh"))})


def test_shard_refuses_leaves_with_different_rows(devices):
    with pytest.raises(PlacementError, match=r"\['x'\] has 8 rows and .*\['y'\].* 16"):
        devices.shard({"x": np.ones(8), "y": np.ones((16, 2))})


@pytest.mark.parametrize("leaf", [[1.0] * 8, 3.0, np.float32(1), []])
def test_shard_refuses_leaves_that_are_no_arrays_of_rows(devices, leaf):
    with pytest.raises(PlacementError, match=r"without rows|holds no array"):
        devices.shard({"x": leaf})


def test_what_is_on_several_sets_of_devices_is_fetched(four_devices):
    others = DeviceManager.create("cpu:6,7")
    tree = {"a": four_devices.replicate(np.ones(3)), "b": others.shard(np.arange(4))}
    fetched = four_devices.fetch(tree)
    np.testing.assert_array_equal(fetched["b"].reshape(-1), np.arange(4))


def test_a_fetch_waits_for_all_devices_before_it_reads_any(four_devices, monkeypatch):
    """A device that waits for a lost process is then noticed by the watchdog."""
    waited, read = [], []
    arrays = four_devices.init(lambda: {"x": jnp.ones(3), "y": jnp.zeros(())})
    block, get = jax.block_until_ready, jax.device_get
    monkeypatch.setattr(
        jax,
        "block_until_ready",
        lambda x: waited.extend(jax.tree.leaves(x)) or block(x),
    )
    monkeypatch.setattr(
        jax, "device_get", lambda x: read.append(len(waited)) or get(x), raising=True
    )
    four_devices.fetch(arrays)
    assert {id(x) for x in arrays.values()} <= {id(x) for x in waited}
    assert read and min(read) == len(waited)
