"""Fingerprint of a run's mathematics: a script that was edited is another run.

It digests the jaxprs of the steps, traced as on one device, and the first batches.
Names, the order of independent operations and addresses in memory do not change it.
Processes of one run compare theirs.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import logging
import platform
import re
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import jax
import numpy as np

from haiku_template.config import LATER, completed, default_config
from haiku_template.data import Data, whole_batches
from haiku_template.devices import canonical_shapes
from haiku_template.devices.transfer import AXIS_NAME
from haiku_template.errors import ConfigError
from haiku_template.storage import workdir as workdirs
from haiku_template.training import step
from haiku_template.training.evaluation import num_rows
from haiku_template.training.optimizers import make_optimization
from haiku_template.training.tasks import facts_of
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

FILE = "program.json"
NAMED = ("model", "data", "task")
FIRST_BATCH = "first batch of the training data"
OVER_DEVICES = "steps over devices"  # Of code that is told the axis.
MAYBE = {FIRST_BATCH, OVER_DEVICES}  # Not in every fingerprint.
NUM_STEPS = "num_steps"  # With which the run began: a schedule may end with it.
VERSIONS = ("jax", "python")
CALLBACKS = {"pure_callback", "io_callback"}
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
    batch = whole_batches(data.train).batch(0)
    several = trainer.devices.processes.count > 1  # A set may give a share alone.
    rows = trainer.batch_size if several else num_rows(batch)
    shapes = canonical_shapes(batch, rows=rows)
    padded = shapes, jax.ShapeDtypeStruct((rows,), np.int32)
    training, evaluating = (state, frozen, shapes), (state.variables(), frozen, padded)
    found = {
        "jax": importlib.metadata.version("jax"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "platform": trainer.devices.platform,
        "train step": traced(functions.step, *training),
        "first parameters": traced(functools.partial(functions.init, {})),
    }
    if num_rows(batch) == rows:
        found[FIRST_BATCH] = _digest(_value(batch))
    if data.evaluation is not None:
        found["evaluation step"] = traced(functions.eval_step, *evaluating)
        first = data.evaluation.batch(0)
        found["first batch of the evaluation data"] = _digest(
            data.evaluation.num_batches, _value(first)
        )
    if _told_the_axis(trainer):
        functions = trainer.functions(AXIS_NAME)
        over = [traced(functions.step, *training)]
        if data.evaluation is not None:
            over.append(traced(functions.eval_step, *evaluating))
        found[OVER_DEVICES] = _digest(*over)
    return found


def _told_the_axis(trainer: Trainer) -> bool:
    """Tests if code of the user's may compute something else where there is an axis."""
    experiment = trainer.experiment
    own = experiment.step is not None or experiment.steps is not step
    return own or "axis_name" in facts_of(trainer.task.values)


def _ends(data: Data) -> dict[str, str]:
    """Digests the first and the last rows of the data, where these are arrays."""
    found = {}
    if hasattr(data.train, "staged"):
        ends = [(x[:1], x[-1:]) for x in jax.tree.leaves(data.train.staged())]
        found["first and last rows of the training data"] = _digest(_value(ends))
    sets = {"": data.evaluation} if data.evaluation is not None else {}
    for name, each in (sets | dict(data.evaluations)).items():
        last = each.batch(each.num_batches - 1)
        found[f"last batch of the evaluation data {name}".rstrip()] = _value(last)
    return found


def _sizes(data: Data) -> dict[str, Any]:
    train, evaluation = data.train, data.evaluation
    batches = None if evaluation is None else evaluation.num_batches
    size = getattr(train, "staged_size", None) or len(getattr(train, "inputs", ()))
    return {"training": size, "evaluation batches": batches}


def keep(
    workdir: Path, trainer: Trainer, config: dict[str, Any], num_steps: int
) -> None:
    """Saves the fingerprint of a new run; asserts that a resumed run has the same.

    Processes of one run must have the same, also where a config says it all.

    Raises:
      ConfigError: the mathematics or the data changed, or differ between processes;
        names the parts.
    """
    processes, file = trainer.devices.processes, workdir / FILE
    if not needed(config) and processes.count == 1:
        return
    found = of(trainer)
    if processes.count > 1:
        data = trainer.experiment.data  # Features are of one process alone.
        parts = (found | _ends(data)).items()
        parts = {f"the fingerprint of the {k}": x for k, x in parts}
        processes.agree({"the size of the data": _sizes(data)} | parts)
    if not needed(config):
        return
    if workdirs.has_checkpoints(workdir) and file.exists():
        advice = ". Nothing was changed there: use another --workdir or restore what "
        advice += f"was edited; to resume all the same, remove {file}"
        _check(workdir, trainer, config, num_steps, found, advice)
    else:
        with workdirs.usable(workdir):
            workdirs.write_json(file, found | {NUM_STEPS: num_steps})


