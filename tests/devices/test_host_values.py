"""What is on the host, or no number at all, in every method of the device manager."""

import jax
import numpy as np
import pytest

from haiku_template.errors import PlacementError

VALUES = {
    "number": 1.0,
    "NumPy scalar": np.float32(1),
    "list": [1.0, 2.0],
    "None": None,
    "text": "a",
    "object": object(),
    "without rows": np.zeros(()),
    "number in a dictionary": {"b": 1.0},
    "None beside an array": {"a": np.ones(4), "b": None},
    "other rows": {"a": np.ones(4), "b": np.ones(3)},
    "texts": np.array(["a", "b", "c", "d"]),
    "too large": np.array([2**40] * 4),
}
CALLS = {
    "fetch": lambda devices, value: devices.fetch(value),
    "replicate": lambda devices, value: devices.replicate(value),
    "shard": lambda devices, value: devices.shard(value),
    "init": lambda devices, value: devices.init(lambda x: x, value),
    "abstract": lambda devices, value: devices.abstract(lambda x: x, value),
    "wait": lambda devices, value: devices.wait(value),
    "audit": lambda devices, value: devices.audit(value),
    "check": lambda devices, value: devices.check(value),
    "abstract_batch": lambda devices, value: devices.abstract_batch(value),
    "check_batch_size": lambda devices, value: devices.check_batch_size(value),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_method_takes_a_value_of_the_host_or_says_why_not(devices, call):
    with devices.explicit_transfers():
        for name, value in VALUES.items():
            try:
                CALLS[call](devices, value)
            except PlacementError as error:
                assert len(str(error).split()) > 5, name


def test_numbers_of_the_host_are_fetched_and_given_to_init(devices):
    tree = {"a": 1.5, "b": np.arange(3), "c": devices.replicate(np.ones(2))}
    with devices.explicit_transfers():
        fetched = devices.fetch(tree)
        made = devices.init(lambda tree: jax.tree.map(lambda x: 2 * x, tree), tree)
        assert devices.fetch(made)["a"] == 3 and fetched["a"] == 1.5
    np.testing.assert_array_equal(fetched["b"], np.arange(3))
    np.testing.assert_array_equal(made["b"], [0, 2, 4])
    devices.check(made)


def test_a_text_is_not_fetched(devices):
    words = "holds 'a', a str, and devices compute with numbers alone"
    with pytest.raises(PlacementError, match=words):
        devices.fetch({"a": "a"})
