"""Fingerprint of a run's mathematics: a script that was edited is another run.

It digests the jaxprs of the steps, traced as on one device, and the first batches.
Names, the order of independent operations and addresses in memory do not change it.
Processes of one run compare theirs.
"""

import contextvars
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

from haiku_template.bounded import exists
from haiku_template.config import completed
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

FORMAT = "3"  # Of the digests: a workdir with those of another is refused.
VERSIONS = ("format", "jax", "python")
FIRST_BATCH = "first batch of the training data"  # Not where a process has a share.
ENDS = "first and last rows of the training data"  # Where these are arrays.
NUM_STEPS = "num_steps"  # With which the run began: a schedule may end with it.
SEVERAL = "several devices"  # If it began on several.
OVER_DEVICES = "steps over devices"
# Traced, in operations that may be others on another platform.
STEPS = {"train step", "evaluation step", "first parameters", OVER_DEVICES}
# The identity on one device. Why: docs/decisions/storage.md#fingerprint
EARLIER = {"optimization_barrier", "psum", "psum_invariant", "pvary", "pcast"}
IDENTITIES = EARLIER | {"pmax", "pmin"}
# So are these where they add no axis.
TILED = {"all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter"}
# Calls of an inner jaxpr with the same arguments, and the parameters that hold it.
CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call"}
CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint"}
# None of them where averages over devices are told from sums.
_identities = contextvars.ContextVar("identities", default=IDENTITIES)
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
PLACEMENT = re.compile("sharding|mesh|layout")  # Parameters that change no value.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def needed(config: dict[str, Any]) -> bool:
    """Tests if a config names code of the user's, which it does not contain."""
    names = [(config.get(key) or {}).get("name") for key in ("model", "data", "task")]
    names += map(str, (config.get("optimizer") or {}).values())
    return bool(config.get("step")) or any(x is None or ":" in x for x in names)


def of(trainer: Trainer) -> dict[str, str]:
    """Digests each part of an experiment, the same on any number of devices."""
    experiment, data = trainer.experiment, trainer.experiment.data
    batch, rows = whole_batches(data.train).batch(0), trainer.feed.batch_size
    shapes = canonical_shapes(batch, rows=rows)
    state = canonical_shapes(trainer.abstract)
    like = batch if data.evaluation is None else data.evaluation.batch(0)
    if jax.tree.structure(like) == jax.tree.structure(batch):
        like = batch  # The lengths of a set to evaluate on are no code.
    padded = canonical_shapes((like, np.zeros(1, np.int32)), rows=rows)

    def steps(axis_name: str | None) -> dict[str, str]:
        functions, trained = trainer.functions(axis_name), state.without_frozen()
        digests = {"train step": traced(functions.step, trained, state.frozen, shapes)}
        if data.evaluation is not None:
            digests["evaluation step"] = traced(
                functions.eval_step, *state.of_model(), padded
            )
        return digests

    digests = {
        "format": FORMAT,
        "jax": importlib.metadata.version("jax"),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "platform": trainer.devices.platform,
        "first parameters": traced(functools.partial(trainer.functions().init, {})),
        **steps(None),
    }
    if experiment.exact_elastic is not None:
        digests["logical shares"] = str(experiment.exact_elastic)
    if num_rows(batch) == rows:
        digests[FIRST_BATCH] = _value(batch)
    if hasattr(data.train, "staged"):
        ends = [(x[:1], x[-1:]) for x in jax.tree.leaves(data.train.staged())]
        digests[ENDS] = _value(ends)
    for name, dataset in ({"": data.evaluation} | dict(data.evaluations)).items():
        dataset = getattr(dataset, "uncut", dataset)  # By eval_batches.
        count = dataset.num_batches if dataset is not None else 0
        for place, index in (("first", 0), ("last", count - 1)) if count else ():
            key = f"{place} batch of the evaluation data {name}".rstrip()
            digests[key] = _value((count, dataset.batch(index)))
    own_step = experiment.step is not None or experiment.steps is not step
    if own_step or "axis_name" in facts_of(trainer.recipe.task.values):
        context = contextvars.copy_context()
        context.run(_identities.set, frozenset())
        digests[OVER_DEVICES] = _value(context.run(steps, AXIS_NAME))
    return digests


def _sizes(data: Data) -> dict[str, Any]:
    train, evaluation = data.train, data.evaluation
    rows = getattr(train, "staged_size", None) or getattr(train, "num_examples", None)
    batches = None if evaluation is None else evaluation.num_batches
    return {"the size of the data": {"training": rows, "evaluation batches": batches}}


