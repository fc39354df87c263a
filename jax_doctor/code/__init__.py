"""Removed names of JAX, Haiku and optax in code, found without importing it."""
