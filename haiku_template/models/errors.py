"""What a model says when it cannot be computed as asked."""


class ModelError(ValueError):
    """A model that does not fit its inputs or its device."""

    exit_code = 64
