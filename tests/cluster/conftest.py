import socket

import pytest


def free_address():
    """HOST:PORT of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def address():
    """HOST:PORT of this machine that nobody listens at."""
    return free_address()


@pytest.fixture(scope="module")
def free():
    """Makes such addresses."""
    return free_address
