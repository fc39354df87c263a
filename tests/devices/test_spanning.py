"""Arrays of all processes, given and taken as this one's; here it is the only one."""

import gc
import weakref

import jax
import numpy as np
import pytest

from haiku_template.devices.spanning import Spanning

HERE, ELSEWHERE = jax.devices()[:2]


class Recorded:
    """A compiled step, with the arguments and results of its calls."""

    def __init__(self):
        self.step = jax.jit(lambda state, batch: (state + batch.sum(), batch.sum()))
        self.given, self.made = [], []

    def __call__(self, *args):
        self.given.append(args)
        self.made.append(self.step(*args))
        return self.made[-1]


def put(*shape, device=HERE):
    return jax.device_put(np.ones(shape, np.float32), device)


def test_results_are_of_this_process_alone():
    state, total = Spanning(Recorded(), [HERE])(put(3), put(1, 4))
    for result in (state, total):
        assert result.is_fully_addressable and result.devices() == {HERE}
    np.testing.assert_array_equal(state, [5, 5, 5])


def test_a_result_that_comes_back_is_what_it_was_a_part_of():
    """Tried by hand, fails: results that are not kept."""
    recorded = Recorded()
    spanning, state, batch = Spanning(recorded, [HERE]), put(3), put(1, 4)
    for _ in range(3):
        state, _ = spanning(state, batch)
    for given, (made, _) in zip(recorded.given[1:], recorded.made, strict=False):
        assert given[0] is made
    np.testing.assert_array_equal(state, [13, 13, 13])


def test_a_state_that_was_taken_over_is_deleted_in_this_process_too():
    step = jax.jit(lambda state, batch: state + batch.sum(), donate_argnums=0)
    spanning, batch = Spanning(step, [HERE]), put(1, 4)
    first = spanning(put(3), batch)
    second = spanning(first, batch)
    assert first.is_deleted() and not second.is_deleted()


def test_arrays_are_kept_until_the_next_call_and_no_longer():
    recorded, batch = Recorded(), put(1, 4)
    spanning = Spanning(recorded, [HERE])
    state, _ = spanning(put(3), batch)
    kept = weakref.ref(recorded.made.pop()[0])
    for _ in range(2):
        assert kept() is not None
        state, _ = spanning(state, batch)
        recorded.given.clear()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("leaf", [put(3, device=ELSEWHERE), np.ones(3)])
def test_what_is_elsewhere_is_left_to_jax_which_names_it(leaf):
    recorded, batch = Recorded(), put(1, 4)
    words = pytest.raises((ValueError, RuntimeError), match="ncompatible|Disallowed")
    with words, jax.transfer_guard("disallow"):
        Spanning(recorded, [HERE])(leaf, batch)
    assert recorded.given[0][0] is leaf
