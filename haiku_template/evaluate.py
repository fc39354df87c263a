"""Evaluates a checkpoint of a run, exactly, on any devices.

    python -m haiku_template.evaluate --workdir=runs/digits [--checkpoint=best]

Prints one JSON object with `step` and the metrics; for classes also draws the confusion
matrix, confusion.png in the workdir. Exit codes: 0 done, 64 bad configuration or data,
69 device not available, 74 checkpoint storage.
"""

import json
from pathlib import Path

from absl import flags

from haiku_template import cli, config

_WORKDIR = flags.DEFINE_string("workdir", None, "The directory of the run.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "latest", "Which one: latest, best, or a step."
)
flags.mark_flag_as_required("workdir")
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Reads the saved config, restores the checkpoint and evaluates it."""
    config.of_run(Path(_WORKDIR.value))  # Raises before JAX starts.
    devices = cli.device_manager()
    from haiku_template.runs import Run

    run = Run.open(_WORKDIR.value, devices, _CHECKPOINT.value)
    print(json.dumps({"step": run.step, **run.evaluate()}))


if __name__ == "__main__":
    cli.run(main)
