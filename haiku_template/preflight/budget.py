"""Memory budget of a run, known before anything is allocated.

XLA tells what the compiled step and the first state need, from shapes alone; the run
finds these programs compiled.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from haiku.data_structures import tree_bytes
from rich.console import Console
from rich.table import Table

from haiku_template.data.dataset import host_memory
from haiku_template.data.staging import why_not_staged
from haiku_template.devices import describe
from haiku_template.devices.layout import device_bytes
from haiku_template.devices.operations import CONVOLUTION, operations
from haiku_template.errors import ConfigError
from haiku_template.models import remat, repeated_blocks
from haiku_template.params import leaves_by_path
from haiku_template.preflight.program import program_table, read_program
from haiku_template.reporting.display import in_units, process_bytes, table
from haiku_template.reporting.perf import matmul_bytes
from haiku_template.storage import workdir as workdirs
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

# Two in the prefetch queue, one in the thread's hands. Each step in flight has its own.
WAITING_BATCHES = 3
WAITING_BLOCKS = 1  # Of staged data: the row numbers of the next steps.
BUS = "fits only with host memory, at the speed of the bus"
LARGEST = 3  # Arrays that an error names.
NO_SHARDING = "no leaf that a rule fits has a dimension that splits evenly"
REMAT_LEVELS = 2  # Of modules within modules, each compiled.
MARGIN = 0.1  # Of temporaries: a card chooses kernels by timing, and versions differ.
STEPS_PER_CALL = 50  # Of steps that take about a millisecond, or less.
FEW_OPERATIONS = {"cpu": 2e8, "gpu": 1e10}  # Floating-point, of a step.
CALL_BYTES = 2**24  # Of the batches of a call.
LARGE = 2**20  # Bytes of an array that is closed over, to be warned of.
# Fields of a budget: those of the state; all that stays from step to step; and the rows
# of its table.
STATE = ("params", "net_state", "opt_state", "ema_params", "frozen")
RESIDENT = (*STATE, "data", "closed_over", "batch", "waiting")
ROWS = (*RESIDENT, "temporaries", "outside", "step_peak", "init_peak")
ROWS += ("evaluation_peak", "matmul", "peak")


class Budget(NamedTuple):
    """Bytes on each device."""

    params: int
    net_state: int
    opt_state: int
    ema_params: int
    frozen: int
    data: int  # The staged training set.
    closed_over: int  # Arrays in the model or the task: constants of the step.
    batch: int  # One device's share, or that of the row numbers of many.
    waiting: int  # Batches that are prefetched, or of other steps in flight.
    temporaries: int  # Of the step, such as activations and gradients.
    step_peak: int  # State, batch, temporaries, code, outputs that reuse no memory.
    init_peak: int  # Of making the first state; 0 for a run that resumes.
    matmul: int  # Of measuring the devices, before there is a state.
    limit: int | None  # What is available; None where JAX cannot tell.
    process: int | None  # On the CPU, what this process has already, if known.
    num_devices: int  # They share the host's memory on the CPU.
    moments: Any  # Shapes of `opt_state`.
    # With --target only: workspaces that XLA's plan leaves out, and a margin.
    outside: int = 0
    evaluation_peak: int = 0  # With --target only: state, data, batch, temporaries.
    card: int | None = None  # The device's own, where unified memory has the host's.

    @property
    def fit(self) -> str:
        """Verdict on the run's fit, in a word or three."""
        if self.limit is not None and self.peak > self.limit:
            return "no"
        is_slow = self.card is not None and self.peak > self.card
        return "with host memory" if is_slow else "yes"

    @property
    def resident(self) -> int:
        """Bytes that no smaller micro-batch saves."""
        return sum(getattr(self, name) for name in RESIDENT)

    @property
    def peak(self) -> int:
        """Largest of all peaks, the step's with the batches that wait."""
        step = self.step_peak + self.waiting
        return max(step, self.init_peak, self.evaluation_peak, self.matmul)

    @property
    def saved(self) -> dict[str, int]:
        """Bytes of `opt_state` that its settings leave out, by the setting."""
        leaves = jax.tree.leaves(self.moments)
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        narrow = sum(x.size * max(4 - x.dtype.itemsize, 0) for x in floats)
        sharded = tree_bytes(self.moments) - device_bytes(self.moments)
        return {k: n for k, n in (("mu_dtype", narrow), ("sharding", sharded)) if n}

    def table(self) -> Table:
        """Tabulates the budget, one row for each part."""
        sizes = {name.replace("_", " "): getattr(self, name) for name in ROWS}
        sizes |= {f"saved by {key}": size for key, size in self.saved.items()}
        rows = [(k, in_units(n)) for k, n in sizes.items() if n or k == "params"]
        limit = "not known here" if self.limit is None else in_units(self.limit)
        limits = [("limit", limit)]
        if self.process is not None:
            total = self.process + self.num_devices * self.peak
            limits += [("this process already", in_units(self.process))]
            limits += [("with all devices", in_units(total))]
        if self.card is not None:
            limits.insert(1, ("of it the device's own", in_units(self.card)))
        title = f"Memory on each device{', about' if self.outside else ''}"
        grid = table(title, ("what", "size"), rows, limits)
        grid.caption = BUS if self.fit == "with host memory" else None
        return grid

    def summary(self) -> Table | str:
        """Budget for the first lines of a run: one line where no limit is known."""
        line = f"memory    {in_units(self.peak)} on each device; no limit is known here"
        return line if self.limit is None else self.table()


