"""Device selection, placement, and every copy between host and devices."""

from haiku_template.devices.checks import Placement as Placement
from haiku_template.devices.checks import audit_table as audit_table
from haiku_template.devices.checks import describe as describe
from haiku_template.devices.checks import device_name as device_name
from haiku_template.devices.collectives import mean_over as mean_over
from haiku_template.devices.collectives import norm_over as norm_over
from haiku_template.devices.collectives import sum_over as sum_over
from haiku_template.devices.layout import Layout as Layout
from haiku_template.devices.manager import DeviceManager as DeviceManager
from haiku_template.devices.replicas import check_processes as check_processes
from haiku_template.devices.replicas import check_replicas as check_replicas
from haiku_template.devices.selection import available as available
from haiku_template.devices.transfer import Ledger as Ledger
from haiku_template.devices.transfer import canonical_shapes as canonical_shapes
from haiku_template.devices.transfer import check_host_batch as check_host_batch
from haiku_template.devices.transfer import detached as detached
from haiku_template.devices.transfer import (
    device_put_replicated as device_put_replicated,
)
from haiku_template.devices.transfer import device_put_sharded as device_put_sharded
from haiku_template.devices.transfer import host_buffer as host_buffer
from haiku_template.errors import DeviceError as DeviceError
from haiku_template.errors import PlacementError as PlacementError
from haiku_template.errors import ReplicaError as ReplicaError
