"""A training template for Haiku models, with every array on its device on purpose.

Importing this package, or any module of it, starts no JAX backend, and sets the flag of
XLA that right numbers on CPUs need.
"""

from haiku_template import xla_flags

__version__ = "0.1.0"
xla_flags.set_flag()