def memory_budget(
    trainer: Trainer, limit: int | None = None, *, starts: bool = True
) -> Budget:
    """Compiles the train step for the largest batch and reads its memory analysis.

    `limit` is in bytes on each device, None asks JAX; `starts` is False on resume.
    Raises `ConfigError` for a larger state, with which XLA would end the process.
    """
    devices, state = trainer.devices, trainer.abstract
    limit = devices.memory_limit() if limit is None else limit
    if device_bytes(state) > (memory := limit or host_memory()):
        raise ConfigError(_too_large(state, memory))
    largest = trainer.feed.host_shapes()[0]
    compiled = trainer.trace(largest).lower().compile()
    # On several devices the program, and so its analysis, is one device's.
    analysis = compiled.memory_analysis()
    batch = tree_bytes(devices.abstract_batch(largest)) // devices.num_devices
    data = tree_bytes(trainer.feed.staged)
    waiting = WAITING_BLOCKS if data else WAITING_BATCHES + devices.steps_in_flight - 1
    closed_over = sum(x.nbytes for x in _closed_over(trainer))
    dtype = trainer.recipe.precision.policy.compute_dtype
    budget = Budget(
        **{name: device_bytes(getattr(state, name)) for name in STATE},
        data=data,
        closed_over=closed_over,
        batch=batch,
        waiting=waiting * batch,
        temporaries=analysis.temp_size_in_bytes,
        step_peak=_peak(analysis, closed_over),
        init_peak=_init_peak(trainer) if starts else 0,
        matmul=matmul_bytes(devices, dtype, limit) if trainer.work.flops else 0,
        limit=limit,
        process=process_bytes() if devices.platform == "cpu" else None,
        num_devices=len(devices.devices),
        moments=state.opt_state,
        card=devices.unified and devices.card_memory(),
    )
    if trainer.experiment.exact_elastic is not None:
        return _of_shares(trainer, budget, analysis)
    if devices.memory is None:
        return budget
    return _of_target(trainer, budget, compiled, starts)


def _of_target(trainer: Trainer, budget: Budget, compiled: Any, starts: bool) -> Budget:
    """Adds what XLA's plan leaves out, a margin for other kernels, and evaluation."""
    workspace = read_program(compiled.as_text()).workspace
    outside = workspace + int(MARGIN * budget.temporaries)
    return budget._replace(
        outside=outside,
        step_peak=budget.step_peak + outside,
        evaluation_peak=_evaluation_peak(trainer) if starts else 0,
    )


def _of_shares(trainer: Trainer, budget: Budget, analysis: Any) -> Budget:
    """Adds the gradients of all shares, and the state, of which a share sees a part."""
    results = trainer.experiment.exact_elastic * analysis.output_size_in_bytes
    temporaries = budget.temporaries + results + device_bytes(trainer.abstract.params)
    step_peak = budget.resident - budget.waiting + temporaries
    return budget._replace(temporaries=temporaries, step_peak=step_peak)


def _too_large(state: TrainState, memory: int) -> str:
    return (
        f"the state of a run is {in_units(device_bytes(state))} on each device and "
        f"there are {in_units(memory)}; its largest arrays are {_largest(state)}; no "
        "accumulate_steps is enough for a model of this size"
    )


def _largest(state: TrainState) -> str:
    sizes = {path: device_bytes(leaf) for path, leaf in leaves_by_path(state).items()}
    largest = sorted(sizes.items(), key=lambda leaf: -leaf[1])[:LARGEST]
    return ", ".join(f"{name} {in_units(size)}" for name, size in largest)


def _peak(analysis: Any, constants: int = 0) -> int:
    """Peak bytes of a compiled program; its code may include its constants."""
    # Why: docs/decisions/training.md#memory-budget
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
        if not trainer.initializer.from_batch:
            return read + device_bytes(state)
    compiled = trainer.initializer.lower(trainer.layout).compile()
    return read + tree_bytes(state.frozen) + _peak(compiled.memory_analysis())