def keep(
    workdir: Path, trainer: Trainer, config: dict[str, Any], num_steps: int
) -> None:
    """Saves the fingerprint of a new run; asserts that a resumed run has the same.

    `ConfigError` names the parts of the mathematics or the data that changed, or differ
    between processes, also where a config says it all.
    """
    processes = trainer.devices.processes
    if processes.count > 1:
        digests = {f"the fingerprint of the {k}": x for k, x in of(trainer).items()}
        processes.agree(_sizes(trainer.experiment.data) | digests)
    if needed(config):
        _save_or_compare(workdir, trainer, num_steps)


def _save_or_compare(workdir: Path, trainer: Trainer, num_steps: int) -> None:
    file = workdir / workdirs.PROGRAM
    if workdirs.has_checkpoints(workdir) and exists(file):
        advice = ". Nothing was changed there: use another --workdir or restore what "
        advice += f"was edited; to resume all the same, remove {file}"
        _check(workdir, trainer, num_steps, advice)
    else:
        num_steps = trainer.experiment.config.get(NUM_STEPS, num_steps)
        several = trainer.devices.num_devices > 1
        digests = of(trainer) | {NUM_STEPS: num_steps, SEVERAL: several}
        with workdirs.usable(workdir):
            workdirs.write_json(file, digests)


def warn_of_changes(workdir: Path, trainer: Trainer) -> None:
    """Warns if a finished run's experiment is not the one that it was trained with."""
    if exists(workdir / workdirs.PROGRAM):
        try:
            _check(workdir, trainer)
        except ConfigError as error:
            logger.warning("%s", error)


def _check(
    workdir: Path, trainer: Trainer, num_steps: int | None = None, advice: str = ""
) -> None:
    """Asserts that this is the fingerprint of the run, whose `num_steps` may differ."""
    saved = workdirs.read_json(workdir / workdirs.PROGRAM)
    config, start = trainer.experiment.config, saved.pop(NUM_STEPS, None)
    several, began = trainer.devices.num_devices > 1, saved.pop(SEVERAL, None)
    if config and start not in (None, config[NUM_STEPS]):
        trainer = _with_num_steps(trainer, config, start)
    digests = _of_version(trainer, saved)
    shared = saved.keys() & digests.keys()
    keys = (saved.keys() | digests.keys()) - ({FIRST_BATCH, ENDS} - shared)
    keys = {key for key in keys if saved.get(key) != digests.get(key)}
    changes = keys - {"platform", *VERSIONS}
    if began not in (None, several):  # A model may average where there are several.
        changes.discard(OVER_DEVICES)
    if "platform" in keys and (steps := changes & STEPS):
        logger.warning(
            f"{workdir} began on {saved.get('platform')}, and on {digests['platform']} "
            f"other operations are traced ({', '.join(sorted(steps))}): whether its "
            "code was edited since cannot be told"
        )
        changes -= STEPS
    if not changes:
        return
    reason = "its code, its data or haiku_template itself was edited since"
    for name in VERSIONS:
        if name in keys & saved.keys():  # The first had none.
            change = f"from {name} {saved.get(name)} to {digests[name]}"
            reason = f"that is the change {change}, or {reason}"
    if not config and None not in (start, num_steps) and start != num_steps:
        reason += f", or {NUM_STEPS}, which was {start} and is {num_steps}, is in its "
        reason += "schedule"
    raise ConfigError(
        f"the run in {workdir} computed something else ({', '.join(sorted(changes))}): "
        f"{reason}{advice}"
    )


def _of_version(trainer: Trainer, saved: dict[str, Any]) -> dict[str, Any]:
    """Digests as `of`, by the rules of an earlier version where a run has those."""
    digests = of(trainer)
    if any(saved[k] != digests.get(k) for k in STEPS & saved.keys()):
        context = contextvars.copy_context()
        context.run(_identities.set, EARLIER)
        earlier = context.run(of, trainer)
        digests |= {k: x for k, x in earlier.items() if saved.get(k) == x}
    return digests


def _with_num_steps(trainer: Trainer, config: dict[str, Any], number: int) -> Trainer:
    """Makes the trainer with the schedule of a run that began with so many steps.

    The schedule's end is a number in the step; that it moves is not an edit.
    """
    # Why: docs/decisions/storage.md#num-steps
    keys = completed(config)["optimizer"]
    keys["warmup_steps"] = min(keys["warmup_steps"], number - 1)  # Warned of then.
    optimizer, schedule = make_optimization(number, **keys)
    return trainer.replace(optimizer=optimizer, schedule=schedule)


def traced(function: Callable[..., Any], *args: Any) -> str:
    """Digests the jaxpr of a function of these shapes."""
    # Models may average over the axis, as they do on several devices.
    return _value(jax.make_jaxpr(function, axis_env=[(AXIS_NAME, 1)])(*args))


