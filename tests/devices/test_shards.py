"""Parts of a state of which each device keeps a share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.devices.shards import Sharded, device_bytes, split_dimension
from haiku_template.errors import PlacementError
from haiku_template.training.optimizers import sharded


@pytest.mark.parametrize(
    ("shape", "dimension"),
    [
        ((), None),
        ((3,), None),
        ((8,), 0),
        ((3, 3, 12, 5), 2),
        ((0, 4), 1),
        ((2, 6), None),
    ],
)
def test_the_first_dimension_that_splits_evenly_is_split(shape, dimension):
    assert split_dimension(shape, 4) == dimension


def make_state():
    tree = {"a": jnp.arange(24.0).reshape(3, 8), "odd": jnp.ones(3)}
    return {"params": tree, "moments": Sharded(tree), "step": jnp.zeros((), jnp.int32)}


def test_a_sharded_part_is_born_split_and_all_else_whole(four_devices):
    like = four_devices.abstract(make_state)
    state = four_devices.init(make_state, like=like)
    four_devices.check(state)
    moments = state["moments"].tree
    shares = [shard.data for shard in moments["a"].addressable_shards]
    assert [share.shape for share in shares] == [(3, 2)] * 4
    assert moments["odd"].is_fully_replicated
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state["params"]))
    fetched = four_devices.fetch(state)
    np.testing.assert_array_equal(fetched["moments"].tree["a"], fetched["params"]["a"])
    assert device_bytes(like) == 2 * 12 + 4 + 24 * 4 + 24 * 4 // 4


def test_a_leaf_that_is_whole_or_split_against_its_part_is_named(four_devices):
    state = four_devices.init(make_state)
    with pytest.raises(PlacementError, match=r"tree\['a'\].*keep its share: use dev"):
        four_devices.check(state)
    state = four_devices.init(make_state, like=four_devices.abstract(make_state))
    with pytest.raises(PlacementError, match=r"params'\]\['a'\].*split over the dev"):
        four_devices.check(state | {"params": state["moments"].tree})


def test_a_step_that_does_not_know_of_shards_is_refused(four_devices):
    """Else a moment [4] and a share [1] would broadcast in silence."""
    optimizer = sharded(optax.adam(1e-3))

    def first():
        params = {"b": jnp.ones(4)}
        return params, optimizer.init(params)

    def step(state, batch):
        params, moments = state
        updates, moments = optimizer.update(params, moments, params)
        return (optax.apply_updates(params, updates), moments), {}

    batch = four_devices.shard(np.zeros((4, 1), np.float32))
    with pytest.raises(PlacementError, match=r"compile\(\.\.\., like=state\)"):
        four_devices.compile(step)(four_devices.init(first), batch)
    like = four_devices.abstract(first)
    compiled = four_devices.compile(step, like=like)
    (params, moments), _ = compiled(four_devices.init(first, like=like), batch)
    np.testing.assert_allclose(four_devices.fetch(params)["b"], 1 - 1e-3, atol=1e-6)
    four_devices.check(moments)