def warn_of_changes(workdir: Path, trainer: Trainer, config: dict[str, Any]) -> None:
    """Warns if a finished run's experiment is not the one that it was trained with."""
    if (workdir / FILE).exists():
        try:
            _check(workdir, trainer, config, config.get(NUM_STEPS), of(trainer))
        except ConfigError as error:
            logger.warning("%s", error)


def _check(
    workdir: Path,
    trainer: Trainer,
    config: dict[str, Any],
    num_steps: int | None,
    found: dict[str, str],
    advice: str = "",
) -> None:
    """Asserts that this is the fingerprint of the run, whose `num_steps` may differ."""
    kept = workdirs.read_json(workdir / FILE)
    saved = workdirs.read_json(workdir / workdirs.CONFIG)
    began = kept.get(NUM_STEPS) or saved.get(NUM_STEPS) or num_steps
    names = _differences(kept, found)
    if names - {*VERSIONS} and began != num_steps and _is_complete(config):
        found = of(_as_it_began(trainer, config, began))
        names = _differences(kept, found)
    changed = ", ".join(sorted(names - {"platform", *VERSIONS}))
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
    for name in VERSIONS:
        if name in names:
            change = f"from {name} {kept.get(name)} to {found[name]}"
            reason = f"that is the change {change}, or {reason}"
    if None not in (began, num_steps) and began != num_steps and not config:
        reason += f", or {NUM_STEPS}, which was {began} and is {num_steps}, is in its "
        reason += "schedule"
    raise ConfigError(
        f"the run in {workdir} computed something else ({changed}): {reason}{advice}"
    )


def _differences(kept: dict[str, str], found: dict[str, str]) -> set[str]:
    """Names the parts that differ; some are not in every fingerprint."""
    optional = {name for name in MAYBE if name not in kept or name not in found}
    if "python" not in kept:  # Of an earlier version.
        optional.add("python")
    keys = (kept.keys() | found.keys()) - {NUM_STEPS, *optional}
    return {key for key in keys if kept.get(key) != found.get(key)}


def _is_complete(config: dict[str, Any]) -> bool:
    """Tests if this is a config of the template's, and not a script's own record."""
    return {*default_config()} - {*LATER} <= config.keys()


def _as_it_began(trainer: Trainer, config: dict[str, Any], num_steps: int) -> Trainer:
    """The trainer with the schedule of a run that began with so many steps.

    The schedule's end is a number in the step; that it moves is not an edit.
    """
    whole, _ = trainer.through or (trainer, None)
    keys = completed(config)["optimizer"]
    keys["warmup_steps"] = min(keys["warmup_steps"], num_steps - 1)  # Was said then.
    optimizer, schedule = make_optimization(num_steps, **keys)
    parts = {"optimizer": optimizer, "schedule": schedule}
    experiment = dataclasses.replace(whole.experiment, **parts)
    return experiment.trainer(whole.devices)


def traced(function: Callable[..., Any], *args: Any) -> str:
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
    if name in CALLBACKS:
        function = params["callback"]
        shown.append(_code(getattr(function, "callback_func", function)))
    shapes = [variable.aval.str_short() for variable in equation.outvars]
    whole = _digest(name, *shown, *shapes, *given)
    return [_digest(whole, i) for i in range(len(equation.outvars))]


def _code(function: Any, callers: tuple[Any, ...] = ()) -> str:
    """Digests a Python function with what it refers to, and its module's functions."""
    if isinstance(function, functools.partial):
        bound = _value(function.args), _value(function.keywords)
        return _digest(_code(function.func, callers), *bound)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        function = type(function).__call__  # Of an object.
    if not isinstance(function, FunctionType) or function in callers:
        return _value(function)

    def digest(value: Any) -> str:
        own = getattr(value, "__module__", "") == function.__module__
        is_code = own and isinstance(value, FunctionType)
        return _code(value, (*callers, function)) if is_code else _value(value)

    code, names = function.__code__, function.__globals__
    references = [names[name] for name in _references(code) if name in names]
    references += [cell.cell_contents for cell in function.__closure__ or ()]
    references += [function.__defaults__, function.__kwdefaults__]
    return _digest(_bytecode(code), *map(digest, references))


def _references(code: CodeType) -> list[str]:
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return sorted({*code.co_names, *(name for x in inner for name in _references(x))})


def _bytecode(code: CodeType) -> str:
    values = code.co_consts
    inner = [_bytecode(x) if isinstance(x, CodeType) else _value(x) for x in values]
    return _digest(code.co_code.hex(), code.co_names, code.co_varnames, *inner)


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
