"""What is held out of a set, chosen by a hash: the same on every machine."""

import hashlib

from haiku_template.errors import ConfigError


def rank(name: bytes) -> float:
    """A number in [0, 1) for a name; those below a fraction are held out."""
    return int.from_bytes(hashlib.sha256(name).digest()[:6], "big") / 2**48


def check_fraction(fraction: float) -> None:
    """Raises `ConfigError` unless `fraction` is in [0, 1)."""
    if not 0 <= fraction < 1:
        raise ConfigError(
            f"validation_fraction={fraction}; possible is from 0 to below 1"
        )
