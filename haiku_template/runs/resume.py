"""State that a run begins with, and what changed since it was saved."""

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from haiku_template.bounded import at_home
from haiku_template.config import default_config, differences, fixed, to_dict
from haiku_template.data import whole_batches
from haiku_template.devices.processes import Processes, gather
from haiku_template.errors import ConfigError
from haiku_template.finetuning import check_same_frozen
from haiku_template.preflight import fingerprint
from haiku_template.storage import Checkpoints, digest_of_batch
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.checkpoint import newest_whole
from haiku_template.training.feed import BUSY_SECONDS
from haiku_template.training.state import TrainState
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)
# Of a key that may change by now: digests of earlier versions have this value.
EARLIER = {"optimizer.shard_moments": True}


def open_workdir(
    trainer: Trainer,
    workdir: Path,
    config: dict[str, Any],
    num_steps: int,
    ranks: dict[str, str] = workdirs.RANKS,
) -> Callable[[int], dict[str, Any]]:
    """Opens a run's workdir; makes the function of a step that gives facts to save."""
    fingerprint.keep(workdir, trainer, config, num_steps)
    # Why: docs/decisions/storage.md#facts
    choices = {"steps_per_call": trainer.feed.steps_per_call, "packs": trainer.packs}
    environment = workdirs.open_workdir(
        workdir, config, trainer.devices, num_steps, ranks, choices
    )
    dataset = whole_batches(trainer.experiment.data.train)
    is_function = dataclasses.is_dataclass(dataset)  # Of the step, without a state.
    digest = _digest_of_config(config)

    def facts(step: int, has_batch: bool = True) -> dict[str, Any]:
        batch, reading = None, trainer.feed.reading
        if is_function and has_batch and reading.acquire(timeout=BUSY_SECONDS):
            with contextlib.suppress(Exception):  # The loop will meet it.
                batch = digest_of_batch(dataset.batch(step))
            reading.release()
        return {"environment": environment, "config": digest, "batch": batch}

    return facts


