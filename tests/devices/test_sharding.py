import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from haiku_template.devices import device_put_replicated, device_put_sharded
from haiku_template.errors import PlacementError

DEVICES = jax.devices()[:4]
DTYPES = [np.float32, np.int32, np.uint8, np.bool_, ml_dtypes.bfloat16, np.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_each_shard_is_on_its_own_device_with_its_own_values(dtype, kind):
    values = [np.array([[i, 1], [0, i]]).astype(dtype) for i in range(4)]
    make = np.asarray if kind == "numpy" else jnp.asarray
    joined = device_put_sharded([make(value) for value in values], DEVICES)
    assert joined.shape == (4, 2, 2) and joined.dtype == dtype
    for i, shard in enumerate(joined.addressable_shards):
        assert shard.device == DEVICES[i]
        np.testing.assert_array_equal(shard.data[0], values[i])


def test_shards_are_pytrees_and_scalars_gain_the_axis():
    shards = [{"a": i, "b": (np.float32(i), [np.ones(3) * i])} for i in range(4)]
    joined = device_put_sharded(shards, DEVICES)
    assert jax.tree.structure(joined) == jax.tree.structure(shards[0])
    np.testing.assert_array_equal(joined["a"], [0, 1, 2, 3])
    np.testing.assert_array_equal(joined["b"][1][0][:, 0], [0, 1, 2, 3])


def test_keys_stay_keys():
    keys = list(jax.random.split(jax.random.key(0), 4))
    joined = device_put_sharded(keys, DEVICES)
    assert joined.dtype == keys[0].dtype and joined.shape == (4,)
    expected = jax.random.key_data(jnp.stack(keys))
    np.testing.assert_array_equal(jax.random.key_data(joined), expected)
    assert device_put_replicated(keys[0], DEVICES).shape == (4,)


def test_pmap_takes_the_result_without_a_copy():
    x = device_put_sharded([np.full(3, i, np.float32) for i in range(4)], DEVICES)
    total = jax.pmap(lambda x: jax.lax.psum(x, "i"), "i", devices=DEVICES)
    with jax.transfer_guard("disallow"):
        y = total(x)
    np.testing.assert_array_equal(y, np.full((4, 3), 6))


def test_devices_may_be_some_and_in_any_order():
    devices = [DEVICES[3], DEVICES[1]]
    joined = device_put_sharded([np.zeros(2), np.ones(2)], devices)
    where = {shard.device: shard.data for shard in joined.addressable_shards}
    assert where.keys() == set(devices)
    np.testing.assert_array_equal(where[DEVICES[1]], [[1, 1]])


def test_no_device_receives_more_than_its_own_shard():
    """Watches every buffer that exists while shards of one size are placed."""
    size = 123_457  # Of no other array.
    shards = [np.full(size, i, np.float32) for i in range(4)]
    others = jax.live_arrays()  # Of other tests.
    joined = device_put_sharded(shards, DEVICES)
    arrays = [x for x in jax.live_arrays() if not any(x is y for y in others)]
    for array in arrays:
        if array.size >= size and array is not joined:
            assert array.size == size and len(array.devices()) == 1
    on_first = [
        shard.data.size
        for array in arrays
        if array.size >= size
        for shard in array.addressable_shards
        if shard.device == DEVICES[0]
    ]
    assert set(on_first) == {size}


def test_replicated_is_the_same_on_each_device():
    tree = {"w": np.arange(6.0).reshape(2, 3), "n": 7}
    copies = device_put_replicated(tree, DEVICES)
    assert copies["w"].shape == (4, 2, 3) and copies["n"].shape == (4,)
    for shard in copies["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data[0], tree["w"])


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([np.ones(2)] * 3, "3 shards for 4 devices"),
        ([{"a": np.ones(2)}] * 3 + [{"b": np.ones(2)}], "differ in structure"),
        (
            [{"a": np.ones(2)}] * 3 + [{"a": np.ones(3)}],
            r"\['a'\].*shard 3 has float32\[3\]",
        ),
        ([np.ones(2, np.int32)] * 3 + [np.ones(2, np.int8)], r"int8\[2\]"),
        ([1, 2, 3, np.int32(4)], r"int32\[\] of a weak type, shard 3 has int32\[\]$"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards, words):
    with pytest.raises(PlacementError, match=words):
        device_put_sharded(shards, DEVICES)


def test_a_device_named_twice_is_refused():
    with pytest.raises(PlacementError, match="distinct"):
        device_put_replicated(np.ones(2), [DEVICES[0]] * 2)


PAIRS = [
    (f"{kind}{bits}", f"{kind}{bits // 2}")
    for kind, bits in (("int", 64), ("uint", 64), ("float", 64), ("complex", 128))
]


@pytest.mark.parametrize(("wide", "narrow"), PAIRS)
@pytest.mark.parametrize("kinds", ["arrays", "scalars", "a JAX array among them"])
def test_dtypes_that_are_one_to_jax_fit_together(wide, narrow, kinds):
    make = np.full if kinds != "scalars" else lambda shape, value, dtype: dtype(value)
    shards = [make((2,), i, np.dtype(d).type) for i, d in enumerate([wide, narrow] * 2)]
    if kinds.startswith("a JAX"):
        shards[3] = jnp.asarray(shards[3])
    joined = device_put_sharded(shards, DEVICES)
    assert joined.dtype == narrow
    np.testing.assert_array_equal(joined.reshape(4, -1)[:, 0], range(4))


@pytest.mark.parametrize("number", [3, 1.5, 2j, True])
def test_python_numbers_keep_their_weak_type(number):
    expected = jax.typeof(number)
    for joined in (
        device_put_sharded([number] * 4, DEVICES),
        device_put_sharded([jnp.asarray(number)] * 4, DEVICES),
        device_put_replicated(number, DEVICES),
    ):
        found = jax.typeof(joined)
        assert (found.dtype, found.weak_type) == (expected.dtype, expected.weak_type)
        assert [shard.device for shard in joined.addressable_shards] == DEVICES
        np.testing.assert_array_equal(joined, [number] * 4)


@pytest.mark.parametrize("shards", [np.ones((4, 2)), jnp.ones((4, 2)), {0: 1}, 7])
def test_what_is_no_sequence_is_a_type_error_as_it_was(shards):
    with pytest.raises(TypeError, match="takes a sequence"):
        device_put_sharded(shards, DEVICES)


@pytest.mark.parametrize("leaf", ["word", np.array(["word"]), object()])
def test_what_is_no_number_is_a_type_error_as_it_was(leaf):
    with pytest.raises(TypeError, match="not a valid JAX"):
        device_put_sharded([{"a": leaf}] * 4, DEVICES)
    with pytest.raises(TypeError, match="not a valid JAX"):
        device_put_replicated({"a": leaf}, DEVICES)


@pytest.mark.parametrize("other", [None, [1, 2]])
def test_a_tree_where_an_array_should_be_is_a_type_error_as_it_was(other):
    with pytest.raises(TypeError, match="differ in structure"):
        device_put_sharded([np.ones(2)] * 3 + [other], DEVICES)
