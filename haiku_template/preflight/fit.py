"""Changes of a config that make a run fit its devices, tried in the order of cost."""

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from haiku_template.devices.layout import device_bytes
from haiku_template.errors import ConfigError, PlacementError
from haiku_template.models import repeated_blocks
from haiku_template.preflight.budget import BUS, Budget, memory_budget, settle
from haiku_template.reporting.display import in_units, table
from haiku_template.storage.workdir import has_checkpoints
from haiku_template.training.trainer import Trainer

Changes = dict[str, Any]  # Values by key of the config.
Build = Callable[[Changes], Trainer]
ALL_SHARDED = ("*", "data")
QUANTIZED = ("float32", "bfloat16")  # Dtypes of frozen parameters that int8 is below.
REMAT, MICRO_BATCHES = "model.remat", "accumulate_steps"
SHARDING, FROZEN = "sharding", "finetuning.base_dtype"
FIT_KEYS = (REMAT, MICRO_BATCHES, SHARDING, FROZEN)  # That a change may set.
NAMES = {REMAT: "remat", MICRO_BATCHES: "{} micro-batches", SHARDING: "sharding"}
NAMES |= {FROZEN: "{}"}  # In the table.


class NothingFits(ConfigError):
    """No change that was tried makes the run fit."""


class Candidate(NamedTuple):
    """A changed config, and what its run needs."""

    changes: Changes
    size: int  # In bytes on each device: the peak, or what alone is beyond the limit.
    budget: Budget | None  # None: it was not compiled.
    limit: int

    @property
    def fits(self) -> bool:
        """True if its run fits."""
        return self.budget is not None and self.size <= self.limit

    @property
    def flags(self) -> str:
        """The changes as flags of the command; a sentence where there are none."""
        quotes = {k: '"' * isinstance(x, tuple) for k, x in self.changes.items()}
        flags = (f"--config.{k}={x}{self.changes[k]}{x}" for k, x in quotes.items())
        return " ".join(flags) or "the run as it is"

    def row(self) -> tuple[str, ...]:
        """Cells: what stays, temporaries, start or evaluation, the peak, if it fits."""
        names = [NAMES[key].format(value) for key, value in self.changes.items()]
        sizes = (self.size, 0, 0, 0)
        if (budget := self.budget) is not None:
            beside = max(budget.init_peak, budget.evaluation_peak)
            temporaries = budget.temporaries + budget.outside
            sizes = budget.resident, temporaries, beside, budget.peak
        cells = (in_units(size) if size else "" for size in sizes)
        return (", ".join(names) or "as it is", *cells, budget.fit if budget else "no")


def candidates(build: Build, workdir: Path, limit: int) -> Iterator[Candidate]:
    """Yields changed configs with what they need, the cheapest first; ends if one fits.

    Args:
      build: makes the trainer of a config with these changes.
      workdir: of the run, which does not make its first state where it resumes.
      limit: bytes on each device.
    """
    trainer, starts = build({}), not has_checkpoints(workdir)
    for changes in _of_stored(trainer):
        if changes:
            try:
                trainer = build(changes)
            except (ConfigError, PlacementError):  # Of parts that exclude each other.
                continue
        state = device_bytes(trainer.abstract)
        if state > limit:  # No program is compiled for that.
            yield Candidate(changes, state, None, limit)
            continue
        trainer = settle(trainer, workdir, limit)
        budget = memory_budget(trainer, limit, starts=starts)
        stored = Candidate(changes, budget.peak, budget, limit)
        yield stored
        if stored.fits:
            return
        fixed = max(budget.init_peak, budget.evaluation_peak, budget.resident)
        if fixed > limit:  # Rematerialization and micro-batches change none of this.
            continue
        for candidate in _of_temporaries(
            lambda changes: settle(build(changes), workdir, limit), trainer, stored
        ):
            yield candidate
            if candidate.fits:
                return


