"""Exports a checkpoint of a run, for other software.

    python -m haiku_template.export --workdir=runs/digits --format=stablehlo \
        --output=exported/digits

safetensors: parameters, in Hugging Face's names where the model has them. stablehlo:
the forward pass with its parameters, for a batch of any size, which JAX runs without
Haiku. adapters: trainable parameters, and the hash of the frozen ones; evaluate,
generate and export take this folder as a workdir. The output folder must not exist.

Exit codes: 0 done, 64 bad configuration or data, 69 device not available, 74 the
checkpoint or the folder cannot be read or written.
"""

from pathlib import Path

from absl import flags

from haiku_template import cli

FORMATS = ["safetensors", "stablehlo", "adapters"]
flags.DEFINE_enum("format", None, FORMATS, "What to write.", required=True)
flags.DEFINE_string("output", None, "The new folder to write.", required=True)
cli.run_flags()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Restores the checkpoint and writes it."""
    run, output = cli.open_run(), Path(flags.FLAGS.output)
    from haiku_template import runs

    write = {
        "safetensors": runs.export_safetensors,
        "stablehlo": runs.export_stablehlo,
        "adapters": runs.export_adapters,
    }[flags.FLAGS.format]
    print(f"{output}: step {write(run, output)} of {run.workdir}")


if __name__ == "__main__":
    cli.run(main)
