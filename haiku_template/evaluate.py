"""Evaluates a checkpoint of a run, exactly, on any devices.

    python -m haiku_template.evaluate --workdir=runs/digits [--checkpoint=best]

Prints one JSON object with `step` and the metrics; for classes also draws the confusion
matrix, confusion.png in the workdir. Exit codes: 0 done, 64 bad configuration or data,
69 device not available, 74 checkpoint storage.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

import json

from absl import flags

from haiku_template import cli

cli.run_flags()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Restores the checkpoint, evaluates it and prints the metrics."""
    run = cli.open_run()
    print(json.dumps({"step": run.step, **run.evaluate()}))


if __name__ == "__main__":
    cli.run(main)
