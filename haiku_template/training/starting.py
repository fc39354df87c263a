"""Where parameters come from when a run starts: the seed, or what others trained."""

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import haiku as hk
import jax

from haiku_template.devices import DeviceManager, Shared
from haiku_template.finetuning.adapters import (
    check_base,
    fingerprint,
    load_adapters,
)
from haiku_template.finetuning.freezing import join
from haiku_template.finetuning.pretrained import flatten, unflatten
from haiku_template.finetuning.tuning import Plan, Tuning, make_plan
from haiku_template.training.notes import dispensable
from haiku_template.training.state import NOTHING_GIVEN, Given
from haiku_template.training.workdir import BASE, has_checkpoints, write_atomically

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """Parameters that others trained; see `training.sources`.

    Attributes:
      read: (shapes of all parameters, paths to leave out) to {path: leaf}, of the
        dtypes asked for, on the devices.
      net_state: shapes of the Haiku state to the state; None for that of the seed.
    """

    read: Callable[[hk.Params, Collection[str]], dict[str, jax.Array]]
    net_state: Callable[[hk.State], hk.State | None]


class Start(NamedTuple):
    """What a run starts from.

    Attributes:
      plan: what trains, and how it and the base make the model's parameters.
      base: what is frozen: read, or made from the seed, each time that a run starts.
        The steps get it by themselves.
      given: reads what of the first state does not come from the seed.
      read: whether the base is; else it is made from the seed.
    """

    plan: Plan
    base: Shared
    given: Callable[[], Given]
    read: bool


def make_start(
    devices: DeviceManager,
    model_init: Callable[[], tuple[hk.Params, hk.State]],
    tuning: Tuning,
    source: Source | None,
) -> Start:
    """Plans the start of a run; nothing is read or made yet.

    Args:
      devices: where the parameters are to live.
      model_init: makes the model's parameters and state from the seed.
      tuning: what trains.
      source: of other parameters; None for the seed's.

    Raises:
      TuningError: see `make_plan`.
    """

    def base_of_seed() -> hk.Params:
        return plan.base(model_init()[0])

    def make_base() -> hk.Params:
        if source is None:
            return devices.init(base_of_seed)
        return unflatten(source.read(join(whole, abstract_base), plan.trained))

    def given() -> Given:
        if tuning.adapters is not None:
            skeleton = devices.abstract(
                lambda: plan.params(model_init()[0], jax.random.key(0))
            )
            params = load_adapters(
                tuning.adapters, skeleton, base.arrays(), plan.lora, devices
            )
            return flatten(params), source and source.net_state(net_state)
        if source is None:
            return NOTHING_GIVEN
        leaves = {}
        if plan.trained > plan.fresh:
            leaves = source.read(whole, plan.frozen | plan.fresh)
        return leaves, source.net_state(net_state)

    whole, net_state = devices.abstract(model_init)
    plan = make_plan(tuning, whole)
    abstract_base = devices.abstract(base_of_seed)
    base = Shared.create(abstract_base, make_base if plan.frozen else dict)
    return Start(plan, base, given, source is not None)


def place_base(devices: DeviceManager, start: Start, workdir: Path) -> None:
    """Makes the base, and asserts that it is the one that the run in `workdir` has.

    The first start of a run keeps the fingerprint of a base that was read.

    Args:
      devices: where it lives.
      start: of the run.
      workdir: of the run; it exists.

    Raises:
      PretrainedError: the base cannot be read, or is another one than it was.
    """
    if not start.plan.frozen:
        return
    base = start.base.arrays()
    devices.check(base)
    if not start.read:
        return  # Made from the seed, which config.json keeps.
    file = workdir / BASE
    if file.exists() and has_checkpoints(workdir):
        try:
            expected = json.loads(file.read_text())["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "whether the base is the one that the run in %s began with is not "
                "known: %s cannot be read (%s)",
                workdir,
                file,
                error,
            )
            return
        check_base(expected, devices, base, f"the parameters in {workdir}")
    else:
        found = {"sha256": fingerprint(devices, base)}
        with dispensable(file):
            write_atomically(file, json.dumps(found) + "\n")
