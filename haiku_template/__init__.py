"""A training template for Haiku models, with every array on its device on purpose.

Importing this package, or any module of it, starts no JAX backend, and sets the flag of
XLA that right numbers on CPUs need.
"""

import sys

if sys.platform == "win32":
    raise SystemExit(
        "error: haiku_template runs on Linux and macOS (it locks files and limits "
        "processes as they do); on Windows install it in WSL: "
        "https://learn.microsoft.com/windows/wsl/install"
    )

from haiku_template import xla_flags

__version__ = "0.1.0"
xla_flags.set_flag()
