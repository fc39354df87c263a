"""Memory budget of a run, known before anything is allocated.

XLA tells what the compiled step and the first state need, from shapes alone; the run
finds these programs compiled.
"""

import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from haiku.data_structures import tree_bytes
from rich.console import Console
from rich.table import Table

from haiku_template.data import each_shape
from haiku_template.data.files import host_memory
from haiku_template.data.staging import why_not_staged
from haiku_template.devices import canonical_shapes, describe
from haiku_template.devices.layout import AXIS_NAME, device_bytes
from haiku_template.errors import ConfigError
from haiku_template.models import remat, repeated_blocks
from haiku_template.params import leaves_by_path
from haiku_template.preflight.program import describe_program, read_program
from haiku_template.reporting.display import in_units, process_bytes, table
from haiku_template.reporting.display import parse_bytes as parse_bytes
from haiku_template.reporting.perf import matmul_bytes
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

# Two in the prefetch queue, one in the thread's hands. Each step in flight has its own.
WAITING_BATCHES = 3
WAITING_BLOCKS = 1  # Of staged data: the row numbers of the next steps.
NOT_PARTS = ("limit", "process", "host", "saved")
LARGEST = 3
WHOLE = "no leaf that a rule fits has a dimension that splits evenly over the devices"
TRIED = 2  # Levels of modules to rematerialize, each compiled.
MARGIN = 0.1  # Of temporaries: a card chooses kernels by timing, and versions differ.
LARGE = 2**20  # Bytes of an array that is closed over, to be warned of.


class Budget(NamedTuple):
    """Bytes on each device.

    Attributes:
      closed_over: arrays that the model or the task closes over: constants of the step.
      batch: one device's share of a batch, or of the row numbers of many.
      waiting: batches that are prefetched, or belong to other steps in flight.
      temporaries: of the step, such as activations and gradients.
      outside: of a target, workspaces beside XLA's plan, and `MARGIN`.
      step_peak: state, batch, temporaries, code, and outputs that reuse no memory.
      init_peak: of making the first state; 0 for a run that resumes.
      evaluation_peak: of a target, state, batch and temporaries of an evaluation.
      matmul: of measuring the devices, before there is a state.
      peak: the largest of these, the step's with the waiting batches.
      limit: bytes available; None where JAX cannot tell.
      process: on the CPU, bytes that this process holds already; None if unknown.
      host: `process` and the peaks of all devices, which share the host's memory.
      saved: of `opt_state`, by the key of `config.optimizer` that leaves them out.
    """

    params: int
    net_state: int
    opt_state: int
    ema_params: int
    frozen: int
    data: int
    closed_over: int
    batch: int
    waiting: int
    temporaries: int
    outside: int
    step_peak: int
    init_peak: int
    evaluation_peak: int
    matmul: int
    peak: int
    limit: int | None
    process: int | None
    host: int | None
    saved: dict[str, int]

    def table(self) -> Table:
        """Tabulates the budget, one row for each part."""
        about = ", about" * bool(self.outside)
        made = table(f"Memory on each device{about}", "what", "bytes")
        for name, size in self._asdict().items():
            if name not in NOT_PARTS and (size or name == "params"):
                made.add_row(name.replace("_", " "), f"{size:,}")
        for key, size in self.saved.items():
            made.add_row(f"saved by {key}", f"{size:,}")
        made.add_section()
        known = "not known here" if self.limit is None else f"{self.limit:,}"
        made.add_row("limit", known)
        if self.process is not None:
            made.add_row("this process already", f"{self.process:,}")
            made.add_row("with all devices", f"{self.host:,}")
        return made


def memory_budget(
    trainer: Trainer, limit: int | None = None, *, starts: bool = True
) -> Budget:
    """Compiles the train step for the largest batch and reads its memory analysis.

    Args:
      limit: bytes on each device; None asks JAX.
      starts: False for a run that resumes.

    Raises:
      ConfigError: the state alone is larger, so that XLA would end the process.
    """
    devices, state = trainer.devices, trainer.abstract
    limit = devices.memory_limit() if limit is None else limit
    _check_state(state, limit or host_memory())
    largest = trainer.shapes()[0]
    batch = devices.abstract_batch(largest)
    # On several devices the program, and so its analysis, is one device's.
    compiled = trainer.lower(largest).compile()
    analysis, outside, evaluation = compiled.memory_analysis(), 0, 0
    if devices.memory is not None:
        outside = _outside(compiled, analysis.temp_size_in_bytes)
        evaluation = _evaluation_peak(trainer) if starts else 0
    share = tree_bytes(batch) // len(devices.devices)
    data = tree_bytes(trainer.abstract_staged)
    batches = WAITING_BATCHES + devices.steps_in_flight - 1
    waiting = share * (WAITING_BLOCKS if data else batches)
    closed_over = sum(x.nbytes for x in _closed_over(trainer))
    step_peak = _peak(analysis, closed_over) + outside
    init_peak = _init_peak(trainer) if starts else 0
    dtype = trainer.precision.policy.compute_dtype
    matmul = matmul_bytes(devices, dtype, limit) if trainer.work.flops else 0
    peak = max(step_peak + waiting, init_peak, evaluation, matmul)
    process = process_bytes() if devices.platform == "cpu" else None
    kept = ("params", "net_state", "opt_state", "ema_params", "frozen")
    return Budget(
        **{name: device_bytes(getattr(state, name)) for name in kept},
        data=data,
        closed_over=closed_over,
        batch=share,
        waiting=waiting,
        temporaries=analysis.temp_size_in_bytes,
        outside=outside,
        step_peak=step_peak,
        init_peak=init_peak,
        evaluation_peak=evaluation,
        matmul=matmul,
        peak=peak,
        limit=limit,
        process=process,
        host=process and process + len(devices.devices) * peak,
        saved=_saved(state.opt_state),
    )


