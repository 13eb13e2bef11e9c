"""Fixtures that contract tests share."""

from tests.support.cluster import cluster
from tests.support.wire_calls import channel

__all__ = ["channel", "cluster"]
