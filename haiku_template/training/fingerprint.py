"""Fingerprint of a run's mathematics: a script that was edited is another run.

It digests the jaxprs of the steps, traced as on one device, and the first batches.
Names, the order of independent operations and addresses in memory do not change it.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from haiku_template.devices import canonical_shapes
from haiku_template.devices.transfer import AXIS_NAME
from haiku_template.errors import ConfigError
from haiku_template.storage import workdir as workdirs
from haiku_template.training.evaluation import num_rows
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

FILE = "program.json"
NAMED = ("model", "data", "task")
FIRST_BATCH = "first batch of the training data"  # Unless processes have shares of it.
# The identity on one device.
IDENTITIES = {"optimization_barrier", "psum", "psum_invariant", "pvary", "pcast"}
# Calls of an inner jaxpr with the same arguments.
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call"}
CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint"}
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
PLACED = re.compile("sharding|mesh|layout")  # Parameters of no mathematics.


def needed(config: dict[str, Any]) -> bool:
    """Tests if a config names code of the user's, which it does not contain."""
    names = [(config.get(key) or {}).get("name") for key in NAMED]
    own = bool(config.get("step"))
    return own or any(name is None or ":" in name for name in names)


def of(trainer: Trainer) -> dict[str, str]:
    """Digests each part of an experiment, the same on any number of devices."""
    trainer, _ = trainer.through or (trainer, None)  # The whole model's.
    data, functions = trainer.experiment.data, trainer.functions()
    abstract = canonical_shapes(trainer.abstract)
    state, frozen = abstract.without_frozen(), abstract.frozen
    batch = data.train.batch(0)
    several = trainer.devices.processes.count > 1  # Each may read its share alone.
    rows = trainer.batch_size if several else num_rows(batch)
    shapes = canonical_shapes(batch, rows=rows)
    padded = shapes, jax.ShapeDtypeStruct((rows,), np.int32)
    found = {
        "jax": importlib.metadata.version("jax"),
        "platform": trainer.devices.platform,
        "train step": _traced(functions.step, state, frozen, shapes),
        "first parameters": _traced(functools.partial(functions.init, {})),
    }
    if num_rows(batch) == rows:
        found[FIRST_BATCH] = _digest(_value(batch))
    if data.evaluation is not None:
        given = state.variables(), frozen, padded
        found["evaluation step"] = _traced(functions.eval_step, *given)
        first = data.evaluation.batch(0)
        found["first batch of the evaluation data"] = _digest(
            data.evaluation.num_batches, _value(first)
        )
    return found


def keep(workdir: Path, trainer: Trainer, config: dict[str, Any]) -> None:
    """Saves the fingerprint of a new run; asserts that a resumed run has the same.

    Raises:
      ConfigError: the mathematics or the data changed; names the parts.
    """
    if not needed(config):
        return
    file, found = workdir / FILE, of(trainer)
    shared = {k: x for k, x in found.items() if k != FIRST_BATCH}
    trainer.devices.processes.agree(shared)
    if workdirs.has_checkpoints(workdir) and file.exists():
        advice = "Nothing was changed there: use another --workdir or restore what was "
        advice += f"edited; to resume all the same, remove {file}"
        _check(workdir, found, f". {advice}")
    else:
        with workdirs.usable(workdir):
            workdirs.write_json(file, found)


def warn_of_changes(workdir: Path, trainer: Trainer) -> None:
    """Warns if a finished run's experiment is not the one that it was trained with."""
    if (workdir / FILE).exists():
        try:
            _check(workdir, of(trainer))
        except ConfigError as error:
            logger.warning("%s", error)


def _check(workdir: Path, found: dict[str, str], advice: str = "") -> None:
    kept = workdirs.read_json(workdir / FILE)
    names = [k for k in kept.keys() | found.keys() if kept.get(k) != found.get(k)]
    if not (FIRST_BATCH in kept and FIRST_BATCH in found):
        names = [name for name in names if name != FIRST_BATCH]
    changed = ", ".join(sorted(set(names) - {"jax", "platform"}))
    if not changed:
        return
    if "platform" in names:
        logger.warning(
            "%s began on %s, and on %s other operations are traced (%s): whether its "
            "code was edited since cannot be told",
            *(workdir, kept.get("platform"), found["platform"], changed),
        )
        return
    reason = "its code or its data was edited since"
    if "jax" in names:
        reason = (
            f"that is the change from jax {kept.get('jax')} to {found['jax']}, or its "
            "code or its data was edited since"
        )
    raise ConfigError(
        f"the run in {workdir} computed something else ({changed}): {reason}{advice}"
    )


def _traced(function: Callable[..., Any], *args: Any) -> str:
    """Digests the jaxpr of a function of these shapes."""
    # Models may average over the axis, as they do on several devices.
    return _jaxpr(jax.make_jaxpr(function, axis_env=[(AXIS_NAME, 1)])(*args))


def _digest(*parts: Any) -> str:
    text = "\0".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()


def _jaxpr(jaxpr: Any) -> str:
    given = [f"{i} {v.aval.str_short()}" for i, v in enumerate(_inner(jaxpr).invars)]
    return _digest(*given, *_results(jaxpr, given))


def _inner(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _results(jaxpr: Any, given: list[str]) -> list[str]:
    """Digests each result of a jaxpr, given the digests of its arguments."""
    inner = _inner(jaxpr)
    known = dict(zip(inner.invars, given, strict=True))
    constants = zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False)
    known |= {variable: _digest(_value(value)) for variable, value in constants}

    def read(variable: Any) -> str:
        if hasattr(variable, "val"):
            return _digest(variable.aval.str_short(), _value(variable.val))
        return known[variable]

    for equation in inner.eqns:
        results = _equation(equation, [read(v) for v in equation.invars])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in inner.outvars]


def _equation(equation: Any, given: list[str]) -> list[str]:
    name, params = equation.primitive.name, equation.params
    # A division by one is an average over one device.
    divisor = getattr(equation.invars[-1], "val", 0) if name == "div" else 0
    if name in IDENTITIES or (np.ndim(divisor) == 0 and divisor == 1):
        return given[: len(equation.outvars)]
    if name in CALLS:
        return _results(next(params[key] for key in BODIES if key in params), given)
    shown = [f"{k}={_value(params[k])}" for k in sorted(params) if not PLACED.search(k)]
    shapes = [variable.aval.str_short() for variable in equation.outvars]
    whole = _digest(name, *shown, *shapes, *given)
    return [_digest(whole, i) for i in range(len(equation.outvars))]


def _value(value: Any) -> str:
    """Digests a parameter or constant, the same in every process."""
    if hasattr(value, "eqns") or hasattr(_inner(value), "eqns"):
        return _jaxpr(value)
    if isinstance(value, jax.core.Tracer):
        return "a tracer that leaks"  # The first state, or the first step, names it.
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        sha = hashlib.sha256(array.tobytes()).hexdigest()
        return f"{array.dtype}{array.shape}{sha}"
    if isinstance(value, dict):
        return _digest(*(f"{k}:{_value(value[k])}" for k in sorted(value, key=str)))
    if isinstance(value, set | frozenset):
        return _digest(*sorted(map(_value, value)))
    if isinstance(value, tuple | list):
        return _digest(*map(_value, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _value(
            {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        )
    plain = bool | int | float | complex | str | bytes | None | enum.Enum | np.dtype
    if isinstance(value, plain):
        return repr(value)
    # A function, or an object of JAX's whose repr may hold its address.
    return getattr(value, "__qualname__", type(value).__qualname__)