def _evaluation_peak(trainer: Trainer) -> int:
    lowered, state = trainer.lower_evaluation(), trainer.abstract
    if lowered is None:
        return 0
    beside = device_bytes(state) - device_bytes(state.of_model())
    beside += tree_bytes(trainer.feed.staged)
    return beside + _peak(lowered.compile().memory_analysis())


def _closed_over(trainer: Trainer) -> list[Any]:
    """Finds the constants of the train step, largest first."""
    jaxpr = trainer.trace(trainer.feed.host_shapes()[0]).jaxpr
    arrays = {id(x): x for x in _constants(jaxpr) if hasattr(x, "nbytes")}
    return sorted(arrays.values(), key=lambda x: -x.nbytes)


def _constants(jaxpr: Any) -> Iterator[Any]:
    yield from getattr(jaxpr, "consts", ())
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for inner in jax.tree.leaves(equation.params):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield from _constants(inner)


def _warn_of_closed_over(trainer: Trainer) -> None:
    large = ", ".join(
        f"{x.dtype}{list(x.shape)} ({in_units(x.nbytes)}, on {describe(x)})"
        for x in _closed_over(trainer)
        if x.nbytes >= LARGE
    )
    if large:
        logger.warning(
            f"the model or the task closes over {large}: what is no parameter, no "
            "network state and no part of a batch becomes a constant of the step's "
            "program, copied to each device from wherever it is; make it with "
            "hk.get_parameter or hk.get_state, or put it into the batch"
        )


def _warn_of_no_sharding(trainer: Trainer) -> None:
    if device_bytes(trainer.abstract) == tree_bytes(trainer.abstract):
        one = trainer.devices.axis_name is None
        reason = "there is one device" if one else f"{NO_SHARDING} over the devices"
        logger.warning("config.sharding changes nothing: %s", reason)
    elif unsplit := trainer.layout.unsplit(trainer.abstract):
        others = f"; and {len(unsplit) - 1} more" * (len(unsplit) > 1)
        logger.warning(
            f"config.sharding leaves {unsplit[0]} whole on each device: none of its "
            f"dimensions is a multiple of the {trainer.devices.num_devices} devices"
            f"{others}"
        )


def check_budget(
    trainer: Trainer, limit: int | None = None, *, starts: bool = True
) -> Budget:
    """Computes `memory_budget`, asserts that it fits, and warns of large constants.

    `ConfigError` names the largest leaves, and what would fit, found by compiling:
    rematerialized modules, or the smallest `accumulate_steps`.
    """
    budget = memory_budget(trainer, limit, starts=starts)
    if trainer.layout.rules:
        _warn_of_no_sharding(trainer)
    if budget.closed_over >= LARGE:
        _warn_of_closed_over(trainer)
    if budget.limit is not None and budget.peak > budget.limit:
        raise ConfigError(_refusal(trainer, budget))
    return budget


def _refusal(trainer: Trainer, budget: Budget) -> str:
    return (
        f"the run needs {in_units(budget.peak)} on each device "
        f"({in_units(budget.temporaries)} of them temporary) and there are "
        f"{in_units(budget.limit)}; the largest arrays of the state are "
        f"{_largest(trainer.abstract)}; {_suggestion(trainer, budget)}"
    )


def print_budget(trainer: Trainer, limit: int | None = None) -> None:
    """Prints the budget, with --target the program, too; raises as `check_budget`."""
    devices, budget = trainer.devices, check_budget(trainer, limit)
    console = Console(markup=False)
    console.print(devices.describe(), budget.table(), sep="\n")
    if devices.memory is not None:
        compiled = trainer.trace(trainer.feed.host_shapes()[0]).lower().compile()
        size = device_bytes(trainer.abstract.without_frozen())
        console.print(program_table(compiled, size))


def print_targets(trainers: dict[str, Trainer], limit: int | None = None) -> None:
    """Prints a row for each target: what a run needs of its memory, and if it fits.

    `limit` is in bytes on each device, in place of the targets' own.
    """
    rows = []
    for target, trainer in trainers.items():
        devices, state = trainer.devices, device_bytes(trainer.abstract)
        limits = devices.memory if limit is None else limit
        try:
            budget = memory_budget(trainer, limit)
        except ConfigError:  # The state alone does not.
            rows.append((target, in_units(state), "", "", in_units(limits), "no"))
            continue
        sizes = (state, budget.temporaries + budget.outside, budget.peak, limits)
        rows.append((target, *map(in_units, sizes), budget.fit))
    columns = ("target", "state", "temporaries", "peak", "limit", "fits")
    Console(markup=False).print(table("Memory on each device, about", columns, rows))


