"""What docs/devices.md says of JAX and Haiku where its own code does not show it."""

from concurrent.futures import ThreadPoolExecutor

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.devices import describe

ADAM = optax.adam(1e-3)
MODEL = hk.transform(lambda x: hk.nets.MLP([16, 10])(x))
ROWS = np.ones((4, 8), np.float32)


@pytest.fixture
def elsewhere(four_devices):
    """A device that is not the default one."""
    return four_devices.devices[3]


def in_a_thread(f):
    with ThreadPoolExecutor() as threads:
        return threads.submit(f).result()


def test_default_device_and_transfer_guard_hold_for_one_thread(elsewhere):
    with jax.default_device(elsewhere):
        assert describe(jnp.ones(3)) == "cpu:3"
        assert describe(in_a_thread(lambda: jnp.ones(3))) == "cpu:0"
    double = jax.jit(lambda x: 2 * x)
    double(ROWS)  # Being compiled already does not help.
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            with pytest.raises(Exception, match="Disallowed host-to-device"):
                double(ROWS)
        assert in_a_thread(lambda: double(ROWS)).shape == ROWS.shape


def test_one_element_of_an_uncommitted_array_costs_a_copy_of_all(elsewhere):
    with jax.default_device(elsewhere):
        x = jnp.arange(1000.0)
    with (
        jax.transfer_guard_device_to_device("disallow"),
        pytest.raises(Exception, match=r"device-to-device.*float32\[1000\]"),
    ):
        x[0]
    assert describe(x[0]) == "cpu:0"


@pytest.mark.parametrize("put", [jax.device_put, jnp.from_dlpack])
def test_putting_numpy_on_the_cpu_shares_memory_or_not(put):
    memory = np.zeros(1032, np.float32)
    aligned = -memory.ctypes.data % 64 // 4
    for offset, shares in ((aligned, True), (aligned + 1, False)):
        x = memory[offset : offset + 1000]
        y = jax.block_until_ready(put(x))
        x[:] = 7
        assert bool((y == 7).all()) == shares
        x[:] = 0


def test_64_bits_become_32_without_a_warning():
    assert jax.device_put(np.ones(3)).dtype == jnp.float32
    assert jnp.asarray(np.array([2**40 + 5])).tolist() == [5]


def test_a_donated_state_takes_with_it_what_shared_its_memory(devices):
    step = devices.compile(lambda x, batch: x + 1)
    x = jax.device_put(np.ones(1000, np.float32), devices.devices[0])
    state = devices.replicate(x)
    step(state, devices.shard(ROWS))
    for gone in (state, x):
        with pytest.raises(RuntimeError, match="Array has been deleted"):
            np.asarray(gone)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_init_runs_the_model_unless_it_is_compiled():
    rng = jax.random.key(0)
    assert "dot_general" in str(jax.make_jaxpr(MODEL.init)(rng, ROWS))
    apply = jax.jit(MODEL.apply)
    params = MODEL.init(rng, ROWS)
    assert " dot(" in apply.lower(params, None, ROWS).compile().as_text()
    init = jax.jit(MODEL.init)
    assert " dot(" not in init.lower(rng, ROWS).compile().as_text()
    same = jax.tree.map(lambda a, b: (a == b).all(), params, init(rng, ROWS))
    assert jax.tree.all(same)
    assert {describe(x) for x in jax.tree.leaves(params)} == {"cpu:0"}


def test_an_optimizer_state_left_behind_follows_without_a_word(elsewhere):
    params = MODEL.init(jax.random.key(0), ROWS)
    left = ADAM.init(params)
    params = jax.device_put(params, elsewhere)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    _, after = step(params, left)
    assert {describe(x) for x in jax.tree.leaves(left)} == {"cpu:0"}
    assert {describe(x) for x in jax.tree.leaves(after)} == {"cpu:3"}
    late = ADAM.init(params)
    assert describe(late[0].count) == "cpu:0" and not late[0].count.committed
    assert {describe(x) for x in jax.tree.leaves(late[0].mu)} == {"cpu:3"}
    with pytest.raises(ValueError, match="incompatible devices"):
        step(params, jax.device_put(left, jax.devices()[0]))


def test_pmap_uses_as_many_devices_as_there_are_rows():
    double = jax.pmap(lambda x: 2 * x)
    assert describe(double(ROWS[:2])) == "cpu:0-1 sharded"


def test_data_on_the_only_device_in_use_has_no_fault_but_is_uncommitted(one_device):
    (row,) = one_device.audit(jnp.asarray(ROWS))
    assert row.verdict == "" and not row.committed
