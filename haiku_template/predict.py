"""Predicts examples with a checkpoint of a run, on any devices.

    python -m haiku_template.predict --workdir=runs/digits --inputs=new.npy \\
        [--checkpoint=best] [--output=digits.npz]

`--inputs` are .npy or .npz files, .csv, .jsonl or .parquet tables of numbers or of
texts, a folder of pictures, or MODULE:FUNCTION, which returns arrays; by default the
run's evaluation set, each example once. Prints a JSON object for each: class and
probability, or the outputs. `--output` writes them instead: `.npz` holds arrays
`outputs`, `labels` and `class`, one row an example; `.jsonl` an object on each line;
`.csv` a row, with a column for each number.
Nothing is overwritten. Exit codes: 0 done, 64 bad configuration or data, 69 device not
available, 74 the checkpoint or the file cannot be read or written.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from pathlib import Path

from absl import flags

from haiku_template import cli
from haiku_template.errors import counted

FLAGS = cli.FLAGS
flags.DEFINE_string("output", None, "The new file to write, .npz, .jsonl or .csv.")
flags.DEFINE_string(
    "inputs",
    None,
    "New examples: .npy, .npz, .csv, .jsonl, .parquet, a folder of pictures, "
    "MODULE:FUNCTION.",
)
cli.run_flags()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Restores the checkpoint and writes or prints its outputs."""
    run = cli.open_run()
    from haiku_template.runs import predictions

    if (examples := FLAGS.inputs) is not None:
        examples = predictions.read_examples(run, examples)
    if FLAGS.output is None:
        return predictions.print_predictions(run, examples)
    output = Path(FLAGS.output)
    count = predictions.write_predictions(run, output, examples)
    print(f"{output}: {counted(count, 'examples')}, step {run.step} of {run.workdir}")


if __name__ == "__main__":
    cli.run(main)
