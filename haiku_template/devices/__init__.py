"""Devices: which ones a run uses, and every copy to and from them."""

from haiku_template.devices.audit import Placement, audit_table, describe, device_name
from haiku_template.devices.collectives import mean_over, sum_over
from haiku_template.devices.compiled import Shared
from haiku_template.devices.errors import DeviceError, PlacementError, ReplicaError
from haiku_template.devices.layout import check_host_batch, host_buffer
from haiku_template.devices.ledger import Ledger
from haiku_template.devices.manager import DeviceManager
from haiku_template.devices.peak import matmul_bytes, matmul_peak
from haiku_template.devices.replicas import check_replicas
from haiku_template.devices.selection import available
from haiku_template.devices.sharding import device_put_replicated, device_put_sharded

__all__ = [
    "DeviceError",
    "DeviceManager",
    "Ledger",
    "Placement",
    "PlacementError",
    "ReplicaError",
    "Shared",
    "audit_table",
    "available",
    "check_host_batch",
    "check_replicas",
    "describe",
    "device_name",
    "device_put_replicated",
    "device_put_sharded",
    "host_buffer",
    "matmul_bytes",
    "matmul_peak",
    "mean_over",
    "sum_over",
]
