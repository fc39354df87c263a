"""What can go wrong with data."""


class DataError(ValueError):
    """Data that is missing, damaged, empty or not what it should be."""

    exit_code = 64