def _digest(*values: Any) -> str:
    text = ADDRESS.sub("", "\0".join(map(str, values)))
    return hashlib.sha256(text.encode()).hexdigest()


def _results(jaxpr: Any, arguments: list[str]) -> list[str]:
    """Digests each result of a jaxpr from the digests of its arguments."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    digests = dict(zip(inner.invars, arguments, strict=True))
    constants = map(_value, getattr(jaxpr, "consts", ()))
    digests |= dict(zip(inner.constvars, constants, strict=False))

    def read(variable: Any) -> str:
        literal = hasattr(variable, "val")
        return _value((variable.aval, variable.val)) if literal else digests[variable]

    for equation in inner.eqns:
        results = _equation(equation, [read(v) for v in equation.invars])
        digests |= dict(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in inner.outvars]


def _equation(equation: Any, arguments: list[str]) -> list[str]:
    name, params = equation.primitive.name, dict(equation.params)
    # A division by one is an average over one device.
    divisor = getattr(equation.invars[-1], "val", 0) if name == "div" else 0
    identities = _identities.get()
    is_one, is_earlier = np.ndim(divisor) == 0 and divisor == 1, identities is EARLIER
    is_one |= name in TILED and params["tiled"] and not is_earlier
    # Over an axis of `jax.vmap` it is a sum, of which earlier versions knew nothing.
    is_mapped = any(isinstance(x, int) for x in params.get("axes", ()))
    is_same = name in identities and (is_earlier or not is_mapped)
    if is_same or (identities and is_one):
        return arguments[: len(equation.outvars)]
    if name in CALLS:
        return _results(next(params[x] for x in BODIES if x in params), arguments)
    if name in ("pure_callback", "io_callback"):
        function = params["callback"]
        function = getattr(function, "callback_func", function)
        params["callback"] = _code(function, has_state=name == "io_callback")
    values = {k: _value(params[k]) for k in sorted(params) if not PLACEMENT.search(k)}
    digest = _digest(name, values, *arguments)
    return [_digest(digest, i) for i in range(len(equation.outvars))]


def _code(function: Any, callers: tuple[Any, ...] = (), has_state: bool = False) -> str:
    """Digests a Python function with what it refers to, and its module's functions."""
    if isinstance(function, functools.partial):
        bound = _value((function.args, function.keywords))
        return _digest(_code(function.func, callers, has_state), bound)
    owner = getattr(function, "__self__", function)
    if owner is not function or not isinstance(function, FunctionType):  # An object's.
        function = getattr(function, "__func__", type(function).__call__)
        # They may change from call to call.
        fields = {} if has_state else getattr(owner, "__dict__", {})
        if fields and isinstance(function, FunctionType):
            return _digest(_code(function, callers), _value(fields))
    if not isinstance(function, FunctionType) or function in callers:
        return _value(function)
    codes, values = [function.__code__], []
    for code in codes:  # It grows by the functions inside.
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
        values += [code.co_code, code.co_names, code.co_varnames]
        values += [x for x in code.co_consts if not isinstance(x, CodeType)]
    names = {name for code in codes for name in code.co_names}
    values += [x for k, x in sorted(function.__globals__.items()) if k in names]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    values += [function.__defaults__, function.__kwdefaults__]
    return _digest(
        *(
            _code(x, (*callers, function))
            if isinstance(x, FunctionType) and x.__module__ == function.__module__
            else _value(x)
            for x in values
        )
    )


def _value(value: Any) -> str:
    """Digests a tree of arrays, jaxprs and other values, the same in every process."""
    try:
        leaves, structure = jax.tree.flatten(value)
    except ValueError:  # Keys of several types have no order.
        leaves, structure = [*value.values()], [*value]
    return _digest(structure, *map(_leaf, leaves))


def _leaf(leaf: Any) -> str:
    inner = getattr(leaf, "jaxpr", leaf)
    if hasattr(inner, "eqns"):
        arguments = [f"{i} {v.aval.str_short()}" for i, v in enumerate(inner.invars)]
        return _digest(*arguments, *_results(leaf, arguments))
    if isinstance(leaf, set | frozenset):
        return _digest(*sorted(map(_value, leaf)))
    if isinstance(leaf, jax.core.Tracer):
        return "a tracer that leaks"  # The first state, or the first step, names it.
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        sha = hashlib.sha256(array.tobytes()).hexdigest()
        return f"{array.dtype}{array.shape}{sha}"
    return getattr(leaf, "__name__", None) or repr(leaf)  # A function's has an address.
