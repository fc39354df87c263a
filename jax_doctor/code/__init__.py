"""Code of yesterday: names that JAX, Haiku and optax removed, found without imports."""
