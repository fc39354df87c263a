"""A training template for Haiku models, with every array on its device on purpose.

Importing this package, or any module of it, starts no JAX backend.
"""

__version__ = "0.1.0"
