"""Device flags, flag parsing and exit codes of the commands.

Exit codes: 0 done, 64 bad configuration or data, 69 device required but unavailable, 70
loss not finite, 71 a device disagrees, 74 checkpoint storage, 75 told to stop and
saved, 130 interrupted and saved. Imports no JAX, so that `--help` and a mistyped flag
answer at once.
"""

import functools
import operator
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging
from ml_collections import config_dict

from haiku_template import doctor
from haiku_template.errors import DeviceError

if TYPE_CHECKING:
    from haiku_template.devices import DeviceManager

USAGE, STORAGE, STOPPED, INTERRUPTED = 64, 74, 75, 130
# `--config.KEY=None`, which config_flags refuses for numbers.
UNSET = re.compile(r"--config\.([\w.]+)=None")

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


class Stopped(KeyboardInterrupt):
    """SIGTERM outside the training loop."""

    exit_code = STOPPED


def stop_on_sigterm() -> None:
    """Makes SIGTERM end the program in a sentence until the loop takes it over."""

    def stop(*_: object) -> None:
        raise Stopped(
            "SIGTERM received while nothing was being trained; the same command goes "
            "on from what is saved"
        )

    signal.signal(signal.SIGTERM, stop)
    # Workers of a data set must end when they are told to.
    end = functools.partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)
    os.register_at_fork(after_in_child=end)


def device_manager(num_devices: int | None = None) -> "DeviceManager":
    """Imports JAX and picks the devices that the flags ask for.

    The doctor looks first, without JAX, whose own messages mostly name the wrong cause.
    `num_devices` counts where no flag does; None means all.

    Raises:
      DeviceError: the devices cannot be had, and why.
    """
    asked = "cpu" if _SIMULATE_DEVICES.value else _DEVICE.value
    for finding in doctor.check_environment(asked):
        if finding.severity == "error" and _FALLBACK.value != "cpu":
            raise DeviceError(f"--device={asked} cannot be used: {finding}")
        logging.warning("%s", finding)
    from haiku_template.devices import DeviceManager

    if _NUM_DEVICES.value is not None or ":" in _DEVICE.value:
        num_devices = _NUM_DEVICES.value
    return DeviceManager.create(
        _DEVICE.value,
        num_devices=num_devices,
        simulate_devices=_SIMULATE_DEVICES.value,
        fallback=_FALLBACK.value,
        gpu_memory_fraction=_GPU_MEMORY_FRACTION.value,
        gpu_preallocate=_GPU_PREALLOCATE.value,
    )


def fail(error: BaseException | str, code: int) -> int:
    """Prints one sentence on standard error, and returns the exit code."""
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
    return code


def run(main: Callable[[], None]) -> None:
    """Parses the flags, calls `main` and exits; users' mistakes show no traceback.

    An exception with an `exit_code` is a sentence for the user; any other is a defect
    and shows its traceback.
    """

    def guarded(_: list[str]) -> int:
        # JAX reports each backend that it tries at this level, Orbax each save.
        logging.set_verbosity(logging.WARNING)
        try:
            main()
        except Exception as error:
            code = getattr(error, "exit_code", None)
            if code is None:
                raise
            fail(error, code)
            if code == STORAGE:
                os._exit(code)  # Without waiting for threads that write.
            return code
        return 0

    try:
        app.run(guarded, flags_parser=_parse)
    except KeyboardInterrupt as error:
        words = str(error) or "interrupted before the state could be saved"
        sys.exit(fail(words, getattr(error, "exit_code", INTERRUPTED)))


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; a mistake ends the program with a sentence."""
    unset = [UNSET.fullmatch(word) for word in argv]
    keys = [match[1] for match in unset if match]
    try:
        _check_config_file(argv)
        rest = flags.FLAGS([w for w, m in zip(argv, unset, strict=True) if not m])
        if len(rest) > 1:
            raise ValueError(f"unexpected argument {rest[1]!r}; flags begin with --")
        if "config" in flags.FLAGS:
            values = flags.FLAGS["config"].value
            if not isinstance(values, config_dict.ConfigDict):
                hasattr(values, "keys")  # Raises if the file could not be read.
                raise ValueError(_returned(_config_file(argv), values))
            for key in keys:
                *parents, leaf = key.split(".")
                functools.reduce(operator.getitem, parents, values)[leaf] = None
        return rest
    except Exception as error:
        sys.exit(fail(_sentence(error), USAGE))


def _sentence(error: Exception) -> str:
    """Cuts an error of absl or ml_collections down to its cause and place."""
    text = str(error.args[0] if error.args else error).strip()
    places = re.findall(r'File "(\S+)", line (\d+)', text) or [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError):
        places.append((error.filename, error.lineno))
    ours = ("<", __file__, sysconfig.get_path("stdlib"))
    places = [
        (name, line)
        for name, line in places
        if "site-packages" not in name and not name.startswith(ours)
    ]
    last = text.split("\n")[-1]
    if places:
        name = f"{type(error).__name__}: " * isinstance(error, LookupError)
        words = repr(last) if isinstance(error, KeyError) else last
        return f"{places[-1][0]}, line {places[-1][1]}: {name}{words}"
    file = _config_file(sys.argv)
    if "get_config() takes" in last or "get_config() missing" in last:
        return f"{file} (what follows a colon is its argument): {last}"
    if "has no attribute 'get_config'" in text:
        return f"{file} has no function get_config(), which returns the config"
    if file and "flag --config=None" in text:
        return _returned(file, None)
    if isinstance(error, flags.Error):
        number = r"flag (\S+): (?:invalid literal for int|could not convert string).*"
        text = re.sub(number, r"\1 has the wrong type: a number is needed here", text)
        truth = r"flag (\S+): .*Non-boolean argument.*"
        text = re.sub(
            truth, r"\1 has the wrong type: true or false is needed here", text
        )
        needed = r"flag --(\w+)=None: .*must have a value.*"
        return re.sub(needed, r"--\1 is needed; --help shows all flags", text)
    return last


def _returned(file: Path | None, value: Any) -> str:
    words = "None" if value is None else f"a {type(value).__name__}"
    return (
        f"get_config() of {file} returns {words}; it must return a ConfigDict, such as "
        "default_config() with changes"
    )


def _config_file(argv: list[str]) -> Path | None:
    """File of the last --config, without its function's argument."""
    found = None
    for word, value in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, given = word.partition("=")
        if name in ("--config", "-config"):
            found = Path((given if equals else value).partition(":")[0])
    return found


def _check_config_file(argv: list[str]) -> None:
    path = _config_file(argv)
    if path is not None and not path.is_file():
        near = sorted(str(p) for p in path.parent.glob("*.py"))[:8]
        raise ValueError(
            f"the config file {path} does not exist; {path.parent} holds "
            f"{', '.join(near) or 'no .py files'}"
        )
