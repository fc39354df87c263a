"""Finds out why the GPU is not used, and prints the fix.

    python -m haiku_template.doctor --device=gpu
    python -m haiku_template.doctor --code=DIR

The command of `jax_doctor`, with what this package has in place of its advice. The
second lists the names in a folder that JAX removed. Exit codes: 0 the device that was
asked for works, or no name was removed; 64 a mistyped flag; 69 it does not work, or
names were.
"""

if __name__ == "__main__":
    from haiku_template import signals

    signals.install()

import sys

import jax_doctor
from haiku_template.compat import MOVED
from jax_doctor.__main__ import main
from jax_doctor.code.names import REMOVED

# Why: docs/decisions/doctor.md#boundary
ADVICE = {  # Why: docs/decisions/doctor.md#advice
    "export JAX_NUM_CPU_DEVICES=": "in a run, --simulate_devices=",
    "put them back before jaxline is imported, such as jax.tree_map = jax.tree.map": (
        "python -m haiku_template.compat SCRIPT ARGS runs a program of jaxline's as it "
        "is; in a run, config.compat = True puts them back"
    ),
} | {REMOVED[name].instead: path for name, path in MOVED.items()}

if __name__ == "__main__":
    signals.CALLED.append(lambda *_: jax_doctor.end_children())
    sys.exit(main(program="python -m haiku_template.doctor", advice=ADVICE))
