"""What a compiled step refuses, what it bounds, and its results of each example."""

import dataclasses
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.devices import (
    DeviceManager,
    check_replicas,
    compiled,
    mean_over,
    transfer,
)
from haiku_template.devices.compiled import IN_FLIGHT, MANY, InFlight, Pace
from haiku_template.devices.layout import Layout
from haiku_template.errors import PlacementError

EIGHT = np.arange(8, dtype=np.float32)


def scaled(state, batch):
    return batch * state


def test_fetch_refuses_what_differs_between_devices(four_devices):
    step = four_devices.compile(scaled, donate_argnums=())
    results = step(four_devices.replicate(np.float32(2)), four_devices.shard(EIGHT))
    with pytest.raises(PlacementError, match="differ.*compile_per_example"):
        four_devices.fetch({"results": results})


def test_fetch_gathers_what_is_sharded(devices):
    placed = devices.shard({"x": EIGHT})
    np.testing.assert_array_equal(devices.fetch(placed)["x"].reshape(-1), EIGHT)


def test_sharded_results_are_those_of_each_example(devices):
    step = devices.compile_per_example(
        lambda state, batch: {"double": scaled(state, batch), "row": batch[:, None]},
    )
    with devices.explicit_transfers():
        results = step(devices.replicate(np.float32(2)), devices.shard(EIGHT))
        results = devices.fetch(results)
    np.testing.assert_array_equal(results["double"], 2 * EIGHT)
    np.testing.assert_array_equal(results["row"], EIGHT[:, None])


def test_sharded_results_may_average_over_the_devices_on_their_way(devices):
    def step(state, batch):
        return batch - mean_over(devices.axis_name, batch.mean()) + state

    step = devices.compile_per_example(step)
    results = step(devices.replicate(np.float32(1)), devices.shard(EIGHT))
    np.testing.assert_array_equal(devices.fetch(results), EIGHT - EIGHT.mean() + 1)


@pytest.mark.parametrize("result", [lambda s, b: b.sum(), lambda s, b: b[:1]])
def test_sharded_results_that_are_not_of_each_example_are_refused(devices, result):
    step = devices.compile_per_example(result)
    with pytest.raises(PlacementError, match="one entry for each row"):
        step(devices.replicate(np.float32(1)), devices.shard(EIGHT))


@pytest.mark.parametrize("sizes", [[8, 8, 3], [5], [2, 7, 1], [4, 4]])
def test_map_batches_gives_each_example_once_whatever_the_sizes(devices, sizes):
    rows = np.random.default_rng(0).normal(size=(sum(sizes), 3)).astype(np.float32)
    batches = np.split(rows, np.cumsum(sizes)[:-1])
    step = devices.compile_per_example(
        lambda w, batch: {"sum": (batch["x"] * w).sum(axis=1)},
    )
    w = devices.replicate(np.array([1, 2, 4], np.float32))
    with devices.explicit_transfers():
        results = list(devices.map_batches(step, w, ({"x": b} for b in batches)))
    assert [len(result["sum"]) for result in results] == sizes
    joined = np.concatenate([result["sum"] for result in results])
    np.testing.assert_allclose(joined, rows @ [1, 2, 4], rtol=1e-5)


def test_a_state_that_was_donated_is_named_and_not_used_again(devices):
    step = devices.compile(lambda s, b: jax.tree.map(lambda x: x + 1, s))
    state = devices.init(lambda: {"a": jnp.ones(3), "b": jnp.ones(2)})
    batch = devices.shard(EIGHT)
    new = step(state, batch)
    for use in (lambda: step(state, batch), lambda: devices.fetch(state)):
        with pytest.raises(PlacementError, match=r"\['a'\] \(float32\[3\]\).*deleted"):
            use()
    step(new, batch)
    with pytest.raises(PlacementError, match=r"\['b'\].*deleted"):
        check_replicas({"b": new["b"]})


def test_a_deleted_batch_is_named(devices):
    step = devices.compile(lambda s, b: s, donate_argnums=())
    state, batch = devices.replicate(EIGHT), devices.shard({"x": EIGHT})
    batch["x"].delete()
    with pytest.raises(PlacementError, match=r"the batch's \['x'\].*deleted"):
        step(state, batch)


def test_an_array_that_is_in_a_donated_state_twice_is_refused(devices):
    step = devices.compile(lambda s, b: jax.tree.map(lambda x: x + 1, s))
    one = devices.replicate(EIGHT)
    with pytest.raises(PlacementError, match=r"\['b'\].*the same array as.*\['a'\]"):
        step({"a": one, "b": one}, devices.shard(EIGHT))
    state = devices.replicate({"a": (x := jnp.ones(3)), "b": x})
    new = devices.fetch(step(state, devices.shard(EIGHT)))
    np.testing.assert_array_equal(new["a"], new["b"])


