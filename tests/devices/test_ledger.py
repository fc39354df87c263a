"""What the transfer ledger counts, and what a misplaced leaf is called."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.devices import Ledger
from haiku_template.errors import PlacementError


def test_bytes_are_those_that_travel(devices):
    state = devices.replicate({"w": np.ones((3, 5), np.float32)})
    assert devices.ledger.totals()["bytes_to_devices"] == 60 * devices.num_devices
    before = devices.ledger.totals()
    batch = devices.shard({"x": np.ones((8, 2), np.float16), "y": np.ones(8, np.int8)})
    travelled = devices.ledger.totals() - before
    assert travelled["bytes_to_devices"] == 32 + 8  # Once, whatever the devices.
    step = devices.compile(lambda s, b: s["w"].sum() + b["x"].shape[0], ())
    result = step(state, batch)
    before = devices.ledger.totals()
    devices.fetch({"a": result, "w": state["w"]})
    assert (devices.ledger.totals() - before)["bytes_from_devices"] == 4 + 60


def test_a_manager_has_a_ledger_of_its_own(one_device, four_devices):
    one_device.shard({"x": np.ones(8)})
    assert not four_devices.ledger.totals()


def test_seconds_are_entered_where_they_are_spent(one_device):
    @one_device.compile
    def step(state, batch):
        return jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x @ x), state) + batch

    state = one_device.replicate(np.ones((200, 200), np.float32))
    batch = one_device.shard(np.ones((200, 200), np.float32))
    one_device.wait(step(state, batch))
    spent = one_device.ledger.totals()
    assert spent["dispatch"] > 0 and spent["compute"] > 0 and spent["to_devices"] > 0
    assert spent["from_devices"] == 0


def test_waiting_is_the_time_until_an_item_is_there():
    ledger, go = Ledger(), threading.Event()

    def items():
        yield 1
        go.wait()
        yield 2

    threading.Timer(0.05, go.set).start()
    assert list(ledger.waits(items())) == [1, 2]
    assert ledger.totals()["waiting"] >= 0.04


def test_amounts_from_many_threads_add_up():
    ledger = Ledger()
    threads = [
        threading.Thread(target=lambda: [ledger.add({"n": 1}) for _ in range(2000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.totals()["n"] == 8000


@pytest.fixture
def step(devices):
    def add(state, batch):
        return {"w": state["w"] + batch["x"].sum()}

    return devices.compile(add, donate_argnums=())


def test_an_implicit_copy_of_the_state_names_the_leaf(devices, step):
    batch = devices.shard({"x": np.ones(8, np.float32)})
    state = {"w": np.ones(3, np.float32)}
    words = r"the state's \['w'\] \(float32\[3\]\) is on host \(NumPy\)"
    with devices.explicit_transfers(), pytest.raises(PlacementError, match=words):
        step(state, batch)


def test_an_implicit_copy_of_the_batch_names_the_leaf(devices, step):
    state = devices.replicate({"w": np.ones(3, np.float32)})
    shape = (8,) if devices.num_devices == 1 else (devices.num_devices, 2)
    batch = {"x": np.ones(shape, np.float32)}
    words = r"the batch's \['x'\].* is on host \(NumPy\).*devices.shard"
    with devices.explicit_transfers(), pytest.raises(PlacementError, match=words):
        step(state, batch)


@pytest.mark.parametrize("put", [jnp.from_dlpack, jnp.asarray])
def test_a_batch_on_one_of_several_devices_is_named(four_devices, put):
    step = four_devices.compile(lambda s, b: s + b["x"].sum(), ())
    state = four_devices.replicate(np.ones(3, np.float32))
    batch = {"x": put(np.ones((4, 2), np.float32))}
    words = r"the batch's \['x'\] \(float32\[4, 2\]\) is on cpu:0"
    with four_devices.explicit_transfers(), pytest.raises(PlacementError, match=words):
        step(state, batch)


def test_an_error_of_the_step_itself_stays_what_it_is(devices, step):
    state = devices.replicate({"w": np.ones(3, np.float32)})
    with pytest.raises(KeyError, match="x"):
        step(state, devices.shard({"y": np.ones(8, np.float32)}))
