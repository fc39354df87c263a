import pytest
from words import make_config

from haiku_template.devices import DeviceManager
from haiku_template.runs import start


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The config and the workdir of a run that knows its text by heart."""
    config = make_config()
    workdir = tmp_path_factory.mktemp("trained") / "run"
    start.run(config, DeviceManager.create("cpu", num_devices=1), str(workdir))
    return config, workdir
