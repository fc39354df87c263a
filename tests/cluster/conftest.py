import socket

import pytest


@pytest.fixture
def address():
    """HOST:PORT of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
