"""What the commands share: device flags, and one sentence for a user's mistake.

Exit codes: 0 done, 64 bad configuration or data, 69 device required but unavailable,
70 loss not finite, 74 checkpoint storage, 75 told to stop and saved, 130 interrupted
and saved. Imports no JAX, so that `--help` and a mistyped flag answer at once.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import app, flags, logging

if TYPE_CHECKING:
    from haiku_template.devices import DeviceManager

USAGE = 64

_DEVICE = flags.DEFINE_string(
    "device",
    "auto",
    "Where to run: auto, cpu, gpu, tpu, or chosen devices such as gpu:1 or gpu:0,2.",
)
_NUM_DEVICES = flags.DEFINE_integer(
    "num_devices", None, "Use the first so many devices; all by default."
)
_SIMULATE_DEVICES = flags.DEFINE_integer(
    "simulate_devices", None, "Make the CPU appear as so many devices."
)
_FALLBACK = flags.DEFINE_enum(
    "fallback", "error", ["error", "cpu"], "What to do when --device cannot be had."
)
_GPU_MEMORY_FRACTION = flags.DEFINE_float(
    "gpu_memory_fraction", None, "Share of a card's memory that JAX may take."
)
_GPU_PREALLOCATE = flags.DEFINE_bool(
    "gpu_preallocate", None, "Whether JAX reserves that memory at the start."
)


def device_manager() -> "DeviceManager":
    """The devices that the flags ask for. Imports and starts JAX.

    Raises:
      DeviceError: they cannot be had.
    """
    from haiku_template.devices import DeviceManager

    return DeviceManager.create(
        _DEVICE.value,
        num_devices=_NUM_DEVICES.value,
        simulate_devices=_SIMULATE_DEVICES.value,
        fallback=_FALLBACK.value,
        gpu_memory_fraction=_GPU_MEMORY_FRACTION.value,
        gpu_preallocate=_GPU_PREALLOCATE.value,
    )


def fail(error: BaseException | str, code: int) -> int:
    """Prints one sentence on standard error, and returns the exit code."""
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr)
    return code


def run(main: Callable[[], None]) -> None:
    """Parses the flags, calls `main` and exits; users' mistakes show no traceback.

    An exception with an `exit_code` is a sentence for the user; any other is a defect
    and shows where it happened.
    """

    def guarded(_: list[str]) -> int:
        # JAX reports each backend that it tries at this level, Orbax each save.
        logging.set_verbosity(logging.WARNING)
        try:
            main()
        except KeyboardInterrupt:
            return fail("interrupted before the state could be saved", 130)
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if code is None:
                raise
            return fail(error, code)
        return 0

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise ValueError(f"unexpected argument {rest[1]!r}; flags begin with --")
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        if config is not None:
            len(config)  # A config file that does not exist shows only when touched.
        return rest
    except SystemExit:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).split("\n") if line.strip()]
        sys.exit(fail(lines[-1] if lines else type(error).__name__, USAGE))