def _check_state(state: TrainState, memory: int) -> None:
    size = device_bytes(state)
    if size > memory:
        raise ConfigError(
            f"the state of a run is {in_units(size)} on each device and there are "
            f"{in_units(memory)}; its largest arrays are {_largest(state)}; no "
            "accumulate_steps is enough for a model of this size"
        )


def _outside(compiled: Any, temporaries: int) -> int:
    """Bytes beside XLA's plan: cuDNN's workspace, and a margin for other kernels."""
    return read_program(compiled.as_text()).workspace + int(MARGIN * temporaries)


def _saved(opt_state: Any) -> dict[str, int]:
    """Bytes that moments would take beside those they take, by what saves them."""
    leaves = jax.tree.leaves(opt_state)
    floats = [x for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
    narrow = sum(x.size * max(4 - x.dtype.itemsize, 0) for x in floats)
    found = {"mu_dtype": narrow}
    found["sharding"] = tree_bytes(opt_state) - device_bytes(opt_state)
    return {key: size for key, size in found.items() if size}


def _largest(state: TrainState) -> str:
    """Names the largest arrays of a state, with their sizes."""
    sizes = {path: device_bytes(leaf) for path, leaf in leaves_by_path(state).items()}
    largest = sorted(sizes.items(), key=lambda leaf: -leaf[1])[:LARGEST]
    return ", ".join(f"{name} {in_units(size)}" for name, size in largest)


def _peak(analysis: Any, constants: int = 0) -> int:
    """Peak bytes of a compiled program; its code may include its constants."""
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
        + max(analysis.generated_code_size_in_bytes, constants)
    )


def _init_peak(trainer: Trainer) -> int:
    state, read = trainer.abstract, 0
    if trainer.experiment.init_from is not None:
        # The parameters that were read exist beside the state made of them.
        read = tree_bytes((state.params, state.net_state))
        if not trainer.from_batch:
            return read + device_bytes(state)
    beside = read + tree_bytes(state.frozen)
    return beside + _peak(trainer.lower_init().compile().memory_analysis())


def _evaluation_peak(trainer: Trainer) -> int:
    lowered, state = trainer.lower_evaluation(), trainer.abstract
    if lowered is None:
        return 0
    kept = device_bytes(state) - tree_bytes((state.variables(), state.frozen))
    return kept + _peak(lowered.compile().memory_analysis())


