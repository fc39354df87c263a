"""Tests run on a CPU that appears as four devices, on a machine with GPUs too."""

from haiku_template import testing

testing.simulate_devices()
