"""What a run needs of each device's memory, known before anything is allocated.

XLA says what the compiled step needs, from shapes alone. The compilation is the run's
own: its first step finds it done.
"""

from typing import Any, NamedTuple

import jax
from rich.table import Table

from haiku_template.data import each_shape
from haiku_template.data.dataset import host_memory
from haiku_template.data.staging import why_not_staged
from haiku_template.errors import ConfigError
from haiku_template.training.trainer import Program

WAITING_BATCHES = 3  # Two in the prefetch queue, one in the thread's hands.
WAITING_BLOCKS = 1  # Of staged data: the row numbers of the next steps.
LARGEST = 3
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Budget(NamedTuple):
    """Bytes on each device.

    Attributes:
      params, net_state, opt_state, ema_params: the parts of the train state.
      base: what of the model is frozen.
      data: the training set, where it is staged on each device.
      batch: one device's share of a batch, or of the row numbers of many.
      waiting: batches made ahead of their step.
      temporaries: what the step uses in between, such as activations and gradients.
      step_peak: the most that one step holds: state, batch, temporaries, new values
        that cannot take the place of old ones, and code.
      peak: with the waiting batches.
      limit: what a device has for this; None where JAX cannot tell.
    """

    params: int
    net_state: int
    opt_state: int
    ema_params: int
    base: int
    data: int
    batch: int
    waiting: int
    temporaries: int
    step_peak: int
    peak: int
    limit: int | None


def memory_budget(program: Program, limit: int | None = None) -> Budget:
    """Compiles the train step for the largest batches and reads what it needs.

    Args:
      program: see `make_program`.
      limit: bytes on each device; None asks JAX.

    Raises:
      ConfigError: the state alone is larger; XLA would end the process.
    """
    devices = program.devices
    state = devices.abstract(program.init)
    limit = devices.memory_limit() if limit is None else limit
    _check_state(program, state, limit or host_memory())
    batch = devices.abstract_batch(each_shape(program.data.train)[0])
    # On several devices the compiled program, and what it says, is one device's.
    analysis = program.train_step.lower(state, batch).compile().memory_analysis()
    share = _bytes(batch) // devices.num_devices
    data = 0 if program.staged is None else _bytes(program.staged.abstract)
    waiting = share * (WAITING_BLOCKS if data else WAITING_BATCHES)
    step_peak = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.generated_code_size_in_bytes
    )
    return Budget(
        params=_bytes(state.params),
        net_state=_bytes(state.net_state),
        opt_state=_bytes(state.opt_state),
        ema_params=_bytes(state.ema_params),
        base=_bytes(program.start.base.abstract),
        data=data,
        batch=share,
        waiting=waiting,
        temporaries=analysis.temp_size_in_bytes,
        step_peak=step_peak,
        peak=step_peak + waiting,
        limit=limit,
    )


def _check_state(program: Program, state: Any, memory: int) -> None:
    size = _bytes(state) + _bytes(program.start.base.abstract)
    if size > memory:
        raise ConfigError(
            f"the state of a run is {in_units(size)} on each device and there are "
            f"{in_units(memory)}; its largest arrays are {_largest(program, state)}; "
            "no accumulate_steps is enough for a model of this size"
        )


def _largest(program: Program, state: Any) -> str:
    """The largest arrays of a state, and their sizes."""
    leaves = [
        (prefix + jax.tree_util.keystr(path), _bytes(leaf))
        for prefix, tree in (("", state), (".base", program.start.base.abstract))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    largest = sorted(leaves, key=lambda leaf: -leaf[1])[:LARGEST]
    return ", ".join(f"{name} {in_units(size)}" for name, size in largest)


def check_budget(program: Program, limit: int | None = None) -> Budget:
    """The budget of a run that fits.

    Raises:
      ConfigError: it does not; names the largest leaves, and the smallest
        `accumulate_steps` with which the same batch size would fit, found by
        compiling.
    """
    budget = memory_budget(program, limit)
    if budget.limit is None or budget.peak <= budget.limit:
        return budget
    state = program.devices.abstract(program.init)
    raise ConfigError(
        f"a step needs {in_units(budget.peak)} on each device "
        f"({in_units(budget.temporaries)} of them temporary) and there are "
        f"{in_units(budget.limit)}; the largest arrays of the state are "
        f"{_largest(program, state)}; {_suggestion(program, budget)}"
    )


def _suggestion(program: Program, budget: Budget) -> str:
    share = program.batch_size // program.devices.num_devices
    now = program.parts["accumulate_steps"]
    possible = [parts for parts in range(now + 1, share + 1) if share % parts == 0]
    if not possible:
        return "the batch cannot be worked through in smaller parts"
    kept = sum(budget[: Budget._fields.index("temporaries")])
    if kept > budget.limit:  # Compiling takes minutes, and would not find a way.
        return (
            f"no accumulate_steps is enough: {in_units(kept)} are what the run keeps, "
            "its state, data and batches"
        )
    least = budget.peak
    for parts in possible:
        parted = program.with_parts(accumulate_steps=parts)
        peak = memory_budget(parted, budget.limit).peak
        if peak <= budget.limit:
            return (
                f"--config.accumulate_steps={parts} would fit with "
                f"{in_units(peak)} and the same batch"
            )
        least = min(least, peak)
    return f"no accumulate_steps is enough: the least is {in_units(least)}"


def budget_table(budget: Budget) -> Table:
    """One row for each part of the budget."""
    table = Table(title="Memory on each device", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for name, size in budget._asdict().items():
        if name != "limit" and (size or name == "params"):
            table.add_row(name.replace("_", " "), f"{size:,}")
    table.add_section()
    limit = budget.limit
    table.add_row("limit", "not known here" if limit is None else f"{limit:,}")
    return table


def in_units(size: int) -> str:
    """A number of bytes as people read it."""
    for unit, factor in reversed(UNITS.items()):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


def parse_bytes(text: str) -> int:
    """Reads `24GiB`, `500MiB`, or a number of bytes.

    Raises:
      ConfigError: it is neither.
    """
    number, factor = text.strip(), 1
    for unit in UNITS:
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), UNITS[unit]
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ConfigError(
            f"--device_memory_limit={text} is not an amount of memory; possible are a "
            "number of bytes, and amounts such as 500MiB or 24GiB"
        )
    return size


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


PLACEMENTS = ("host", "device", "auto")


def place_data(program: Program, placement: str, limit: int | None = None) -> Program:
    """The program with its training data where `placement` says.

    Args:
      program: with its data on the host.
      placement: `host`; `device` to stage the whole set once on each device, so that
        no bytes travel in a step; `auto` to do so if the set fits beside the model.
      limit: bytes that each device has; None asks JAX.

    Raises:
      ConfigError: an unknown placement.
      ConfigError: `device`, and the set cannot be staged; the message says its size.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(
            f"config.data.placement={placement!r}; possible are {', '.join(PLACEMENTS)}"
        )
    if placement == "host":
        return program
    if placement == "auto":
        reason = _why_on_host(program, limit)
        if reason:
            return program._replace(placement=f"on the host, because {reason}")
    return program.with_parts(placement="device")


def _why_on_host(program: Program, limit: int | None) -> str:
    reason = why_not_staged(program.data.train)
    if reason:
        return reason
    limit = program.devices.memory_limit() if limit is None else limit
    if limit is None:
        return "a device's memory is not known here"
    peak = memory_budget(program.with_parts(placement="device"), limit).peak
    if peak > limit:
        return (
            f"staged it would make a run of {in_units(peak)} on each device, which has "
            f"{in_units(limit)}"
        )
    return ""