@pytest.mark.parametrize(
    "batch",
    [
        {"x": EIGHT},
        {"x": EIGHT[:2]},
        {"x": [1.0, 2.0]},
        {"x": 3},
        {"x": jnp.arange(4.0)},
    ],
)
def test_a_batch_that_is_not_from_shard_is_refused_by_name(four_devices, batch):
    step = four_devices.compile(lambda s, b: s, donate_argnums=())
    with pytest.raises(PlacementError, match=r"the batch's \['x'\].*devices.shard"):
        step(four_devices.replicate(EIGHT), batch)


def test_a_replicated_batch_is_refused(four_devices):
    step = four_devices.compile(lambda s, b: s, donate_argnums=())
    batch = four_devices.replicate(np.ones((4, 2), np.float32))
    with pytest.raises(PlacementError, match="cpu:0-3 replicated.*devices.shard"):
        step(batch, batch)


def test_no_more_steps_are_in_flight_than_the_devices_allow(devices):
    def slow(state, batch):
        return jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x), state)

    step = devices.compile(slow)
    state = devices.replicate(np.eye(150, dtype=np.float32))
    batch = devices.shard(EIGHT)
    for _ in range(2 * devices.steps_in_flight + 2):
        state = step(state, batch)  # Donated: what came out is gone at once.
        unfinished = [token for token, _ in IN_FLIGHT if not token.is_ready()]
        assert len(unfinished) <= devices.steps_in_flight
    assert len(IN_FLIGHT) <= devices.steps_in_flight


class Token:
    """Of a step that takes so many seconds, which passes when it is waited for."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.ended = clock, seconds, False

    def block_until_ready(self):
        if not self.ended:
            self.ended = True
            self.clock[0] += self.seconds


def in_flight(monkeypatch, manager, steps):
    """Numbers of such steps in flight, as each is dispatched: (seconds, pace)."""
    clock, queue, numbers = [100.0], InFlight(), []
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: clock[0])
    for seconds, pace in steps:
        queue.make_room(manager, pace)
        queue.append((Token(clock, seconds), pace))
        numbers.append(sum(token.seconds == seconds for token, _ in queue))
    return numbers


def test_many_short_steps_may_be_in_flight_and_few_long_ones(one_device, monkeypatch):
    """Else the devices wait while the host makes the batches of the next steps."""
    short = [(1e-4, Pace())] * 200
    numbers = in_flight(monkeypatch, one_device, short)
    assert numbers[:4] == [1, 2, 3, 4] and set(numbers[3:11]) == {4}
    assert max(numbers) == MANY and min(numbers[-100:]) == MANY // 2 + 1
    long = [(0.01, Pace())] * 200
    assert max(in_flight(monkeypatch, one_device, long)) == 4
    # Once one of the short ones is seen to be long there are few again.
    pace = Pace()
    mixed = [(1e-4, pace)] * 100 + [(0.1, pace)] * 100
    numbers = in_flight(monkeypatch, one_device, mixed)
    assert max(numbers) == MANY and max(numbers[100 + MANY :]) == 4


@pytest.mark.parametrize("pace", [Pace(), None], ids=["program", "several steps"])
def test_after_short_steps_few_of_another_kind_are_in_flight(
    pace, one_device, monkeypatch
):
    """As after evaluation batches, or those of a short bucket."""
    short, long = (1e-5, Pace()), (0.2, pace)
    numbers = in_flight(monkeypatch, one_device, [short] * 100 + [long] * 50)
    assert max(numbers[:100]) == MANY and max(numbers[100:]) == 4
    turns = ([short] * 6 + [long] * 2) * 20
    numbers = in_flight(monkeypatch, one_device, turns)
    assert max(x for x, step in zip(numbers, turns, strict=True) if step is long) <= 4


def test_batches_of_another_shape_are_of_another_pace(one_device):
    step = one_device.compile(lambda state, batch: state, donate_argnums=())
    state = one_device.replicate(EIGHT)
    for rows in (8, 16, 8):
        step(state, one_device.shard(np.ones((rows, 2), np.float32)))
    assert [*step.paces] == [((8, 2),), ((16, 2),)]
    assert step._pace({}) is step._pace(()) is not step._pace(state)


def test_steps_that_ended_unseen_are_not_taken_for_short_ones(one_device, monkeypatch):
    """A host that was away finds the last four done at once."""
    pace = Pace()
    steps = [(x, pace) for x in (0.1, 0, 0, 0)] * 50
    assert max(in_flight(monkeypatch, one_device, steps)) <= 4


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_few_steps_are_in_flight_elsewhere(platform, one_device, monkeypatch):
    monkeypatch.setattr(DeviceManager, "platform", platform)
    pace = Pace()
    assert max(in_flight(monkeypatch, one_device, [(1e-5, pace)] * 100)) == 4


def test_simulated_devices_have_one_step_in_flight(four_devices, monkeypatch):
    pace = Pace()
    assert max(in_flight(monkeypatch, four_devices, [(1e-5, pace)] * 100)) == 1


OWN_LOOP = """
import numpy as np, jax, jax.numpy as jnp
from haiku_template.devices import DeviceManager, mean_over
devices = DeviceManager.create(simulate_devices=8)
def first(state, batch):
    return state + mean_over(devices.axis_name, batch.mean())
