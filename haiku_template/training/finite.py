"""What happens when a number is no longer finite."""

import math
from typing import Any

import jax
import jmp

from haiku_template.devices import DeviceManager

_all_finite = jax.jit(jmp.all_finite)


class NonFiniteError(RuntimeError):
    """The loss or a parameter is no longer a finite number."""

    exit_code = 70


def check_loss(values: dict[str, float], step: int, latest: int | None) -> None:
    """Asserts that the loss is finite.

    Args:
      values: scalars of the step, `loss` among them.
      step: named in the message.
      latest: the newest step that is saved; None without any.

    Raises:
      NonFiniteError: it is not.
    """
    if not math.isfinite(values["loss"]):
        raise _error("the loss of", step, latest)


def check_params(
    devices: DeviceManager, params: Any, step: int, latest: int | None
) -> None:
    """The same of the parameters, which are looked at on their devices."""
    if not devices.fetch(_all_finite(params)):
        raise _error("a parameter after", step, latest)


def _error(what: str, step: int, latest: int | None) -> NonFiniteError:
    kept = f"the newest is of step {latest}" if latest else "there is none"
    return NonFiniteError(
        f"{what} step {step} is infinite or NaN and was not saved as a checkpoint; "
        f"{kept}. Values in the data that are not finite do this, and learning "
        "rates too high for want of a warm-up or clip_norm"
    )
