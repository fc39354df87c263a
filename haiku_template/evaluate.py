"""Evaluates a checkpoint of a run, exactly, on any devices.

    python -m haiku_template.evaluate --workdir=runs/digits [--checkpoint=best] \\
        [--inputs=new.npz]

Prints one JSON object with `step` and the metrics; for classes also draws the confusion
matrix, confusion.png in the workdir. `--inputs` are other examples with labels, as
`predict` reads them. Exit codes: 0 done, 64 bad configuration or data,
69 device not available, 74 checkpoint storage.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from absl import flags

from haiku_template import cli

flags.DEFINE_string(
    "inputs", None, "Labelled examples instead: as those of predict, such as a .npz."
)
cli.run_flags()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Restores the checkpoint, evaluates it and prints the metrics."""
    run, dataset, name = cli.open_run(), None, cli.FLAGS.inputs
    from haiku_template.runs import predictions

    if name is not None:
        dataset = predictions.read_examples(run, name).dataset
    metrics = run.evaluate(dataset, f"--inputs={name}")
    print(predictions.json_line({"step": run.step} | metrics), end="")


if __name__ == "__main__":
    cli.run(main)