def second(state, batch):
    return mean_over(devices.axis_name, batch.sum() * state)
first, second = devices.compile(first), devices.compile(second, donate_argnums=())
state = devices.replicate(np.zeros((300, 300), np.float32))
batch = devices.shard(np.ones((8, 300, 300), np.float32))
for _ in range(300):
    state = first(state, batch)
    more = second(state, batch)
print(devices.fetch(state)[0, 0], devices.fetch(more)[0, 0])
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_over_simulated_devices_ends():
    done = subprocess.run(
        [sys.executable, "-c", OWN_LOOP], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["300.0", "2.7e+07"]


def test_a_step_can_be_traced_without_being_dispatched(one_device):
    step = one_device.compile(lambda s, b: s + b.sum(), donate_argnums=())
    shape = jax.eval_shape(step, jnp.ones(3), jnp.ones(2))
    assert shape.shape == (3,)
    one_device.fetch(step(one_device.replicate(EIGHT), one_device.shard(EIGHT)))


@pytest.mark.parametrize("copy", ["shard", "replicate", "place"])
def test_nothing_is_copied_to_a_gpu_while_a_program_is_called_first(
    devices, monkeypatch, copy
):
    """The copy would join what cuDNN records; the first call of each shape counts."""
    monkeypatch.setattr(compiled, "GPU", devices.platform)
    copies = {
        "shard": lambda: devices.shard(EIGHT),
        "replicate": lambda: devices.replicate(EIGHT),
        "place": lambda: devices.place(EIGHT, Layout(devices.devices)),
    }
    step, overlaps = devices.compile(scaled, donate_argnums=()), []

    def program(*args):
        thread = threading.Thread(target=copies[copy])
        thread.start()
        thread.join(0.3)
        overlaps.append(not thread.is_alive())
        results = step.compiled(*args)
        threads.append(thread)
        return results

    threads, state = [], devices.replicate(np.float32(2))
    other = dataclasses.replace(step, compiled=program)
    for size in (8, 8, 16, 16, 8):
        batch = devices.shard(np.ones(size, np.float32))
        devices.wait(other(state, batch))
        threads[-1].join()
    assert overlaps == [False, True, False, True, True]


class Counting:
    """A lock's stand-in that counts how often it is taken."""

    taken = 0

    def __enter__(self):
        self.taken += 1

    def __exit__(self, *_):
        pass


@pytest.fixture
def copying(devices, monkeypatch):
    monkeypatch.setattr(compiled, "GPU", "cpu")
    monkeypatch.setattr(transfer, "COPYING", counting := Counting())
    return counting


def test_a_gpus_first_call_of_each_kind_of_batch_holds_copies_back(devices, copying):
    step = devices.compile(lambda state, batch: state + batch.sum(), donate_argnums=())
    state = devices.replicate(np.float32(1))
    eight, sixteen = devices.shard(EIGHT), devices.shard(np.tile(EIGHT, 2))
    whole = devices.shard(EIGHT.astype(np.int32))
    assert copying.taken == 4  # Each copy to the devices takes its turn.
    jax.eval_shape(step, state, eight)  # Traced: nothing has run.
    assert copying.taken == 4
    for batch, taken in ((eight, 5), (eight, 5), (sixteen, 6), (whole, 7), (eight, 7)):
        step(state, batch)
        assert copying.taken == taken


def test_a_gpus_first_call_that_fails_is_made_again_without_copies(devices, copying):
    def step(state, batch):
        raise ValueError("of a user's step")

    step, state = devices.compile(step), devices.replicate(np.float32(1))
    batch, taken = devices.shard(EIGHT), copying.taken
    for n in (1, 2):
        with pytest.raises(ValueError, match="of a user's step"):
            step(state, batch)
        assert copying.taken == taken + n
