"""What can go wrong with devices; each error carries its command's exit code."""


class DeviceError(RuntimeError):
    """A device that was asked for cannot be had."""

    exit_code = 69


class PlacementError(ValueError):
    """Arrays cannot be, or are not, where a run needs them."""

    exit_code = 64


class ReplicaError(PlacementError):
    """A device's copy of the state is no longer what the others have."""

    exit_code = 71