def _of_stored(trainer: Trainer) -> list[Changes]:
    """Changes of what a device keeps: nothing, sharding, int8, both."""
    values = trainer.experiment.config
    rules = tuple(map(tuple, values["sharding"]))
    several = trainer.devices.num_devices > 1 and ALL_SHARDED not in rules
    sharding = [{SHARDING: (*rules, ALL_SHARDED)}] * several
    is_wide = values["finetuning"]["base_dtype"] in QUANTIZED
    frozen = [{FROZEN: "int8"}] * bool(trainer.recipe.plan.frozen and is_wide)
    both = [first | second for first in sharding for second in frozen]
    return [{}, *sharding, *frozen, *both]


def _of_temporaries(
    build: Build, trainer: Trainer, base: Candidate
) -> Iterator[Candidate]:
    """Yields `base` with rematerialized blocks, with micro-batches, and with both."""
    again = _remat(trainer)
    shares = trainer.experiment.exact_elastic or trainer.devices.num_devices
    share = trainer.feed.batch_size // shares
    first = trainer.experiment.accumulate_steps + 1
    counts = [n for n in range(first, share + 1) if share % n == 0]

    def with_changes(changes: Changes) -> Candidate:
        changes = base.changes | changes
        budget = memory_budget(build(changes), base.limit, starts=False)
        budget = budget._replace(
            init_peak=base.budget.init_peak, evaluation_peak=base.budget.evaluation_peak
        )
        return Candidate(changes, budget.peak, budget, base.limit)

    def with_micro_batches(changes: Changes) -> Candidate:
        compiled: dict[int, Candidate] = {}

        def fits(count: int) -> bool:
            compiled[count] = with_changes(changes | {MICRO_BATCHES: count})
            return compiled[count].fits

        place = bisect.bisect_left(counts, True, key=fits)  # More of them need less.
        return compiled[counts[min(place, len(counts) - 1)]]

    if again:
        yield with_changes(again)
    if counts:
        yield with_micro_batches({})
    if again and counts:
        yield with_micro_batches(again)


def _remat(trainer: Trainer) -> Changes:
    """Change that rematerializes blocks: the model's own switch, or their pattern."""
    experiment, devices = trainer.experiment, trainer.devices
    if (switch := experiment.config["model"].get("remat")) is False:
        return {REMAT: True}
    if switch or experiment.step is not None or experiment.model is None:
        return {}
    init = trainer.functions(devices.axis_name).init
    levels = repeated_blocks(lambda: devices.abstract(init, {}))
    return {REMAT: levels[0]} if levels else {}


def fit(build: Build, workdir: Path, limit: int | None) -> Candidate:
    """Prints what each change needs, and returns the cheapest that fits.

    Arguments as of `candidates`. Raises `NothingFits` with the closest where none
    fits, and `ConfigError` for a limit of None, which is not known.
    """
    if limit is None:
        raise ConfigError(
            "--fit compares with what a device has, which JAX does not tell of this "
            "one; give --device_memory_limit=24GiB, or --dry_run --target=l4"
        )
    tried = list(candidates(build, workdir, limit))
    title = f"Memory on each device, of {in_units(limit)}"
    columns = ("change", "state", "temporary", "start", "peak", "fits")
    rows = [candidate.row() for candidate in tried]  # None behind one that fits.
    Console(markup=False).print(table(title, columns, rows))
    closest = closest_of(tried)
    if not closest.fits:
        raise NothingFits(
            f"nothing that --fit tries makes the run fit {in_units(limit)} on each "
            f"device: the closest is {closest.flags}, of {in_units(closest.size)}"
            f"{unified(closest)}; a smaller config.batch_size, more devices or LoRA "
            "need less"
        )
    print(f"fit       {closest.flags}: {in_units(closest.size)} of {in_units(limit)}")
    return closest


def closest_of(tried: Sequence[Candidate]) -> Candidate:
    """The candidate that fits, or the smallest of those that were compiled."""
    return min(tried, key=lambda x: (not x.fits, x.budget is None, x.size))


def unified(candidate: Candidate) -> str:
    """Says with how much unified memory a change would fit; "" where that is none."""
    if candidate.budget is None or candidate.budget.process is not None:
        return ""  # On CPUs a process's memory is the host's.
    times = math.ceil(10 * candidate.size / candidate.limit) / 10
    sentence = f", which with --gpu_memory=unified:{times} {BUS}"
    return sentence * (candidate.budget.card is None)
