"""Exports a checkpoint of a run, for other software.

    python -m haiku_template.export --workdir=runs/digits --format=stablehlo \\
        --output=exported/digits

safetensors: parameters, in Hugging Face's names where the model has them. npz: one
file, in the names of config.init_from and the form that --names says, for the
publisher's own loader. stablehlo: the forward pass with its parameters, which JAX runs
without Haiku, for a batch of any size, or of --batch_size. onnx: the same as one file,
for onnxruntime, which checks it. adapters: trainable parameters, and the hash of the
frozen ones; evaluate, generate and export take this folder as a workdir. The output
must not exist.

Exit codes: 0 done, 64 bad configuration or data, 69 device not available, 74 the
checkpoint or the folder cannot be read or written.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from pathlib import Path

from absl import flags

from haiku_template import cli
from haiku_template.errors import ConfigError

FORMATS = ["safetensors", "npz", "stablehlo", "onnx", "adapters"]
FILES = {".safetensors", ".npz", ".onnx"}
FOLDERS = ["safetensors", "stablehlo", "adapters"]
NAMES = ["haiku", "alphafold", "graphcast"]
flags.DEFINE_enum("format", None, FORMATS, "What to write.", required=True)
flags.DEFINE_string(
    "output", None, "The new folder, .npz or .onnx to write.", required=True
)
flags.DEFINE_enum(
    "names",
    None,
    NAMES,
    "Of npz: MODULE/NAME, MODULE//NAME or params:MODULE:NAME; by default haiku.",
)
flags.DEFINE_integer(
    "batch_size",
    None,
    "Of stablehlo and onnx: examples in a batch; by default any number.",
    lower_bound=1,
)
cli.run_flags()
flags.adopt_module_key_flags(cli)


def main() -> None:
    """Restores the checkpoint and writes it."""
    values = cli.FLAGS
    formats = {"names": ("npz",), "batch_size": ("stablehlo", "onnx")}
    options = {k: values[k].value for k in formats if values[k].value is not None}
    for name in options:
        if values.format not in formats[name]:
            raise ConfigError(f"--{name} is not for --format={values.format}")
    output = Path(values.output)
    if values.format in FOLDERS and output.suffix in FILES:
        raise ConfigError(
            f"--format={values.format} writes a folder, and --output={output} is the "
            "name of a file; name a new folder"
        )
    run = cli.open_run()
    from haiku_template import runs

    write = {
        "safetensors": runs.export_safetensors,
        "npz": runs.export_npz,
        "stablehlo": runs.export_stablehlo,
        "onnx": runs.export_onnx,
        "adapters": runs.export_adapters,
    }[values.format]
    print(f"{output}: step {write(run, output, **options)} of {run.workdir}")


if __name__ == "__main__":
    cli.run(main)