def _suggestion(trainer: Trainer, budget: Budget) -> str:
    """Names a setting that fits, found by compiling; or why there is none."""
    limit, fixed = budget.limit, max(budget.init_peak, budget.evaluation_peak)
    none = "no accumulate_steps is enough:"
    # Compiling takes minutes, and smaller micro-batches shrink none of this.
    if budget.resident > limit:
        size = in_units(budget.resident)
        return f"{none} {size} are what the run keeps, its state, data and batches"
    if fixed > limit:
        phase = "evaluation" if fixed > budget.init_peak else "making the first state"
        return f"{none} {in_units(fixed)} are what {phase} needs"
    peaks = []
    for changes, sentence in _smaller_runs(trainer):
        smaller = memory_budget(trainer.replace(**changes), limit, starts=False)
        peak = max(smaller.peak, fixed)
        if peak <= limit:
            return sentence.format(in_units(peak))
        peaks += [peak] * ("accumulate_steps" in changes)
    if trainer.experiment.step is not None:
        return "a step of one's own has no micro-batches; a smaller batch takes less"
    if not peaks:
        return "the batch does not split into smaller micro-batches"
    return f"{none} the least is {in_units(min(budget.peak, *peaks))}"


def _smaller_runs(trainer: Trainer) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields changes that may take less memory, each with its advice for {} bytes."""
    experiment, devices = trainer.experiment, trainer.devices
    levels = []
    if experiment.step is None and experiment.model is not None:
        init = trainer.functions(devices.axis_name).init
        levels = repeated_blocks(lambda: devices.abstract(init, {}))[:REMAT_LEVELS]
    for blocks in levels:
        yield (
            {"model": remat(experiment.model, blocks)},
            f"it fits with remat of {', '.join(blocks)}, {{}} and the same batch: "
            f'--config.model.remat="{blocks}" (in a script models.remat(model, '
            f"{blocks}))",
        )
    if experiment.step is not None:  # It makes the whole update.
        return
    shares = experiment.exact_elastic or devices.num_devices
    share = trainer.feed.batch_size // shares
    for number in range(experiment.accumulate_steps + 1, share + 1):
        if share % number == 0:
            yield (
                {"accumulate_steps": number},
                f"--config.accumulate_steps={number} would fit with {{}} and the same "
                "batch",
            )


def settle(
    trainer: Trainer, workdir: Path, limit: int | None = None, unseen: int = 0
) -> Trainer:
    """Decides what is left to a run in `workdir`: where data lives, steps per call.

    Whether states are packed, too: for so many `unseen` steps, none if hooks or a
    replay take the state of each.
    """
    if trainer.experiment.placement == "auto":
        trainer = staged_if_it_fits(trainer, limit)
    trainer = choose_steps_per_call(trainer, workdir, limit)
    return trainer.with_packing(unseen, workdirs.chosen(workdir, "packs", False))


def staged_if_it_fits(trainer: Trainer, limit: int | None) -> Trainer:
    """Stages the training data on the devices if it fits them."""
    limit = trainer.devices.memory_limit() if limit is None else limit
    reason = why_not_staged(trainer.experiment.data.train)
    if not reason and limit is None:
        reason = "a device's memory is not known here"
    if not reason:
        staged = trainer.replace(placement="device")
        if (peak := memory_budget(staged, limit).peak) <= limit:
            return staged
        reason = (
            f"staged it would make a run of {in_units(peak)} on each device, which has "
            f"{in_units(limit)}"
        )
    return trainer.replace(placement="host", why_on_host=f"because {reason}")


def choose_steps_per_call(
    trainer: Trainer, workdir: Path, limit: int | None = None
) -> Trainer:
    """Has several steps in one call where `steps_per_call=None` and steps are short.

    That is: few operations, on GPUs no convolution, data in memory, and a call's
    batches fit the device. A run in `workdir` that has begun keeps its own.
    """
    experiment, devices = trainer.experiment, trainer.devices
    if experiment.steps_per_call is not None or experiment.exact_elastic is not None:
        return trainer
    if (number := workdirs.chosen(workdir, "steps_per_call", 1)) is not None:
        return trainer.with_steps_per_call(number)
    shapes = trainer.feed.host_shapes()
    if len(shapes) > 1 or why_not_staged(experiment.data.train):
        return trainer
    is_cpu = devices.platform == "cpu"
    convolution = CONVOLUTION if is_cpu else math.inf  # Of GPUs it was not measured.
    count = operations(trainer.trace(shapes[0]).jaxpr.jaxpr, convolution)
    most = FEW_OPERATIONS.get(devices.platform, FEW_OPERATIONS["gpu"])
    several = trainer.with_steps_per_call(STEPS_PER_CALL)
    if count > most or tree_bytes(several.feed.host_shapes()[0]) > CALL_BYTES:
        return trainer
    limit = devices.memory_limit() if limit is None else limit
    fits = limit is None or memory_budget(several, limit).peak <= limit
    return several if fits else trainer