def _digest_of_config(config: dict[str, Any], **earlier: Any) -> str:
    """Digests what is not the default of a config, and may not change on resume."""
    defaults = fixed(to_dict(default_config()))
    values = fixed(config).items()
    values = {k: x for k, x in values if (k, x) not in defaults.items()}
    text = json.dumps(values | earlier, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _warn_of_changes(
    step: int, saved: dict[str, Any], now: dict[str, Any], config: dict[str, Any]
) -> None:
    """Warns, in a line each, if facts are not those that were saved with a step."""
    if not saved:  # By an earlier version.
        return
    if lines := differences(saved["environment"], now["environment"]):
        logger.warning("this run's environment changed: %s", "; ".join(lines))
    if saved["config"] not in (now["config"], _digest_of_config(config, **EARLIER)):
        logger.warning("config.json is not the one that step %d was saved with", step)
    if None not in (saved["batch"], now["batch"]) and saved["batch"] != now["batch"]:
        logger.warning(
            f"the batch of step {step + 1} is not what it was when step {step} was "
            "saved: the data changed, or the code that makes batches; the run goes on "
            "with those it has now"
        )


def open_checkpoints(
    trainer: Trainer,
    workdir: str | Path,
    facts: Callable[[int], dict[str, Any]],
    save_minutes: float | None,
    mirror: str | None,
    **options: Any,
) -> Checkpoints:
    """Opens the checkpoints of a run to save there; `options` are of `Checkpoints`."""
    folder = Path(workdir) / workdirs.CHECKPOINTS
    run = trainer.devices.processes.first(workdirs.run_id(Path(workdir)))
    checkpoints = Checkpoints(folder, run=run, cleanup=True, facts=facts, **options)
    if save_minutes is not None:
        from haiku_template.runs.save_timer import SaveTimer

        checkpoints.timer = SaveTimer(save_minutes, checkpoints, trainer.devices)
    if mirror:  # An empty one is none.
        from haiku_template.storage.mirror import Mirror

        checkpoints.mirror = Mirror(Path(workdir), _folder_of(mirror), run)
    return checkpoints


def brought_back(trainer: Trainer, workdir: Any, mirror: Any, config: Any) -> Path:
    """Workdir of this process; a run that it has not, or no more, is its mirror's."""
    if mirror:
        _bring_back(trainer.devices.processes, workdir, mirror, config)
    return workdirs.own(workdir)


def _bring_back(processes: Processes, workdir: Any, mirror: str, config: Any) -> None:
    from haiku_template.storage.mirror import bring_back

    if processes.index == 0:
        bring_back(Path(workdir), _folder_of(mirror), config)
    processes.first(None)  # All wait for it.


def _folder_of(mirror: str) -> Path:
    if str(folder := at_home(mirror)).startswith("~"):  # It would be made here.
        raise ConfigError(f"config.mirror={mirror}: there is no such user")
    return folder


def restored_or_first(
    trainer: Trainer, checkpoints: Checkpoints, num_steps: int, workdir: Path
) -> tuple[int, TrainState]:
    """Restores the newest whole checkpoint or initializes; returns step and state.

    Newer ones, which are damaged, are set aside; if all are, `DamagedError`.
    `ConfigError`: it is beyond `num_steps`, or the frozen parameters changed.
    """
    start = checkpoints.latest or 0
    if checkpoints.mirror is not None:
        copies = trainer.devices.processes.first(checkpoints.mirror.checkpoints.steps)
        start = max([start, *copies])
    facts = {"the newest checkpoint": start, "num_steps": num_steps}
    facts |= {"the placement of the data": trainer.feed.placement}
    facts |= {"the steps of a call": trainer.experiment.steps_per_call}
    trainer.devices.processes.agree(facts)
    if start:
        start, state = _restored(trainer, checkpoints, num_steps)
    else:
        state = trainer.init()
    trainer.devices.check(state, trainer.layout)
    if trainer.experiment.init_from is not None:
        check_same_frozen(trainer.devices, state.frozen, workdir)
    return start, state


def _restored(
    trainer: Trainer, checkpoints: Checkpoints, num_steps: int
) -> tuple[int, TrainState]:
    """Restores the newest checkpoint that is whole in all processes, or its copy."""
    processes, abstract = trainer.devices.processes, trainer.abstract.saved()
    mirror = checkpoints.mirror
    places = [checkpoints] if mirror is None else [mirror.checkpoints, checkpoints]
    copies = [(step, i) for i, place in enumerate(places) for step in place.steps]

    def of_all(damage: str | None) -> str | None:  # None if no process found any.
        damages = gather(damage) if processes.count > 1 else [damage]
        return next(filter(None, damages), None)

    (step, place), saved, damages = newest_whole(
        [(step, place) for step, place in processes.first(copies)],
        lambda copy: places[copy[1]].restore(copy[0], abstract),
        of_all,
    )
    if processes.index == 0:
        for (damaged, i), sentence in damages.items():
            name = checkpoints.set_aside(damaged) if places[i] is checkpoints else ""
            called = f"; it is called {name} now" * bool(name)
            logger.warning(f"{sentence}{called}, and the run goes on from step {step}")
        if places[place] is not checkpoints:
            text = "step %d is that of %s, and copied from there"
            logger.warning(text, step, places[place].directory)
            mirror.give_back(step)
        facts = places[place].saved_facts(step)
        config = workdirs.read_json(checkpoints.directory.parent / workdirs.CONFIG)
        _warn_of_changes(step, facts, checkpoints.facts(step), config)
    processes.first(None)  # All read what the first has copied or renamed.
    if step > num_steps:
        raise ConfigError(
            f"{checkpoints.directory.parent} is at step {step}, and num_steps is "
            f"{num_steps}; a run does not go back: use another --workdir"
        )
    if mirror is not None and step in checkpoints.steps:
        mirror.update()  # It may be new, or cut off.
    return step, TrainState(**saved, frozen=trainer.initializer.frozen(trainer.layout))


def resumed(trainer: Trainer, workdir: Path, config: dict[str, Any]) -> Trainer:
    """Trainer of a run that resumes, without the steps that `--rewind` left out.

    Writes the config, of which keys may have changed.
    """
    workdirs.update_config(workdir, config)
    if not (steps := workdirs.left_out(workdir)):
        return trainer
    from haiku_template.runs.rewind import leaving_out

    return leaving_out(trainer, steps)
