"""Where parameters come from when a run starts: the seed, or what others trained."""

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.config import load
from haiku_template.devices import DeviceManager, Shared
from haiku_template.errors import ConfigError
from haiku_template.finetuning.adapters import (
    ADAPTERS,
    check_base,
    fingerprint,
    load_adapters,
    same_names,
)
from haiku_template.finetuning.plan import Plan, Tuning, join, make_plan
from haiku_template.pretrained.families import FAMILIES
from haiku_template.pretrained.folder import describe
from haiku_template.pretrained.reading import flatten, read, unflatten
from haiku_template.storage.checkpoint import BEST_OR_LATEST, Checkpoints, restore
from haiku_template.storage.files import dispensable
from haiku_template.storage.workdir import (
    BASE,
    CHECKPOINTS,
    CONFIG,
    has_checkpoints,
    write_atomically,
)
from haiku_template.training.state import NOTHING_GIVEN, Given

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """Parameters that others trained; see `finetuning.source`.

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
      ConfigError: see `make_plan`.
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
      ConfigError: the base cannot be read, or is another one than it was.
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


logger = logging.getLogger(__name__)

STATE = "state.safetensors"  # Network state, beside the parameters' file.


def make_source(init_from: str | None, model: str, devices: DeviceManager) -> Source:
    """The source that `config.init_from` names.

    Args:
      init_from: a workdir, a Hugging Face folder, a folder that was exported, or a
        safetensors file with names of Hugging Face's or of Haiku's.
      model: the name of the model.
      devices: where the parameters are to live.

    Raises:
      ConfigError: nothing is there, or what holds no whole model.
      ConfigError: see `describe`.
    """
    path = Path(init_from)
    if not path.exists():
        raise ConfigError(
            f"config.init_from={init_from} is not there (looked for in {Path.cwd()}); "
            "possible are a workdir, a Hugging Face or exported folder and a "
            "safetensors file; "
            "where a run's source has moved, its config.json may be told"
        )
    if (path / ADAPTERS).is_file():
        raise ConfigError(
            f"config.init_from={init_from} holds adapters and no whole model; give "
            "its base there, and the adapters as config.finetuning.adapters"
        )
    if is_workdir(path):
        return _of_workdir(path, devices)
    if is_folder(init_from):
        describe(path, model)
    families = [family for family in FAMILIES.values() if family.model == model]
    rules = sum((family.rules for family in families), ())

    def of_files(shapes: hk.Params, skip: Collection[str]) -> dict[str, jax.Array]:
        table = rules + same_names(shapes)
        return read(path, shapes, table, devices, skip=skip)

    def net_state(shapes: hk.State) -> hk.State | None:
        file = (path if path.is_dir() else path.parent) / STATE
        if shapes and file.is_file():
            return unflatten(read(file, shapes, same_names(shapes), devices))
        if shapes:
            logger.warning(
                "network state starts afresh, not as it was trained: %s is not there, "
                "which would give %s",
                file,
                ", ".join(list(flatten(shapes))[:4]),
            )
        return None

    return Source(of_files, net_state)


def with_sizes(values: dict[str, Any], init_from: str | None) -> dict[str, Any]:
    """The keys of `config.model`, with what a Hugging Face folder says of its model.

    Args:
      values: the keys; those that are None or absent are taken from the folder.
      init_from: see `make_source`.

    Raises:
      ConfigError: a key says something else than the folder.
      ConfigError: see `describe`.
    """
    if not is_folder(init_from):
        return values
    known = describe(init_from, values["name"]).arguments
    known = {k: v for k, v in known.items() if k not in ("num_outputs", "dropout")}
    for key, value in known.items():
        if values.get(key) not in (None, value):
            raise ConfigError(
                f"config.model.{key}={values[key]}, and the model in {init_from} has "
                f"{value}; leave the key out"
            )
    return values | known


def vocabulary_of(init_from: str | None) -> int | None:
    """How many tokens a model has: a Hugging Face folder's, or a run's that says it.

    Raises:
      ConfigError: see `config.load`.
      ConfigError: see `describe`.
    """
    if init_from is not None and _has_config(Path(init_from)):
        saved = load(Path(init_from) / CONFIG)
        given = saved and saved.data.get("vocab_size")
        return given or vocabulary_of(saved.get("init_from"))
    if not is_folder(init_from):
        return None
    arguments = describe(init_from).arguments
    return arguments.get("vocab_size", arguments.get("num_outputs"))


def is_folder(init_from: str | None) -> bool:
    """Whether `config.init_from` names a Hugging Face folder."""
    path = Path(init_from or "")
    return init_from is not None and path.is_dir() and not _has_config(path)


def is_workdir(path: Path) -> bool:
    """Whether a run has written here."""
    return (path / CHECKPOINTS).is_dir()


def _has_config(path: Path) -> bool:
    """Whether this is a workdir, or was exported in Haiku's names with its config."""
    try:
        config = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError):
        return is_workdir(path)
    ours = isinstance(config, dict) and "model_type" not in config
    return is_workdir(path) or (ours and "model" in config)


def _of_workdir(workdir: Path, devices: DeviceManager) -> Source:
    """The best checkpoint of a run, or the latest: its averages where it has any."""
    saved = load(workdir / CONFIG)
    if not saved:
        raise ConfigError(
            f"the run in {workdir} was made by a script, without a config"
        )
    if saved.finetuning.train or saved.finetuning.lora.rank is not None:
        raise ConfigError(
            f"config.init_from={workdir} is a run that trained a part of its model, "
            "and holds no more than that; export it with --format=safetensors and "
            "start from that, or with --format=adapters for config.finetuning.adapters"
        )

    def of_run(shapes: hk.Params, skip: Collection[str]) -> dict[str, jax.Array]:
        wanted = {k: v for k, v in flatten(shapes).items() if k not in skip}
        as_saved = {k: _like_saved(leaf) for k, leaf in wanted.items()}

        def part(checkpoints: Checkpoints, step: int) -> hk.Params:
            averaged = checkpoints.saved(step).get("ema_params")
            name = "ema_params" if averaged else "params"
            return checkpoints.restore_part(step, name, unflatten(as_saved), skip)

        _, params = restore(saved, workdir, BEST_OR_LATEST, part)
        leaves = flatten(params)
        # Leaf by leaf, so that no second copy of all of them exists.
        for path, leaf in wanted.items():
            if leaf.dtype != leaves[path].dtype:
                leaves[path] = devices.init(_cast_to(leaf.dtype), leaves[path])
        return leaves

    def net_state(shapes: hk.State) -> hk.State | None:
        def part(checkpoints: Checkpoints, step: int) -> hk.State:
            return checkpoints.restore_part(step, "net_state", shapes)

        if not shapes:
            return None
        return restore(saved, workdir, BEST_OR_LATEST, part)[1]

    return Source(of_run, net_state)


def _like_saved(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    dtype = jnp.float32 if is_float else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _cast_to(dtype: Any) -> Any:
    return lambda leaf: leaf.astype(dtype)
