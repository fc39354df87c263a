"""Device selection, placement, and every copy between host and devices."""

from haiku_template.devices.checks import (
    Placement,
    audit_table,
    describe,
    device_name,
)
from haiku_template.devices.manager import DeviceManager
from haiku_template.devices.replicas import check_replicas
from haiku_template.devices.selection import available
from haiku_template.devices.step import mean_over, sum_over
from haiku_template.devices.transfer import (
    Ledger,
    canonical_shapes,
    check_host_batch,
    device_put_replicated,
    device_put_sharded,
    host_buffer,
)
from haiku_template.errors import DeviceError, PlacementError, ReplicaError

__all__ = [
    "DeviceError",
    "DeviceManager",
    "Ledger",
    "Placement",
    "PlacementError",
    "ReplicaError",
    "audit_table",
    "available",
    "canonical_shapes",
    "check_host_batch",
    "check_replicas",
    "describe",
    "device_name",
    "device_put_replicated",
    "device_put_sharded",
    "host_buffer",
    "mean_over",
    "sum_over",
]
