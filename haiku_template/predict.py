"""Writes the outputs of a checkpoint for each example, on any devices.

    python -m haiku_template.predict --workdir=runs/digits --output=digits.npz \
        [--checkpoint=best]

The examples are the run's evaluation set, each once, in its order. `.npz` holds arrays
`outputs` and `labels`, one row an example; `.jsonl` an object with both on each line.
Nothing is overwritten. Exit codes: 0 done, 64 bad configuration or data, 69 device not
available, 74 the checkpoint or the file cannot be read or written.
"""

from pathlib import Path

from absl import flags

from haiku_template import cli, config

_WORKDIR = flags.DEFINE_string("workdir", None, "The directory of the run.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "latest", "Which one: latest, best, or a step."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "The file to write, .npz or .jsonl; it must not exist."
)
flags.mark_flags_as_required(["workdir", "output"])
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Reads the saved config, restores the checkpoint and writes its outputs."""
    workdir, output = Path(_WORKDIR.value), Path(_OUTPUT.value)
    config.of_run(workdir)  # Raises before JAX starts.
    devices = cli.device_manager()
    from haiku_template.runs import Run, write_predictions

    run = Run.open(workdir, devices, _CHECKPOINT.value)
    examples = write_predictions(run, output)
    print(f"{output}: {examples} examples, step {run.step} of {workdir}")


if __name__ == "__main__":
    cli.run(main)
