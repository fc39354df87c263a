"""Copies of a leaf that differ between devices are found, however they differ."""

from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

from haiku_template.devices import DeviceManager, check_processes, check_replicas
from haiku_template.errors import PlacementError

RNG = np.random.default_rng(0)
DTYPES = [np.bool_, np.int8, np.uint16, np.int32, np.float16, np.float32, np.complex64]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
WIDE = [np.int64, np.uint64, np.float64, np.complex128]


def copies(devices, values):
    """A leaf that claims to be replicated, and holds `values[i]` on device i."""
    placed = [
        jax.device_put(value, device)
        for value, device in zip(values, devices.devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(
        values[0].shape, devices.replicated, placed
    )


def sign(x):
    return 0 - x if x.dtype != bool else ~x


def bit(place):
    def damage(x):
        x = x.copy()
        raw = x.reshape(-1).view(np.uint8)
        raw[place % raw.size] ^= 1  # The only bit that a bool has, and no NaN.
        return x

    return damage


def swapped(x):
    x = x.copy()
    flat = x.reshape(-1)
    flat[[0, -1]] = flat[[-1, 0]]
    return x


DAMAGE = {
    "sign": sign,
    "twice": lambda x: x + x,
    "four times": lambda x: x + x + x + x,
    "zeros": np.zeros_like,
    "ones": np.ones_like,
    "its first bit": bit(0),
    "another bit": bit(10**9 + 7),
    "swapped": swapped,
}


def pairs(dtype, shape):
    """Values, damaged ones, and what was done to them."""
    values = (RNG.normal(size=shape) * 3).clip(-8, 7)  # int4 holds no others.
    starts = [values.astype(dtype), np.ones(shape, dtype), np.zeros(shape, dtype)]
    for good in starts:
        for name, damage in DAMAGE.items():
            yield name, good, damage(good).astype(dtype)
    for low, high in ((1, 2), (0.1, 0.2), (0, 3)):
        low, high = np.full(shape, low, dtype), np.full(shape, high, dtype)
        yield "constant", low, high


def missed(devices, dtype, shape):
    """What `check_replicas` does not find, of what differs bitwise on one device."""
    names, leaves = [], []
    for name, good, bad in pairs(dtype, shape):
        if good.tobytes() != bad.tobytes():
            names.append(name)
            leaves.append(copies(devices, [good, good, bad, good]))
    with pytest.raises(PlacementError) as caught:
        check_replicas(leaves)
    assert len(names) > 10
    found = f"{len(leaves)} of {len(leaves)} leaves differ"
    return "" if found in str(caught.value) else str(caught.value)


@pytest.mark.parametrize("shape", [(32,), (64, 32), (65536,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_copies_that_differ_are_found_whatever_the_damage(four_devices, dtype, shape):
    assert not missed(four_devices, dtype, shape)


@pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: np.dtype(dtype).name)
def test_all_bits_of_64_bit_leaves_count(four_devices, dtype):
    jax.config.update("jax_enable_x64", True)
    try:
        assert not missed(four_devices, dtype, (64,))
        high = np.full(64, 2**40).astype(dtype)  # The low 32 bits are those of 0.
        leaf = copies(four_devices, [0 * high, 0 * high, 0 * high, high])
        with pytest.raises(PlacementError, match="1 of 1"):
            check_replicas(leaf)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_constants_that_count_the_devices_are_found(four_devices):
    """As a step leaves them that forgets to average `axis_index`."""
    leaf = copies(four_devices, [np.full(64, i, np.float32) for i in range(4)])
    remedies = r"step of your own averages .*mean_over\(axis_name.*BatchNorm needs"
    with pytest.raises(PlacementError, match=f"differ.*{remedies}"):
        check_replicas({"count": leaf})


def test_leaves_on_different_sets_of_devices_are_each_compared(four_devices):
    others = DeviceManager.create("cpu:6,7")
    good = np.ones(5, np.float32)
    tree = {"a": four_devices.replicate(good), "b": others.replicate(good)}
    check_replicas(tree)
    tree["bad"] = copies(others, [good, -good])
    with pytest.raises(PlacementError, match=r"1 of 3 leaves.*\['bad'\].*cpu:6-7"):
        check_replicas(tree)


def test_processes_compare_what_is_replicated_alone(four_devices):
    state = {
        "a": four_devices.replicate(np.ones(4)),
        "b": four_devices.shard(np.ones(4)),
    }
    names = []
    processes = SimpleNamespace(count=2, agree=lambda facts, *_: names.extend(facts))
    check_processes(processes, state)
    assert names == ["the bits of ['a']"]
