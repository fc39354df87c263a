"""Converts published parameters to safetensors, once, for config.init_from.

    python -m haiku_template.convert --input=params.joblib --output=params.safetensors

Reads joblib's files, pickles (.pkl), .npy and .npz with a pickled dictionary or train
state. What may be a pickle is read in a process of its own, which knows arrays and
their containers and runs nothing: of other objects it reads the fields, and a file that
calls any other name is refused. Parameters and network state are kept apart.

Exit codes: 0 done, 64 bad flags, or a file that is damaged or refused, 74 the output
cannot be written; nothing is left of it then.
"""

if __name__ == "__main__":  # Before imports, which take a second.
    from haiku_template import signals

    signals.install()

from absl import flags

from haiku_template import cli
from haiku_template.errors import counted

flags.DEFINE_string("input", None, "The published file.", required=True)
flags.DEFINE_string("output", None, "The new .safetensors file.", required=True)
flags.DEFINE_string("key", None, "Of the parameters in the file: params, or a/b.")
flags.DEFINE_bool("unreplicate", False, "Takes the first of replicas: [devices, ...].")


def main() -> None:
    """Converts the file and says what it took and what it left out."""
    from haiku_template.pretrained import convert

    values = cli.FLAGS
    facts = convert(values.input, values.output, values.key, values.unreplicate)
    where = f"{facts['taken']} of " if facts["taken"] else ""
    print(
        f"{values.output}: {counted(facts['arrays'], 'arrays')}, "
        f"{counted(facts['numbers'], 'numbers')}, {facts['bytes'] / 1e6:.1f} MB, "
        f"from {where}{values.input}"
    )
    if facts["left"]:
        print(f"left out: {', '.join(facts['left'])}")


if __name__ == "__main__":
    cli.run(main)
