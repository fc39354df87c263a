"""Where the training data lives: on the host, or staged on every device."""

from haiku_template.config import ConfigError
from haiku_template.data.staging import why_not_staged
from haiku_template.training.budget import in_units, memory_budget
from haiku_template.training.program import Program

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
      DataError: `device`, and the set cannot be staged; the message says its size.
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
