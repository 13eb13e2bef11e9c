"""Fixtures."""

from tests.support.cluster import cluster
from tests.support.settings_server import serve
from tests.support.wire_calls import channel

__all__ = ["channel", "cluster", "serve"]
