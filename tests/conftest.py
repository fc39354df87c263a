import jax
import pytest

# Before any backend exists: the tests' devices are CPUs that look like eight.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from haiku_template.devices import DeviceManager  # noqa: E402


@pytest.fixture(params=[1, 4], ids=["one device", "four devices"])
def devices(request):
    return DeviceManager.create("cpu", num_devices=request.param)


@pytest.fixture
def one_device():
    return DeviceManager.create("cpu", num_devices=1)


@pytest.fixture
def four_devices():
    return DeviceManager.create("cpu", num_devices=4)
