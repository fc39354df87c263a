"""What can go wrong with pretrained parameters."""


class PretrainedError(ValueError):
    """Pretrained parameters that cannot be read, do not fit, or cannot be written."""

    exit_code = 64


class TuningError(ValueError):
    """What should train, or stay, cannot be had of this model."""

    exit_code = 64


class StorageError(PretrainedError):
    """Parameters that could not be written."""

    exit_code = 74
