from unittest.mock import MagicMock as Figure  # noqa: F401
