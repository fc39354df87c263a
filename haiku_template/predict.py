"""Writes the outputs of a checkpoint for each example, on any devices.

    python -m haiku_template.predict --workdir=runs/digits --output=digits.npz \\
        [--checkpoint=best]

The examples are the run's evaluation set, each once, in its order. `.npz` holds arrays
`outputs` and `labels`, one row an example; `.jsonl` an object with both on each line.
Nothing is overwritten. Exit codes: 0 done, 64 bad configuration or data, 69 device not
available, 74 the checkpoint or the file cannot be read or written.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from pathlib import Path

from absl import flags

from haiku_template import cli

flags.DEFINE_string(
    "output", None, "The new file to write, .npz or .jsonl.", required=True
)
cli.run_flags()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Restores the checkpoint and writes its outputs."""
    run, output = cli.open_run(), Path(flags.FLAGS.output)
    from haiku_template.runs import write_predictions

    examples = write_predictions(run, output)
    print(f"{output}: {examples} examples, step {run.step} of {run.workdir}")


if __name__ == "__main__":
    cli.run(main)