def _closed_over(trainer: Trainer) -> list[Any]:
    """Finds the constants of the train step, largest first."""
    state = trainer.abstract
    batch = each_shape(trainer.experiment.data.train)[0]
    shapes = canonical_shapes((state.without_frozen(), state.frozen, batch))
    step = trainer.functions().step
    jaxpr = jax.make_jaxpr(step, axis_env=[(AXIS_NAME, 1)])(*shapes)
    arrays = {id(x): x for x in _constants(jaxpr) if hasattr(x, "nbytes")}
    return sorted(arrays.values(), key=lambda x: -x.nbytes)


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yields the constants of a jaxpr and of its inner jaxprs."""
    yield from getattr(jaxpr, "consts", ())
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _constants(inner)


def _warn_of_closed_over(trainer: Trainer) -> None:
    large = [
        f"{x.dtype}{list(x.shape)} ({in_units(x.nbytes)}, on {describe(x)})"
        for x in _closed_over(trainer)
        if x.nbytes >= LARGE
    ]
    if large:
        logger.warning(
            "the model or the task closes over %s: what is no parameter, no network "
            "state and no part of a batch becomes a constant of the step's program, "
            "copied to each device from wherever it is; make it with hk.get_parameter "
            "or hk.get_state, or put it into the batch",
            ", ".join(large),
        )


def check_budget(
    trainer: Trainer, limit: int | None = None, *, starts: bool = True
) -> Budget:
    """Computes the budget, asserts that it fits, and warns of large constants.

    Arguments are those of `memory_budget`.

    Raises:
      ConfigError: it does not fit; names the largest leaves, and what would fit, found
        by compiling: rematerialized modules, or the smallest `accumulate_steps`.
    """
    budget = memory_budget(trainer, limit, starts=starts)
    is_sharded = any(
        not x.sharding.is_fully_replicated for x in jax.tree.leaves(trainer.abstract)
    )
    if trainer.layout.rules and not is_sharded:
        why = "there is one device" if trainer.devices.axis_name is None else WHOLE
        logger.warning("config.sharding changes nothing: %s", why)
    if budget.closed_over >= LARGE:
        _warn_of_closed_over(trainer)
    if budget.limit is None or budget.peak <= budget.limit:
        return budget
    raise ConfigError(
        f"the run needs {in_units(budget.peak)} on each device "
        f"({in_units(budget.temporaries)} of them temporary) and there are "
        f"{in_units(budget.limit)}; the largest arrays of the state are "
        f"{_largest(trainer.abstract)}; {_suggestion(trainer, budget)}"
    )


def print_budget(trainer: Trainer, limit: int | None = None) -> None:
    """Prints the budget, or raises as `check_budget`; of a target its program, too."""
    devices, budget = trainer.devices, check_budget(trainer, limit)
    parts = [devices.describe(), budget.table()]
    if devices.memory is not None:
        parts.append(_program_table(trainer))
    Console(markup=False).print(*parts, sep="\n")


def _program_table(trainer: Trainer) -> Table:
    """Tabulates what the compiled train step holds."""
    compiled = trainer.lower(trainer.shapes()[0]).compile()
    rows = describe_program(read_program(compiled.as_text()))
    size = device_bytes(trainer.abstract.without_frozen())
    donated = compiled.memory_analysis().alias_size_in_bytes
    part = f"{in_units(donated)} of {in_units(size)} are donated"
    rows["state"] = "donated whole" if donated >= size else part
    made = table("Train step", "what", "found")
    made.columns[1].no_wrap = False
    for row in rows.items():
        made.add_row(*row)
    return made


def _suggestion(trainer: Trainer, budget: Budget) -> str:
    experiment, devices, limit = trainer.experiment, trainer.devices, budget.limit
    kept = sum(budget[: Budget._fields.index("temporaries")])
    fixed = max(budget.init_peak, budget.evaluation_peak)

    def peak_of(**parts: Any) -> int:
        smaller = dataclasses.replace(experiment, **parts).trainer(devices)
        return max(memory_budget(smaller, limit, starts=False).peak, fixed)

    # Compiling takes minutes, and would not find a way for what does not shrink.
    for blocks in _repeated(trainer) if max(kept, fixed) <= limit else ():
        peak = peak_of(model=remat(experiment.model, blocks))
        if peak <= limit:
            return (
                f"it fits with remat of {', '.join(blocks)}, {in_units(peak)} and the "
                f'same batch: --config.model.remat="{blocks}" (in a script '
                f"models.remat(model, {blocks}))"
            )
    share = trainer.batch_size // devices.num_devices
    now = experiment.accumulate_steps
    possible = [parts for parts in range(now + 1, share + 1) if share % parts == 0]
    if not possible:
        return "the batch does not split into smaller micro-batches"
    none = "no accumulate_steps is enough:"
    if kept > limit:
        size = in_units(kept)
        return f"{none} {size} are what the run keeps, its state, data and batches"
    if fixed > limit:
        what = "evaluation" if fixed > budget.init_peak else "making the first state"
        return f"{none} {in_units(fixed)} are what {what} needs"
    least = budget.peak
    for parts in possible:
        peak = peak_of(accumulate_steps=parts)
        if peak <= limit:
            return (
                f"--config.accumulate_steps={parts} would fit with "
                f"{in_units(peak)} and the same batch"
            )
        least = min(least, peak)
    return f"{none} the least is {in_units(least)}"


def _repeated(trainer: Trainer) -> list[tuple[str, ...]]:
    """Patterns of the model's blocks whose rematerialization is worth a try."""
    if trainer.experiment.step is not None or trainer.experiment.model is None:
        return []
    init = trainer.functions(trainer.devices.axis_name).init
    return repeated_blocks(lambda: trainer.devices.abstract(init, {}))[:TRIED]


def place_data(trainer: Trainer, limit: int | None = None) -> Trainer:
    """Stages the training data of `placement="auto"` on the devices if it fits there.

    `limit` is in bytes on each device; None asks JAX. Other trainers are returned as
    they are.
    """
    experiment, devices = trainer.experiment, trainer.devices
    if experiment.placement != "auto":
        return trainer
    limit = devices.memory_limit() if limit is None else limit
    reason = why_not_staged(experiment.data.train)
    if not reason and limit is None:
        reason = "a device's memory is not known here"
    if not reason:
        staged = dataclasses.replace(experiment, placement="device").trainer(devices)
        peak = memory_budget(staged, limit).peak
        if peak <= limit:
            return staged
        reason = (
            f"staged it would make a run of {in_units(peak)} on each device, which has "
            f"{in_units(limit)}"
        )
    on_host = {"placement": "host", "why_on_host": f"because {reason}"}
    return dataclasses.replace(experiment, **on_host).trainer(devices)
